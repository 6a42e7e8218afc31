"""A cache with tokens in it."""

import kvant
from reference import numbers


def filled(scheme, tokens, batch=1, heads=2, size=64, layers=1, **options):
    """A cache, and what was appended to layer 0: K and V."""
    options.setdefault("capacity", 96)
    cache = kvant.KvCache(
        scheme, layers=layers, batch=batch, heads=heads, head_size=size, **options
    )
    k, v = (numbers(batch, heads, tokens, size, seed=s) for s in (1, 2))
    cache.append(0, k, v)
    return cache, k, v
