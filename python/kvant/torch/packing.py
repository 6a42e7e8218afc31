"""Codes of less than a byte: how a graph takes them out of bytes, and how they become kvant's packing.

Where a byte's codes lie side by side along the last axis, the first in the lowest bits, it is kvant's
packing. HQQ and quanto keep them in planes: the codes in one place of all bytes are the first rows, those
in the next place the rows after them. No strides say that, so the bytes are rewritten, which moves bits
and not floats, eight bytes at a time: what inductor makes of single bytes takes twice as long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import CASTS, Declined, add, aten, holds, is_call, is_tensor, shape, value

SHIFTS = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
ANDS = (aten.bitwise_and.Scalar, aten.__and__.Scalar)
_WORD = 8

_library = torch.library.Library("kvant", "FRAGMENT")
_library.define("words(Tensor(a) bytes) -> Tensor(a)")


@torch.library.impl(_library, "words", "CompositeExplicitAutograd")
def _words(data: torch.Tensor) -> torch.Tensor:
    """Eight bytes in each, the first lowest. The same memory, as the schema says, but where a view would fail,
    or would not begin where inductor wants what an op returns to begin."""
    if data.storage_offset() % _WORD or data.data_ptr() % 16 or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(torch.int64)


@torch.library.register_fake("kvant::words", lib=_library)
def _fake_words(data: torch.Tensor) -> torch.Tensor:
    return data.new_empty(*data.shape[:-1], data.shape[-1] // _WORD, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Codes without a sign, each of so many bits of a byte."""

    data: fx.Node
    bits: int
    planes: tuple[int, ...] = ()
    """The lowest bit of each plane, in their order along the axis. None: codes lie side by side."""
    axis: int = 0
    end: Any = None
    """Where the planes are cut off along the axis, if they are: a number, or a node that has it."""


def find(node: fx.Node) -> Packed | None:
    """What its codes are taken out of, if they are all that it has."""
    if not is_tensor(node) or not holds(value(node).dtype, 0, 15):
        return None
    if is_call(node, aten.stack.default):
        parts, axis = node.args[0], _argument(node, 1, 0) % len(shape(node))
        packed = _of_parts(parts, axis)
        ascending = packed is not None and list(packed.planes) == sorted(packed.planes)
        if not ascending or axis != len(shape(node)) - 1:
            return None
        return Packed(packed.data, packed.bits)
    if is_call(node, aten.slice.Tensor):
        return _first_of(node)
    # It is quanto's, and is in the graph only where quanto is.
    if str(node.target) == "quanto.unpack.default":
        data, bits = node.args
        known = bits in (2, 4) and value(data).dtype == torch.uint8
        return Packed(data, bits, tuple(range(0, 8, bits))) if known else None
    if is_call(node, aten.cat.default):
        return _of_parts(node.args[0], _argument(node, 1, 0) % len(shape(node)))
    if is_call(node, aten.slice_scatter.default):
        axis = _argument(node, 2, 0) % len(shape(node))
        return _of_parts(_written(node, axis), axis)
    return None


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _first_of(cut: fx.Node) -> Packed | None:
    """Of the first of what is in planes."""
    packed = find(cut.args[0])
    if packed is None or not packed.planes or packed.end is not None:
        return None
    rank = len(shape(cut))
    starts = _argument(cut, 2, None) in (None, 0) and _argument(cut, 4, 1) == 1
    # Along the last axis a cut may be within a byte.
    if not starts or _argument(cut, 1, 0) % rank != packed.axis or packed.axis == rank - 1:
        return None
    return dataclasses.replace(packed, end=_argument(cut, 3, None))


def _written(node: fx.Node, axis: int) -> list[fx.Node]:
    """The parts that are written one after another along an axis, in their order there; empty if anything
    else is left of what they are written into."""
    written, size = [], shape(node)[axis]
    while is_call(node, aten.slice_scatter.default):
        if _argument(node, 2, 0) % len(shape(node)) != axis or _argument(node, 5, 1) != 1:
            return []
        start = _argument(node, 3, None)
        written.append((start.meta["val"] if isinstance(start, fx.Node) else start or 0, node.args[1]))
        node = node.args[0]
    each = shape(written[0][1])[axis]
    ordered = [next((part for start, part in written if statically_known_true(start == place * each)), None)
               for place in range(len(written))]
    if None in ordered or not statically_known_true(size == len(written) * each):
        return []
    return ordered


