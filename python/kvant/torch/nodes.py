"""What is asked of the nodes of a graph of ATen ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim,
         aten.unsqueeze.default, aten.unflatten.int)
COPIES = (aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.to.dtype)

# What integer types hold, and whole numbers that floats hold.
HOLDS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-2**15, 2**15 - 1),
          torch.int32: (-2**31, 2**31 - 1), torch.int64: (-2**63, 2**63 - 1), torch.float16: (-2**11, 2**11),
          torch.bfloat16: (-2**8, 2**8), torch.float32: (-2**24, 2**24), torch.float64: (-2**53, 2**53)}


class Declined(Exception):
    """Why a chain that looks like dequantization is not one that kvant has."""


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node."""
    return node.meta["val"]


def shape(node: fx.Node) -> list[Any]:
    return list(value(node).shape)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_float(node: fx.Node) -> bool:
    return value(node).dtype.is_floating_point


def is_wide(dtype: torch.dtype) -> bool:
    """Whether it is a float whose rounding is no quantization: of more than 8 bits."""
    return dtype.is_floating_point and dtype.itemsize > 1


def holds(dtype: torch.dtype, low: float, high: float) -> bool:
    """Whether it has every whole number between."""
    least, most = HOLDS.get(dtype, (1, 0))
    return least <= low and high <= most


def add(before: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
    """A new node, with its fake tensor. options: no nodes."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, options)
    node.meta["val"] = target(*fx.map_arg(args, value), **options)
    return node


def skip(node: Any, *targets: Any) -> Any:
    """Behind views and the like; of casts, behind those from float to float that only round."""
    while is_call(node, *targets):
        if node.target in CASTS and not (is_wide(value(node).dtype) and is_wide(value(node.args[0]).dtype)):
            break
        node = node.args[0]
    return node


def skip_same(node: fx.Node) -> fx.Node:
    """Behind what changes neither shape nor type."""
    while is_call(node, *COPIES, *VIEWS, *CASTS, aten.expand.default):
        source = node.args[0]
        if shape(source) != shape(node) or value(source).dtype != value(node).dtype:
            break
        node = source
    return node


def in_f32(node: fx.Node, before: fx.Node) -> fx.Node:
    """What has fewer bits, converted."""
    if value(node).dtype.itemsize >= 4:
        return node
    return add(before, torch.ops.prims.convert_element_type.default, node, torch.float32)


def is_tokens_first(out: torch.Tensor) -> bool:
    """Whether [batch, heads, tokens, channels] is [batch, tokens, heads, channels] in memory."""
    return not out.is_contiguous() and out.transpose(1, 2).is_contiguous()


def viewed(node: fx.Node, target: list[Any], before: fx.Node) -> fx.Node:
    """The node in another shape, of which one size may be symbolic."""
    if shape(node) == target:
        return node
    unknown = [d for d in target if not isinstance(d, int)]
    if len(unknown) > 1:
        raise Declined(f"{len(unknown)} sizes are symbolic where a view is needed")
    sizes = [d if isinstance(d, int) else -1 for d in target]
    return add(before, aten.reshape.default, node, sizes)
