"""KV caches, and attention over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from . import _core
from .cache_arguments import by_row, one_layer, options_of, terms_of
from .checks import boolean, integer, integers, string
from .compiled import engine_for
from .dtypes import type_name
from .errors import invalid
from .tensors import allocate, torch_like

PARTS = ("sinks", "codes", "scales", "zero_points", "window")


class CacheBytes(NamedTuple):
    """Memory of a cache, in bytes.

    ``codes`` is that of quantized tokens (of all where none is quantized), ``parameters`` that of
    scales and zero points, ``window`` that of sinks and windows.
    """

    codes: int
    parameters: int
    window: int
    bookkeeping: int
    total: int


class Range(NamedTuple):
    """Slots of a ring: ``tokens`` of them, from ``first`` on, and from 0 on after the last."""

    first: int
    tokens: int


class Ranges(NamedTuple):
    """Which slots of a cache's three segments a row has."""

    sinks: Range
    quantized: Range
    window: Range


class KvCache:
    """Keys and values of a model's layers, compressed as they come, and attention over them.

        cache = kvant.KvCache("int4_g64_R128_s4", layers=32, heads=8, head_size=128, capacity=32768)
        for each token, for each layer:
            cache.append(layer, k, v)
            o = cache.attend(layer, q)

    Methods may be called from several threads at once.

    Args:
      scheme: how K and V are stored (``kvant.schemes()``, docs/kv_cache.md); a list of as many as
        layers gives each its own.
      layers, batch: of the model, and sequences.
      heads: of K and V.
      head_size: channels of a head of K; ``v_head_size`` of V, 0: as many.
      capacity: tokens of a sequence; the memory is taken at once.
      rollback: how many of the last tokens ``crop`` can take back where there is a window.
      allow_non_finite: store NaN and infinity instead of refusing them.
      k_scales, v_scales: static scales of each layer: 1, heads, or heads * head_size of them.
      keep: how many of a sequence's last tokens a layer keeps, for attention with windows; a list
        gives each layer's own, 0 or None for all. None: all, in every layer.
      fpmath: what attention may be computed in, of codes as well: "strict", "bf16", "f16", "any" or
        "tf32". On a CPU with AMX "bf16" makes prompts of more than a few tokens three times as fast.
      device, threads: as of ``kvant.compile``. The memory is the device's, and on a GPU the work
        goes to torch's current stream.
    """

    def __init__(
        self,
        scheme: str | Sequence[str] = "f16",
        *,
        head_size: int,
        capacity: int,
        layers: int = 1,
        batch: int = 1,
        heads: int = 1,
        v_head_size: int = 0,
        rollback: int = 0,
        allow_non_finite: bool = False,
        k_scales: Sequence[Sequence[float]] | None = None,
        v_scales: Sequence[Sequence[float]] | None = None,
        keep: int | Sequence[int | None] | None = None,
        fpmath: str = "strict",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        options = options_of(
            scheme,
            layers=layers,
            batch=batch,
            heads=heads,
            head_size=head_size,
            v_head_size=v_head_size,
            capacity=capacity,
            rollback=rollback,
            allow_non_finite=allow_non_finite,
            k_scales=k_scales,
            v_scales=v_scales,
            keep=keep,
            fpmath=fpmath,
        )
        self._core = _core.Cache(engine_for(device, threads, None), options)
        self.layers, self.batch, self.heads = layers, batch, heads
        self.head_size, self.v_head_size = head_size, v_head_size or head_size
        self.capacity, self.rollback = capacity, rollback
        self.device = device

    @staticmethod
    def bytes_for(
        scheme: str | Sequence[str] = "f16",
        *,
        head_size: int,
        capacity: int,
        layers: int = 1,
        batch: int = 1,
        heads: int = 1,
        **options: Any,
    ) -> CacheBytes:
        """What a cache of these options takes, without making it."""
        made = options_of(
            scheme,
            layers=layers,
            batch=batch,
            heads=heads,
            head_size=head_size,
            capacity=capacity,
            **options,
        )
        return CacheBytes(*made.bytes())

    def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        counts: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Appends tokens to a layer: k and v [batch, heads, tokens, head size].

        They are f32, f16 or bf16, with any strides from 0 on. counts [batch]: of row b only so
        many tokens; starts [batch]: from that one on, where rows are padded on the left. None: all,
        from the first on.
        """
        layer = integer("layer", layer)
        self._core.append(layer, k, v, by_row("counts", counts), by_row("starts", starts))

    def attend(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        scale: float | None = None,
        *,
        soft_cap: float | None = None,
        window: int | None = None,
        sinks: Any = None,
        bias: Any = None,
        k: Any = None,
        v: Any = None,
        starts: Sequence[int] | None = None,
        causal: bool = True,
        stats: Any = None,
    ) -> Any:
        """Attention of the last tokens' queries over a layer; returns the output.

        ``out`` and ``stats`` overlap no other argument, which is not checked.

        Args:
          q: [batch, query heads, query tokens, head size], dense; f32, f16 or bf16. Each query
            sees what is not behind it.
          out: of q's type, [batch, query heads, query tokens, v head size], dense; None: like q.
          scale: of scores; None: 1 / sqrt(head size).
          soft_cap: scores become cap * tanh(score / cap).
          window: the last tokens up to its own that a query sees; None: all.
          sinks: f32 [query heads], a logit that joins each softmax's denominator.
          bias: f32 [batch or 1, query heads or 1, query tokens, columns], added to the scaled
            scores. Column j is of the j-th token that a row keeps; there are at least
            ``self.columns`` of them, and with k and v query tokens more.
          k, v: of the query tokens, where the cache does not have them yet: they are read as they
            are, of q's type, dense, and appended afterwards by who calls.
          starts: [batch], the first of k and v that a row has; None: all. What comes out for the
            queries before it, which are padding, means nothing.
          causal: False: the queries are of tokens that come after all of these, and see them all.
          stats: f32 [batch, query heads, query tokens, 1], written: max + ln(sum exp(score - max))
            of each query, -inf where it sees nothing, by which ``MergeAttention`` joins attention
            over parts of the tokens; True: made, and returned behind the output.
        """
        out, written, result = self._results(q, out, stats)
        layer = integer("layer", layer)
        terms = terms_of(scale, soft_cap, window)
        rows, sees_all = by_row("starts", starts), not boolean("causal", causal)
        self._core.attend(layer, q, out, *terms, sinks, bias, k, v, rows, sees_all, written)
        return result

    def attention(
        self,
        query_heads: int,
        query_tokens: int = 1,
        type: Any = "f32",
        scale: float | None = None,
        *,
        soft_cap: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        new_tokens: bool = False,
        bias: Sequence[int] = (),
        causal: bool = True,
        stats: bool = False,
    ) -> Attention:
        """Attention for one shape and type of queries, compiled; it says what runs.

        Each call takes ``sinks``, k and v of ``new_tokens``, a bias of these dims and ``stats``,
        where they are given. The rest is as of ``attend``.
        """
        tokens = integer("query_tokens", query_tokens)
        if tokens < 1:
            raise invalid(f"attention of {tokens} query tokens")
        core = self._core.attention(
            integer("query_heads", query_heads),
            tokens,
            type_name(type),
            *terms_of(scale, soft_cap, window),
            boolean("sinks", sinks),
            boolean("new_tokens", new_tokens),
            integers("bias", bias),
            not boolean("causal", causal),
            boolean("stats", stats),
        )
        return Attention(self, core)

    def length(self, layer: int = 0, row: int = 0) -> int:
        """Tokens of a sequence in a layer."""
        return self._core.length(integer("layer", layer), integer("row", row))

    @property
    def columns(self) -> int:
        """Tokens that a sequence has room for in a layer's memory, of all layers the most."""
        return self._core.columns()

    def crop(self, tokens: int | Sequence[int], layer: int | None = None) -> None:
        """Takes sequences back to their first tokens, in one layer or all; a list is by row."""
        # A tensor of no dims is a number.
        if not isinstance(tokens, Iterable) or getattr(tokens, "ndim", None) == 0:
            tokens = [integer("tokens", tokens)] * self.batch
        rows = integers("tokens", tokens)
        if len(rows) != self.batch:
            raise invalid(f"crop needs tokens for {self.batch} rows, not {len(rows)}")
        self._core.crop(rows, one_layer(layer))

    def reset(self) -> None:
        """Takes all tokens out."""
        self._core.reset()

    def reorder(self, rows: Sequence[int], layer: int | None = None) -> None:
        """Row i becomes what row rows[i] was, in one layer or all: beam search."""
        self._core.reorder(integers("rows", rows), one_layer(layer))

    def fork(self, rows: Sequence[int] | None = None, capacity: int | None = None) -> KvCache:
        """A cache of its own with the same tokens.

        Its row i is row rows[i], so batches change; None: all rows. With another capacity
        sequences go on where this one is full.
        """
        taken = by_row("rows", rows)
        wanted = self.capacity if capacity is None else integer("capacity", capacity)
        if wanted < 1:
            raise invalid(f"a fork with a capacity of {wanted}")
        core = self._core.fork(taken, wanted)
        copy = object.__new__(KvCache)
        copy.__dict__.update(self.__dict__, _core=core, capacity=wanted)
        if taken is not None:
            copy.batch = len(taken)
        return copy

    def saved_bytes(self, layer: int, lengths: Sequence[int] | None = None) -> int:
        """How many bytes ``save`` gives of rows of these lengths; None: of what they are now."""
        return self._core.saved_bytes(integer("layer", layer), by_row("lengths", lengths))

    def save(self, layer: int, out: Any = None) -> Any:
        """A layer's sequences as bytes, to be sent to another machine or written to a file.

        What attention reads of each row, as it is stored, and no more: neither scheme nor lengths.
        Where another thread appends meanwhile, lengths, ``saved_bytes`` and this are asked under a
        lock of the caller's, as they belong together.

        Args:
          out: uint8 [saved_bytes], where the cache's memory is; None: made, of torch on a GPU.
        """
        layer = integer("layer", layer)
        if out is None:
            out = allocate("out", "u8", [self.saved_bytes(layer)], None, self._torch_on_device())
        self._core.save(layer, out)
        return out

    def load(self, layer: int, data: Any, lengths: Sequence[int]) -> None:
        """A layer's rows become what a cache saved, of rows of these lengths [batch].

        Scheme, heads, sizes and ``keep`` must be those of the cache that saved it; capacity and
        number of layers need not. What a crop would take back into a window, or into what the
        layer keeps, is gone.

        Args:
          data: uint8 [saved_bytes(layer, lengths)], where the cache's memory is. It is trusted:
            neither scheme nor lengths are in it, and lengths that differ a little take as many
            bytes.
        """
        self._core.load(integer("layer", layer), integers("lengths", lengths), data)

    def __reduce__(self) -> Any:
        raise invalid("a KvCache cannot be pickled: fork() copies it, and save() gives its tokens as bytes")

    def __deepcopy__(self, memo: dict[int, Any]) -> KvCache:
        return self.fork()

    @property
    def bytes(self) -> CacheBytes:
        """The memory of the cache."""
        return CacheBytes(*self._core.bytes())

    @property
    def used_bytes(self) -> int:
        """What its sequences hold of that now, in bytes."""
        return self._core.used_bytes()

    @property
    def scratch_bytes(self) -> int:
        """What attention computes in, in bytes; kept from the first execution on."""
        return self._core.scratch_bytes()

    def scheme(self, layer: int = 0) -> str:
        """How a layer is stored, as text that the constructor takes."""
        return self._core.scheme(integer("layer", layer))

    def part(self, layer: int, values: bool, part: str) -> Any:
        """A part of K (of V, if ``values``) as it is stored: [batch, heads, slots, channels].

        A read-only numpy array over the cache's memory, which stays while the array does; None
        where the scheme has no such part. Later calls change what it shows. bf16 is uint16, f8
        and what is smaller than a byte uint8, packed along the last dim; where that does not
        fill bytes (zero points of few groups), all bytes in one dim, elements one after another.

        Args:
          part: "sinks", "codes", "scales", "zero_points" or "window".
        """
        if self.device.partition(":")[0] != "cpu":
            raise invalid(f"a part of a cache on {self.device} is not in the host's memory")
        if part not in PARTS:
            raise invalid(f"{part!r} is no part; parts are {', '.join(PARTS)}")
        of_values = boolean("values", values)
        return self._core.part(integer("layer", layer), of_values, PARTS.index(part))

    def ranges(self, layer: int, values: bool, row: int = 0) -> Ranges:
        """Which slots of sinks, quantized tokens and window a row of K (of V) has."""
        of_values = boolean("values", values)
        found = self._core.ranges(integer("layer", layer), of_values, integer("row", row))
        return Ranges(*(Range(*each) for each in found))

    def explain(self) -> str:
        """The schemes of its layers, and its memory."""
        schemes = [self.scheme(layer) for layer in range(self.layers)]
        lines = [f"layers {layers}: {scheme}" for layers, scheme in _runs(schemes)]
        used, total = self.used_bytes, self.bytes.total
        return "\n".join([*lines, f"{used} of {total} bytes are used"])

    def _torch_on_device(self) -> Any | None:
        """A tensor of torch on the cache's GPU; None for a cache in the host's memory."""
        if self.device.partition(":")[0] == "cpu":
            return None
        import torch

        return torch.empty(0, device=self.device)

    def _results(self, q: Any, out: Any, stats: Any) -> tuple[Any, Any, Any]:
        """Output and statistics of attention, made where they are not given, and what to return."""
        if out is None:
            out = self._output(q)
        if stats is None or stats is False:
            return out, None, out
        if stats is True:
            stats = allocate("stats", "f32", [*_shape_of(q)[:3], 1], None, torch_like([q]))
        return out, stats, (out, stats)

    def _output(self, q: Any) -> Any:
        dims = [*_shape_of(q)[:3], self.v_head_size]
        # The buffer protocol's types are not names.
        if not hasattr(q, "dtype"):
            raise invalid(f"q is a {q.__class__.__name__}, whose type has no name: give out as well")
        type = str(q.dtype).removeprefix("torch.")
        if type not in ("float32", "float16", "bfloat16"):
            raise invalid(f"q must be f32, f16 or bf16, not {type}")
        return allocate("out", type_name(type), dims, None, torch_like([q]))

    def __repr__(self) -> str:
        return (
            f"<kvant.KvCache {self.scheme(0)}: {self.layers} layers, {self.batch} sequences, "
            f"{self.heads} heads of {self.head_size}, capacity {self.capacity}>"
        )


class Attention:
    """Attention over a cache, for one shape and type of queries; ``KvCache.attention`` makes it."""

    def __init__(self, cache: KvCache, core: _core.Attention) -> None:
        self._cache, self._core = cache, core

    def __call__(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        sinks: Any = None,
        *,
        bias: Any = None,
        k: Any = None,
        v: Any = None,
        starts: Sequence[int] | None = None,
        stats: Any = None,
    ) -> Any:
        """As ``KvCache.attend``."""
        out, written, result = self._cache._results(q, out, stats)
        rows = by_row("starts", starts)
        self._core.execute(integer("layer", layer), q, out, sinks, bias, k, v, rows, written)
        return result

    def explain(self, layer: int | None = None) -> str:
        """What runs for a layer, or for all, and why nothing better does."""
        if layer is not None:
            return self._core.explain(integer("layer", layer))
        texts = [self._core.explain(layer) for layer in range(self._cache.layers)]
        return "\n".join(f"layers {layers}:\n{text}" for layers, text in _runs(texts))


def schemes() -> dict[str, str]:
    """Schemes that have names, and what each is."""
    return dict(_core.schemes())


def scheme_bits(scheme: str, head_size: int = 128, heads: int = 1) -> float:
    """What an element of K or V takes in the long run, in bits, scales included."""
    name = string("scheme", scheme)
    return _core.scheme_bits(name, integer("head_size", head_size), integer("heads", heads))


def _shape_of(q: Any) -> Sequence[int]:
    """That of queries."""
    shape = getattr(q, "shape", None)
    if shape is None or len(shape) != 4:
        is_a = f"a {q.__class__.__name__}" if shape is None else list(shape)
        raise invalid(f"q must be [batch, query heads, query tokens, head size], not {is_a}")
    return shape


def _runs(texts: list[str]) -> list[tuple[str, str]]:
    """Texts that follow each other and are the same, as ("0-3", text)."""
    runs: list[tuple[str, str]] = []
    start = 0
    for at in range(1, len(texts) + 1):
        if at == len(texts) or texts[at] != texts[start]:
            runs.append((str(start) if at == start + 1 else f"{start}-{at - 1}", texts[start]))
            start = at
    return runs
