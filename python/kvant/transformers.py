"""kvant in transformers: a compressed cache, and attention that reads it as it is stored.

    from kvant.transformers import KvantCache
    model.set_attn_implementation("kvant")
    model.generate(**inputs, past_key_values=KvantCache(model.config, "int4_g64_R128_s4"))

A layer's keys and values are appended and attended to in one call, with the model's soft cap, window
and sinks. Prompts may be padded on the left. What the cache cannot do is refused in words.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from .cache import KvCache
from .errors import invalid, make_error

NAME = "kvant"


class KvantCache(Cache):
    """Keys and values of a model, compressed as they come.

    The memory is taken at the first tokens, for ``capacity`` of them in each row of the batch.

    Args:
      config: the model's.
      scheme: how they are stored (``kvant.schemes()``); a list gives each layer its own.
      capacity: tokens of a sequence, padding not counted.
      rollback: how many of the last tokens assisted generation may take back where the scheme has a
        window; where it has none all can be.
      threads: None: as many as torch uses.
    """

    def __init__(
        self,
        config: Any,
        scheme: str | list[str] = "f16",
        *,
        capacity: int = 8192,
        rollback: int = 0,
        threads: int | None = None,
    ) -> None:
        text = config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ())
        others = kinds - {"full_attention", "sliding_attention"}
        if others:
            raise invalid(f"KvantCache is of attention layers; this model has {sorted(others)}")
        self.scheme, self.capacity = scheme, capacity
        self._rollback, self._threads = rollback, threads
        self._cache: KvCache | None = None
        self._padding: list[int] = []  # on the left of each row
        super().__init__(layers=[_Layer(self, i) for i in range(text.num_hidden_layers)])

    @property
    def cache(self) -> KvCache:
        """The kvant.KvCache that it stands for, from the first tokens on."""
        if self._cache is None:
            raise invalid("KvantCache has no tokens yet")
        return self._cache

    def reset(self) -> None:
        """Forgets all tokens; the next may be of another batch."""
        self._cache, self._padding = None, []
        for layer in self.layers:
            layer.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens of each row, as transformers counts."""
        if tokens_to_remove > 0:
            raise invalid(f"crop takes how many tokens to remove, as a number below 0, not {tokens_to_remove}")
        if self._cache is None or tokens_to_remove == 0:
            return
        rows = range(self._cache.batch)
        self._cache.crop([self._cache.length(0, row) + tokens_to_remove for row in rows])
        for layer in self.layers:
            layer.tokens += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        rows = [int(row) for row in beam_idx]
        self.cache.reorder(rows)
        self._padding = [self._padding[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _lacks("give each row more than once (expand the inputs before the first forward)")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _lacks("drop rows of the batch")

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None) -> None:
        """The new tokens of a layer. padding: [batch, tokens so far], true where there is a token."""
        batch, heads, tokens, size = k.shape
        if self._cache is None:
            self._cache = KvCache(
                self.scheme, layers=len(self.layers), batch=batch, heads=heads, head_size=size,
                v_head_size=v.shape[3], capacity=self.capacity, rollback=self._rollback,
                threads=self._threads)
            self._padding = [0] * batch
        if batch != self._cache.batch:
            raise invalid(f"a batch of {batch} for a cache of {self._cache.batch} rows; reset() it, or make another")
        seen = self.layers[layer].tokens
        counts = None
        if padding is not None:
            self._check_padding(padding, seen, tokens)
        if seen == 0 and any(self._padding):
            # Rows lose their padding: their tokens move to the front.
            start = torch.tensor(self._padding)
            places = (torch.arange(tokens) + start[:, None]).clamp(max=tokens - 1)
            k, v = (x.gather(2, places[:, None, :, None].expand(-1, heads, -1, x.shape[3])) for x in (k, v))
            counts = [tokens - pad for pad in self._padding]
        self._cache._core.append(layer, k, v, counts)
        self.layers[layer].tokens += tokens

    def _check_padding(self, padding: torch.Tensor, seen: int, tokens: int) -> None:
        if seen == 0:
            left = (~padding[:, :tokens]).sum(1)
            if not padding[:, :tokens].eq(torch.arange(tokens) >= left[:, None]).all():
                raise invalid("attention_mask has padding that is not on the left of a row")
            if (left == tokens).any():
                raise invalid(f"row {int(left.argmax())} of attention_mask has no token")
            self._padding = left.tolist()
        elif not padding[:, seen:seen + tokens].all():
            raise invalid(f"attention_mask has padding among tokens {seen} to {seen + tokens - 1}, behind "
                          "those that the cache has; it may be on the left of the first ones only")


class _Keys(torch.Tensor):
    """New keys, that attention "kvant" alone may read: any other would not see those in the cache."""

    plain: torch.Tensor
    layer: _Layer

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
        raise invalid(f"{getattr(func, '__name__', func)} of the keys of a KvantCache: call "
                      f'model.set_attn_implementation("{NAME}"), no other attention reads it')


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer. Tokens are appended when they are attended to, which knows the
    mask; until then the new keys carry their cache."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: KvantCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.tokens = 0  # padding counted
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            raise make_error("unimplemented", "KvantCache is not compiled: run the model without torch.compile")
        return _Keys.of(key_states, self), value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
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
    if not isinstance(key, _Keys):
        raise invalid('attention "kvant" reads a KvantCache: give past_key_values=KvantCache(model.config, ...), '
                      'or set another implementation ("sdpa") where there is no cache')
    layer, key = key.layer, key.plain
    if dropout:
        raise invalid(f"a dropout of {dropout}: KvantCache is for inference, call model.eval()")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise invalid("gradients are asked for: KvantCache is for inference, use torch.no_grad()")
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise _lacks(f"take a {name}")
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    owner, index = layer.owner, layer.index
    out = query.new_empty(*query.shape[:3], value.shape[3])
    # Without gradients, and past KvCache's checks: at a few thousand tokens a layer takes a few hundred
    # microseconds, of which each call of Python's takes several.
    with torch.no_grad():
        owner._append(index, key, value, attention_mask)
        owner._cache._core.attend(index, query.contiguous(), out, scaling or 0.0, softcap or 0.0, sliding_window or 0,
                                  sinks)
    return out.transpose(1, 2), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of attention "kvant": [batch, tokens so far], true where there is a token, or None."""
    if not _is_causal(mask_function):
        raise _lacks("take a mask that is neither causal nor a causal window")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.dim() != 2:
        raise _lacks(f"take an attention_mask of {attention_mask.dim()} dims, but [batch, tokens]")
    return attention_mask[:, :kv_length].bool()


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
