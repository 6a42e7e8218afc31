"""The ops of docs/ops.md that graphs are usually made of, as methods of GraphBuilder."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from .checks import boolean, items
from .errors import invalid
from .quantize import QuantizeOps
from .dtypes import REAL
from .value import Operand, Value


class Ops(QuantizeOps):
    """Shapes are written as in docs/ops.md. Results are values of the same graph.

    ``type``, where a method has it, is the result's; None: the first input's.
    """

    def matmul(
        self,
        a: Value,
        b: Value,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        type: Any = None,
    ) -> Value:
        """a [..,m,k] times b [..,k,n]: [..,m,n]. ``transpose_b``: b is [..,n,k].

        ``type``: None is f32 where a and b are of two types.
        """
        if type is None and self._value(a, "MatMul").type != self._value(b, "MatMul").type:
            type = "f32"
        return self.op(
            "MatMul", a, b, type=type, transpose_a=transpose_a, transpose_b=transpose_b
        )

    def softmax(
        self,
        x: Value,
        axis: int = -1,
        *,
        lengths: Value | None = None,
        first: Value | None = None,
        mode: str = "inf_as_zero",
        type: Any = None,
        stats: bool = False,
    ) -> Any:
        """Softmax along an axis.

        Args:
          lengths, first: s32 [N] or [1]; of row n only elements [first, lengths) exist.
          mode: what a row that is wholly -inf gives: zeros ("inf_as_zero") or NaN ("none").
          stats: return (softmax, log of the sum of exponentials).
        """
        if first is not None and lengths is None:
            raise invalid("softmax: first goes with lengths")
        inputs = [each for each in (x, lengths, first) if each is not None]
        result = self._value(x, "softmax").type if type is None else type
        types = [result, "f32"] if boolean("softmax: stats", stats) else result
        return self.op("SoftMax", *inputs, type=types, axis=axis, mode=mode)

    def add(self, a: Operand, b: Operand) -> Value:
        """a + b, broadcast as numpy does."""
        return self._arithmetic("Add", a, b)

    def subtract(self, a: Operand, b: Operand) -> Value:
        """a - b, broadcast as numpy does."""
        return self._arithmetic("Subtract", a, b)

    def multiply(self, a: Operand, b: Operand) -> Value:
        """a * b, broadcast as numpy does."""
        return self._arithmetic("Multiply", a, b)

    def divide(self, a: Operand, b: Operand) -> Value:
        """a / b, broadcast as numpy does."""
        return self._arithmetic("Divide", a, b)

    def maximum(self, a: Operand, b: Operand) -> Value:
        """The larger of a and b, broadcast as numpy does."""
        return self._arithmetic("Maximum", a, b)

    def minimum(self, a: Operand, b: Operand) -> Value:
        """The smaller of a and b, broadcast as numpy does."""
        return self._arithmetic("Minimum", a, b)

    def select(self, condition: Value, x: Operand, y: Operand) -> Value:
        """x where the condition (boolean) is true, y elsewhere."""
        x, y = self._pair("Select", x, y, constants_alike=True)
        return self.op("Select", condition, x, y)

    def tanh(self, x: Value) -> Value:
        """The hyperbolic tangent."""
        return self.op("Tanh", x)

    def exp(self, x: Value) -> Value:
        """e to the power of x."""
        return self.op("Exp", x)

    def gen_index(self, x: Value, axis: int) -> Value:
        """The index of each element along an axis, s32, of x's shape."""
        return self.op("GenIndex", x, axis=axis)

    def greater_equal(self, a: Operand, b: Operand) -> Value:
        """a >= b, boolean, broadcast as numpy does."""
        a, b = self._pair("GreaterEqual", a, b, constants_alike=True)
        return self.op("GreaterEqual", a, b)

    def type_cast(self, x: Value, type: Any) -> Value:
        """x in another type."""
        return self.op("TypeCast", x, type=type)

    def reshape(self, x: Value, shape: Sequence[int], special_zero: bool = False) -> Value:
        """x in another shape; -1 is what is left, 0 with ``special_zero`` x's own dim."""
        return self.op("StaticReshape", x, shape=shape, special_zero=special_zero)

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """x with its axes in another order, as numpy.transpose."""
        return self.op("StaticTranspose", x, order=order)

    def slice(self, x: Value, axis: int, begin: int, size: int) -> Value:
        """Elements [begin, begin + size) of x along an axis."""
        return self.op("Slice", x, axis=axis, begin=begin, size=size)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Values one after another along an axis."""
        return self.op("Concat", *items("concat: values", "a list of values", values), axis=axis)

    def hadamard(self, x: Value, block: int) -> Value:
        """Runs of ``block`` elements along the last axis times H / sqrt(block)."""
        return self.op("Hadamard", x, block=block)

    def causal_mask(
        self,
        scores: Value,
        fill: Operand = float("-inf"),
        *,
        kv_length: Value | None = None,
        query_length: Value | None = None,
    ) -> Value:
        """Scores [..,Sq,S] where the column is at most the row, ``fill`` elsewhere.

        With ``kv_length`` and ``query_length`` (s32 scalars) the row is shifted by their
        difference: the last query sees the last key.
        """
        if (kv_length is None) != (query_length is None):
            raise invalid("causal_mask: kv_length and query_length go together")
        dims = self._value(scores, "causal_mask").dims
        if dims is None or len(dims) < 2:
            raise invalid(f"causal_mask: scores must have a rank of 2 or more, not {scores!r}")
        rows = self.gen_index(scores, len(dims) - 2)
        if kv_length is not None and query_length is not None:
            rows = rows + kv_length - query_length
        columns = self.gen_index(scores, len(dims) - 1)
        return self.select(self.greater_equal(rows, columns), scores, fill)

    def scaled_dot_product_attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        bias: Value | None = None,
        select: Value | None = None,
        kv_lengths: Value | None = None,
        kv_first: Value | None = None,
        query_offsets: Value | None = None,
        sinks: Value | None = None,
        alibi_slopes: Value | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        select_fill: float | None = None,
        bottom_right: bool = False,
        left_window: int = -1,
        right_window: int = -1,
        mode: str | None = None,
        stats: bool = False,
    ) -> Any:
        """Attention stated directly: q [N,Hq,Sq,D], k [N,Hkv,S,D], v [N,Hkv,S,Dv] -> [N,Hq,Sq,Dv].

        Args:
          bias: added to the scaled scores [N,Hq,Sq,S], to which it broadcasts.
          select: boolean; where false, a score becomes ``select_fill``.
          kv_lengths, kv_first: s32 [N] or [1]; of sequence n tokens [first, lengths) exist.
          query_offsets: s32 [N + 1]; queries are ragged then, q is [T,Hq,D].
          sinks: [Hq], a logit for each head that joins the softmax's denominator.
          alibi_slopes: [Hq], times the distance of key and query.
          scale: of scores; None: 1 / sqrt(D).
          soft_cap: scores become cap * tanh(score / cap).
          select_fill: None: -inf.
          bottom_right: windows count from the last query and the last key, not from the first.
          left_window, right_window: how many keys before and after its own a query sees; -1: all.
            Causal is ``right_window=0``.
          mode: what a row of no key gives: zeros ("inf_as_zero") or NaN ("none").
          stats: return (attention, log of the sum of exponentials [N,Hq,Sq,1]).
        """
        optional = {
            "bias": bias,
            "select": select,
            "kv_lengths": kv_lengths,
            "kv_first": kv_first,
            "query_offsets": query_offsets,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        what = "scaled_dot_product_attention"
        type = self._value(q, what).type
        return self.op(
            "ScaledDotProductAttention",
            q,
            k,
            v,
            *given.values(),
            type=[type, "f32"] if boolean(f"{what}: stats", stats) else type,
            optional_inputs=",".join(given) or None,
            scale=scale,
            soft_cap=soft_cap,
            select_fill=select_fill,
            mask_alignment="bottom_right" if boolean(f"{what}: bottom_right", bottom_right) else None,
            left_window=left_window,
            right_window=right_window,
            mode=mode,
        )

    def merge_attention(
        self, parts: Sequence[tuple[Value, Value]], *, type: Any = None, stats: bool = False
    ) -> Any:
        """Attention over all tokens from that over parts of them.

        Args:
          parts: (output [..,D], stats [..,1]) of each, stats being the log of the sum of exponentials;
            -inf: the part has no tokens for that row, and does not count.
          type: of the result; None: of the parts' outputs.
          stats: return (attention, stats).
        """
        wanted = "a list of pairs of values"
        pairs = [items("merge_attention: parts", wanted, part) for part in items("merge_attention: parts", wanted, parts)]
        values = [value for pair in pairs for value in pair]
        if not values:
            raise invalid("merge_attention needs a part")
        type = self._value(values[0], "merge_attention").type if type is None else type
        both = boolean("merge_attention: stats", stats)
        return self.op("MergeAttention", *values, type=[type, "f32"] if both else type)

    def _arithmetic(self, kind: str, a: Operand, b: Operand) -> Value:
        left, right = self._pair(kind, a, b)
        type = left.type if left.type == right.type else "f32"
        # A number beside a real value has no type of its own.
        if not isinstance(a, Value) and right.type in REAL:
            type = right.type
        if not isinstance(b, Value) and left.type in REAL:
            type = left.type
        return self.op(kind, left, right, type=type)

    def _pair(
        self, kind: str, a: Operand, b: Operand, constants_alike: bool = False
    ) -> tuple[Value, Value]:
        """Both as values. A number beside a value is f32, or an integer; or of its very type."""
        if isinstance(a, Value) == isinstance(b, Value):
            return self._value(a, kind), self._value(b, kind)
        value = self._value(a if isinstance(a, Value) else b, kind)
        other = b if isinstance(a, Value) else a
        type = None
        if constants_alike or (isinstance(other, Integral) and value.type not in REAL):
            type = value.type
        elif not isinstance(other, bool):
            type = "f32"
        constant = self._value(other, kind, type)
        return (value, constant) if isinstance(a, Value) else (constant, value)
