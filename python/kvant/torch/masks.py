"""What is done to scores between the product of Q and K and the softmax."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .nodes import CASTS, COPIES, VIEWS, add, aten, in_f32, is_call, is_float, is_tensor, shape, skip, value, viewed


@dataclasses.dataclass
class Masked:
    """Scores times scale, capped, plus bias, filled where the mask is false; why: what of this is not taken."""

    scores: Any
    scale: float = 1.0
    factor: fx.Node | None = None  # beside the scale, alike for all tokens of a query
    soft_cap: float | None = None
    bias: fx.Node | None = None
    mask: fx.Node | None = None
    fill: float = -math.inf
    filled: bool = False  # by the mask, or by what is added
    hidden: tuple[fx.Node, bool, list[Any]] | None = None  # of the only fill: its condition, whether true hides, its dims
    floor: float = -math.inf  # no score is less
    sinks: fx.Node | None = None  # [heads], of a column behind the last token's
    sinks_first: bool = False  # or of one before the first's
    seen: list[Any] | None = None  # [batch, heads], where scores are seen as of them
    heads: list[Any] | None = None  # the same of masks and the like that are not alike for all
    why: str = ""

    @property
    def unscaled(self) -> bool:
        return self.scale == 1 and self.factor is None


def unmasked(masked: Any) -> Masked:
    """What a softmax is of, read from the last step to the first."""
    found = Masked(masked)
    later: list[fx.Node] = []  # steps behind this one, the last first: a fill is rounded to their types
    while isinstance(step := found.scores, fx.Node):
        if len(shape(step)) > 3:
            found.seen = _heads_of(step)
        if value(step).dtype == torch.float64:
            found.why = found.why or "its scores are in f64"
        if skip(step, *CASTS, *COPIES) is not step:
            found.scores = step.args[0]
        elif is_call(step, aten.copy.default) and shape(step.args[1]) == shape(step):
            found.scores = step.args[1]  # what is written over all of other scores
        elif (source := _viewed(step)) is not None:
            found.scores = source
        elif _shifts_all(found) and (source := _less_maximum(step)) is not None:
            found.scores = source
        elif not found.filled and found.unscaled and found.bias is found.sinks is found.soft_cap is None and (
                joined := _joined(step)):
            found.scores, column, found.sinks_first = joined
            found.sinks = _of_heads(column, step, masked)
            _agree(found, _heads_of(step))
            if found.sinks is None:
                found.why = found.why or "what is beside its scores is no number for each head"
        elif found.soft_cap is None and (number := _number_added(step)) is not None and _is_unseen(found, number):
            found.scores = step.args[0]
        elif found.soft_cap is None and found.bias is None and not found.filled and found.unscaled and (
                floored := _floored(step)):
            found.scores, number = floored
            for result in reversed(later):
                number = _rounded(number, result)
            found.floor = max(found.floor, number)
        elif found.soft_cap is None and (added := _added(step)):
            found.scores, bias, number = added
            found.why = found.why or _why_not_added(bias)
            _add(found, _by_heads(found, bias, step, masked), masked, number)
        elif found.soft_cap is None and (filled := _filled(step)):
            found.scores, condition, hides, fill = filled
            for result in (step, *reversed(later)):
                fill = _rounded(fill, result)
            found.why = found.why or _why_not_filled(found, fill)
            found.hidden = None if found.filled else (condition, hides, shape(step))
            _fill(found, _by_heads(found, condition, step, masked), hides, fill, masked)
        elif found.unscaled and found.soft_cap is None and (capped := _capped(step)):
            found.scores, found.soft_cap = capped
        elif is_call(step, aten.mul.Tensor, aten.div.Tensor) and isinstance(step.args[1], (int, float)):
            found.scores, number = _multiplied(step)
            found.scale *= number
        elif is_call(step, aten.neg.default):
            found.scores, found.scale = step.args[0], -found.scale
        elif multiplied := _multiplied_by_tensor(step):
            found.scores, factor = multiplied
            factor = in_f32(_by_heads(found, factor, step, masked), masked)
            if step.target is aten.div.Tensor:
                factor = add(masked, aten.reciprocal.default, factor)
            found.factor = _both(found, aten.mul.Tensor, found.factor, factor, masked)
        else:
            break
        later.append(step)
    product = product_of(found.scores)
    if is_call(product, aten.baddbmm.default):
        _add_product(found, product, masked)
    if found.mask is not None:
        found.fill = max(found.fill, found.floor)
    if found.bias is not None and found.floor > -math.inf:
        found.bias = add(masked, aten.clamp_min.default, in_f32(found.bias, masked), found.floor)
    return found


def _heads_of(scores: fx.Node) -> list[Any]:
    """[batch, heads]. Of more dims, all before heads are the batch, as Swin's windows; [heads, ..] are of a batch of one."""
    *batch, heads = shape(scores)[:-2]
    return [math.prod(batch), heads]


