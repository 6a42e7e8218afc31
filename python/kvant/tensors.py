"""Outputs that the caller did not give."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from . import _core
from .errors import invalid
from .dtypes import framework_name


def torch_like(tensors: Iterable[Any]) -> Any | None:
    """The first torch tensor that is on a device, or the first at all; None if there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return next((tensor for tensor in found if not tensor.is_cpu), found[0] if found else None)


def allocate(
    name: str, type: str, dims: Sequence[int], strides: Sequence[int] | None, like: Any | None
) -> Any:
    """Zeros of that type and shape: of torch, where ``like`` is its tensor, or of numpy.

    Elements of less than a byte are packed in uint8, along the last dim.
    """
    dims = list(dims)
    strides = dense_strides(dims) if strides is None else list(strides)
    bits = _core.type_bits(type)
    if bits < 8:
        dims, strides = _packed(name, type, dims, strides, 8 // bits)
    dtype = framework_name(type, numpy=like is None)
    if dtype is None:
        raise invalid(f"{name} is {type}, which numpy lacks: give it in out=")
    elements = 0 if 0 in dims else 1 + sum((d - 1) * s for d, s in zip(dims, strides))
    if like is not None:
        torch = sys.modules["torch"]
        memory = torch.zeros(elements, dtype=getattr(torch, dtype), device=like.device)
        return memory.as_strided(dims, strides)
    import numpy

    memory = numpy.zeros(elements, dtype)
    steps = [stride * memory.itemsize for stride in strides]
    return numpy.ndarray(tuple(dims), memory.dtype, memory, strides=steps)


def dense_strides(dims: Sequence[int]) -> list[int]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for dim in reversed(dims):
        strides.append(step)
        step *= dim
    return strides[::-1]


def _packed(
    name: str, type: str, dims: list[int], strides: list[int], in_byte: int
) -> tuple[list[int], list[int]]:
    if not dims:
        raise invalid(f"{name} is {type} without dims, but arrays of bytes are packed along one: reshape it to [1]")
    why = ""
    if dims[-1] > 1 and strides[-1] != 1:
        why = "elements of a row are not side by side"
    elif any(s % in_byte for d, s in zip(dims[:-1], strides[:-1]) if d > 1):
        why = "rows do not begin at bytes"
    if why:
        whole = dense_strides([*dims[:-1], -(-dims[-1] // in_byte) * in_byte])
        raise invalid(f"{name} is {type}{dims} of strides {strides}, whose {why}, so that no array of bytes holds it: "
                      f"name it as an output with strides={whole}")
    return (
        [*dims[:-1], -(-dims[-1] // in_byte)],
        [*(s // in_byte for s in strides[:-1]), 1],
    )
