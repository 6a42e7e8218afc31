"""What K and V are dequantized from, as ATen nodes.

Where a rule says that a chain of views keeps the order of elements, it is row-major order, whatever memory looks like.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from . import packing
from .nodes import (CASTS, COPIES, HOLDS, VIEWS, Declined, add, aten, holds, in_f32, is_call, is_float, is_tensor, is_wide,
                    shape, skip, skip_same, value, viewed)
from .permutes import order_of

# Of codes as they lie in memory.
_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


@dataclasses.dataclass
class Whole:
    """Whole numbers between two: of 8 bits as they lie in memory, or codes of less that are in bytes."""

    node: fx.Node
    low: int
    high: int
    packed: packing.Packed | None


def whole_numbers(node: Any) -> Whole | None:
    """Those behind views and casts that change none of them; None for what is not such."""
    casts = []
    while is_call(node, *VIEWS, *COPIES, *CASTS):
        if is_call(node, *CASTS):
            casts.append(value(node).dtype)
        node = node.args[0]
    if not is_tensor(node):
        return None
    packed = packing.find(node)
    low, high = _RANGES.get(value(node).dtype, (1, 0)) if packed is None else (0, (1 << packed.bits) - 1)
    if low > high or not all(holds(dtype, low, high) for dtype in casts):
        return None
    return Whole(node, low, high, packed)


@dataclasses.dataclass
class Codes:
    """What a tensor is dequantized from, as kvant::attention takes it."""

    codes: fx.Node
    type: str
    scales: fx.Node
    zero_points: fx.Node | None
    repacked: bool

    def __str__(self) -> str:
        kind = self.type or {torch.int8: "s8", torch.uint8: "u8"}[value(self.codes).dtype]
        points = "" if self.zero_points is None else ", zero points"
        planes = ", its planar codes repacked at each call" if self.repacked else ""
        return f"{kind} with scales {shape(self.scales)}{points}{planes}"


def codes_of(node: fx.Node, before: fx.Node) -> Codes | None:
    """What [B,H,S,D] is dequantized from. None if it is no arithmetic on integers at all."""
    source, order = skip_same(node), None
    if is_call(source, aten.transpose.int, aten.permute.default):
        order = order_of(source)
        if order[-1] != len(order) - 1:
            return None
        source = skip_same(source.args[0])
    if len(shape(source)) != 4:
        return None
    found = _affine(skip(source, *VIEWS, *COPIES, *CASTS))
    if found is None:
        return None
    target, packed, in_byte = shape(source), found.integers.packed, 1
    codes, kind, repacked = found.integers.node, "", False
    if packed is not None:
        in_byte, kind, repacked = 8 // packed.bits, f"u{packed.bits}", bool(packed.planes)
        if not isinstance(target[3], int):
            raise Declined(f"{target[3]} channels of {packed.bits} bits: the number of channels is symbolic")
        if target[3] % in_byte:
            raise Declined(f"{target[3]} channels of {packed.bits} bits are not whole bytes")
        codes = packing.repacked(packed, before)
    elif why := packing.near_miss(codes):
        raise Declined(why)
    codes = viewed(codes, [*target[:3], target[3] // in_byte], before)
    scales, points = found.scale, None
    if isinstance(scales, fx.Node):
        scales = _per_group(scales, shape(found.product), target, before)
    if isinstance(found.point, fx.Node):
        points = _per_group(found.point, shape(found.difference), target, before)
    if not isinstance(scales, fx.Node):
        scales = add(before, aten.full.default, [1, 1, 1, 1], scales, dtype=torch.float32, device=value(codes).device)
    if points is not None:
        scales, points = _of_same_groups(scales, points, before)
        if found.real and not is_float(points):
            points = in_f32(points, before)  # whole numbers, yet not in codes: the product is shifted by them
        elif is_float(points) and not found.real:
            points = add(before, aten.mul.Tensor, *(in_f32(x, before) for x in (points, scales)))
    elif found.point:
        # In real units it is off by the same for a whole group, so it is not rounded.
        points = add(before, aten.mul.Tensor, in_f32(scales, before), found.point)
    result = Codes(codes, kind, scales, points, repacked)
    if order is not None:
        result.codes, result.scales = (add(before, aten.permute.default, x, order)
                                       for x in (result.codes, result.scales))
        if points is not None:
            result.zero_points = add(before, aten.permute.default, points, order)
    return result


def why_no_codes(node: fx.Node) -> str:
    """Of what is computed from bytes or bits, in few steps, that it is not read as codes; empty for all else."""
    open_nodes, seen = [node], set[fx.Node]()
    bytes_are = False
    while open_nodes and len(seen) < 64:
        source = open_nodes.pop(0)
        if source in seen or not is_tensor(source):
            continue
        seen.add(source)
        if packing.find(source) is not None:
            bytes_are = True
            continue
        if why := packing.near_miss(source):
            return f"is not read as codes: {why}"
        bytes_are = bytes_are or value(source).dtype in (torch.uint8, torch.int8)
        open_nodes.extend(source.all_input_nodes)
    return "is computed from bytes, but by no chain that is read as codes" if bytes_are else ""


@dataclasses.dataclass
class Affine:
    """(integers - point) * scale; or integers * scale - point, where real. product and difference are the
    nodes that multiply and subtract."""

    integers: Whole
    scale: fx.Node | float
    product: fx.Node
    point: Any = None
    difference: fx.Node | None = None
    real: bool = False


def _affine(node: Any) -> Affine | None:
    if is_call(node, aten.sub.Tensor, aten.add.Tensor):
        product, shift = node.args[:2]
        if node.kwargs.get("alpha", 1) != 1 or not is_call(product, aten.mul.Tensor):
            return None
        inner = _affine(product)
        if inner is None or inner.point is not None or not isinstance(shift, fx.Node):
            return None
        _keeps_shape(node, product)
        if node.target is aten.add.Tensor:
            raise Declined("a shift is added: kvant subtracts real zero points, so subtract it")
        return dataclasses.replace(inner, point=shift, difference=node, real=True)
    if not is_call(node, aten.mul.Tensor):
        return None
    for factor, scale in (node.args[:2], node.args[1::-1]):
        if not isinstance(factor, fx.Node) or not (is_float(scale) if is_tensor(scale) else isinstance(scale, float)):
            continue
        outer, difference, point, casts = factor, factor, None, []
        while is_call(difference, *VIEWS, *CASTS):
            casts.append(value(difference).dtype)
            difference = difference.args[0]
        if is_call(difference, aten.sub.Tensor) and difference.kwargs.get("alpha", 1) == 1:
            factor, point = difference.args[:2]
        integers = whole_numbers(factor)
        if integers is None:
            continue
        _keeps_shape(node, outer)
        if point is not None:
            _keeps_shape(difference, factor)
            if not is_float(difference):
                least, most = _range_of(point)
                if not all(holds(d, integers.low - most, integers.high - least)
                           for d in (value(difference).dtype, *casts)):
                    raise Declined(f"codes less their zero point may wrap around in {value(difference).dtype}")
            elif not all(map(is_wide, casts)):
                raise Declined("codes less their zero point are cut off to integers or 8 bits")
        return Affine(integers, scale, node, point, difference)
    return None


def _keeps_shape(result: fx.Node, codes: fx.Node) -> None:
    if shape(result) != shape(codes):
        raise Declined(f"codes {shape(codes)} are broadcast to {shape(result)} by their scales or zero points")


def _range_of(point: Any) -> tuple[float, float]:
    """Of a zero point among integers."""
    if not isinstance(point, fx.Node):
        return point, point
    found = whole_numbers(point)
    return HOLDS.get(value(point).dtype, (-math.inf, math.inf)) if found is None else (found.low, found.high)


def _per_group(
    parameters: fx.Node, full: list[Any], target: list[Any], before: fx.Node
) -> fx.Node:
    """Scales or zero points, which broadcast to `full`, as [B,H,S,D] divided by a group's dims."""
    own = shape(parameters)
    own = [1] * (len(full) - len(own)) + own
    # What has a size of its own for each group is left of what a group spans.
    spans = len(full)
    while spans > 0 and own[spans - 1] == 1:
        spans -= 1
    base = parameters
    if whole_numbers(parameters) is not None:
        while is_call(base, *CASTS):
            base = base.args[0]
    if spans == 0:
        return viewed(base, [1, 1, 1, 1], before)
    if own[:spans] == full[:spans]:
        group, tokens, channels = math.prod(full[spans:]), *target[2:]
        static = isinstance(group, int) and isinstance(channels, int)
        if static and channels % group == 0:
            return viewed(base, [*target[:3], channels // group], before)
        # Groups of whole tokens, none of which is of two heads.
        if static and group % channels == 0 and isinstance(tokens, int) and tokens % (group // channels) == 0:
            return viewed(base, [*target[:2], tokens * channels // group, 1], before)
    if full == target:
        return viewed(base, own, before)
    if (groups := _groups_of_axes(own, full, target)) is not None:
        return viewed(base, groups, before)
    raise Declined(f"scales or zero points {own} of {full} are no groups of [batch, heads, tokens, channels]")


def _of_same_groups(scales: fx.Node, points: fx.Node, before: fx.Node) -> tuple[fx.Node, fx.Node]:
    """One of the two, where it has one group for several of the other, is repeated for them."""
    dims = shape(scales), shape(points)
    wide = [point if scale == 1 else scale for scale, point in zip(*dims)]
    if wide not in dims or any(own not in (1, all_of) for sizes in dims for own, all_of in zip(sizes, wide)):
        raise Declined(f"scales {dims[0]} and zero points {dims[1]} are of different groups")
    like = (scales, points)[dims.index(wide)]

    def repeated(x: fx.Node) -> fx.Node:
        if shape(x) == wide:
            return x
        # Dense: what is expanded has strides of 0. Not by sizes, which may be symbolic.
        return add(before, aten.clone.default, add(before, aten.expand_as.default, x, like),
                   memory_format=torch.contiguous_format)

    return repeated(scales), repeated(points)


def _groups_of_axes(own: list[Any], full: list[Any], target: list[Any]) -> list[int] | None:
    """How many groups there are along each axis, where views split an axis into [groups, elements of a group]."""
    if not all(isinstance(d, int) for d in (*own, *full, *target)):
        return None
    groups, at = [], 0
    for size in target:
        begin, product = at, 1
        while at < len(full) and (product < size or full[at] == 1):
            product *= full[at]
            at += 1
        spans = at
        while spans > begin and own[spans - 1] == 1:
            spans -= 1
        if product != size or own[begin:spans] != full[begin:spans]:
            return None
        groups.append(math.prod(own[begin:spans]))
    return groups if at == len(full) else None
