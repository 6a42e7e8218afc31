"""What attention looks like as ATen nodes.

Nothing here changes a graph but by adding nodes that nobody uses yet.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from .masks import Masked, clears, leads_to_product, made_by, product_of, unmasked, without_sinks
from .nodes import (CASTS, COPIES, VIEWS, add, aten, in_f32, is_call, is_float, is_tensor, is_tokens_first, shape, skip,
                    skip_same, value)
from .permutes import is_permuted, is_transposed, order_of


def unrepeated(node: fx.Node) -> fx.Node:
    """[B,H,S,D] of which the node is [B,H * n,S,D], each head n times in a row; or the node."""
    source = skip_same(node)
    if not is_call(source, *VIEWS) or len(shape(source)) != 4:
        return node
    expanded = skip(source.args[0], *COPIES)
    if not is_call(expanded, aten.expand.default) or len(shape(expanded)) != 5:
        return node
    single = expanded.args[0]
    if not is_call(single, aten.unsqueeze.default) or single.args[1] != 2:
        return node
    batch, heads, _, tokens, channels = shape(expanded)
    kept = shape(single.args[0]) == [batch, heads, tokens, channels]
    return single.args[0] if kept and shape(source)[2:] == [tokens, channels] else node


@dataclasses.dataclass
class Attention:
    """One that was found: `output` is what to replace."""

    output: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | None = None
    mask: fx.Node | None = None
    slopes: fx.Node | None = None
    sinks: fx.Node | None = None
    scale: float | None = None
    soft_cap: float | None = None
    mask_fill: float = -math.inf
    left_window: int = -1
    right_window: int = -1
    tokens_first: bool = False
    nan_rows: bool = False
    flat: tuple[int, int] | None = None
    """From which of its dims to which the output is one dim of three."""
    mixed: tuple[list[Any], list[int]] | None = None
    """Sizes of the second of these, and the order that they are in there."""
    turned: bool = False
    """The output has channels before queries."""


def stated_attention(node: fx.Node) -> Attention:
    """Of a kvant::sdpa."""
    q, k, v, mask, slopes, scale, soft_cap, left, right, tokens_first, _ = node.args
    return Attention(node, q, k, v, *_bias_or_mask(mask), slopes, scale=scale, soft_cap=soft_cap, left_window=left,
                     right_window=right, tokens_first=tokens_first)


def native_attention(node: fx.Node) -> Attention | str:
    """Of what scaled_dot_product_attention is inside of PyTorch's own modules, as nn.MultiheadAttention."""
    users = list(node.users)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in users) or len(users) != 1:
        return "its log-sum-exp is read"
    q, k, v, dropout, causal = (*node.args, *(0.0, False)[len(node.args) - 3:])
    if dropout:
        return "it has dropout"
    return Attention(users[0], q, k, v, *_bias_or_mask(node.kwargs.get("attn_mask")), scale=node.kwargs.get("scale"),
                     right_window=0 if causal else -1, tokens_first=is_tokens_first(value(users[0])))


def _bias_or_mask(mask: Any) -> tuple[Any, Any]:
    return (None, mask) if is_tensor(mask) and value(mask).dtype == torch.bool else (mask, None)


