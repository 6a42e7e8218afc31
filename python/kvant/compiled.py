"""Compiling graphs, and executing them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from . import _core
from .checks import boolean, dims, string, strings
from .checks import threads as checked_threads
from .errors import invalid, shown
from .graph import Graph, TensorInfo, find_port, names_of
from .tensors import allocate, torch_like

_engines: dict[tuple[str, int, str | None, bool], _core.Engine] = {}
_engines_lock = threading.Lock()


def engine_for(
    device: str, threads: int | None, backends: str | Sequence[str] | None
) -> _core.Engine:
    """The engine of these options; there is one for each.

    ``threads`` of None is what torch uses, if it is imported, else one per hardware thread. Where it
    is imported they are its own: those of two libraries would wait for each other's processors.
    """
    _core.check_not_forked()
    torch = sys.modules.get("torch")
    threads = checked_threads(threads)
    if threads is None:
        threads = torch.get_num_threads() if torch else 0
    kind, colon, index = string("device", device).partition(":")
    # There is one CPU.
    if colon and (not index.isdecimal() or len(index) > 4 or (kind == "cpu" and int(index) > 0)):
        raise invalid(f"device '{device}' must be \"cpu\", \"cuda\" or \"cuda:1\"")
    names = None if backends is None else ",".join(strings("backends", backends))
    key = (device, threads, names, torch is not None)
    with _engines_lock:
        if key not in _engines:
            _engines[key] = _core.Engine(kind, int(index or 0), names, threads, torch is not None)
        return _engines[key]


def compile(
    graph: Graph,
    device: str = "cpu",
    threads: int | None = None,
    backends: str | Sequence[str] | None = None,
    require_fused: bool = False,
    shapes: Mapping[str | int, Any] | None = None,
) -> Compiled:
    """Compiles a graph for a device.

    Args:
      device: "cpu", "cuda" or "cuda:1".
      threads: of the CPU; None: as many as torch uses, if it is imported, else all.
      backends: names to ask, in order; None: the device's.
      require_fused: raise where something would run op by op, with the reasons.
      shapes: dims of inputs and outputs, by name or id, that the graph leaves open, or instead of
        the graph's; a pair ``(dims, strides)`` gives both, strides in elements.
    """
    if not isinstance(graph, Graph):
        raise invalid(f"compile takes a kvant.Graph, not {shown(graph)}")
    if shapes is not None and not isinstance(shapes, Mapping):
        raise invalid(f"shapes must be a dict of dims by name, not {shown(shapes)}")
    tensors = [_shape(graph, key, value) for key, value in (shapes or {}).items()]
    engine = engine_for(device, threads, backends)
    fused = boolean("require_fused", require_fused)
    return Compiled(_core.compile(engine, graph._core, fused, tensors))


def _shape(
    graph: Graph, key: str | int, value: Any
) -> tuple[int, list[int | None], list[int | None] | None]:
    ports = graph.inputs + graph.outputs
    port = ports[find_port(ports, key, "input or output")]
    what = f"shapes[{key!r}]"
    both = isinstance(value, (tuple, list)) and value and isinstance(value[0], (tuple, list))
    if not both:
        return port.id, dims(what, value), None
    if len(value) == 2:
        known, strides = dims(what, value[0]), dims(what, value[1])
        if len(known) == len(strides):
            return port.id, known, strides
    raise invalid(f"{what} must be dims, or dims and as many strides, not {shown(value)}")


class Compiled:
    """A compiled graph. ``compile`` makes one.

    Calling it executes: ``compiled(q=q, k=k)`` or ``compiled({"q": q, "k": k}, out={"o": o})``.
    Tensors are numpy arrays, torch tensors, or whatever has the buffer protocol or DLPack; kvant
    reads and writes their memory, and copies nothing. Several threads may call it at once.
    """

    def __init__(self, core: _core.Compiled) -> None:
        self._core = core
        self.graph: Graph = Graph(core.graph())
        """The graph, with all shapes known."""
        self.inputs: list[TensorInfo] = self.graph.inputs
        self.outputs: list[TensorInfo] = self.graph.outputs
        self._input_places = _places(self.inputs)
        self._output_places = _places(self.outputs)
        self.fused: bool = core.fused()
        """Whether nothing runs op by op."""
        self.rounding: float = core.rounding()
        """How far from f32 arithmetic results may be, as relative L2 distance."""
        self.scratch_bytes: int = core.scratch_bytes()
        """Memory that one execution computes in, in bytes."""
        self.execute = core.execute
        """``execute(inputs, outputs)``: lists in the order of ``inputs`` and ``outputs``.

        It allocates nothing. Where arguments are wrong, nothing has been written, unless it is
        lengths or positions that the graph itself computes.
        """

    def __call__(
        self, inputs: Mapping[str | int, Any] | None = None, /, *, out: Any = None, **named: Any
    ) -> Any:
        """Executes with inputs by name, or id.

        Args:
          inputs: tensors by name; names may also be keywords.
          out: tensors to write outputs to, by name; or the one tensor of a graph's one output.
            Those that are not given begin as zeros, of torch if any input is of torch, on its
            device, else of numpy. What is smaller than a byte is packed in uint8. None may overlap
            an input or another output, which is not checked.

        Returns:
          Outputs by name; of a graph with one output that output.
        """
        given = self._ordered(inputs, named)
        written = self._written(out)
        missing = [at for at, tensor in enumerate(written) if tensor is None]
        if missing:
            like = torch_like(given)
            for at in missing:
                port = self.outputs[at]
                name = f"output '{port.name or port.id}'"
                written[at] = allocate(name, port.type, *_shape_of(port), like)
        self.execute(given, written)
        if len(written) == 1:
            return written[0]
        return {port.name or port.id: tensor for port, tensor in zip(self.outputs, written)}

    def explain(self) -> str:
        """What runs, which backends were passed over and why, and what was nearly found."""
        return self._core.explain()

    def _ordered(self, inputs: Mapping[str | int, Any] | None, named: dict[str, Any]) -> list[Any]:
        if inputs is not None and not isinstance(inputs, Mapping):
            raise invalid(f"inputs must be a dict of tensors by name, not {type(inputs).__name__}")
        given: dict[str | int, Any] = dict(inputs or {})
        given.update(named)
        twice = [name for name in named if inputs and name in inputs]
        if twice:
            raise invalid(f"input {twice[0]!r} is given twice; inputs are {names_of(self.inputs)}")
        placed = _placed(given, self.inputs, self._input_places, "input")
        missing = [port for port, tensor in zip(self.inputs, placed) if tensor is None]
        if missing:
            raise invalid(
                f"input {names_of(missing)} is missing; inputs are {names_of(self.inputs)}"
            )
        return placed

    def _written(self, out: Any) -> list[Any]:
        if out is None:
            return [None] * len(self.outputs)
        if isinstance(out, Mapping):
            return _placed(out, self.outputs, self._output_places, "output")
        if len(self.outputs) != 1:
            raise invalid(f"out must be a dict; outputs are {names_of(self.outputs)}")
        return [out]

    def __repr__(self) -> str:
        how = "fused" if self.fused else "not fused"
        return f"<kvant.Compiled, {how}: {self.graph!r}>"


def _shape_of(port: TensorInfo) -> tuple[Any, Any]:
    """Dims and strides of a port of a compiled graph, where all of them are known."""
    return port.dims, port.strides


def _places(ports: list[TensorInfo]) -> dict[str | int, int]:
    places: dict[str | int, int] = {port.id: at for at, port in enumerate(ports)}
    places.update((port.name, at) for at, port in enumerate(ports) if port.name)
    return places


def _placed(
    given: Mapping[str | int, Any],
    ports: list[TensorInfo],
    places: dict[str | int, int],
    what: str,
) -> list[Any]:
    placed: list[Any] = [None] * len(ports)
    for key, tensor in given.items():
        at = places.get(key)
        if at is None:
            at = find_port(ports, key, what)
        if placed[at] is not None:
            raise invalid(f"{what} {key!r} is given twice, by name and by id")
        placed[at] = tensor
    return placed
