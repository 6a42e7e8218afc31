"""kvant in PyTorch.

    import kvant.torch
    model = torch.compile(model, backend="kvant")
    print(kvant.torch.explain(model))  # after its first call

``attention`` is the op that it is made of, for whoever calls it directly; ``merge_attention`` makes
attention over all tokens of that over parts of them, and ``context_parallel`` attends to tokens that are
spread over ranks of torch.distributed.
"""

from .backend import Report, explain, kvant, reports_of
from .merge import merge_attention
from .ops import attention

__all__ = ["Report", "attention", "explain", "kvant", "merge_attention", "reports_of"]