def eager_attention(softmax: fx.Node) -> Attention | str | None:
    """Around a softmax along the last axis; why not, or None if it is not about attention."""
    if softmax.args[1] not in (-1, len(shape(softmax)) - 1):
        return None
    masked = unmasked(softmax.args[0])
    scores = product_of(masked.scores)
    if scores is None:
        last = (made_by(masked.scores) or made_by(softmax.args[0])) if leads_to_product(softmax) else None
        capped = "" if masked.soft_cap is None else " before they are capped"
        return f"its scores are computed by {last}{capped}, which is no scale or mask of a product" if last else None
    if masked.why:
        return masked.why
    if any(_is_from(x, scores) for x in (masked.bias, masked.mask, masked.factor, masked.sinks)):
        return "its masks or scales are computed from its scores"
    tokens = softmax if masked.sinks is None else without_sinks(softmax, masked.sinks_first)
    if tokens is None:
        return "the probabilities of its sinks are read"
    weighted = _weighted(tokens, masked)
    if not isinstance(weighted, _Weighted):
        return weighted
    product, turned = weighted.product, weighted.turned
    operands = (scores.args[-2], scores.args[-1], product.args[not turned])
    batch, queries = shape(product)[0], shape(product)[2 if turned else 1]
    if shape(tokens)[-1] != shape(operands[1])[2]:
        return f"its softmax is over {shape(tokens)[-1]} numbers, not the {shape(operands[1])[2]} tokens"
    if shape(operands[0])[:2] != [batch, queries]:
        return f"its scores of Q {shape(operands[0])} are broadcast to {shape(product.args[turned])}"
    own = shape(tokens)[-2]
    if own == queries and weighted.order is None:
        heads = masked.heads or _seen_by_heads(product) or [1, batch]
        if math.prod(heads) != batch:
            return f"its masks are those of {heads} [batch, heads], and its products {batch}"
        seen = [_four(x, heads, product) for x in operands]
        if None in seen:
            return f"{heads} [batch, heads] are symbolic"
        (q, k, v), flat, mixed = seen, (0, 1), None
    else:
        # Queries of several heads are the rows of one product, as einsum has those that share K and V.
        mixed = _mixed(weighted.order, batch, queries)
        if isinstance(mixed, str):
            return mixed
        if own == 0 or queries % own:
            return f"its scores are of {own} queries, and its products of {queries}"
        heads = int(queries // own)
        if masked.heads not in (None, [batch, heads]):
            return f"its masks are those of {masked.heads} [batch, heads], and its products {[batch, heads]}"
        if is_call(scores, aten.baddbmm.default):
            return f"its bias is that of scores of {queries} rows, which are {heads} heads"
        q, flat = add(product, aten.unflatten.int, operands[0], 1, [heads, -1]), (1, 2)
        k, v = (_four(x, [batch, 1], product) for x in operands[1:])
    k = _transposed(k, product)
    v = _transposed(v, product) if turned else v
    if value(product).dtype.itemsize > value(q).dtype.itemsize:
        q = in_f32(q, product)  # the result is of its type
    if masked.factor is not None:
        if any(size != 1 and size != full for size, full in zip(reversed(shape(masked.factor)), reversed(shape(q)))):
            return f"its scales {shape(masked.factor)} are not those of Q {shape(q)}"
        q = add(product, aten.mul.Tensor, in_f32(q, product), masked.factor)
    fill = -math.inf if weighted.cleared else masked.fill
    return Attention(product, q, k, v, masked.bias, masked.mask, sinks=masked.sinks, scale=masked.scale,
                     soft_cap=masked.soft_cap, mask_fill=fill, nan_rows=weighted.nan_rows, flat=flat, mixed=mixed, turned=turned)


def _is_from(node: fx.Node | None, product: fx.Node) -> bool:
    open_nodes, seen = [node], set[fx.Node]()
    while open_nodes:
        source = open_nodes.pop()
        if source is product:
            return True
        if source is not None and source not in seen and product < source:
            seen.add(source)
            open_nodes.extend(source.all_input_nodes)
    return False


@dataclasses.dataclass
class _Weighted:
    """The product with V, of which the probabilities are the right side if they were turned."""

    product: fx.Node
    turned: bool = False
    order: tuple[list[Any], list[int]] | None = None  # sizes, and which of them are where after a permutation
    cleared: bool = False  # hidden ones become 0, also where all are
    nan_rows: bool = True


def _weighted(tokens: fx.Node, masked: Masked) -> _Weighted | str | None:
    """What probabilities go into; why it is no such product, or None if they go nowhere."""
    node, found = tokens, _Weighted(tokens)
    while True:
        users = list(node.users)
        if len(users) != 1:
            return f"its probabilities have {len(users)} users" if users else None
        source, node = node, users[0]
        sizes = shape(tokens)[-2:][::-1 if found.turned else 1]
        if is_call(node, aten.bmm.default):
            break
        if is_transposed(node) and shape(source)[-2:] == sizes:
            found.turned = not found.turned
        elif is_permuted(node) and found.order is None and not found.turned:
            found.order = shape(source), order_of(node)
        elif not found.turned and found.order is None and clears(node, masked):
            found.cleared, found.nan_rows = True, False
        elif is_call(node, aten.nan_to_num.default) and not any(node.args[1:2]):
            found.nan_rows = False
        elif not is_call(node, *VIEWS, *COPIES, *CASTS, aten.expand.default) or (
                is_call(node, *CASTS) and not is_float(node)):
            return f"its probabilities go into {node.target}"
    found.product, turned = node, found.turned
    if node.args[turned] is not source or node.args[not turned] is source or (turned and shape(source)[1:] != sizes):
        return f"its probabilities are not the {'right' if turned else 'left'} side of a product"
    return found


def _mixed(order: tuple[list[Any], list[int]] | None, batch: Any, queries: Any) -> tuple[list[Any], list[int]] | str | None:
    """The part of a permutation that is of a product's rows; why it is of others as well."""
    if order is None:
        return None
    sizes, axes = order
    for first in range(1, len(sizes) - 1):
        if math.prod(sizes[:first]) == batch and math.prod(sizes[first:-1]) == queries:
            rows = [size if isinstance(size, int) else -1 for size in sizes[first:-1]]
            if axes[:first] == list(range(first)) and axes[-1] == len(sizes) - 1 and rows.count(-1) < 2:
                return rows, [axis - first for axis in axes[first:-1]]
    return f"its probabilities {sizes} are permuted by {axes}"


def _seen_by_heads(product: fx.Node) -> list[Any] | None:
    """[batch, heads], where the product with V is seen as of them."""
    node = product
    while len(shape(node)) != 4:
        if len(node.users) != 1 or not is_call(user := next(iter(node.users)), *VIEWS):
            return None
        node = user
    return shape(node)[:2] if shape(node)[2:] == shape(product)[1:] else None


def _transposed(operand: fx.Node, before: fx.Node) -> fx.Node:
    operand = skip_same(operand)
    return operand.args[0] if is_transposed(operand) else add(before, aten.transpose.int, operand, -2, -1)


def _four(operand: fx.Node, heads: list[Any], before: fx.Node) -> fx.Node | None:
    """A bmm's operand [batch * heads, ..] as [batch, heads, ..]: what it is a view of, or a view of it; None: both
    are symbolic."""
    node = skip_same(operand)
    if is_transposed(node):
        inner = _four(node.args[0], heads, before)
        return None if inner is None else add(before, aten.transpose.int, inner, -2, -1)
    while is_call(node, *VIEWS, *COPIES, aten.expand.default) and (
            len(shape(node)) != 4 or shape(node) == shape(node.args[0])):
        node = node.args[0]
    if shape(node) == [*heads, *shape(operand)[1:]]:
        return node
    sizes = [size if isinstance(size, int) else -1 for size in heads]
    return None if sizes.count(-1) > 1 else add(before, aten.unflatten.int, operand, 0, sizes)
