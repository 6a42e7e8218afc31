"""kvant's C ABI (kvant_c.h), as the package uses it.

Tensors are whatever has DLPack's exchange table, the buffer protocol or __dlpack__. Everything
raises kvant.Error.
"""

from collections.abc import Sequence
from typing import Any

# name, id, type, property, dims, strides, bytes: kvant.TensorInfo.
_Tensor = tuple[
    str, int, str, str, tuple[int | None, ...] | None, tuple[int | None, ...] | None, int
]
_Dims = Sequence[int | None]

def version() -> str: ...
def type_bits(name: str, /) -> int:
    """2 to 64; 0 for what is no type."""

def after_fork() -> None:
    """To be called in the child of a fork."""

def check_not_forked() -> None:
    """Raises in a child of a process that had engines."""

def xla_handler(platform: str) -> Any:
    """A capsule for jax.ffi.register_ffi_target; platform is "cpu" or "CUDA"."""

class Graph:
    @staticmethod
    def from_json(text: str) -> Graph: ...
    def to_json(self) -> str: ...
    def to_dot(self) -> str: ...
    def inputs(self) -> list[_Tensor]: ...
    def outputs(self) -> list[_Tensor]: ...
    def partitions(self) -> Partitions: ...

class Partitions:
    def __len__(self) -> int: ...
    def at(self, at: int) -> tuple[str, str, str, list[int]]:
        """Kind, pattern, notes (a line each) and ids of ops."""

    def graph(self, at: int) -> Graph: ...

class Builder:
    def __init__(self, fpmath: str, apply_to_int: bool) -> None: ...
    def input(
        self, name: str, type: str, property: str, dims: _Dims | None, strides: _Dims | None
    ) -> int: ...
    def constant(self, type: str, number: float) -> int: ...
    def op(
        self,
        kind: str,
        name: str,
        inputs: Sequence[int],
        attributes: list[tuple[str, str, Any]],
        results: list[tuple[str | None, _Dims | None]],
    ) -> list[int]:
        """attributes: (name, type of kvant.attributes, value); results: (type, dims)."""

    def output(self, name: str, value: int, strides: _Dims | None) -> None: ...
    def describe(self, value: int) -> _Tensor: ...
    def build(self) -> Graph: ...

class Engine:
    def __init__(self, device: str, index: int, backends: str | None, threads: int, openmp: bool) -> None: ...

class Compiled:
    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...
    def graph(self) -> Graph: ...
    def explain(self) -> str: ...
    def fused(self) -> bool: ...
    def rounding(self) -> float: ...
    def scratch_bytes(self) -> int: ...

def compile(
    engine: Engine,
    graph: Graph,
    require_fused: bool,
    tensors: list[tuple[int, list[int | None], list[int | None] | None]],
) -> Compiled:
    """tensors: (id, dims, strides) of what the graph leaves open."""

class CacheOptions:
    def __init__(
        self,
        schemes: Sequence[str],
        layers: int,
        batch: int,
        heads: int,
        head_size: int,
        v_head_size: int,
        capacity: int,
        rollback: int,
        allow_non_finite: bool,
        k_scales: Sequence[Sequence[float]],
        v_scales: Sequence[Sequence[float]],
        keep: Sequence[int],
        fpmath: str,
    ) -> None: ...
    def bytes(self) -> tuple[int, int, int, int, int]: ...

class Cache:
    def __init__(self, engine: Engine, options: CacheOptions) -> None: ...
    def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        counts: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None: ...
    def attend(
        self,
        layer: int,
        q: Any,
        out: Any,
        scale: float,
        soft_cap: float,
        window: int,
        sinks: Any,
        bias: Any = None,
        k: Any = None,
        v: Any = None,
        starts: Sequence[int] | None = None,
        sees_all: bool = False,
        stats: Any = None,
    ) -> None: ...
    def attention(
        self,
        query_heads: int,
        query_tokens: int,
        type: str,
        scale: float,
        soft_cap: float,
        window: int,
        sinks: bool,
        new_tokens: bool,
        bias: Sequence[int],
        sees_all: bool,
        stats: bool,
    ) -> Attention: ...
    def length(self, layer: int, row: int) -> int: ...
    def columns(self) -> int: ...
    def crop(self, tokens: Sequence[int], layer: int | None = None) -> None: ...
    def reorder(self, rows: Sequence[int], layer: int | None = None) -> None: ...
    def reset(self) -> None: ...
    def fork(self, rows: Sequence[int] | None = None, capacity: int = 0) -> Cache: ...
    def bytes(self) -> tuple[int, int, int, int, int]:
        """Codes, parameters, window, bookkeeping and total."""

    def used_bytes(self) -> int: ...
    def scratch_bytes(self) -> int: ...
    def scheme(self, layer: int) -> str: ...
    def part(self, layer: int, values: bool, part: int) -> Any:
        """A read-only numpy array, or None."""

    def ranges(self, layer: int, values: bool, row: int) -> list[tuple[int, int]]: ...
    def saved_bytes(self, layer: int, lengths: Sequence[int] | None) -> int: ...
    def save(self, layer: int, to: Any) -> None: ...
    def load(self, layer: int, lengths: Sequence[int], data: Any) -> None: ...

class Attention:
    def execute(
        self,
        layer: int,
        q: Any,
        out: Any,
        sinks: Any,
        bias: Any,
        k: Any,
        v: Any,
        starts: Sequence[int] | None,
        stats: Any,
    ) -> None: ...
    def explain(self, layer: int) -> str: ...

def schemes() -> list[tuple[str, str]]:
    """Names, and what each is."""

def scheme_text(scheme: str) -> str:
    """Its name where it has one."""

def scheme_bits(scheme: str, head_size: int, heads: int) -> float: ...
