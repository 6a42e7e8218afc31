"""kvant in transformers: a compressed cache, and attention that reads it as it is stored.

    from kvant.transformers import KvantCache
    model.set_attn_implementation("kvant")
    model.generate(**inputs, past_key_values=KvantCache(model.config, "int4_g64_R128_s4"))

A layer's keys and values are appended and attended to in one call, with the model's soft cap, window
and sinks. Prompts may be padded on the left. What the cache cannot do is refused in words.
"""

from __future__ import annotations

import array
import itertools
import os
import weakref
from copy import deepcopy
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import causal_mask_function

from . import _core
from .cache import KvCache
from .checks import integer, strings
from .checks import threads as checked_threads
from .errors import invalid, make_error

NAME = "kvant"


class KvantCache(Cache):
    """Keys and values of a model, compressed as they come.

    The memory is taken at the first tokens, for ``capacity`` of them in each row of the batch. A
    sequence that gets longer moves to memory for twice as many. A layer with a sliding window keeps
    only that.

    Args:
      config: the model's.
      scheme: how they are stored (``kvant.schemes()``); a list of as many as layers
        gives each its own.
      capacity: tokens of a sequence, padding not counted, that there is memory for.
      max_capacity: tokens beyond which a sequence is refused; None: none are.
      rollback: how many of the last tokens assisted generation may take back where a scheme or a
        layer has a window; where there is none all can be.
      threads: None: as many as torch uses.
      allow_non_finite: store NaN and infinity instead of refusing them.
      fpmath: as of ``kvant.KvCache``.
    """

    def __init__(
        self,
        config: Any,
        scheme: str | list[str] = "f16",
        *,
        capacity: int = 8192,
        max_capacity: int | None = None,
        rollback: int = 64,
        threads: int | None = None,
        allow_non_finite: bool = False,
        fpmath: str = "strict",
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise invalid(f"KvantCache takes a model's config, not a {type(config).__name__}")
        text = config.get_text_config(decoder=True)
        if text.is_encoder_decoder or getattr(text, "cross_attention_layers", None):
            raise invalid(f"KvantCache is of a decoder's own tokens; a model of {type(config).__name__} has attention to others")
        kinds, options = get_layer_types_and_kwargs(text)
        if (layers := getattr(text, "decoder_layers", len(kinds))) != len(kinds):  # the encoder's are counted
            kinds, options = (all_of[:1] * layers for all_of in (kinds, options))
        others = set(kinds) - {"full_attention", "sliding_attention"}
        if others:
            raise invalid(f"KvantCache is of attention layers; this model has {sorted(others)}")
        keep = [layer.get("sliding_window") or 0 for layer in options]
        schemes = [_core.scheme_text(name) for name in strings("scheme", scheme)]
        # What is wrong whatever the model's tensors are: f16 takes heads of any size.
        KvCache.bytes_for(["f16"] * len(schemes), layers=len(keep), head_size=1, keep=keep, capacity=capacity,
                          rollback=rollback, allow_non_finite=allow_non_finite, fpmath=fpmath)
        checked_threads(threads)
        if max_capacity is not None and capacity > integer("max_capacity", max_capacity):
            raise invalid(f"a capacity of {capacity}, of at most {max_capacity}")
        self._store = _Store(keep, max_capacity, scheme=scheme, capacity=capacity, rollback=rollback, threads=threads,
                             allow_non_finite=allow_non_finite, fpmath=fpmath)
        super().__init__(layers=[_Layer(self._store, i) for i in range(len(kinds))])

    @property
    def cache(self) -> KvCache:
        """The kvant.KvCache with its tokens. A change of the batch, or growth, puts another in its place."""
        if self._store.cache is None:
            raise invalid("KvantCache has no tokens yet")
        return self._store.cache

    @property
    def batch_size(self) -> int:
        """Rows; -1 before there are tokens."""
        return -1 if self._store.cache is None else self._store.cache.batch

    @property
    def is_initialized(self) -> bool:
        return self._store.cache is not None

    def reset(self) -> None:
        """Forgets all tokens; the next may be of another batch, or another model."""
        self._store.clear()
        for layer in self.layers:
            layer.count[0] = 0
            layer.module = None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens of each row, as transformers counts."""
        if tokens_to_remove > 0:
            raise invalid(f"crop takes how many tokens to remove, as a number below 0, not {tokens_to_remove}")
        if self._store.cache is None or tokens_to_remove == 0:
            return
        left = self.get_seq_length() + tokens_to_remove
        if left < 0:
            raise invalid(f"crop({tokens_to_remove}) of {left - tokens_to_remove} tokens")
        self._store.crop(left)
        for layer in self.layers:
            layer.count[0] += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        rows = [int(row) for row in beam_idx]
        self.cache.reorder(rows)
        self._store.reorder_padding(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes so many."""
        self._take([row for row in range(self.cache.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only those rows stay, in that order; a mask says which."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            if len(indices) != self.cache.batch:
                raise invalid(f"a mask of {len(indices)} rows for a cache of {self.cache.batch}")
            indices = indices.nonzero().flatten()
        elif indices.dtype.is_floating_point:
            raise invalid(f"rows are integers or a mask, not {indices.dtype}")
        self._take(indices.tolist())

    def _take(self, rows: list[int]) -> None:
        self._store.cache = self.cache.fork(rows)
        self._store.reorder_padding(rows)


class _Store:
    """The tokens, and what is known of them. Its own object, so that a KvantCache and its layers are no
    cycle: memory goes back when the last of them does."""

    def __init__(self, keep: list[int], max_capacity: int | None, **options: Any) -> None:
        self.keep, self.max_capacity, self._options = keep, max_capacity, options
        self.cache: KvCache | None = None
        self._padding: list[int] = []  # on the left of each row
        self._step = 0  # tokens before the forward that runs, or ran last
        # A graph of torch.compile takes it as an input, and so serves every cache.
        self.number = torch.tensor(next(_numbers))
        _stores[int(self.number)] = self

    def __reduce__(self) -> Any:
        raise _lacks("be pickled: copy.deepcopy copies it, and KvCache.save gives its tokens as bytes")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Store:
        copy = _Store(self.keep, self.max_capacity, **self._options)
        copy.cache = None if self.cache is None else self.cache.fork()
        copy._padding, copy._step = list(self._padding), self._step
        return copy

    def clear(self) -> None:
        self.cache, self._padding, self._step = None, [], 0

    def crop(self, left: int) -> None:
        assert self.cache is not None
        self.cache.crop(self.lengths(left))
        self._padding = [min(padding, left) for padding in self._padding]

    def reorder_padding(self, rows: list[int]) -> None:
        self._padding = [self._padding[row] for row in rows]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        before: int,
        mask: torch.Tensor | None,
        *terms: Any,
    ) -> torch.Tensor:
        """Appends the new tokens of a layer, behind `before`, and attends to all: [batch, heads, tokens, channels].

        mask: [batch, tokens so far], true where there is a token. terms: as the extension takes them.
        """
        batch, _, tokens, _ = q.shape
        # Of a forward that was refused there may be one without tokens.
        if self.cache is None or (layer == 0 and before == 0 and batch != self.cache.batch):
            self.cache = KvCache(layers=len(self.keep), batch=batch, heads=k.shape[1], head_size=k.shape[3],
                                 v_head_size=v.shape[3], keep=self.keep, **self._options)
            self._padding = [0] * batch
        sizes = self.cache.heads, self.cache.head_size, self.cache.v_head_size
        if before == 0 and (own := (k.shape[1], k.shape[3], v.shape[3])) != sizes:
            raise _lacks(f"keep layers of different sizes: layer {layer} has {own[0]} KV heads of {own[1]} and {own[2]} "
                         f"channels (K and V), layer 0 has {sizes[0]} of {sizes[1]} and {sizes[2]}")
        if batch != self.cache.batch:
            raise invalid(f"a batch of {batch} for a cache of {self.cache.batch} rows; reset() it, or make another")
        if layer == 0:
            self._begin(before, tokens, mask)
        elif before != self._step:
            raise invalid(f"layer {layer} has {before} tokens where layer 0 had {self._step}: {_INTERRUPTED}")
        starts = [max(0, padding - before) for padding in self._padding] if before < max(self._padding) else None
        self._make_room(before + tokens - min(self._padding))
        self._take_back(layer, before)
        core = self.cache._core
        out = q.new_empty(*q.shape[:3], v.shape[3])
        q = q.contiguous()
        if tokens == 1 and starts is None:
            core.append(layer, k, v)
            core.attend(layer, q, out, *terms)
        else:
            # A prompt reads its own tokens as they are.
            new = (x.to(q.dtype).contiguous() for x in (k, v))
            core.attend(layer, q, out, *terms, None, *new, starts)
            core.append(layer, k, v, None, starts)
        return out

    def _make_room(self, tokens: int) -> None:
        assert self.cache is not None
        if tokens <= self.cache.capacity:
            return
        if self.max_capacity is not None and tokens > self.max_capacity:
            raise invalid(f"a sequence of {tokens} tokens for a KvantCache of at most {self.max_capacity}")
        capacity = max(tokens, 2 * self.cache.capacity)
        self.cache = self.cache.fork(None, min(capacity, self.max_capacity or capacity))

    def _take_back(self, layer: int, before: int) -> None:
        """Where the same step is run again the layer has its tokens already."""
        assert self.cache is not None
        rows = self.lengths(before)
        if self.cache._core.length(layer, 0) != rows[0]:
            self.cache.crop(rows, layer)

    def lengths(self, before: int) -> list[int]:
        """Of each row, without its padding."""
        return [max(0, before - padding) for padding in self._padding]

    def _begin(self, before: int, tokens: int, mask: torch.Tensor | None) -> None:
        """The first layer of a forward: what is wrong is found before anything is written."""
        assert self.cache is not None
        last = len(self.keep) - 1
        if self.cache._core.length(last, 0) < self.lengths(before)[0]:
            raise invalid(f"layer {last} has fewer tokens than layer 0: {_INTERRUPTED}")
        if mask is not None:
            self._read(mask, before, tokens)
        elif before == 0:
            # Not that of a prompt that was refused, or taken back.
            self._padding = [0] * len(self._padding)
        self._step = before

    def _read(self, mask: torch.Tensor, before: int, tokens: int) -> None:
        """How many tokens of padding each row has; a mask that says anything else is refused."""
        batch, end = len(self._padding), before + tokens
        if mask.shape[0] != batch or mask.shape[1] < end:
            raise invalid(f"attention_mask is {list(mask.shape)}, where there are {batch} rows of {end} tokens")
        mask = mask[:, :end]
        left = end - mask.sum(1)
        if not torch.equal(mask, torch.arange(end) >= left[:, None]):
            raise invalid("attention_mask has padding that is not on the left of a row")
        for row, (padding, was) in enumerate(zip(left.tolist(), self._padding)):
            # Of a row that has no token yet more may be padding.
            if before > 0 and padding != was and (was < before or padding < min(was, end)):
                raise invalid(f"attention_mask has {padding} tokens of padding in row {row}, which had {was}")
        self._padding = left.tolist()


_INTERRUPTED = "a forward was interrupted; reset() the cache"
_stores: weakref.WeakValueDictionary[int, _Store] = weakref.WeakValueDictionary()
# Not the numbers of another process, whose compiled graphs may be loaded here.
_numbers = itertools.count(int.from_bytes(os.urandom(7), "big"))


class _Keys(torch.Tensor):
    """New keys, that attention "kvant" alone may read: any other would not see those in the cache."""

    plain: torch.Tensor
    layer: _Layer
    read = False

    @classmethod
    def of(cls, keys: torch.Tensor, layer: _Layer) -> _Keys:
        result = keys.as_subclass(cls)
        result.plain, result.layer = keys, layer
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its shape and the like may be asked for.
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride", "is_contiguous", "__repr__"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise invalid(f"{getattr(func, '__name__', func)}() is asked of the keys of a KvantCache, which attention "
                      f'"{NAME}" alone reads: call model.set_attn_implementation("{NAME}"); a model that has '
                      "attention of its own, or computes with its cached keys outside of it, cannot use it")


class _CompiledKeys:
    """The same in a graph of torch.compile, which does without subclasses of tensors."""

    def __init__(self, plain: torch.Tensor, layer: _Layer) -> None:
        self.plain, self.layer, self.read = plain, layer, False


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer. Tokens are appended when they are attended to, which knows the
    mask; until then the new keys carry their cache."""

    is_sliding = False
    # That would ask for masks of four dims; the layers compile all the same.
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, store: _Store, index: int) -> None:
        super().__init__()
        self.store, self.index = store, index
        # Tokens so far, padding counted. A graph of torch.compile counts them itself, in a tensor over
        # the same memory; other calls count in the array, as an op on a tensor takes microseconds.
        self.count = array.array("q", [0])
        with torch.inference_mode(False):
            self.position = torch.frombuffer(self.count, dtype=torch.int64).view(())
        self.module: weakref.ref[torch.nn.Module] | None = None  # whose keys and values they are
        self.is_initialized = True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        copy = _Layer(deepcopy(self.store, memo), self.index)
        copy.count[0], copy.module = self.count[0], self.module
        return copy

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[Any, torch.Tensor]:
        if torch.compiler.is_compiling():
            return _CompiledKeys(key_states, self), value_states
        return _Keys.of(key_states, self), value_states

    def get_seq_length(self) -> Any:
        return self.position.clone() if torch.compiler.is_compiling() else self.count[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            return query_length, 0  # of no account: the mask is not cut
        return self.count[0] + query_length, 0

    def offload(self) -> None:
        raise _lacks("be offloaded: its memory is the host's")

    def prefetch(self) -> None:
        raise _lacks("be prefetched: its memory is the host's")

    def get_max_length(self) -> int:
        return -1 if self.store.max_capacity is None else self.store.max_capacity


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention "kvant" of transformers: [batch, tokens, heads, channels]."""
    if not isinstance(key, (_Keys, _CompiledKeys)):
        raise invalid('attention "kvant" reads a KvantCache: give past_key_values=KvantCache(model.config, ...), or set '
                      'another implementation ("sdpa") where there is no cache. Encoders of images have none: '
                      'set_attn_implementation({"text_config": "kvant"}) leaves theirs. What generate() computes beside '
                      'its cache, as for guidance_scale and assistant_early_exit, has none of this kind')
    if key.read:
        raise _lacks("serve a model that attends to the same keys twice")
    key.read = True
    layer, key = key.layer, key.plain
    window, keep = sliding_window, layer.store.keep[layer.index]
    if attention_mask is not None and attention_mask.dim() == 3:  # some models have their window in it alone
        window, attention_mask = window or keep, attention_mask[0] if attention_mask.shape[1] > 0 else None
        if not window:
            raise invalid(f"layer {layer.index} attends within a window, of which its config's layer_types do not tell")
    if keep > 0 and not window:
        raise invalid(f"layer {layer.index} attends to all tokens, but its config has a sliding_window of {keep}: set it to None")
    causal = kwargs.get("is_causal")
    if attention_mask is None:
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _lacks("serve attention that is not causal")
    elif attention_mask.dim() == 0:
        raise _lacks("take a mask that is neither causal nor a causal window")
    elif attention_mask.dim() != 2:
        raise _lacks(f"take an attention_mask of {attention_mask.dim()} dims, but [batch, tokens]")
    if dropout:
        raise invalid(f"a dropout of {dropout}: KvantCache is for inference, call model.eval()")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, s_aux)):
        raise invalid("gradients are asked for: KvantCache is for inference, use torch.no_grad()")
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise _lacks(f"take a {name}")
    terms = (scaling or 0.0, softcap or 0.0, window or 0, None if s_aux is None else s_aux.detach().float().contiguous())
    if torch.compiler.is_compiling():
        out = torch.ops.kvant.cached_attention(query, key, value, layer.store.number, layer.position,
                                               attention_mask, layer.index, *terms)
        layer.position.add_(query.shape[2])
    else:
        if layer.module is None:
            layer.module = weakref.ref(module)
        elif layer.module() is not module:
            raise invalid("a KvantCache has the tokens of one model and is given to another; make one for each")
        # Past KvCache's checks: at a few thousand tokens a layer takes a hundred microseconds, of which each
        # call of Python's takes several.
        out = layer.store.attend(layer.index, query, key, value, layer.count[0], attention_mask, *terms)
        layer.count[0] += query.shape[2]
    return out.transpose(1, 2).contiguous(), None


