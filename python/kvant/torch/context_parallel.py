"""Attention over tokens that are spread over the ranks of torch.distributed.

    dist.init_process_group("gloo")                     # or "nccl"; under torchrun
    cache = ContextParallelCache("int4_g64", layers=2, heads=8, head_size=128, capacity=16384)
    o = cache.prefill(layer, q, k, v)                   # of a prompt, each rank its chunk
    o = cache.attend(layer, q, k, v)                    # of new tokens, the same on every rank

docs/context_parallel.md tells more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import __version__
from ..cache import KvCache
from ..checks import integer, integers, number
from ..errors import Error, invalid
from .merge import merge_attention
from .ranks import Ranks, SentBytes

__all__ = ["ContextParallelCache", "SentBytes", "split"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# What a call's header holds before the rows' starts; ranks must agree about those that have a name here.
_HEADER = ("method", "layer", "query heads", "tokens", "channels of q", "heads of k", "channels of v",
           "the type of q", "scale", "soft_cap", "whether there are sinks", "whether there are k and v")
_METHODS = ("prefill", "attend")

Part = tuple[torch.Tensor, torch.Tensor]


def split(tokens: int, ranks: int, balance: str = "compute") -> list[int]:
    """How many tokens of a prompt each rank gets: in all ``tokens``.

    Args:
      balance: "compute": as many products of queries and keys on each, so that the first, which see
        the fewest tokens before them, get the most; "memory": as many tokens on each.
    """
    tokens, ranks = integer("tokens", tokens), integer("ranks", ranks)
    if tokens < 0 or ranks < 1:
        raise invalid(f"a prompt of {tokens} tokens on {ranks} ranks")
    if balance not in ("compute", "memory"):
        raise invalid(f'balance must be "compute" or "memory", not {balance!r}')
    power = 0.5 if balance == "compute" else 1.0
    ends = [round(tokens * ((rank + 1) / ranks) ** power) for rank in range(ranks)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


class ContextParallelCache:
    """Keys and values whose tokens are spread over ranks, compressed as they come, and attention over them.

    Every rank makes one, and calls the same methods in the same order. What ranks disagree about (shapes,
    types, schemes) raises kvant.Error on all of them, in the same words, and nothing has changed. A rank that
    is gone raises it on those that wait for it, when the collective's timeout has passed at the latest; the
    cache is of no use from then on.

    Args:
      scheme, layers, batch, heads, head_size, v_head_size, allow_non_finite, k_scales, v_scales,
        fpmath: as of ``kvant.KvCache``.
      capacity: tokens of a sequence that this rank has room for; ranks may differ.
      group: the ranks; None: all.
      device: where this rank's tensors and cache are.
      checks: compare shapes at each call, by a message between hosts. False is for programs that are known
        to be right: ranks that disagree then wait for each other until the timeout.
      timeout: of these messages where the group's backend is not gloo, a datetime.timedelta; None: torch's.
    """

    def __init__(
        self,
        scheme: str | Sequence[str] = "f16",
        *,
        heads: int,
        head_size: int,
        capacity: int,
        layers: int = 1,
        batch: int = 1,
        v_head_size: int = 0,
        allow_non_finite: bool = False,
        k_scales: Sequence[Sequence[float]] | None = None,
        v_scales: Sequence[Sequence[float]] | None = None,
        fpmath: str = "strict",
        group: Any = None,
        device: str | torch.device = "cpu",
        checks: bool = True,
        timeout: Any = None,
    ) -> None:
        self._ranks = Ranks(group, timeout)
        self.rank, self.ranks = self._ranks.rank, self._ranks.count
        self.layers, self.batch, self.heads = layers, batch, heads
        self.head_size, self.v_head_size = head_size, v_head_size or head_size
        self.device, self.checks = torch.device(device), checks
        self._scales = {"k_scales": k_scales, "v_scales": v_scales}
        # What all caches here have in common, those of one layer too.
        self._common = dict(batch=batch, heads=heads, head_size=head_size, v_head_size=v_head_size,
                            allow_non_finite=allow_non_finite, fpmath=fpmath, device=str(device))
        self.cache = self._make(scheme, capacity)
        """This rank's tokens. What is appended to it directly, or taken out, other ranks do not know of."""
        # Of each layer, rank and row how many tokens there are: every rank keeps count of all.
        self._lengths = [[[0] * batch for _ in range(self.ranks)] for _ in range(layers)]
        # Scales and soft caps that a cache takes.
        self._terms: set[Any] = set()
        # By scheme and static scales: for chunks of other ranks, and one that stays empty.
        self._visitors: dict[Any, KvCache] = {}
        self._empty: dict[Any, KvCache] = {}

    @property
    def sent(self) -> SentBytes:
        """What this rank has sent so far, in bytes."""
        return self._ranks.sent

    def lengths(self, layer: int = 0) -> list[list[int]]:
        """Of each rank, how many tokens of each row it has in a layer."""
        return [list(rows) for rows in self._lengths[self._layer(layer)]]

    def length(self, layer: int = 0, row: int = 0) -> int:
        """Tokens of a sequence in a layer, on all ranks."""
        if not 0 <= row < self.batch:
            raise invalid(f"there is no row {row}: the cache has {self.batch}")
        return sum(rows[row] for rows in self._lengths[self._layer(layer)])

    def prefill(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        starts: Sequence[int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of a prompt of which each rank has a chunk, in the order of ranks; it is appended.

        A query reads its own chunk's keys and values as they are, and those of chunks before it as they are
        stored: these go from rank to rank as codes, each while the one before it is attended to. The layer
        must be empty.

        Args:
          q: [batch, query heads, tokens, head size], of this rank's chunk; ranks may have different numbers
            of tokens, 0 too.
          k, v: [batch, heads, tokens, head size], of q's type.
          starts: [batch], the first token of the chunk that a row has; None: all. The rest is padding, and
            the output of its queries is of no account.
          scale, soft_cap, sinks: as of ``KvCache.attend``.

        Returns:
          [batch, query heads, tokens, v head size] of q's type, of this rank's queries.
        """
        found = self._agree("prefill", layer, q, k, v, scale, soft_cap, sinks, starts)
        if any(any(rows) for rows in self._lengths[layer]):
            raise invalid(f"prefill: layer {layer} has tokens already: {self._lengths[layer]} on ranks 0 to "
                          f"{self.ranks - 1}; attend appends to it")
        counts = [[tokens - start for start in of_rank] for tokens, of_rank in found]
        for rank, added in enumerate(counts):
            self._check_room(layer, rank, added)
        rows = found[self.rank][1]
        q, k, v = (x.contiguous() for x in (q, k, v))
        sinks = None if sinks is None else sinks.contiguous()
        terms = {"scale": scale, "soft_cap": soft_cap, "stats": True}
        parts: list[Part] = []

        def attend(cache: KvCache, **more: Any) -> None:
            if q.shape[2] == 0:
                return
            parts.append(cache.attend(0, q, **terms, **more))
            if len(parts) > 1:
                parts[:] = [merge_attention([(out.float(), stats) for out, stats in parts])]

        # The codes go on their way first: attention to this chunk takes the numbers that they are made of.
        self._append_alike(layer, k, v, rows)
        self._lengths[layer] = counts
        saved = self._bytes(self.cache.saved_bytes(layer))
        self.cache.save(layer, saved)
        none = self._of_one_layer(self._empty, layer, 1)
        self._pass_on(layer, saved, lambda: attend(none, k=k, v=v, starts=rows, sinks=sinks),
                      lambda visitor: attend(visitor, causal=False))
        if not parts:
            return q.new_empty(self.batch, q.shape[1], 0, self.v_head_size)
        return parts[0][0].to(q.dtype)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the next tokens, which are the same on every rank; they are appended.

        Each rank attends to the tokens that it has, and all merge what all have found. A single token reads
        itself as it is stored, several read each other as they are. Each row's tokens go to the rank that has
        the fewest of it.

        Args:
          q: [batch, query heads, tokens, head size].
          k, v: [batch, heads, tokens, head size], of q's type; None: nothing is appended, and the queries
            see all tokens.
          scale, soft_cap, sinks: as of ``KvCache.attend``.

        Returns:
          [batch, query heads, tokens, v head size] of q's type, on every rank.
        """
        self._agree("attend", layer, q, k, v, scale, soft_cap, sinks, None)
        tokens = q.shape[2]
        if tokens == 0:
            return q.new_empty(self.batch, q.shape[1], 0, self.v_head_size)
        owners = self._owners(layer, tokens) if k is not None else []
        queries = q.float().contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        terms = {"scale": scale, "soft_cap": soft_cap}

        def attend_to_own(out: torch.Tensor, stats: torch.Tensor) -> None:
            if tokens == 1 and k is not None:
                self._append(layer, k, v, owners)
            # A sink joins the denominator once.
            self.cache.attend(layer, queries, out=out, stats=stats, causal=False,
                              sinks=sinks if self.rank == 0 else None, **terms)
            if tokens > 1 and k is not None:
                self._append(layer, k, v, owners)

        parts = self._gather(queries, attend_to_own)
        for row, owner in enumerate(owners):
            self._lengths[layer][owner][row] += tokens
        if tokens > 1 and k is not None:
            none = self._of_one_layer(self._empty, layer, 1)
            k, v = (x.float().contiguous() for x in (k, v))
            parts.append(none.attend(0, queries, k=k, v=v, stats=True, **terms))
        return merge_attention(parts, dtype=q.dtype)[0]

    def reset(self) -> None:
        """Takes all tokens out, on this rank: every rank has to."""
        self.cache.reset()
        self._lengths = [[[0] * self.batch for _ in range(self.ranks)] for _ in range(self.layers)]

    def _make(self, scheme: str | Sequence[str], capacity: int) -> KvCache:
        """This rank's cache, if every rank can make one of the same kind."""
        made, what, wrong = None, {}, None
        try:
            made = KvCache(scheme, layers=self.layers, capacity=capacity, **self._common, **self._scales)
            what = {"kvant": __version__, "layers": self.layers, "batch": self.batch, "heads": self.heads,
                    "head_size": self.head_size, "v_head_size": self.v_head_size,
                    "allow_non_finite": self._common["allow_non_finite"], "fpmath": self._common["fpmath"],
                    **self._scales}
            what |= {f"the scheme of layer {layer}": made.scheme(layer) for layer in range(self.layers)}
        except Error as error:
            wrong = error
        found = self._ranks.gather_objects("a cache over ranks", (what, capacity, wrong and str(wrong)))
        for rank, (_, _, text) in enumerate(found):
            if text is not None:
                raise invalid(f"rank {rank} of {self.ranks} makes no cache: {text}") from wrong
        for name in found[0][0]:
            _check_alike("a cache over ranks", name, [what.get(name) for what, _, _ in found])
        self.capacities: list[int] = [capacity for _, capacity, _ in found]
        return made

    def _agree(
        self, method: str, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None,
        scale: float | None, soft_cap: float | None, sinks: Any, starts: Sequence[int] | None,
    ) -> list[tuple[int, list[int]]]:
        """Of each rank how many tokens come, and the rows' starts; raises if something does not fit."""
        wrong, own = None, [-1] * (len(_HEADER) + self.batch)
        try:
            self._check(method, q, k, v, scale, soft_cap, sinks)
            own = [_METHODS.index(method), self._layer(layer), q.shape[1], q.shape[2], q.shape[3],
                   0 if k is None else k.shape[1], 0 if v is None else v.shape[3], _TYPES.index(q.dtype),
                   _bits("scale", scale), _bits("soft_cap", soft_cap), sinks is not None, k is not None,
                   *self._starts(starts, q)]
        except Error as error:
            wrong = error
        if not self.checks and method == "attend":
            if wrong:
                raise wrong
            return []
        found = self._ranks.gather_headers(f"{method} in layer {layer}", own)
        self._raise_alike(f"{method} in layer {layer}", wrong, [header[0] < 0 for header in found])
        for at, name in enumerate(_HEADER):
            values = [header[at] for header in found]
            if name == "method":
                values = [_METHODS[value] for value in values]
            elif name == "the type of q":
                values = [str(_TYPES[value]) for value in values]
            elif name in ("scale", "soft_cap"):
                values = [_number(value) for value in values]
            if name != "tokens" or method != "prefill":
                _check_alike(f"{method} in layer {layer}", name, values)
        return [(header[3], header[len(_HEADER):]) for header in found]

    def _raise_alike(self, where: str, wrong: Error | None, failed: list[bool]) -> None:
        """What failed here, or that something did on another rank."""
        if wrong:
            raise wrong
        if any(failed):
            rank = failed.index(True)
            raise invalid(f"{where}: rank {rank} of {self.ranks} has failed, and says why there")

    def _check(self, method: str, q: Any, k: Any, v: Any, scale: Any, soft_cap: Any, sinks: Any) -> None:
        """This rank's arguments, by themselves: what a cache would refuse when others have begun."""
        if not isinstance(q, torch.Tensor) or q.dim() != 4 or q.dtype not in _TYPES:
            raise invalid(f"{method}: q must be [batch, query heads, tokens, head size] of f32, f16 or bf16, not "
                          f"{_describe(q)}")
        if (k is None) != (v is None):
            raise invalid(f"{method}: k and v go together")
        wanted = {"q": (q, q.shape[1], self.head_size)}
        if k is not None or method == "prefill":
            wanted |= {"k": (k, self.heads, self.head_size), "v": (v, self.heads, self.v_head_size)}
        for name, (x, heads, channels) in wanted.items():
            shape = [self.batch, heads, q.shape[2], channels]
            if not isinstance(x, torch.Tensor) or list(x.shape) != shape or x.dtype != q.dtype:
                raise invalid(f"{method}: {name} must be {shape} of {q.dtype}, not {_describe(x)}")
            if x.device.type != self.device.type:
                raise invalid(f"{method}: {name} is on {x.device}, but the cache on {self.device}")
        if q.shape[1] < 1 or q.shape[1] % self.heads:
            raise invalid(f"{method}: {q.shape[1]} query heads over {self.heads} heads of K and V")
        tensors = {name: x for name, (x, _, _) in wanted.items()}
        if sinks is not None:
            shape = [q.shape[1]]
            if not isinstance(sinks, torch.Tensor) or list(sinks.shape) != shape or sinks.dtype != torch.float32:
                raise invalid(f"{method}: sinks must be {shape} of torch.float32, not {_describe(sinks)}")
            tensors["sinks"] = sinks
            if sinks.device.type != self.device.type:
                raise invalid(f"{method}: sinks is on {sinks.device}, but the cache on {self.device}")
        for name, x in tensors.items():
            if x.requires_grad and torch.is_grad_enabled():
                raise invalid(f"{method}: {name} requires grad, and kvant computes no gradients: detach() it, or run "
                              "under torch.no_grad()")
        terms = tuple(None if x is None else number(name, x)
                      for name, x in (("scale", scale), ("soft_cap", soft_cap)))
        if terms not in self._terms:
            # Not by the cache itself, which keeps a few attentions.
            none = self._of_one_layer(self._empty, 0, 1)
            none.attention(q.shape[1], 1, "f32", terms[0], soft_cap=terms[1], causal=False)
            self._terms.add(terms)

    def _owners(self, layer: int, tokens: int) -> list[int]:
        """The rank that each row's next tokens go to: that with the fewest, of those with room."""
        owners = []
        for row in range(self.batch):
            have = [rows[row] for rows in self._lengths[layer]]
            room = [rank for rank in range(self.ranks) if have[rank] + tokens <= self.capacities[rank]]
            if not room:
                raise invalid(f"attend: row {row} of layer {layer} has {have} tokens on ranks of capacities "
                              f"{self.capacities}: no rank has room for {tokens} more")
            owners.append(min(room, key=lambda rank: have[rank]))
        return owners

    def _append(self, layer: int, k: Any, v: Any, owners: list[int]) -> None:
        """The rows of which this rank is the owner."""
        counts = [k.shape[2] if owner == self.rank else 0 for owner in owners]
        if any(counts):
            self.cache.append(layer, k, v, counts=counts if not all(counts) else None)

    def _append_alike(self, layer: int, k: torch.Tensor, v: torch.Tensor, starts: list[int]) -> None:
        """Every rank its chunk to an empty layer, or none: K or V of one may have a number that is refused."""
        wrong = None
        try:
            self.cache.append(layer, k, v, starts=starts)
        except Error as error:
            wrong = error
        where = f"appending to layer {layer}"
        failed = [bool(each) for each, in self._ranks.gather_headers(where, [wrong is not None])]
        if any(failed):
            self.cache.crop([0] * self.batch, layer)
        self._raise_alike(where, wrong, failed)

    def _check_room(self, layer: int, rank: int, added: list[int]) -> None:
        for row, count in enumerate(added):
            if count > self.capacities[rank]:
                raise invalid(f"prefill: row {row} of layer {layer} gets {count} tokens on rank {rank}, more than "
                              f"its capacity of {self.capacities[rank]}")

    def _gather(
        self, queries: torch.Tensor, attend: Callable[[torch.Tensor, torch.Tensor], Any]
    ) -> list[Part]:
        """Output and statistics of every rank, where ``attend`` writes this rank's."""
        shape = [*queries.shape[:3], self.v_head_size]
        rows = queries.shape[:3].numel()
        message, wrong = queries.new_zeros(rows * (self.v_head_size + 1)), None
        out, stats = message[:-rows].view(shape), message[-rows:].view(*shape[:3], 1)
        try:
            attend(out, stats)
        except Error as error:
            # No statistics are infinite: so others know, without a message of its own. What they would
            # merge is NaN.
            wrong = error
            stats.fill_(float("inf"))
        if self.ranks == 1 and wrong is None:
            return [(out, stats)]
        every = self._ranks.gather("what ranks attended to", message)
        parts = [(each[:-rows].view(shape), each[-rows:].view(*shape[:3], 1)) for each in every]
        # A host does not wait for its GPU to look at them.
        if wrong or (self.checks and self.device.type == "cpu"):
            self._raise_alike("attend", wrong, [bool(of[1].isposinf().any()) for of in parts])
        return parts

    def _pass_on(
        self, layer: int, saved: torch.Tensor, attend_to_own: Callable[[], None],
        attend_to: Callable[[KvCache], None],
    ) -> None:
        """A chunk goes from its rank to all behind it, through those between."""
        lengths = self._lengths[layer]
        carried: torch.Tensor | None = saved
        for hop in range(1, self.ranks + 1):
            # At hop h a rank attends to the chunk of rank - h + 1, and passes it on.
            source = self.rank - hop
            coming = self._bytes(self.cache.saved_bytes(layer, lengths[source])) if source >= 0 else None
            sends = carried is not None and self.rank + 1 < self.ranks
            wait = self._ranks.pass_on(f"hop {hop} of chunks of layer {layer}", carried if sends else None, coming)
            if hop == 1:
                attend_to_own()
            elif carried is not None and any(lengths[source + 1]):
                capacity = max(max(rows) for rows in lengths)
                visitor = self._of_one_layer(self._visitors, layer, capacity)
                visitor.load(0, carried, lengths[source + 1])
                attend_to(visitor)
            wait()
            carried = coming

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def _of_one_layer(self, kept: dict[Any, KvCache], layer: int, capacity: int) -> KvCache:
        """A cache of one layer like that layer, with that capacity or more."""
        scales = {name: None if of is None else [list(of[layer])] for name, of in self._scales.items()}
        key = (self.cache.scheme(layer), str(scales))
        if key not in kept or kept[key].capacity < capacity:
            kept[key] = KvCache(key[0], capacity=capacity, **self._common, **scales)
        return kept[key]

    def _layer(self, layer: int) -> int:
        layer = integer("layer", layer)
        if not 0 <= layer < self.layers:
            raise invalid(f"there is no layer {layer}: the cache has {self.layers}")
        return layer

    def _starts(self, starts: Sequence[int] | None, q: Any) -> list[int]:
        if starts is None:
            return [0] * self.batch
        rows = integers("starts", starts)
        if len(rows) != self.batch:
            raise invalid(f"starts must be of {self.batch} rows, not {len(rows)}")
        tokens = q.shape[2] if isinstance(q, torch.Tensor) and q.dim() == 4 else 0
        for row, start in enumerate(rows):
            if not 0 <= start <= tokens:
                raise invalid(f"row {row} starts at token {start} of {tokens}")
        return rows

    def __repr__(self) -> str:
        return f"<kvant.torch.ContextParallelCache, rank {self.rank} of {self.ranks}: {self.cache!r}>"


def _check_alike(where: str, name: str, values: list[Any]) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise invalid(f"{where}: ranks disagree about {name}: it is {values[0]!r} on rank 0 and {value!r} on "
                          f"rank {rank}")


def _bits(name: str, value: float | None) -> int:
    """A number as 64 bits; 0 stands for none, as no term may be 0."""
    return 0 if value is None else struct.unpack("q", struct.pack("d", number(name, value)))[0]


def _number(bits: int) -> float | None:
    return None if bits == 0 else struct.unpack("d", struct.pack("q", bits))[0]


def _describe(x: Any) -> str:
    return f"{list(x.shape)} of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
