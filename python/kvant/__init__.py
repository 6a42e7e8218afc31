"""kvant: compiled-graph attention over compressed KV caches.

    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [1, 8, 64, 128]) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    o = kvant.compile(g.build())(q=q_array, k=k_array, v=v_array)

docs/python.md tells more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .builder import GraphBuilder
from .cache import Attention, CacheBytes, KvCache, Range, Ranges, scheme_bits, schemes
from .compiled import Compiled, compile
from .errors import Error, InvalidError, OutOfMemoryError, UnimplementedError, invalid, shown
from .graph import Graph, Partition, TensorInfo
from .value import Quantized, Value

if TYPE_CHECKING:
    from .onnx import Model as OnnxModel

__version__: str = _core.version()

__all__ = [
    "Attention",
    "CacheBytes",
    "Compiled",
    "Error",
    "Graph",
    "GraphBuilder",
    "InvalidError",
    "KvCache",
    "OutOfMemoryError",
    "Partition",
    "Quantized",
    "Range",
    "Ranges",
    "TensorInfo",
    "UnimplementedError",
    "Value",
    "compile",
    "explain",
    "from_onnx",
    "scheme_bits",
    "schemes",
]


def explain(x: Any) -> str:
    """What kvant makes of it, and why it is not more: a text of a line each.

    Args:
      x: a Graph, a Compiled, an Attention, a KvCache, or what torch.compile(backend="kvant") gave.
    """
    if isinstance(x, (Graph, Compiled, Attention, KvCache)):
        return x.explain()
    if hasattr(x, "_torchdynamo_orig_callable") or hasattr(x, "_orig_mod"):
        from .torch import explain as explain_compiled

        return explain_compiled(x)
    raise invalid(
        "explain takes a Graph, a Compiled, an Attention, a KvCache or what torch.compile gave, "
        f"not {shown(x)}"
    )


def from_onnx(
    model: Any,
    *,
    nodes: str | Sequence[str] | None = None,
    threads: int | None = None,
    backends: str | Sequence[str] | None = None,
    require_fused: bool = False,
) -> OnnxModel:
    """Attention of an ONNX model: Attention (opsets 23 to 25) and GroupQueryAttention (com.microsoft).

    Raises where the model has anything else, with the name of the node.

    Args:
      model: a path, bytes, or an onnx.ModelProto.
      nodes: names of those that are to run; what they read is inputs then, what they write outputs, and
        all other nodes are left out. None: all.
      threads, backends, require_fused: as those of ``compile``.
    """
    from .onnx import load

    return load(model, nodes, threads, backends, require_fused)


os.register_at_fork(after_in_child=_core.after_fork)