# What stands for a layer in a graph of torch.compile. It says where its tokens begin, so that running
# it again does the same: an op with a state of its own could not be in such a graph.
_library = torch.library.Library("kvant", "FRAGMENT")
_library.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor cache, Tensor position, Tensor? mask, int layer, "
    "float scale, float soft_cap, SymInt window, Tensor? sinks) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,))


def _cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    position: torch.Tensor,
    mask: torch.Tensor | None,
    layer: int,
    *terms: Any,
) -> torch.Tensor:
    store = _stores.get(int(cache))
    if store is None:
        raise invalid("a compiled model is called with a KvantCache that is gone, or of another process")
    return store.attend(layer, q, k, v, int(position), mask, *terms)


_library.impl("cached_attention", _cached_attention, "CPU")


@torch.library.register_fake("kvant::cached_attention", lib=_library)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of attention "kvant": [batch, tokens so far], true where there is a token, or None.

    With a window [1, batch, tokens so far], or [1, 0, 0]. Of no dims, one that attention refuses:
    models also make masks that no layer of theirs takes.
    """
    if not _is_causal(mask_function) or (attention_mask is not None and attention_mask.dim() != 2):
        return torch.tensor(False)
    if attention_mask is None:
        return None if mask_function is causal_mask_function else torch.empty(1, 0, 0)
    return attention_mask.bool() if mask_function is causal_mask_function else attention_mask.bool()[None]


def _is_causal(mask_function: Any) -> bool:
    """Causal, or and_masks of a sliding window and causal."""
    if mask_function is causal_mask_function:
        return True
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return False
    parts = mask_function.__closure__[0].cell_contents
    windows = [part for part in parts if part is not causal_mask_function]
    return len(windows) < len(parts) and all(
        getattr(part, "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask" for part in windows)


def _lacks(what: str) -> Exception:
    return make_error("unimplemented", f"KvantCache cannot {what}")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
