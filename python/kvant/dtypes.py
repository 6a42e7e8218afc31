"""Element types by name, and what frameworks call them."""

from __future__ import annotations

from typing import Any

from .errors import make_error, shown

# kvant's name -> torch's; numpy's is the same where it has the type.
_FRAMEWORK_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "s64": "int64",
    "s32": "int32",
    "s8": "int8",
    "u8": "uint8",
    "boolean": "bool",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3": "float8_e4m3fn",
}
_SUB_BYTE = {"s4": "int4", "u4": "uint4", "s2": "int2", "u2": "uint2"}
REAL = ("f32", "f16", "bf16")
NAMES = (*_FRAMEWORK_NAMES, *_SUB_BYTE)
_BY_FRAMEWORK_NAME = {b: a for a, b in (_FRAMEWORK_NAMES | _SUB_BYTE).items()}


def type_name(type: Any) -> str:
    """kvant's name of a type: of "f16", "float16", torch.float16 or numpy.float16, "f16"."""
    name = type if isinstance(type, str) else getattr(type, "__name__", None) or str(type)
    name = name.removeprefix("torch.").removesuffix("_")
    name = _BY_FRAMEWORK_NAME.get(name, name)
    if name not in NAMES:
        raise make_error("invalid_data_type", f"{shown(type)} is no type; types are {', '.join(NAMES)}")
    return name


def framework_name(type: str, numpy: bool) -> str | None:
    """The dtype that holds elements of this type; bytes where the framework lacks it.

    None if it cannot hold them: numpy and bf16.
    """
    if type in _SUB_BYTE or (numpy and type.startswith("f8")):
        return "uint8"
    return None if numpy and type == "bf16" else _FRAMEWORK_NAMES[type]
