"""What kvant raises."""

from __future__ import annotations

from typing import Any


class Error(RuntimeError):
    """What went wrong, as a sentence that names tensors and numbers.

    ``kind`` is one of "invalid_graph", "invalid_graph_op", "invalid_shape", "invalid_data_type",
    "invalid_arguments", "unimplemented", "invalid_json", "out_of_memory" and "internal".
    """

    def __init__(self, sentence: str, kind: str = "internal") -> None:
        super().__init__(sentence)
        self.kind = kind


class InvalidError(Error, ValueError):
    """A graph, a tensor or an argument is wrong."""


class UnimplementedError(Error, NotImplementedError):
    """Nothing here can run it."""


class OutOfMemoryError(Error, MemoryError):
    """The memory cannot be had."""


_CLASSES: dict[str, type[Error]] = {
    "unimplemented": UnimplementedError,
    "out_of_memory": OutOfMemoryError,
    "internal": Error,
}


def make_error(kind: str, sentence: str) -> Error:
    """The error of that kind; the extension raises it."""
    return _CLASSES.get(kind, InvalidError)(sentence, kind)


def shown(value: Any) -> str:
    """A value in a sentence; what it is where that would be no short line."""
    try:
        text = repr(value)
    except Exception:  # of an integer of too many digits, or whatever an object's own does
        text = ""
    if text and len(text) <= 200 and text.isprintable():
        return text
    return f"a {type(value).__name__}"


def invalid(sentence: str) -> Error:
    """A wrong argument."""
    return make_error("invalid_arguments", sentence)
