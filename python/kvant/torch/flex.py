"""What FlexAttention's score_mod and mask_mod say, where kvant has it.

    mask_mod: comparisons of query and key indices, joined by &: causal and sliding windows
    score_mod: a soft cap, c * tanh(score / c), then slopes[head] * (key - query): ALiBi
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx


class Declined(Exception):
    """Why a function is not one that kvant has."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """query * q + key * k + constant, of indices."""

    query: float = 0
    key: float = 0
    constant: float = 0

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        return Linear(self.query + sign * other.query, self.key + sign * other.key,
                      self.constant + sign * other.constant)


@dataclasses.dataclass
class Windows:
    """A query sees keys from `left` before it to `right` behind it; -1: all."""

    left: int = -1
    right: int = -1

    def narrow(self, name: str, limit: float) -> None:
        if limit != int(limit) or limit < 0:
            raise Declined(f"its mask has a window of {limit} tokens")
        old = getattr(self, name)
        setattr(self, name, int(limit) if old < 0 else min(old, int(limit)))


@dataclasses.dataclass
class Scores:
    """What becomes of a score. slopes: the placeholder of ALiBi's, times `sign`."""

    soft_cap: float | None = None
    slopes: fx.Node | None = None
    sign: int = 1


_NAMES = {
    operator.ge: "ge", operator.gt: "gt", operator.le: "le", operator.lt: "lt", torch.ge: "ge",
    torch.gt: "gt", torch.le: "le", torch.lt: "lt", operator.and_: "and", torch.logical_and: "and",
    torch.bitwise_and: "and", operator.add: "add", torch.add: "add", operator.sub: "sub",
    torch.sub: "sub", operator.mul: "mul", torch.mul: "mul", operator.truediv: "div",
    torch.div: "div", torch.tanh: "tanh", operator.getitem: "getitem", operator.neg: "neg",
}


def _name(node: Any) -> str:
    """What a node computes; of what is known, from its arguments alone."""
    if not isinstance(node, fx.Node):
        raise Declined(f"it has {node!r} where a tensor is expected")
    name = str(node.target) if node.op == "call_method" else _NAMES.get(node.target)
    if name is None:
        return getattr(node.target, "__name__", str(node.target))
    given = {key: value for key, value in node.kwargs.items() if value is not None and (key, value) != ("alpha", 1)}
    if name in _NAMES.values() and given:
        raise Declined(f"it has {name} with {given}")
    return name


def windows_of(mask_mod: fx.GraphModule) -> Windows:
    """Of mask_mod(batch, head, query, key, ...)."""
    placeholders, result = _ends(mask_mod)
    windows, open_nodes = Windows(), [result]
    while open_nodes:
        node = open_nodes.pop()
        if node is True:
            continue
        name = _name(node)
        if name == "and":
            open_nodes.extend(node.args)
        elif name in ("new_ones", "ones_like"):
            continue
        elif name in ("ge", "gt", "le", "lt"):
            # As low <= high.
            low, high = (_linear(x, placeholders) for x in node.args)
            if name in ("ge", "gt"):
                low, high = high, low
            gap = high.plus(low, -1)
            room = gap.constant - (1 if name in ("gt", "lt") else 0)
            if (gap.query, gap.key) == (1, -1):
                windows.narrow("right", room)
            elif (gap.query, gap.key) == (-1, 1):
                windows.narrow("left", room)
            else:
                raise Declined(f"its mask compares {gap.query} * query + {gap.key} * key with a number")
        else:
            raise Declined(f"its mask has {name}")
    return windows


def scores_of(score_mod: fx.GraphModule) -> Scores:
    """Of score_mod(score, batch, head, query, key, ...)."""
    placeholders, node = _ends(score_mod)
    score, indices, head = placeholders[0], placeholders[1:], placeholders[2]
    result = Scores()
    if _name(node) in ("add", "sub") and node is not score:
        node, result.slopes, result.sign = _alibi(node, indices, head)
    if _name(node) == "mul" and node is not score:
        capped, cap = _with_number(node)
        if _name(capped) != "tanh":
            raise Declined("its score function multiplies scores, but no tanh of them by its cap")
        if not _is_quotient(capped.args[0], score, cap):
            raise Declined("its score function caps by a tanh, but not as cap * tanh(score / cap)")
        node, result.soft_cap = score, float(cap)
    if node is not score:
        raise Declined(f"its score function has {_name(node)}")
    return result


def _is_quotient(node: Any, score: fx.Node, cap: float) -> bool:
    if _name(node) == "mul":
        of, number = _with_number(node)
        return of is score and math.isclose(number * cap, 1, rel_tol=1e-9)
    return _name(node) == "div" and node.args == (score, cap)


def _ends(gm: fx.GraphModule) -> tuple[list[fx.Node], Any]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    result = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    return placeholders, result[0] if isinstance(result, (tuple, list)) else result


def _linear(x: Any, placeholders: list[fx.Node]) -> Linear:
    if isinstance(x, (int, float)):
        return Linear(constant=x)
    if x is placeholders[2]:
        return Linear(query=1)
    if x is placeholders[3]:
        return Linear(key=1)
    if isinstance(x, fx.Node) and x.op == "call_function" and _name(x) in ("add", "sub"):
        a, b = (_linear(y, placeholders) for y in x.args)
        return a.plus(b, 1 if _name(x) == "add" else -1)
    raise Declined(f"its mask depends on {x if not isinstance(x, fx.Node) else _name(x)}, no index or number")


def _with_number(product: fx.Node) -> tuple[Any, float]:
    a, b = product.args
    if isinstance(a, (int, float)):
        a, b = b, a
    if not isinstance(a, fx.Node) or not isinstance(b, (int, float)):
        raise Declined("its score function multiplies two tensors")
    return a, b


def _alibi(node: fx.Node, indices: list[fx.Node], head: fx.Node) -> tuple[Any, fx.Node, int]:
    """The rest, the slopes' placeholder, and the sign of key - query."""
    score, bias = node.args
    sign = 1 if _name(node) == "add" else -1
    if sign == 1 and not _is_bias(bias):
        score, bias = bias, score
    if not _is_bias(bias):
        raise Declined("its score function adds what is not slopes[head] * (key - query)")
    slope, distance = bias.args
    if _name(slope) != "getitem":
        slope, distance = distance, slope
    if _name(slope) != "getitem" or slope.args[1] is not head or slope.args[0].op != "placeholder":
        raise Declined("its score function has a bias whose slopes are not by head")
    gap = _linear(distance, indices)
    if (gap.query, gap.key, gap.constant) not in ((-1, 1, 0), (1, -1, 0)):
        raise Declined("its score function has a bias that is not of key - query")
    return score, slope.args[0], sign * int(gap.key)


def _is_bias(x: Any) -> bool:
    return (isinstance(x, fx.Node) and x.op == "call_function" and _name(x) == "mul"
            and all(isinstance(y, fx.Node) for y in x.args))
