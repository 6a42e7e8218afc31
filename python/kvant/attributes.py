"""Attributes of ops, and their types.

An attribute's name gives its type, so that ``scale=1`` is a float. The table is that of
graph/attributes.inc; a test compares them.
"""

from __future__ import annotations

from typing import Any

from .checks import boolean, integer, integers, number, numbers, string

TYPES = {
    "transpose_a": "bool",
    "transpose_b": "bool",
    "accumulation_mode": "string",
    "axis": "s64",
    "mode": "string",
    "auto_broadcast": "string",
    "axes": "s64s",
    "keep_dims": "bool",
    "shape": "s64s",
    "special_zero": "bool",
    "order": "s64s",
    "qtype": "string",
    "scales": "f32s",
    "zps": "s64s",
    "group_shape": "s64s",
    "power_of_two_scales": "bool",
    "scale_floor": "f32",
    "formula": "string",
    "codebook": "f32s",
    "token_axis": "s64",
    "token_group": "s64",
    "begin": "s64",
    "size": "s64",
    "block": "s64",
    "optional_inputs": "string",
    "scale": "f32",
    "soft_cap": "f32",
    "select_fill": "f32",
    "mask_alignment": "string",
    "left_window": "s64",
    "right_window": "s64",
}

_CHECKS = {
    "bool": boolean,
    "string": string,
    "s64": integer,
    "s64s": integers,
    "f32": number,
    "f32s": numbers,
}


def typed(kind: str, attributes: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(name, type, value) of each attribute of an op of this kind; those of None are left out."""
    result = []
    for name, value in attributes.items():
        type = TYPES.get(name)
        if type is None:  # of no op: adding it fails, and says which the op has
            result.append((name, "bool", False))
        elif value is not None:
            result.append((name, type, _CHECKS[type](f"{kind}: attribute '{name}'", value)))
    return result
