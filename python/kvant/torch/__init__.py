"""kvant in PyTorch.

    import kvant.torch
    model = torch.compile(model, backend="kvant")
    print(kvant.torch.explain(model))  # after its first call

``attention`` is the op that it is made of, for whoever calls it directly.
"""

from .backend import Report, explain, kvant, reports_of
from .ops import attention

__all__ = ["Report", "attention", "explain", "kvant", "reports_of"]
