"""What is done to scores between the product of Q and K and the softmax."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from .nodes import CASTS, COPIES, VIEWS, add, aten, in_f32, is_call, is_tensor, shape, skip, value


@dataclasses.dataclass
class Masked:
    """Scores times scale, capped, plus bias, filled where the mask is false; why: what of this is not taken."""

    scores: Any
    scale: float = 1.0
    soft_cap: float | None = None
    bias: fx.Node | None = None
    mask: fx.Node | None = None
    fill: float = -math.inf
    sinks: fx.Node | None = None  # [heads], of a column behind the last token's
    why: str = ""


def unmasked(masked: Any) -> Masked:
    """What a softmax is of."""
    found = Masked(masked)
    later: list[fx.Node] = []  # what scores are rounded to by, the last first
    while isinstance(step := found.scores, fx.Node):
        if skip(step, *CASTS, *COPIES) is not step:
            found.scores = step.args[0]
        elif (outermost := found.bias is found.mask is found.sinks is None) and (source := _less_maximum(step)):
            found.scores = source
        elif outermost and (joined := _joined(step)):
            found.scores, column = joined
            found.sinks = _of_heads(column, masked)
            found.why = "" if found.sinks else f"what is behind its scores, {shape(column)}, is no number for each head"
        elif is_call(step, aten.add.Tensor) and step.kwargs.get("alpha", 1) == 1 and isinstance(step.args[1], fx.Node):
            turned = made_by(step.args[0]) is None and made_by(step.args[1]) is not None
            found.scores, bias = step.args[::-1] if turned else step.args
            found.why = found.why or _why_not_added(bias, len(shape(step)))
            if not found.why:
                found.bias = bias if found.bias is None else add(masked, aten.add.Tensor, *(
                    in_f32(x, masked) for x in (bias, found.bias)))
        elif found.mask is None and (filled := _filled(step)):
            found.scores, condition, hides, fill = filled
            for result in (step, *reversed(later)):
                fill = _rounded(fill, result)
            found.why = found.why or _why_not_filled(condition, len(shape(step)), fill, found.bias is not None)
            if not found.why:
                found.mask = add(masked, aten.logical_not.default, condition) if hides else condition
                found.fill = float(fill)
        else:
            break
        later.append(step)
    capped, cap = _multiplied(step)
    if is_call(capped, aten.tanh.default):
        quotient, inverse = _multiplied(capped.args[0])
        if cap > 0 and math.isclose(cap * inverse, 1, rel_tol=1e-9):
            step, found.soft_cap = quotient, cap
    found.scores, found.scale = _multiplied(step)
    product = product_of(found.scores)
    if is_call(product, aten.baddbmm.default):
        _take_what_a_product_is_added_to(found, product, masked)
    return found


def _take_what_a_product_is_added_to(found: Masked, product: fx.Node, before: fx.Node) -> None:
    """beta * input + alpha * product, of [batch * heads, queries, tokens]; BLOOM's ALiBi is such an input."""
    sizes, own = shape(found.scores), shape(product.args[0])
    alike = len(sizes) == 4 and len(own) == 3 and own[0] == sizes[0] * sizes[1]
    if not alike or (found.scale, found.soft_cap) != (1.0, None):
        found.why = found.why or f"its product is added to {own}, which is no bias of its scores {sizes}"
        return
    bias = add(before, aten.reshape.default, product.args[0], [*sizes[:2], *own[1:]])
    if (beta := product.kwargs.get("beta", 1)) != 1:
        bias = add(before, aten.mul.Tensor, bias, beta)
    found.bias = bias if found.bias is None else add(before, aten.add.Tensor, *(
        in_f32(x, before) for x in (bias, found.bias)))
    found.scale = float(product.kwargs.get("alpha", 1))


def _is_last(node: fx.Node, argument: int) -> bool:
    """Whether an axis is the last."""
    return len(node.args) > argument and node.args[argument] in (-1, len(shape(node)) - 1)


def _joined(logits: fx.Node) -> list[fx.Node] | None:
    """Scores, and a column behind them."""
    pair = is_call(logits, aten.cat.default) and len(logits.args[0]) == 2 and _is_last(logits, 1)
    return logits.args[0] if pair and shape(logits.args[0][1])[-1] == 1 else None


