"""Arguments of caches as the extension takes them, or kvant.Error in words."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from . import _core
from .checks import boolean, integer, integers, number, number_lists, string, strings
from .errors import invalid


def options_of(
    scheme: str | Sequence[str],
    *,
    layers: int,
    batch: int,
    heads: int,
    head_size: int,
    capacity: int,
    v_head_size: int = 0,
    rollback: int = 0,
    allow_non_finite: bool = False,
    k_scales: Sequence[Sequence[float]] | None = None,
    v_scales: Sequence[Sequence[float]] | None = None,
    keep: int | Sequence[int | None] | None = None,
    fpmath: str = "strict",
) -> _core.CacheOptions:
    layers = integer("layers", layers)
    # A tensor of no dims is a number.
    if keep is None:
        keep = []
    elif not isinstance(keep, Iterable) or getattr(keep, "ndim", None) == 0:
        keep = [integer("keep", keep)] * layers
    return _core.CacheOptions(
        strings("scheme", scheme),
        layers,
        integer("batch", batch),
        integer("heads", heads),
        integer("head_size", head_size),
        integer("v_head_size", v_head_size),
        integer("capacity", capacity),
        integer("rollback", rollback),
        boolean("allow_non_finite", allow_non_finite),
        [] if k_scales is None else number_lists("k_scales", k_scales),
        [] if v_scales is None else number_lists("v_scales", v_scales),
        integers("keep", [0 if one is None else one for one in keep]),
        string("fpmath", fpmath),
    )


def by_row(name: str, rows: Sequence[int] | None) -> list[int] | None:
    return None if rows is None else integers(name, rows)


def one_layer(layer: int | None) -> int | None:
    return None if layer is None else integer("layer", layer)


def terms_of(
    scale: float | None, soft_cap: float | None, window: int | None
) -> tuple[float, float, int]:
    """As the extension takes them: what is not given is 0."""
    given = {
        "scale": None if scale is None else number("scale", scale),
        "soft_cap": None if soft_cap is None else number("soft_cap", soft_cap),
        "window": None if window is None else integer("window", window),
    }
    for name, value in given.items():
        if value is not None and ctypes.c_float(value).value == 0:
            raise invalid(f"{name} must not be 0" + (f", as {value} is in f32" if value else ""))
    return given["scale"] or 0.0, given["soft_cap"] or 0.0, int(given["window"] or 0)
