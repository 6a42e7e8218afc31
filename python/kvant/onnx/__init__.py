"""Attention of ONNX models.

    model = kvant.from_onnx("model.onnx", nodes=["/layers.0/attn/GroupQueryAttention"])
    outputs = model(query=q, key=k, value=v, ...)

docs/onnx.md tells more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checks import boolean, strings
from ..checks import threads as checked_threads
from ..errors import Error, invalid, make_error
from ..graph import Graph
from .attention import Attention
from .common import Op, Options
from .group_query_attention import GroupQueryAttention
from .reading import Port, array_of, check, read

__all__ = ["Model", "Port", "load"]

_OPS: dict[str, dict[str, type[Op]]] = {
    "": {"Attention": Attention}, "com.microsoft": {"GroupQueryAttention": GroupQueryAttention}}


class Model:
    """The nodes of attention of an ONNX model. ``kvant.from_onnx`` makes one.

    Calling it runs them on the CPU: ``model(Q=q, K=k, V=v)`` or ``model({"Q": q, ...})``. What it takes and gives
    are numpy arrays, by the model's names. Several threads may call it at once.
    """

    def __init__(self, ops: list[Op], constants: dict[str, np.ndarray], inputs: list[Port], outputs: list[Port]) -> None:
        self.inputs: list[Port] = inputs
        """What it takes, all of it."""
        self.outputs: list[Port] = outputs
        """What it gives."""
        self._ops, self._constants = ops, constants

    def __call__(
        self, inputs: Mapping[str, Any] | None = None, /, *, out: Mapping[str, Any] | None = None, **named: Any
    ) -> Any:
        """Runs the nodes, compiling them for shapes that are new.

        Args:
          inputs: arrays by name; names may also be keywords.
          out: arrays to write outputs to, by name. A present that lies in the memory of the past is appended to in
            place; other outputs share no memory with inputs.

        Returns:
          Outputs by name; of a model with one output that output.
        """
        for what, given in (("inputs", inputs), ("out", out)):
            if given is not None and not isinstance(given, Mapping):
                raise invalid(f"{what} must be a dict of arrays by name, not {type(given).__name__}")
        values = dict(self._constants)
        sizes: dict[str, int] = {}
        ports = {port.name: port for port in self.inputs}
        for name, x in (*(inputs or {}).items(), *named.items()):
            if name not in ports:
                raise invalid(f"the model has no input {name!r}; inputs are {_names(self.inputs)}")
            if name in values:
                raise invalid(f"input {name!r} is given twice")
            values[name] = array_of(f"input {name!r}", x)
            check(ports[name], values[name], sizes)
        missing = [port for port in self.inputs if port.name not in values]
        if missing:
            raise invalid(f"input {_names(missing)} is missing; inputs are {_names(self.inputs)}")
        written = {name: array_of(f"out[{name!r}]", x) for name, x in (out or {}).items()}
        for name in written:
            if all(name not in op.node.outputs for op in self._ops):
                raise invalid(f"the model has no output {name!r}; outputs are {_names(self.outputs)}")
        for op in self._ops:
            given = [values[name] if name else None for name in op.node.inputs]
            memory = [written.get(name) if name else None for name in op.node.outputs]
            try:
                results = op.run(given, memory)
            except Error as error:
                title = str(op.node)
                raise error if str(error).startswith(title) else make_error(error.kind, f"{title}: {error}") from None
            values.update((name, x) for name, x in zip(op.node.outputs, results) if name and x is not None)
        if len(self.outputs) == 1:
            return values[self.outputs[0].name]
        return {port.name: values[port.name] for port in self.outputs}

    @property
    def graphs(self) -> dict[str, Graph]:
        """kvant's graph of each node, for the shapes that ran last, by the node's name."""
        return {op.node.name: next(iter(op.compiled.values())).graph for op in self._ops if op.compiled}

    def explain(self) -> str:
        """Of each node, what ran last, and why it is not more."""
        lines = []
        for op in self._ops:
            lines.append(str(op.node) + ("" if op.compiled else ": no kernel has run"))
            for what, compiled in op.compiled.items():
                lines += [f"   {what}: {line}" for line in compiled.explain().splitlines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        ports = (", ".join(map(str, each)) for each in (self.inputs, self.outputs))
        return f"<kvant.onnx.Model of {len(self._ops)} node{'s' if len(self._ops) > 1 else ''}: {' -> '.join(ports)}>"


def load(
    model: Any, nodes: str | Sequence[str] | None, threads: int | None, backends: str | Sequence[str] | None,
    require_fused: bool,
) -> Model:
    """As kvant.from_onnx, which says what the arguments are."""
    options = Options(checked_threads(threads), None if backends is None else tuple(strings("backends", backends)),
                      boolean("require_fused", require_fused))
    source = read(model, None if nodes is None else strings("nodes", nodes), _OPS)
    ops = [_OPS[node.domain][node.op](node, options) for node in source.nodes]
    return Model(ops, source.constants, source.inputs, source.outputs)


def _names(ports: Sequence[Port]) -> str:
    return ", ".join(repr(port.name) for port in ports) or "none"
