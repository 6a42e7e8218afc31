"""Ops that quantize and dequantize, and that write and read caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .checks import boolean, integer, integers, items
from .errors import invalid
from .dtypes import REAL, type_name
from .value import Operand, Quantized, Value


class QuantizeOps:
    """Groups: ``group_shape`` gives the elements of a group along each axis, ``axis`` one group for
    each of its elements; without either the tensor is one group.
    """

    if TYPE_CHECKING:

        def op(self, kind: str, *inputs: Operand, **arguments: Any) -> Any: ...
        def _value(self, operand: Operand, what: str, type: str | None = None) -> Value: ...

    def dynamic_dequantize(
        self,
        codes: Value,
        scales: Value,
        zero_points: Value | None = None,
        *,
        group_shape: Sequence[int] | None = None,
        axis: int | None = None,
        codebook: Sequence[float] | None = None,
        type: Any = None,
    ) -> Value:
        """(codes - zero_points) * scales; codes * scales - zero_points if these are real.

        ``type`` is the result's; None: the scales'. With ``codebook`` a code stands for the
        number at its place there.
        """
        inputs = [each for each in (codes, scales, zero_points) if each is not None]
        return self.op(
            "DynamicDequantize", *inputs, type=type, codebook=codebook, **_groups(group_shape, axis)
        )

    def dynamic_quantize(
        self,
        x: Value,
        type: Any,
        *,
        scales: Value | None = None,
        zero_points: Value | None = None,
        scale_type: Any = "f32",
        zero_point_type: Any = None,
        group_shape: Sequence[int] | None = None,
        axis: int | None = None,
        power_of_two_scales: bool = False,
        scale_floor: float = 0.0,
        codebook: Sequence[float] | None = None,
        formula: str | None = None,
    ) -> Quantized:
        """Codes of ``type``, with scales and zero points that are given or computed.

        ``zero_point_type`` of None computes none. ``formula`` may be "ggml".
        """
        attributes = dict(_groups(group_shape, axis), codebook=codebook)
        computed = _Computed(scale_type, zero_point_type, power_of_two_scales, scale_floor, formula)
        return self._quantize(
            "DynamicQuantize", [x], type, scales, zero_points, attributes, computed
        )

    def append(
        self,
        x: Value,
        positions: Value,
        capacity: int,
        type: Any,
        *,
        token_axis: int = -2,
        scales: Value | None = None,
        zero_points: Value | None = None,
        scale_type: Any = "f32",
        zero_point_type: Any = None,
        group_shape: Sequence[int] | None = None,
        axis: int | None = None,
        power_of_two_scales: bool = False,
        scale_floor: float = 0.0,
        codebook: Sequence[float] | None = None,
        formula: str | None = None,
    ) -> Quantized:
        """``dynamic_quantize`` of x into tensors of ``capacity`` tokens along ``token_axis``.

        Row b of axis 0 goes to tokens positions[b] and on; all else stays as it is, so outputs are
        the cache, and are read too. positions: s32 [N] or [1]. A ``type`` of f32, f16 or bf16 is
        a conversion without scales.
        """
        rank = len(self._value(x, "append").dims or ())
        token_axis = integer("append: token_axis", token_axis)
        where = {token_axis % rank if rank else 0: integer("append: capacity", capacity)}
        attributes = dict(_groups(group_shape, axis), codebook=codebook, token_axis=token_axis)
        computed = _Computed(scale_type, zero_point_type, power_of_two_scales, scale_floor, formula)
        return self._quantize(
            "Append", [x, positions], type, scales, zero_points, attributes, computed, rank, where
        )

    def append_pages(
        self,
        x: Value,
        slots: Value,
        pages: int,
        page_size: int,
        type: Any,
        *,
        token_axis: int = -2,
        scales: Value | None = None,
        zero_points: Value | None = None,
        scale_type: Any = "f32",
        zero_point_type: Any = None,
        group_shape: Sequence[int] | None = None,
        axis: int | None = None,
        power_of_two_scales: bool = False,
        scale_floor: float = 0.0,
        codebook: Sequence[float] | None = None,
        formula: str | None = None,
    ) -> Quantized:
        """``append`` of packed tokens x [tokens,H,D] into a pool of pages.

        The pool is [pages,H,page_size,D], or with ``token_axis`` 1 [pages,page_size,H,D]. slots:
        s32 or s64 [tokens], page * page_size + place; a negative one leaves its token out. Groups
        are the pool's.
        """
        rank = len(self._value(x, "append_pages").dims or ()) + 1
        token_axis = integer("append_pages: token_axis", token_axis)
        where = {
            0: integer("append_pages: pages", pages),
            token_axis % rank: integer("append_pages: page_size", page_size),
        }
        attributes = dict(_groups(group_shape, axis), codebook=codebook, token_axis=token_axis)
        computed = _Computed(scale_type, zero_point_type, power_of_two_scales, scale_floor, formula)
        return self._quantize(
            "AppendPages", [x, slots], type, scales, zero_points, attributes, computed, rank, where
        )

    def load_tokens(
        self,
        x: Value,
        lengths: Value,
        first: Value | None = None,
        *,
        token_axis: int = -2,
        token_group: int = 1,
    ) -> Value:
        """Of row n tokens [first, lengths) of x along ``token_axis``, zeros elsewhere.

        lengths, first: s32 [N] or [1]. ``token_group``: tokens of a row, of scales.
        """
        inputs = [each for each in (x, lengths, first) if each is not None]
        return self.op("LoadTokens", *inputs, token_axis=token_axis, token_group=token_group)

    def load_pages(
        self,
        pool: Value,
        page_table: Value,
        lengths: Value,
        *,
        token_axis: int = -2,
        token_group: int = 1,
    ) -> Value:
        """Sequences [N,H,max_pages * page_size,D] out of a pool [pages,H,page_size,D].

        page_table: s32 [N,max_pages]; lengths: s32 [N] or [1], tokens.
        """
        return self.op(
            "LoadPages", pool, page_table, lengths, token_axis=token_axis, token_group=token_group
        )

    def load_ranges(
        self,
        segments: Sequence[Value],
        ranges: Value,
        *,
        token_axis: int = -2,
        lengths: bool = False,
    ) -> Any:
        """Tokens of rings, one after another, then zeros.

        ranges: s32 [N or 1, segments, 2], the first token and how many. ``lengths``: return
        (tokens, how many each row has, s32).
        """
        rings = items("load_ranges: segments", "a list of values", segments)
        if not rings:
            raise invalid("load_ranges: there are no segments")
        type = self._value(rings[0], "load_ranges").type
        types = [type, "s32"] if boolean("load_ranges: lengths", lengths) else type
        return self.op("LoadRanges", ranges, *rings, type=types, token_axis=token_axis)

    def _result_type(self, kind: str, inputs: Sequence[Value]) -> str | None:
        """Where that is not the type of the first input; None where it is."""
        if kind == "GenIndex":
            return "s32"
        if kind == "GreaterEqual":
            return "boolean"
        if kind in ("DynamicDequantize", "Select", "LoadRanges") and len(inputs) > 1:
            return inputs[1].type
        return None

    def _quantize(
        self,
        kind: str,
        inputs: list[Value],
        type: Any,
        scales: Value | None,
        zero_points: Value | None,
        attributes: dict[str, Any],
        computed: _Computed,
        rank: int = 0,
        where: dict[int, int] | None = None,
    ) -> Quantized:
        """`where`: dims of the result that the op leaves open, by axis, the last that of tokens."""
        codes_dims = _dims(rank, where or {})
        if zero_points is not None and scales is None:
            raise invalid(f"{kind}: zero_points go with scales")
        if scales is not None or type_name(type) in REAL:
            given = [each for each in (scales, zero_points) if each is not None]
            said = dict(computed.attributes(), zero_point_type=computed.zero_point_type)
            if scales is None:
                said.update((name, attributes.get(name)) for name in ("group_shape", "axis", "codebook"))
                _refuse(f"{kind}: {type_name(type)} is stored without scales, and", said)
                attributes = {"token_axis": attributes.get("token_axis")}
            else:
                _refuse(f"{kind}: its scales are given, and it", said)
            codes = self.op(kind, *inputs, *given, type=type, dims=codes_dims, **attributes)
            return Quantized(codes, None, None)
        types = [type, computed.scale_type]
        if computed.zero_point_type is not None:
            types.append(computed.zero_point_type)
        group_shape = attributes.get("group_shape")
        parameters = codes_dims
        if where and group_shape is not None and len(group_shape) == rank:
            at = list(where)[-1]
            parameters = _dims(rank, {**where, at: where[at] // max(1, group_shape[at])})
        made = self.op(
            kind,
            *inputs,
            type=types,
            dims=[codes_dims] + [parameters] * (len(types) - 1),
            **attributes,
            **computed.attributes(),
        )
        return Quantized(made[0], made[1], made[2] if len(made) > 2 else None)


class _Computed:
    """How scales and zero points are computed."""

    def __init__(
        self,
        scale_type: Any,
        zero_point_type: Any,
        power_of_two: bool,
        floor: float,
        formula: str | None,
    ) -> None:
        self.scale_type, self.zero_point_type = scale_type, zero_point_type
        self._power_of_two, self._floor, self._formula = power_of_two, floor, formula

    def attributes(self) -> dict[str, Any]:
        return {
            "power_of_two_scales": self._power_of_two or None,
            "scale_floor": self._floor or None,
            "formula": self._formula,
        }


def _refuse(why: str, said: dict[str, Any]) -> None:
    """What is said of scales that are not computed."""
    for name, value in said.items():
        if value is not None:
            raise invalid(f"{why} takes no {name}")


def _groups(group_shape: Sequence[int] | None, axis: int | None) -> dict[str, Any]:
    if group_shape is not None and axis is not None:
        raise invalid("group_shape and axis exclude each other")
    if group_shape is not None:
        return {"qtype": "per_group", "group_shape": integers("group_shape", group_shape)}
    return {"qtype": "per_tensor" if axis is None else "per_channel", "axis": axis}


def _dims(rank: int, known: dict[int, int]) -> list[int | None] | None:
    return [known.get(axis) for axis in range(rank)] if known else None
