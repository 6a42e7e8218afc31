"""torch.nn.TransformerEncoderLayer in evaluation, which is one op of PyTorch's, as the ops that it is of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def layer(src: Any, channels: int, heads: int, in_weight: Any, in_bias: Any, out_weight: Any, out_bias: Any, gelu: bool,
          norm_first: bool, eps: float, *parameters: Any) -> Any:
    """torch._transformer_encoder_layer_fwd; src: [batch, tokens, channels].

    parameters: weight and bias of both norms and of both linear layers, mask, and its kind: 0 of [queries, tokens],
    1 of [batch, tokens], 2 of [batch, heads, queries, tokens]. It hides where it is not 0, whatever its type.
    """
    first, second, up, down = zip(parameters[0:8:2], parameters[1:8:2])
    mask, kind = (*parameters[8:], None, None)[:2]
    hidden = None if mask is None else (mask[:, None, None, :] if kind == 1 else mask).to(torch.bool)

    def attended(x: Any) -> Any:
        q, k, v = F.linear(x, in_weight, in_bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (channels // heads) ** -0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return F.linear((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2), out_weight, out_bias)

    def fed(x: Any) -> Any:
        return F.linear((F.gelu if gelu else F.relu)(F.linear(x, *up)), *down)

    def norm(x: Any, of: Any) -> Any:
        return F.layer_norm(x, (channels,), *of, eps)

    if norm_first:
        src = src + attended(norm(src, first))
        return src + fed(norm(src, second))
    src = norm(src + attended(src), first)
    return norm(src + fed(src), second)
