"""Tensors of the graph that a builder makes."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, NamedTuple, Union

from .errors import Error

if TYPE_CHECKING:
    from .builder import GraphBuilder


class Value:
    """A tensor of a builder's graph.

    ``+ - * / @`` add ops to the graph; a Python number becomes a constant of it. Arithmetic of two
    types gives f32, that of a value and a number keeps the value's type.
    """

    __slots__ = ("_builder", "_id")
    # numpy's scalars leave operators to this class.
    __array_ufunc__ = None

    def __init__(self, builder: GraphBuilder, id: int) -> None:
        self._builder, self._id = builder, id

    @property
    def type(self) -> str:
        """Its element type, "f32"."""
        return self._builder._describe(self).type

    @property
    def dims(self) -> tuple[int | None, ...] | None:
        """Its dims, None for each that is not known yet, or None if its rank is not."""
        return self._builder._describe(self).dims

    def __add__(self, other: Operand) -> Value:
        return self._builder.add(self, other) if _is_operand(other) else NotImplemented

    def __radd__(self, other: Operand) -> Value:
        return self._builder.add(other, self) if _is_operand(other) else NotImplemented

    def __sub__(self, other: Operand) -> Value:
        return self._builder.subtract(self, other) if _is_operand(other) else NotImplemented

    def __rsub__(self, other: Operand) -> Value:
        return self._builder.subtract(other, self) if _is_operand(other) else NotImplemented

    def __mul__(self, other: Operand) -> Value:
        return self._builder.multiply(self, other) if _is_operand(other) else NotImplemented

    def __rmul__(self, other: Operand) -> Value:
        return self._builder.multiply(other, self) if _is_operand(other) else NotImplemented

    def __truediv__(self, other: Operand) -> Value:
        return self._builder.divide(self, other) if _is_operand(other) else NotImplemented

    def __rtruediv__(self, other: Operand) -> Value:
        return self._builder.divide(other, self) if _is_operand(other) else NotImplemented

    def __matmul__(self, other: Value) -> Value:
        return self._builder.matmul(self, other) if isinstance(other, Value) else NotImplemented

    def __repr__(self) -> str:
        try:
            return f"<kvant.Value {self._builder._describe(self)}>"
        except Error:
            return "<kvant.Value of a builder that has built its graph>"


Operand = Union[Value, float, int]


def _is_operand(other: object) -> bool:
    return isinstance(other, (Value, numbers.Real))


class Quantized(NamedTuple):
    """Codes, and the scales and zero points that were computed with them; None for what is not."""

    codes: Value
    scales: Value | None
    zero_points: Value | None
