"""What attention looks like as ATen nodes.

Nothing here changes a graph but by adding nodes that nobody uses yet.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .masks import leads_to_product, made_by, product_of, unmasked, without_last
from .nodes import (CASTS, COPIES, VIEWS, add, aten, in_f32, is_call, is_float, is_tensor, is_tokens_first, shape, skip,
                    skip_same, value)


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
    flat: bool = False
    """The output is [heads, queries, channels], of a batch of one."""


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
    scores = masked.scores
    product = product_of(scores)
    if product is None:
        last = (made_by(scores) or made_by(softmax.args[0])) if leads_to_product(softmax) else None
        return f"its scores are computed by {last}, which is no scale or mask of a product" if last else None
    if masked.why:
        return masked.why
    scores = product
    tokens = softmax if masked.sinks is None else without_last(softmax)
    if tokens is None:
        return "the probabilities of its sinks are read"
    probabilities, weighted = tokens, tokens
    while not is_call(weighted, aten.bmm.default):
        users = list(weighted.users)
        if len(users) != 1:
            return f"its probabilities have {len(users)} users" if users else None
        probabilities, weighted = weighted, users[0]
        cut = is_call(weighted, *CASTS) and not is_float(weighted)
        if cut or not is_call(weighted, *VIEWS, *COPIES, *CASTS, aten.expand.default, aten.bmm.default):
            return f"its probabilities go into {weighted.target}"
    if weighted.args[0] is not probabilities or weighted.args[1] is probabilities:
        return "its probabilities are not the left side of a product"
    operands = (scores.args[-2], scores.args[-1], weighted.args[1])
    if shape(tokens)[-1] != shape(operands[1])[2]:
        return f"its softmax is over {shape(tokens)[-1]} numbers, not the {shape(operands[1])[2]} tokens"
    if shape(operands[0])[:2] != shape(weighted)[:2]:
        return f"its scores of Q {shape(operands[0])} are broadcast to {shape(probabilities)}"
    output, flat = _seen_by_heads(weighted, operands), False
    if output is not None and masked.ranks <= {4}:
        q, k, v = (_four(operands[0]), _transposed(_four(operands[1]), output), _four(operands[2]))
    elif masked.ranks <= {3}:
        output, flat = weighted, True
        q, k, v = (add(output, aten.unsqueeze.default, x, 0)
                   for x in (operands[0], _transposed(operands[1], output), operands[2]))
    else:
        return ("Q, K, V or the product with V is not seen as [batch, heads, tokens, channels], as its masks are "
                f"(by scores of {max(masked.ranks)} dims)")
    if value(output).dtype.itemsize > value(q).dtype.itemsize:
        q = in_f32(q, output)  # the result is of its type
    if masked.factor is not None:
        if any(size != 1 and size != full for size, full in zip(reversed(shape(masked.factor)), reversed(shape(q)))):
            return f"its scales {shape(masked.factor)} are not those of Q {shape(q)}"
        q = add(output, aten.mul.Tensor, in_f32(q, output), masked.factor)
    return Attention(output, q, k, v, masked.bias, masked.mask, sinks=masked.sinks, scale=masked.scale,
                     soft_cap=masked.soft_cap, mask_fill=masked.fill, nan_rows=True, flat=flat)


def _seen_by_heads(weighted: fx.Node, operands: Sequence[fx.Node]) -> fx.Node | None:
    """The product with V as [batch, heads, queries, channels], if Q, K and V are of that batch and those heads."""
    sources = [_four(operand) for operand in operands]
    node = weighted
    while len(shape(node)) != 4:
        if len(node.users) != 1 or not is_call(user := next(iter(node.users)), *VIEWS):
            return None
        node = user
    alike = all(source is not None and shape(source)[:2] == shape(node)[:2] for source in sources)
    return node if alike and shape(node)[2] == shape(weighted)[1] else None


def _transposed(operand: fx.Node, before: fx.Node) -> fx.Node:
    operand, rank = skip_same(operand), len(shape(operand))
    if is_call(operand, aten.transpose.int) and {axis % rank for axis in operand.args[1:3]} == {rank - 2, rank - 1}:
        return operand.args[0]
    return add(before, aten.transpose.int, operand, -2, -1)


def _four(operand: fx.Node) -> fx.Node | None:
    """[B,H,S,D] of which a bmm's operand [B * H,S,D] is a view, or transposes one."""
    node = skip_same(operand)
    if is_call(node, aten.transpose.int) and {axis % 3 for axis in node.args[1:3]} == {1, 2}:
        inner = _four(node.args[0])
        return None if inner is None else add(operand, aten.transpose.int, inner, -2, -1)
    while is_call(node, *VIEWS, *COPIES, aten.expand.default) and (
            len(shape(node)) != 4 or shape(node) == shape(node.args[0])):
        node = node.args[0]
    if len(shape(node)) != 4 or shape(node)[2:] != shape(operand)[1:]:
        return None
    return node
