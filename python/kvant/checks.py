"""Arguments as the extension takes them, or kvant.Error in words."""

from __future__ import annotations

import numbers as abstract
import operator
from collections.abc import Sequence
from typing import Any

from .errors import Error, invalid, shown

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_MOST_THREADS = 2**31 - 1


def _wrong(what: str, wanted: str, value: Any) -> Error:
    return invalid(f"{what} must be {wanted}, not {shown(value)}")


def integer(what: str, value: Any) -> int:
    """An integer of 64 bits; True and False are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise _wrong(what, "an integer", value) from None
    if not _LOWEST <= result <= _HIGHEST:
        raise _wrong(what, "an integer of 64 bits", value)
    return result


def number(what: str, value: Any) -> float:
    """A real number; True and False are none."""
    if not isinstance(value, abstract.Real) or isinstance(value, bool):
        raise _wrong(what, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(what, "a number that a float holds", value) from None


def threads(value: Any) -> int | None:
    """A number of threads; None: as many as there are."""
    if value is None:
        return None
    count = integer("threads", value)
    if count < 1:
        raise invalid(f"threads must be at least 1, not {count}")
    if count > _MOST_THREADS:
        raise invalid(f"threads must be at most {_MOST_THREADS}, not {count}")
    return count


def boolean(what: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _wrong(what, "True or False", value)
    return value


def string(what: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise _wrong(what, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(what, "text that UTF-8 holds", value) from None
    if "\0" in value:
        raise invalid(f"{what} must be text without a NUL")
    return value


def items(what: str, wanted: str, value: Any) -> list[Any]:
    """What a list, or anything like it, has; a text is none."""
    try:
        if isinstance(value, str):
            raise TypeError
        return list(value)
    except TypeError:  # of a tensor without dims too, which is an Iterable
        raise _wrong(what, wanted, value) from None


def integers(what: str, value: Any) -> list[int]:
    """A list of integers."""
    return [integer(what, each) for each in items(what, "a list of integers", value)]


def numbers(what: str, value: Any) -> list[float]:
    """A list of real numbers."""
    return [number(what, each) for each in items(what, "a list of numbers", value)]


def number_lists(what: str, value: Any) -> list[list[float]]:
    """A list of lists of real numbers."""
    return [numbers(what, each) for each in items(what, "a list of lists of numbers", value)]


def dims(what: str, value: Any) -> list[int | None]:
    """Dims, or strides; None for one that is not known."""
    wanted = "a list of integers and None"
    return [None if d is None else integer(what, d) for d in items(what, wanted, value)]


def strings(what: str, value: str | Sequence[str]) -> list[str]:
    """One text, or a list of them."""
    if isinstance(value, str):
        return [string(what, value)]
    return [string(what, each) for each in items(what, "a string or a list of strings", value)]
