"""kvant::merge_attention for PyTorch: attention over all tokens from that over parts of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import is_tensor_like

from ..builder import GraphBuilder
from ..compiled import Compiled, compile
from ..errors import invalid
from ..kept import Kept
from .ops import TYPES, check_devices

_library = torch.library.Library("kvant", "FRAGMENT")
_library.define(
    "merge_attention(Tensor[] outputs, Tensor[] stats, ScalarType? dtype=None) -> (Tensor, Tensor)")
_compiled: Kept[Compiled] = Kept(64)


def merge_attention(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all tokens from that over parts of them, and its statistics.

    Args:
      parts: of each part its output [.., channels], f32, f16 or bf16, and statistics [.., 1], f32: max
        + ln(sum exp(score - max)) of the scores of a query with the part's tokens, -inf where it sees
        none. Any number of parts of one shape and type, each with any strides.
      dtype: of the output; None: the parts'.

    Returns:
      Output and statistics, by which it may be merged with others.
    """
    pairs = list(parts)
    if not pairs:
        raise invalid("merge_attention needs a part")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(is_tensor_like, pair)):
            raise invalid(f"merge_attention: part {i} is no pair of tensors, (output, statistics)")
    outputs, stats = ([pair[i] for pair in pairs] for i in range(2))
    return torch.ops.kvant.merge_attention(outputs, stats, dtype)


@torch.library.impl(_library, "merge_attention", "CPU")
@torch.library.impl(_library, "merge_attention", "CUDA")
def _run(
    outputs: list[torch.Tensor], stats: list[torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, out_stats = _empty(outputs, stats, dtype)
    tensors = [tensor for part in zip(outputs, stats) for tensor in part]
    key = (*((x.dtype, x.shape, x.stride()) for x in tensors), out.dtype, out.device,
           torch.get_num_threads())
    compiled = _compiled.get(key, lambda: _compile(outputs, stats, out))
    # Gradients are above this: what is read here is not recorded.
    compiled.execute([tensor.detach() for tensor in tensors], [out, out_stats])
    return out, out_stats


@torch.library.register_fake("kvant::merge_attention", lib=_library)
def _empty(
    outputs: list[torch.Tensor], stats: list[torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(outputs) != len(stats):
        raise invalid(f"kvant::merge_attention: {len(outputs)} outputs, but {len(stats)} statistics")
    first = outputs[0]
    shape = list(first.shape)
    if not shape:
        raise invalid("kvant::merge_attention: output 0 has no dim of channels")
    for i, (output, stat) in enumerate(zip(outputs, stats)):
        check_devices("merge_attention", first.device, ((f"output {i}", output), (f"statistics {i}", stat)))
        for name, x, wanted in (("output", output, shape), ("statistics", stat, [*shape[:-1], 1])):
            if list(x.shape) != wanted:
                raise invalid(f"kvant::merge_attention: {name} {i} are {list(x.shape)}, but must be {wanted} as "
                              f"those of output 0 {shape}")
    return (first.new_empty(shape, dtype=dtype or first.dtype),
            first.new_empty([*shape[:-1], 1], dtype=torch.float32))


def _compile(
    outputs: list[torch.Tensor], stats: list[torch.Tensor], out: torch.Tensor
) -> Compiled:
    g = GraphBuilder()

    def tensor(name: str, x: torch.Tensor) -> Any:
        if x.dtype not in TYPES:
            raise invalid(f"kvant::merge_attention: {name} is {x.dtype}, which kvant lacks")
        return g.input(name, TYPES[x.dtype], list(x.shape), list(x.stride()))

    parts = [(tensor(f"output {i}", output), tensor(f"statistics {i}", stat))
             for i, (output, stat) in enumerate(zip(outputs, stats))]
    if out.dtype not in TYPES:
        raise invalid(f"kvant::merge_attention: the result is {out.dtype}, which kvant lacks")
    merged, merged_stats = g.merge_attention(parts, type=TYPES[out.dtype], stats=True)
    g.output("output", merged)
    g.output("statistics", merged_stats)
    return compile(g.build(), device=str(out.device), require_fused=True)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    outputs, stats, _ = inputs
    ctx.parts = len(outputs)
    ctx.save_for_backward(*outputs, *stats, *output)


def _backward(ctx: Any, d_out: torch.Tensor, d_stats: torch.Tensor) -> tuple[Any, ...]:
    """With p = exp(stats of a part - stats): dO of a part is p dO, dstats p (dO . (O of it - O) + dstats)."""
    outputs, stats = ctx.saved_tensors[:ctx.parts], ctx.saved_tensors[ctx.parts:-2]
    out, out_stats = ctx.saved_tensors[-2:]
    d_outputs, d_of_stats = [], []
    for output, stat in zip(outputs, stats):
        # A part without tokens does not count, whatever it holds.
        empty = stat == float("-inf")
        share = torch.exp(stat - out_stats).masked_fill(empty, 0.0)
        away = (output.float() - out.float()).masked_fill(empty, 0.0)
        d_outputs.append((share * d_out.float()).to(output.dtype))
        d_of_stats.append(share * ((d_out.float() * away).sum(-1, keepdim=True) + d_stats))
    return d_outputs, d_of_stats, None


torch.library.register_autograd(
    "kvant::merge_attention", _backward, setup_context=_keep_for_backward, lib=_library)