def _agree(found: Masked, heads: list[Any]) -> None:
    if found.heads not in (None, heads):
        found.why = found.why or f"its masks are those of both {found.heads} and {heads} [batch, heads]"
    found.heads = heads


def _both(found: Masked, target: Any, a: fx.Node | None, b: fx.Node, before: fx.Node) -> fx.Node:
    """target(a, b), in f32; b, where there is no a."""
    if a is None:
        return b
    try:
        torch.broadcast_shapes(shape(a), shape(b))
    except RuntimeError:
        found.why = found.why or f"its masks or scales {shape(a)} and {shape(b)} do not go together"
        return b
    if target is aten.logical_and.default:
        return add(before, target, a, b)
    return add(before, target, in_f32(a, before), in_f32(b, before))


def _by_heads(found: Masked, mask: Any, scores: fx.Node, before: fx.Node) -> Any:
    """What is broadcast to scores, as [batch, heads, queries, tokens]: those of [batch * heads, ..] may be seen so later."""
    if not is_tensor(mask) or len(shape(mask)) <= 2:
        return mask
    sizes, rank = shape(mask), len(shape(scores))
    if rank > 4 and all(isinstance(size, int) for size in (*sizes, *shape(scores))):
        own = [1] * (rank - len(sizes)) + sizes
        batch = [1] if all(size == 1 for size in own[:-3]) else shape(scores)[:-3]
        wide = add(before, aten.expand.default, viewed(mask, own[-3 - len(batch):], before), [*batch, *own[-3:]])
        mask, rank = viewed(wide, [math.prod(batch), *own[-3:]], before), 4
    elif rank > 4 and len(sizes) > 3:
        found.why = found.why or f"its masks are of {len(sizes)} dims, of which some are symbolic"
    if all(size == 1 for size in shape(mask)[:-2]):
        return mask
    heads, seen = _heads_of(scores), found.heads or found.seen
    if rank == 3 and seen and shape(mask)[0] == math.prod(seen) and isinstance(seen[1], int):
        mask, heads = add(before, aten.unflatten.int, mask, 0, [-1, seen[1]]), seen
    _agree(found, heads)
    return mask


def _add(found: Masked, bias: fx.Node, before: fx.Node, number: float = 1) -> None:
    """A number of times, to scores that are multiplied by the scale later."""
    if found.why:
        return
    if number * found.scale != 1:
        bias = add(before, aten.mul.Tensor, in_f32(bias, before), number * found.scale)
    found.bias = _both(found, aten.add.Tensor, found.bias, _both(found, aten.mul.Tensor, found.factor, bias, before), before)


def _fill(found: Masked, condition: fx.Node, hides: bool, fill: float, before: fx.Node) -> None:
    if found.why:
        return
    keeps = add(before, aten.logical_not.default, condition) if hides else condition
    if found.filled:
        if found.mask is None or fill != found.fill or (found.bias is not None and fill != -math.inf):
            found.why = f"it is filled with {fill} before a second fill"
        else:
            found.mask = _both(found, aten.logical_and.default, found.mask, keeps, before)
        return
    found.filled = True
    if found.bias is not None and fill != -math.inf:
        zero, low = (add(before, aten.scalar_tensor.default, x, dtype=torch.float32) for x in (0.0, fill))
        _add(found, add(before, aten.where.self, condition, *((low, zero) if hides else (zero, low))), before)
    else:
        found.mask, found.fill = keeps, float(fill)


