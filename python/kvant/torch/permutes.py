"""Permutations in a row become one; dims of one element are taken out before and put back behind.

torch.einsum makes such, most of which move nothing but dims of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .nodes import VIEWS, add, aten, is_call, shape

_PERMUTES = (aten.permute.default, aten.transpose.int)


def order_of(node: fx.Node) -> list[int]:
    """Of a permutation: which dim of its source each dim is."""
    rank = len(shape(node))
    if node.target is aten.permute.default:
        return [axis % rank for axis in node.args[1]]
    order = list(range(rank))
    a, b = (axis % rank for axis in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def is_permuted(node: Any) -> bool:
    return is_call(node, *_PERMUTES)


def is_transposed(node: Any) -> bool:
    """Whether it has the last two dims of its source in turn."""
    order = order_of(node) if is_call(node, *_PERMUTES) else []
    return len(order) > 1 and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]


def gather(graph: fx.Graph) -> None:
    """Numbers stay what they are."""
    for node in list(graph.nodes):
        if not is_call(node, *_PERMUTES):
            continue
        permuted = _permuted(node.args[0], order_of(node), node)
        if not is_call(permuted, *_PERMUTES) or permuted.args[0] is not node.args[0]:
            node.replace_all_uses_with(permuted)
    graph.eliminate_dead_code()


def _permuted(source: fx.Node, order: Sequence[int], before: fx.Node) -> fx.Node:
    while is_call(source, *_PERMUTES):
        inner = order_of(source)
        source, order = source.args[0], [inner[axis] for axis in order]
    if list(order) == list(range(len(order))):
        return source
    moved = [axis for axis, of in enumerate(order) if axis != of]
    if (split := _without_a_dim(source, moved, before)) is not None:
        rest, dim = split
        kept = [axis - (axis > dim) for axis in order if axis != dim]
        return add(before, aten.unsqueeze.default, _permuted(rest, kept, before), order.index(dim))
    if len(moved) == 2:
        return add(before, aten.transpose.int, source, *moved)
    return add(before, aten.permute.default, source, list(order))


def _without_a_dim(source: fx.Node, moved: Sequence[int], before: fx.Node) -> tuple[fx.Node, int] | None:
    """What it is but for a dim of one element, and that dim. moved: dims that are elsewhere afterwards."""
    sizes = shape(source)
    if is_call(source, aten.unsqueeze.default):
        return source.args[0], source.args[1] % len(sizes)
    if single := [dim for dim in moved if isinstance(sizes[dim], int) and sizes[dim] == 1]:
        return add(before, aten.squeeze.dim, source, single[0]), single[0]
    if not is_call(source, *VIEWS) or not all(isinstance(size, int) for size in sizes) or 1 not in sizes:
        return None
    if len(sizes) <= 4 and not is_call(source.args[0], aten.bmm.default):
        return None
    dim = len(sizes) - 1 - sizes[::-1].index(1)
    return add(before, aten.reshape.default, source.args[0], sizes[:dim] + sizes[dim + 1:]), dim