def _of_parts(parts: Any, axis: int) -> Packed | None:
    """Of parts that are the same bytes' halves or quarters."""
    if len(parts) not in (2, 4):
        return None
    fields = [_field(part) for part in parts]
    data, bits = fields[0][0], 8 // len(parts)
    if any(field[0] is not data or field[2] != bits for field in fields):
        return None
    lowest = tuple(field[1] for field in fields)
    if data is None or sorted(lowest) != list(range(0, 8, bits)):
        return None
    return Packed(data, bits, lowest, axis)


def _field(node: Any) -> tuple[fx.Node | None, int, int]:
    """The bytes whose bits it has, the lowest of them and how many; or no bytes."""
    steps, dims = [], shape(node)
    while is_tensor(node) and holds(value(node).dtype, 0, 255):
        if is_call(node, *ANDS, *SHIFTS):
            steps.append((node.target in SHIFTS, node.args[1]))
            node = node.args[0]
        elif is_call(node, *CASTS):
            node = node.args[0]
        elif is_call(node, aten.copy.default):  # into what its first argument is a part of
            node = node.args[1]
        else:
            break
    if not is_tensor(node) or value(node).dtype != torch.uint8 or shape(node) != dims:
        return None, 0, 0
    mask, lowest = 255, 0
    for shifts, number in reversed(steps):
        if not isinstance(number, int) or not 0 <= number <= 255:
            return None, 0, 0
        if shifts:
            lowest += number
            mask &= -1 << lowest
        else:
            mask &= number << lowest
    bits = mask.bit_count()
    return (node, lowest, bits) if mask == (1 << bits) - 1 << lowest else (None, 0, 0)


def near_miss(node: fx.Node) -> str:
    """Why codes are not read that masks and shifts take out of numbers; empty if it is nothing of that."""
    if not is_call(node, aten.stack.default, aten.cat.default, aten.slice_scatter.default):
        return ""
    part = node.args[1] if is_call(node, aten.slice_scatter.default) else node.args[0][0]
    while is_call(part, *CASTS, aten.copy.default):
        part = part.args[1] if is_call(part, aten.copy.default) else part.args[0]
    if not is_call(part, *ANDS, *SHIFTS):
        return ""
    if is_call(node, aten.stack.default):
        return "codes are stacked, but are not a byte & 15 and the same byte >> 4, side by side"
    return f"codes are taken out of {value(part).dtype} by masks and shifts that are not the halves or quarters of bytes, in planes"


def repacked(packed: Packed, before: fx.Node) -> fx.Node:
    """Its bytes in kvant's packing, of the dims of the codes but for the last, which is in bytes."""
    if not packed.planes:
        return packed.data
    columns = shape(packed.data)[-1]
    if not isinstance(columns, int) or columns % _WORD:
        raise Declined(f"codes in planes of {columns} columns are not known to be whole words of {_WORD} bytes")
    words = add(before, torch.ops.kvant.words.default, packed.data)
    planes = []
    for lowest in packed.planes:
        # Masked after it is shifted, it has no copies of the sign.
        lane, used = 8, packed.bits
        codes = add(before, aten.bitwise_right_shift.Tensor_Scalar, words, lowest) if lowest else words
        codes = add(before, aten.bitwise_and.Scalar, codes, _mask(lane, used))
        # What two neighbours hold moves together, until the codes of the word do.
        while lane < 64:
            moved = add(before, aten.bitwise_right_shift.Tensor_Scalar, codes, lane - used)
            codes = add(before, aten.bitwise_or.Tensor, codes, moved)
            lane, used = 2 * lane, 2 * used
            codes = add(before, aten.bitwise_and.Scalar, codes, _mask(lane, used))
        planes.append(add(before, torch.ops.prims.convert_element_type.default, codes, _OF_BITS[packed.bits]))
    result = add(before, aten.view.dtype, add(before, aten.cat.default, planes, packed.axis), torch.uint8)
    return result if packed.end is None else add(before, aten.slice.Tensor, result, packed.axis, 0, packed.end)


# What holds eight codes of so many bits.
_OF_BITS = {2: torch.int16, 4: torch.int32}


def _mask(lane: int, used: int) -> int:
    """The lowest bits of each lane of a word."""
    return sum((1 << used) - 1 << low for low in range(0, 64, lane))
