"""kvant::attention for PyTorch: one fused attention, also over codes that are dequantized as they are read.

Graphs are built and compiled at the first call of a shape; the calls after it look them up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import is_tensor_like

from ..builder import GraphBuilder
from ..compiled import Compiled, compile
from ..errors import invalid, make_error
from ..kept import Kept
from ..value import Value

# Tensors are [batch, heads, tokens, channels]. Codes of less than a byte are packed along channels,
# the first in the lowest bits, and k_type ("u4") says so. k_scales and k_zero_points have the dims
# of K divided by those of a group; zero points of integers are in codes, of floats in real units:
# value = code * scale - zero point. bias is added to the scores; where the mask, boolean, is false, they
# become mask_fill. Both are of any shape that broadcasts. sinks: a logit of each head. Without a scale
# it is 1 / sqrt(channels). bottom_right: the last query is at the last token, else the first at the
# first. tokens_first: the result is [batch, tokens, heads, channels] in memory. nan_rows: a query that
# sees nothing gives NaN, not 0.
SCHEMA = """attention(Tensor q, Tensor k, Tensor v, Tensor? k_scales, Tensor? k_zero_points,
Tensor? v_scales, Tensor? v_zero_points, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks,
str k_type, str v_type, float? scale, float? soft_cap, float mask_fill, int left_window, int right_window,
bool bottom_right, bool tokens_first, bool nan_rows) -> Tensor"""

TYPES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int8: "s8",
    torch.uint8: "u8", torch.int32: "s32", torch.int64: "s64", torch.bool: "boolean",
    torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2",
}
NAMES = ("q", "k", "v", "k_scales", "k_zero_points", "v_scales", "v_zero_points", "bias",
         "mask", "alibi_slopes", "sinks")
IN_BYTE = {"u4": 2, "s4": 2, "u2": 4, "s2": 4}

_library = torch.library.Library("kvant", "DEF")
_library.define(SCHEMA.replace("\n", " "), tags=(torch.Tag.needs_fixed_stride_order,))

# A decoding loop whose cache grows has a new shape for each token.
_compiled: Kept[Compiled] = Kept(256)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    k_zero_points: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    v_zero_points: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_type: str = "",
    v_type: str = "",
    scale: float | None = None,
    soft_cap: float | None = None,
    mask_fill: float = -math.inf,
    left_window: int = -1,
    right_window: int = -1,
    bottom_right: bool = False,
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v, fused, over K and V as they are stored.

    Scores are scaled, capped, and have slopes, bias and mask put on them, in this order; then windows hide.

    Args:
      q: [batch, heads, queries, channels] of f32, f16 or bf16.
      k, v: [batch, KV heads, tokens, channels]; heads are a multiple of KV heads. Floats, or codes.
      k_scales, v_scales: of codes, [batch, KV heads, tokens, channels] divided by a group's dims.
      k_zero_points, v_zero_points: as the scales. Integers are in codes; floats are in real units:
        value = code * scale - zero point.
      k_type, v_type: "u4", "s4", "u2" or "s2": uint8 holds so many codes packed, the first lowest.
      bias: added to the scores; broadcasts to [batch, heads, queries, tokens].
      mask: boolean, likewise; where it is false, a score becomes mask_fill.
      mask_fill: -inf, which hides it, or a number.
      scale: None: 1 / sqrt(channels).
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      alibi_slopes: [heads] of f32; slope * (token - position of the query) is added.
      sinks: [heads], logits that join the softmax's denominator, as of a token whose value is 0.
      left_window, right_window: a query at position i sees tokens from i - left_window to
        i + right_window; -1: all. Causal is right_window = 0.
      bottom_right: the last query is at the last token, as in decoding over a cache and in
        FlashAttention; else the first query is at the first token, as with PyTorch's is_causal.

    Returns:
      [batch, heads, queries, channels of v], in memory [batch, queries, heads, channels].
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_tensor_like(x):  # also what traces a function
            raise invalid(f"kvant::attention: {name} is {type(x).__name__}, not a tensor")
    return torch.ops.kvant.attention(
        q, k, v, k_scales, k_zero_points, v_scales, v_zero_points, bias, mask, alibi_slopes, sinks,
        k_type, v_type, scale, soft_cap, mask_fill, left_window, right_window,
        bottom_right, True, False)


@torch.library.impl(_library, "attention", "CPU")
@torch.library.impl(_library, "attention", "CUDA")
def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scales: Any, k_zero_points: Any,
    v_scales: Any, v_zero_points: Any, bias: Any, mask: Any, alibi_slopes: Any, sinks: Any,
    *words: Any,
) -> torch.Tensor:
    tensors = (q, k, v, k_scales, k_zero_points, v_scales, v_zero_points, bias, mask, alibi_slopes, sinks)
    check_devices("attention", q.device, zip(NAMES, tensors))
    out = _empty(q, v, words[1], words[-2])
    if out.numel() == 0:
        return out
    key = (*(x if x is None else (x.dtype, x.shape, x.stride()) for x in tensors), *words, q.device,
           torch.get_num_threads())
    compiled = _compiled.get(key, lambda: _compile(tensors, *words))
    # Gradients are above this: what is read here is not recorded.
    given = {name: x.detach() for name, x in zip(NAMES, tensors) if x is not None}
    compiled.execute([given[port.name] for port in compiled.inputs], [out])
    return out


@torch.library.register_fake("kvant::attention", lib=_library)
def _fake(*arguments: Any) -> Any:
    tensors, words = arguments[:len(NAMES)], arguments[len(NAMES):]
    # With one on "meta" this runs, wherever the others are.
    check_devices("attention", tensors[0].device, zip(NAMES, tensors))
    return _empty(tensors[0], tensors[2], words[1], words[-2])


def check_devices(op: str, device: torch.device, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """PyTorch picks the kernel by the device of any one tensor, so others may lie elsewhere."""
    for name, x in tensors:
        if x is not None and x.device != device:
            raise invalid(f"kvant::{op}: {name} is on {x.device}, but the others are on {device}")


def _empty(q: torch.Tensor, v: torch.Tensor, v_type: str, tokens_first: bool) -> torch.Tensor:
    if q.dim() != 4 or v.dim() != 4:
        raise invalid(f"kvant::attention: q is {list(q.shape)} and v {list(v.shape)}, but both must be "
                      "[batch, heads, tokens, channels]")
    batch, heads, queries, _ = q.shape
    channels = v.shape[3] * IN_BYTE.get(v_type, 1)
    if not tokens_first:
        return q.new_empty(batch, heads, queries, channels)
    return q.new_empty(batch, queries, heads, channels).transpose(1, 2)


def explain(*arguments: Any) -> str:
    """What kvant runs for such arguments of kvant::attention, and why; an Error if nothing does."""
    return _compile(arguments[:len(NAMES)], *arguments[len(NAMES):]).explain()


def _compile(
    tensors: tuple[torch.Tensor | None, ...], k_type: str, v_type: str, scale: float | None,
    soft_cap: float | None, mask_fill: float, left_window: int, right_window: int,
    bottom_right: bool, tokens_first: bool, nan_rows: bool,
) -> Compiled:
    q, k, v, k_scales, k_zero_points, v_scales, v_zero_points, bias, mask, alibi_slopes, sinks = tensors
    _check_shapes(q, k, v, bias, mask, alibi_slopes, sinks)
    compressed = k_scales is not None or v_scales is not None
    g = GraphBuilder("f16" if compressed else "strict", apply_to_int=compressed)

    def tensor(name: str, x: torch.Tensor, type: str = "") -> Value:
        dims, strides = list(x.shape), list(x.stride())
        if type in IN_BYTE:
            if x.dtype != torch.uint8 or strides[-1] != 1 and dims[-1] > 1:
                raise invalid(f"kvant::attention: {name} is {x.dtype} of strides {strides}, but {type} "
                              "is packed in uint8, dense along channels")
            dims[-1] *= IN_BYTE[type]
            strides[:-1] = (stride * IN_BYTE[type] for stride in strides[:-1])
        elif type:
            raise invalid(f"kvant::attention: {name}'s type is {type!r}, but must be one of {list(IN_BYTE)} "
                          "or empty")
        elif x.dtype not in TYPES:
            raise invalid(f"kvant::attention: {name} is {x.dtype}, which kvant lacks")
        return g.input(name, type or TYPES[x.dtype], dims, strides)

    def numbers(name: str, x: Any, type: str, scales: Any, zero_points: Any) -> Value:
        codes = tensor(name, x, type)
        if scales is None:
            if type or not x.dtype.is_floating_point:
                raise invalid(f"kvant::attention: {name} is {type or x.dtype} without scales")
            return codes
        dims = codes.dims
        if scales.dim() != 4 or any(s == 0 or d % s for d, s in zip(dims, scales.shape)):
            raise invalid(f"kvant::attention: {name}_scales {list(scales.shape)} do not divide {name} {dims}")
        group = [d // s for d, s in zip(dims, scales.shape)]
        points = None if zero_points is None else tensor(name + "_zero_points", zero_points)
        return g.dynamic_dequantize(codes, tensor(name + "_scales", scales), points, group_shape=group,
                                    type=TYPES[q.dtype])

    q_value = tensor("q", q)
    sources = [("k", k, k_type, k_scales, k_zero_points), ("v", v, v_type, v_scales, v_zero_points)]
    k_value, v_value = (numbers(*source) for source in sources)
    if mask is None and mask_fill != -math.inf:
        raise invalid(f"kvant::attention: mask_fill is {mask_fill}, but there is no mask")
    optional = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    masks = {"select" if name == "mask" else name: tensor(name, x) for name, x in optional.items() if x is not None}
    out = g.scaled_dot_product_attention(
        q_value, k_value, v_value, scale=scale, soft_cap=soft_cap,
        select_fill=None if mask_fill == -math.inf else mask_fill, left_window=left_window,
        right_window=right_window, bottom_right=bottom_right,
        # Queries that see nothing give NaN, but those that have no tokens to see give 0, a sum of none.
        mode="none" if nan_rows and k.shape[2] > 0 else "inf_as_zero", **masks)
    batch, heads, queries, channels = q.shape[0], q.shape[1], q.shape[2], v_value.dims[3]
    inner = [channels, heads * channels] if tokens_first else [queries * channels, channels]
    g.output("o", out, strides=[queries * heads * channels, *inner, 1])
    return compile(g.build(), device=str(q.device), require_fused=True)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, mask: Any, slopes: Any,
                  sinks: Any) -> None:
    """What the graph would refuse as well, in the words of the call."""
    shown = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
        raise invalid(f"kvant::attention: {shown} are not queries, keys and values of one batch")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise invalid(f"kvant::attention: {shown}: {q.shape[1]} heads are no multiple of {k.shape[1]} KV heads")
    scores = [*q.shape[:3], k.shape[2]]
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        if x.dim() > 4 or any(have not in (1, want) for have, want in zip(reversed(x.shape), reversed(scores))):
            raise invalid(f"kvant::attention: {name} {list(x.shape)} does not broadcast to {scores}")
        if (x.dtype == torch.bool) != (name == "mask"):
            raise invalid(f"kvant::attention: {name} is {x.dtype}; bias is added to the scores, and mask, boolean, "
                          "says which to keep")
    for name, x in (("alibi_slopes", slopes), ("sinks", sinks)):
        if x is not None and list(x.shape) != [q.shape[1]]:
            raise invalid(f"kvant::attention: {name} are {list(x.shape)}, but must be [{q.shape[1]}]")


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, k_scales, _, v_scales, _, bias, mask, slopes, sinks, _, _, *words, _ = inputs
    ctx.compressed = k_scales is not None or v_scales is not None
    ctx.words = words
    ctx.save_for_backward(*((q, k, v, bias, mask, slopes, sinks, output) if not ctx.compressed else ()))


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """With P = softmax(S): dV = P' dO, dS = P (dO V' - sum(dO O)), dQ = dS K, dK = dS' Q."""
    if ctx.compressed:
        raise make_error(
            "unimplemented", "kvant::attention: there is no gradient through compressed K and V; "
            "detach the queries, or compute under torch.no_grad()")
    q, k, v, bias, mask, slopes, sinks, output = ctx.saved_tensors
    scale, soft_cap, mask_fill, left_window, right_window, bottom_right, _ = ctx.words
    scale = q.shape[3] ** -0.5 if scale is None else scale
    grouped = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(grouped, 1) for x in (k, v))
    queries, d_out = q.float(), gradient.float()
    scores = queries @ keys.mT * scale
    capped = torch.tanh(scores / soft_cap) if soft_cap is not None else None
    if capped is not None:
        scores = capped * soft_cap
    # [queries, tokens]: how far a token lies behind a query.
    first = k.shape[2] - q.shape[2] if bottom_right else 0
    distance = (torch.arange(k.shape[2], device=q.device)
                - torch.arange(first, first + q.shape[2], device=q.device)[:, None])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    visible = None
    if left_window >= 0:
        visible = distance >= -left_window
    if right_window >= 0:
        visible = distance <= right_window if visible is None else visible & (distance <= right_window)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, mask_fill)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    # A row that sees nothing has no probabilities.
    column = scores[..., :0] if sinks is None else sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    with_sinks = torch.softmax(torch.cat([scores, column], -1), -1).nan_to_num(0.0)
    probabilities, of_sinks = with_sinks[..., :k.shape[2]], with_sinks[..., k.shape[2]:]
    d_probabilities = d_out @ values.mT
    sums = (d_out * output.float()).sum(-1, keepdim=True)
    d_scores = probabilities * (d_probabilities - sums)
    d_sinks = -(of_sinks * sums).sum((0, 2, 3)).to(sinks.dtype) if ctx.needs_input_grad[10] else None
    if mask is not None:
        d_scores = d_scores.masked_fill(~mask, 0.0)
    d_bias = d_scores.sum_to_size(bias.shape).to(bias.dtype) if ctx.needs_input_grad[7] else None
    d_slopes = (d_scores * distance).sum((0, 2, 3)) if ctx.needs_input_grad[9] else None
    if capped is not None:
        d_scores = d_scores * (1 - capped * capped)
    d_scores = d_scores * scale

    def of_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (like.shape[1], grouped)).sum(2).to(like.dtype)

    return ((d_scores @ keys).to(q.dtype), of_heads(d_scores.mT @ queries, k),
            of_heads(probabilities.mT @ d_out, v), None, None, None, None, d_bias, None,
            d_slopes, d_sinks, *(None,) * 10)


torch.library.register_autograd(
    "kvant::attention", _backward, setup_context=_keep_for_backward, lib=_library)