def _add_product(found: Masked, product: fx.Node, before: fx.Node) -> None:
    """beta * input + alpha * product; BLOOM's ALiBi is such an input."""
    bias, (beta, alpha) = product.args[0], (product.kwargs.get(name, 1) for name in ("beta", "alpha"))
    why = "is added to a bias before it is capped" if found.soft_cap is not None else ""
    if not all(isinstance(x, (int, float)) for x in (beta, alpha)):
        why = f"is multiplied by {alpha}, and what is added to it by {beta}, of which one is symbolic"
    if why:
        found.why = found.why or f"its product {why}"
        return
    if beta != 0:  # else it is not read
        _add(found, _by_heads(found, bias, product, before), before, beta)
    found.scale *= float(alpha)


def _viewed(step: fx.Node) -> fx.Node | None:
    """Behind views, where queries and tokens are the last dims again."""
    source: Any = step
    while is_call(source, *VIEWS):
        source = source.args[0]
        if shape(source)[-2:] == shape(step)[-2:] and len(shape(source)) > 2:
            return source
    return None


def _added(step: fx.Node) -> tuple[Any, Any, float] | None:
    """Scores, what is added to them, and how often."""
    if not is_call(step, aten.add.Tensor, aten.sub.Tensor) or not isinstance(step.args[1], fx.Node):
        return None
    (a, b), alpha = step.args, step.kwargs.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    if step.target is aten.sub.Tensor:
        return a, b, -alpha
    # A bias may be made of products as well, as DeBERTa's.
    turned = product_of(a) is None and product_of(b) is not None or made_by(a) is None and made_by(b) is not None
    return (b, a, 1) if alpha == 1 and turned else (a, b, alpha)


def _number_added(step: fx.Node) -> float | None:
    added = is_call(step, aten.add.Tensor, aten.sub.Tensor) and all(
        isinstance(x, (int, float)) for x in (step.args[1], step.kwargs.get("alpha", 1)))
    return _rounded(float(step.args[1]) * step.kwargs.get("alpha", 1), step) if added else None


def _shifts_all(found: Masked) -> bool:
    """Whether what is added to the scores of a row alike is added to all logits of its softmax, which does not see it."""
    hides = not found.filled or (found.mask is not None and found.fill == -math.inf)
    return found.soft_cap is None and found.sinks is None and found.floor == -math.inf and hides


def _is_unseen(found: Masked, number: float) -> bool:
    return number == 0 or (math.isfinite(number) and _shifts_all(found))


def _floored(step: fx.Node) -> tuple[Any, float] | None:
    """Scores, and a number that is their least, below which only tokens are that a mask hides."""
    if not is_call(step, aten.maximum.default, aten.clamp.default, aten.clamp_min.default) or len(step.args) != 2:
        return None
    number = step.args[1] if isinstance(step.args[1], (int, float)) else _number(step.args[1])
    number = _rounded(number, step)
    return (step.args[0], number) if isinstance(number, (int, float)) and number <= _LOSES_SCORES else None


def _capped(step: fx.Node) -> tuple[fx.Node, float] | None:
    """Scores, and a number that is above them, as cap * tanh(scores / cap)."""
    tanh, cap = _multiplied(step)
    if not is_call(tanh, aten.tanh.default):
        return None
    scores, inverse = _multiplied(tanh.args[0])
    return (scores, cap) if cap > 0 and math.isclose(cap * inverse, 1, rel_tol=1e-9) else None


def _is_last(node: fx.Node, argument: int) -> bool:
    """Whether an axis is the last."""
    return len(node.args) > argument and node.args[argument] in (-1, len(shape(node)) - 1)


def _joined(logits: fx.Node) -> tuple[fx.Node, Any, bool] | None:
    """Scores, a column beside them or the number in it, and whether it comes first."""
    if len(shape(logits)) < 3:
        return None
    if is_call(logits, aten.constant_pad_nd.default) and logits.args[1] in ([0, 1], [1, 0]):
        return logits.args[0], (*logits.args, 0.0)[2], logits.args[1] == [1, 0]
    if not is_call(logits, aten.cat.default) or len(logits.args[0]) != 2 or not _is_last(logits, 1):
        return None
    a, b = logits.args[0]
    first = made_by(a) is None and made_by(b) is not None
    scores, column = (b, a) if first else (a, b)
    return (scores, column, first) if shape(column)[-1] == 1 else None


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