def _less_maximum(logits: fx.Node) -> fx.Node | None:
    """What each row's own maximum is subtracted from, which no softmax sees."""
    if not is_call(logits, aten.sub.Tensor) or not isinstance(logits.args[1], fx.Node):
        return None
    source, maximum = logits.args
    if maximum.target is operator.getitem and maximum.args[1] == 0:
        maximum = maximum.args[0]
    taken = is_call(maximum, aten.max.dim, aten.amax.default) and maximum.args[0] is source
    axes = maximum.args[1] if taken and len(maximum.args) == 3 and maximum.args[2] else ()
    return source if axes in (-1, [-1], len(shape(source)) - 1, [len(shape(source)) - 1]) else None


def _of_heads(column: fx.Node, before: fx.Node) -> fx.Node | None:
    """[heads] of which it is [batch, heads, queries, 1]."""
    source = skip(column, *CASTS, *COPIES, aten.expand.default)
    sizes = [1] * (4 - len(shape(source))) + shape(source)
    if len(shape(column)) != 4 or sizes != [1, shape(column)[1], 1, 1]:
        return None
    return add(before, aten.reshape.default, source, [sizes[1]])


def without_last(probabilities: fx.Node) -> fx.Node | None:
    """All but the last column, if nothing else of them is read."""
    users = list(probabilities.users)
    if len(users) != 1 or not is_call(users[0], aten.slice.Tensor) or not _is_last(users[0], 1):
        return None
    start = users[0].args[2] if len(users[0].args) > 2 else 0
    return users[0] if not start and shape(users[0])[-1] + 1 == shape(probabilities)[-1] else None


def _multiplied(step: Any) -> tuple[Any, float]:
    """What a number is multiplied by, and the number."""
    step = skip(step, *CASTS, *COPIES)
    if not is_call(step, aten.mul.Tensor, aten.div.Tensor) or not isinstance(step.args[1], (int, float)):
        return step, 1.0
    factor, number = step.args
    return factor, float(number) if step.target is aten.mul.Tensor else 1 / number if number else math.inf


def _why_not_added(bias: fx.Node, rank: int) -> str:
    """To scores of that rank."""
    if not is_tensor(bias):
        return "what is added to its scores is a number"
    if value(bias).dtype == torch.bool:
        return "its mask is boolean and added, as ones, which hides nothing"
    return _why_not_of_heads(bias, rank)


def _why_not_filled(condition: fx.Node, rank: int, fill: Any, adds: bool) -> str:
    """Where the condition says so; adds: whether something is added to what is filled."""
    if not isinstance(fill, (int, float)) or not fill < math.inf:
        return f"its mask fills with {fill}"
    if adds and fill != -math.inf:
        return f"its mask fills with {fill}, to which a bias is added"
    return _why_not_of_heads(condition, rank)


def _why_not_of_heads(mask: fx.Node, rank: int) -> str:
    if rank == 4 or len(shape(mask)) <= 2:
        return ""
    return f"its mask {shape(mask)} is that of scores of {rank} dims"


def _filled(scores: Any) -> tuple[Any, fx.Node, bool, float] | None:
    """Scores, a condition, whether it hides or shows them where it is true, and the number elsewhere."""
    if is_call(scores, aten.masked_fill.Scalar):
        scores, condition, fill = scores.args[:3]
        return scores, condition, True, fill
    if is_call(scores, aten.where.self):
        condition, *sides = scores.args
        for hides, (fill, rest) in zip((True, False), (sides, sides[::-1])):
            if is_call(fill, aten.scalar_tensor.default):
                return rest, condition, hides, _rounded(fill.args[0], fill)
            if is_call(fill, aten.full.default):
                return rest, condition, hides, _rounded(fill.args[1], fill)
    return None


def _rounded(number: Any, node: fx.Node) -> Any:
    """As the node's type has it: the lowest number of one type is -inf in another."""
    if not isinstance(number, (int, float)):
        return number
    return torch.tensor(float(number), dtype=torch.float64).to(value(node).dtype).item()


def product_of(scores: Any) -> fx.Node | None:
    product = skip(scores, *VIEWS, *COPIES, *CASTS)
    return product if is_call(product, aten.bmm.default, aten.baddbmm.default) else None


def made_by(scores: Any) -> Any:
    """What a product becomes scores by, that is not known; None if there is no product."""
    open_nodes, seen = [scores], set[fx.Node]()
    while open_nodes and len(seen) < 24:
        node = open_nodes.pop(0)
        if not isinstance(node, fx.Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if is_call(node, aten.bmm.default, aten.baddbmm.default, aten.mm.default):
            return skip(scores, *VIEWS, *COPIES, *CASTS).target
        open_nodes.extend(node.all_input_nodes)
    return None
