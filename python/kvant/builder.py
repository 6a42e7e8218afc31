"""Building graphs."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from . import _core
from .attributes import typed
from .checks import boolean, dims as checked_dims, number as checked_number, string
from .errors import invalid, shown
from .graph import Graph, TensorInfo
from .ops import Ops
from .dtypes import type_name
from .value import Operand, Value


class GraphBuilder(Ops):
    """Makes a graph, op by op.

        g = kvant.GraphBuilder()
        q = g.input("q", "f32", [1, 8, 1, 64])
        ...
        g.output("o", g.softmax(q @ k) @ v)
        graph = g.build()

    Every op is checked as it is added. After one was refused the builder gives no graph.

    Args:
      fpmath: "strict", "bf16", "f16", "any" or "tf32": what f32 may be multiplied in.
      apply_to_int: integer inputs may be multiplied in floating point too, as compressed K and V.
    """

    def __init__(self, fpmath: str = "strict", apply_to_int: bool = False) -> None:
        self._core = _core.Builder(string("fpmath", fpmath), boolean("apply_to_int", apply_to_int))

    def input(
        self,
        name: str,
        type: Any,
        dims: Sequence[int | None],
        strides: Sequence[int] | None = None,
        *,
        constant: bool = False,
    ) -> Value:
        """An input of the graph: dense unless strides (in elements) are given.

        A dim of None is left open, for ``compile(shapes=...)``. ``constant``: it does not change
        between executions.
        """
        what = f"input {string('name', name)!r}: "
        property = "constant" if boolean(what + "constant", constant) else "variable"
        shape = checked_dims(what + "dims", dims)
        steps = None if strides is None else checked_dims(what + "strides", strides)
        return Value(self, self._core.input(name, type_name(type), property, shape, steps))

    def host_scalar(self, name: str, type: Any) -> Value:
        """A number that each execution is given, read on the host on every device: f32, s32, s64.

        An execution takes a Python number for it, or a tensor without dims.
        """
        name, type = string("name", name), type_name(type)
        if type not in ("f32", "s32", "s64"):
            raise invalid(f"host scalar {name!r} must be f32, s32 or s64, not {type}")
        return Value(self, self._core.input(name, type, "host_scalar", [], None))

    def scalar(self, number: float | int | bool, type: Any = None) -> Value:
        """A constant of the graph, of no dims; f32, s32 or s64, or boolean, by the number."""
        if type is None:
            type = _type_of(number)
        if isinstance(number, bool):
            number = int(number)
        return Value(self, self._core.constant(type_name(type), checked_number("scalar", number)))

    def op(
        self,
        kind: str,
        *inputs: Operand,
        type: Any = None,
        name: str | None = None,
        dims: Sequence[Any] | None = None,
        **attributes: Any,
    ) -> Any:
        """Adds any op of docs/ops.md, "SoftMax".

        Args:
          inputs: values, or numbers, which become constants.
          type: of the result; None: that of the first input, or what the op says. A list of types
            gives as many results.
          name: of the op and its results; None: one is made up.
          dims: of the result where the op leaves them open (the capacity of Append), None for each
            that it does not; a list of dims where type is a list.
          attributes: as in docs/ops.md; None is as if it were not given.

        Returns:
          A Value, or a tuple of them where ``type`` is a list.
        """
        string("op: kind", kind)
        several = isinstance(type, (list, tuple))
        values = [self._value(each, kind) for each in inputs]
        if not several and type is None:
            type = self._result_type(kind, values)
        types = list(type) if several else [type]
        shapes: list[Any] = list(dims) if several and dims is not None else [dims] * len(types)
        if len(shapes) != len(types):
            raise invalid(f"{kind}: {len(types)} types and {len(shapes)} dims")
        results: list[tuple[str | None, Sequence[int | None] | None]] = [
            (
                None if each is None else type_name(each),
                None if shape is None else checked_dims(f"{kind}: dims", shape),
            )
            for each, shape in zip(types, shapes)
        ]
        ids = self._core.op(
            kind,
            "" if name is None else string(f"{kind}: name", name),
            [value._id for value in values],
            typed(kind, attributes),
            results,
        )
        made = tuple(Value(self, id) for id in ids)
        return made if several else made[0]

    def output(self, name: str, value: Value, strides: Sequence[int] | None = None) -> None:
        """Names a result and makes it an output: dense unless strides (in elements) are given."""
        what = f"output {string('name', name)!r}"
        if not isinstance(value, Value):
            raise invalid(f"{what} must be a Value, not {shown(value)}")
        steps = None if strides is None else checked_dims(f"{what}: strides", strides)
        self._core.output(name, self._value(value, what)._id, steps)

    def build(self) -> Graph:
        """The finished graph; the builder is empty from then on."""
        return Graph(self._core.build())

    def _describe(self, value: Value) -> TensorInfo:
        return TensorInfo(*self._core.describe(value._id))

    def _value(self, operand: Operand, what: str, type: str | None = None) -> Value:
        """A value of this builder; a number becomes a constant."""
        if isinstance(operand, Value):
            if operand._builder is not self:
                raise invalid(f"{what}: {operand!r} is a Value of another builder")
            return operand
        if not isinstance(operand, numbers.Real):
            raise invalid(f"{what}: an input must be a Value or a number, not {shown(operand)}")
        return self.scalar(operand, type)


def _type_of(number: Any) -> str:
    if isinstance(number, bool):
        return "boolean"
    if isinstance(number, numbers.Integral):
        return "s32" if -(2**31) <= int(number) < 2**31 else "s64"
    return "f32"