def _of_heads(column: Any, logits: fx.Node, before: fx.Node) -> fx.Node | None:
    """[heads] of which it is [batch, heads, queries, 1]."""
    if not isinstance(column, fx.Node):
        heads = shape(logits)[1] if len(shape(logits)) == 4 else None
        return add(before, aten.full.default, [heads], column, dtype=torch.float32,
                   device=value(logits).device) if isinstance(heads, int) else None
    source = skip(column, *CASTS, *COPIES, aten.expand.default)
    sizes = [1] * (4 - len(shape(source))) + shape(source)
    if len(shape(column)) != 4 or sizes != [1, shape(column)[1], 1, 1]:
        return None
    return add(before, aten.reshape.default, source, [-1])


def without_sinks(probabilities: fx.Node, first: bool) -> fx.Node | None:
    """All but the last column, or the first, if nothing else of them is read."""
    users = list(probabilities.users)
    if len(users) != 1 or not is_call(users[0], aten.slice.Tensor) or not _is_last(users[0], 1):
        return None
    start = users[0].args[2] if len(users[0].args) > 2 else 0
    return users[0] if start == first and shape(users[0])[-1] + 1 == shape(probabilities)[-1] else None


def clears(probabilities: fx.Node, masked: Masked) -> bool:
    """Whether it makes those 0 that the mask has hidden. They are 0, but in rows where no other token counts."""
    filled = _filled(probabilities)
    lowest = torch.finfo(value(masked.scores).dtype).min
    hides = masked.mask is not None and masked.fill <= max(_LOSES_SCORES, lowest) and masked.floor == -math.inf
    others_count = masked.bias is None or _hides_nothing(masked.bias)
    return hides and others_count and filled is not None and filled[3] == 0 and (
        masked.hidden == (*filled[1:3], shape(probabilities)))


def _hides_nothing(bias: Any) -> bool:
    """Whether it is made of products and finite numbers alone, as relative positions are, so that it is no mask."""
    if isinstance(bias, (int, float)):
        return math.isfinite(bias)
    if is_call(bias, aten.bmm.default, aten.mm.default, aten.addmm.default):
        return True
    if is_call(bias, aten.cat.default):
        return all(map(_hides_nothing, bias.args[0]))
    if is_call(bias, aten.add.Tensor, aten.sub.Tensor):
        return all(map(_hides_nothing, bias.args))
    if is_call(bias, aten.mul.Tensor, aten.div.Tensor):
        by_number = not is_tensor(bias.args[1]) or math.prod(shape(bias.args[1])) == 1
        return by_number and _hides_nothing(bias.args[0])
    if is_call(bias, *VIEWS, *COPIES, *CASTS, aten.expand.default, aten.transpose.int, aten.permute.default,
               aten.slice.Tensor, aten.gather.default):
        return _hides_nothing(bias.args[0])
    number = _number(bias) if isinstance(bias, fx.Node) else None
    return isinstance(number, (int, float)) and math.isfinite(number)


def _multiplied(step: Any) -> tuple[Any, float]:
    """What is multiplied by a number, and the number."""
    step = skip(step, *CASTS, *COPIES)
    if not is_call(step, aten.mul.Tensor, aten.div.Tensor) or not isinstance(step.args[1], (int, float)):
        return step, 1.0
    factor, number = step.args
    if step.target is aten.mul.Tensor:
        return skip(factor, *CASTS, *COPIES), float(number)
    return skip(factor, *CASTS, *COPIES), 1 / number if number else math.inf


def _multiplied_by_tensor(step: fx.Node) -> tuple[Any, fx.Node] | None:
    """Scores, and what they are multiplied or divided by, alike for all tokens of a query."""
    if not is_call(step, aten.mul.Tensor, aten.div.Tensor) or not all(map(is_tensor, step.args)):
        return None
    scores, factor = step.args
    if step.target is aten.mul.Tensor and made_by(scores) is None:
        scores, factor = factor, scores
    alike = is_float(factor) and shape(factor)[-1:] in ([], [1]) and made_by(scores) is not None
    return (scores, factor) if alike and shape(scores) == shape(step) else None


def _why_not_added(bias: fx.Node) -> str:
    if not is_tensor(bias):
        return "what is added to its scores is a number"
    if value(bias).dtype == torch.bool:
        return "its mask is boolean and added, as ones, which hides nothing"
    return ""


# A number of f32 at or below this one does not change when a score of less than 2^102 is added to it.
_LOSES_SCORES = -(2.0**127)


def _why_not_filled(found: Masked, fill: Any) -> str:
    """Before what was found."""
    if not isinstance(fill, (int, float)) or not fill < math.inf:
        return f"its mask fills with {fill}"
    if (fill != -math.inf and found.scale != 1) or not found.scale > 0 or found.factor is not None:
        return f"its mask fills with {fill}, which is multiplied"
    if fill > _LOSES_SCORES and found.bias is not None:
        return f"its mask fills with {fill}, to which a bias is added"
    return ""


def _filled(scores: Any) -> tuple[Any, fx.Node, bool, float] | None:
    """Scores, a condition, whether it hides or shows them where it is true, and the number elsewhere."""
    if is_call(scores, aten.masked_fill.Scalar):
        scores, condition, fill = scores.args[:3]
        return scores, condition, True, fill
    if is_call(scores, aten.masked_fill.Tensor) and (fill := _number(scores.args[2])) is not None:
        return scores.args[0], scores.args[1], True, _rounded(fill, scores.args[2])
    if is_call(scores, aten.where.self):
        condition, *sides = scores.args
        for hides, (fill, rest) in zip((True, False), (sides, sides[::-1])):
            number = _number(fill)
            if number is not None:
                return rest, condition, hides, _rounded(number, fill)
    return None


def _number(node: Any) -> Any:
    """Of a tensor that holds one, as is known before it runs."""
    node = skip(node, *COPIES, aten.lift_fresh_copy.default, aten.expand.default)
    if skip(node, *CASTS) is not node:
        return _rounded(_number(node.args[0]), node)
    if is_call(node, aten.scalar_tensor.default):
        return node.args[0]
    if is_call(node, aten.full.default, aten.full_like.default):
        return node.args[1]
    if is_call(node, aten.zeros_like.default, aten.ones_like.default):
        return float(node.target is aten.ones_like.default)
    if is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float)):
        number = _number(node.args[0])
        return number * node.args[1] if isinstance(number, (int, float)) else None
    if isinstance(node, fx.Node) and node.op == "get_attr":
        constant = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(constant, torch.Tensor) and constant.numel() == 1:
            with unset_fake_temporarily():
                return constant.item()
    return None


def _rounded(number: Any, node: fx.Node) -> Any:
    """As the node's type has it: the lowest number of one type is -inf in another."""
    if not isinstance(number, (int, float)):
        return number
    return torch.tensor(float(number), dtype=torch.float64).to(value(node).dtype).item()


def product_of(scores: Any) -> fx.Node | None:
    product = skip(scores, *VIEWS, *COPIES, *CASTS)
    return product if is_call(product, aten.bmm.default, aten.baddbmm.default) else None


def leads_to_product(probabilities: fx.Node) -> bool:
    """Within few nodes: those of a classifier or a router do not."""
    open_nodes, seen = [probabilities], set[fx.Node]()
    while open_nodes and len(seen) < 16:
        node = open_nodes.pop(0)
        if is_call(node, aten.bmm.default, aten.baddbmm.default, aten.mm.default):
            return True
        if node not in seen:
            seen.add(node)
            open_nodes.extend(node.users)
    return False


def made_by(scores: Any) -> Any:
    """The op that scores come from, if a product is among what they are computed from; else None."""
    open_nodes, seen = [scores], set[fx.Node]()
    while open_nodes and len(seen) < 64:
        node = open_nodes.pop(0)
        if not isinstance(node, fx.Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if is_call(node, aten.bmm.default, aten.baddbmm.default, aten.mm.default):
            return skip(scores, *VIEWS, *COPIES, *CASTS).target
        open_nodes.extend(node.all_input_nodes)
    return None
