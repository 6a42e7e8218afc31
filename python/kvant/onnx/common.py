"""What the ops of ONNX share: arrays as tensors of graphs, and graphs that are compiled for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..builder import GraphBuilder
from ..compiled import Compiled, compile
from ..kept import Kept
from ..value import Value
from .reading import TYPES, Node, type_of

REAL = ("FLOAT", "FLOAT16", "BFLOAT16")


@dataclasses.dataclass(frozen=True)
class Options:
    """Of kvant.compile."""

    threads: int | None
    backends: str | Sequence[str] | None
    require_fused: bool


class Op:
    """A node that can run. ``run`` takes an array for each of its inputs, None for what is not given, and memory
    for each of its outputs, or None; it gives its outputs."""

    def __init__(self, node: Node, options: Options) -> None:
        self.node, self.options = node, options
        self.compiled: dict[str, Compiled] = {}  # by what it is for, that which ran last
        self._kept: Kept[Compiled] = Kept(64)

    def run(self, inputs: list[np.ndarray | None], out: list[np.ndarray | None]) -> list[np.ndarray | None]:
        raise NotImplementedError

    def execute(
        self, what: str, inputs: Mapping[str, np.ndarray | None], outputs: Mapping[str, np.ndarray],
        make: Callable[[GraphBuilder, dict[str, Value]], Mapping[str, Value]], key: tuple[Any, ...],
        backends: str | Sequence[str] | None = None,
    ) -> None:
        """Runs the graph that ``make`` makes of the inputs that are not None.

        ``key``: what the graph depends on beside types, dims and strides. ``backends``: where the user says nothing.
        """
        given = {name: tidy(array) for name, array in inputs.items() if array is not None}
        tensors = {**given, **outputs}
        shapes = tuple((name, type_of(x), x.shape, x.strides) for name, x in tensors.items())

        def build() -> Compiled:
            g = GraphBuilder()
            values = {name: g.input(name, TYPES[type_of(x)], x.shape, _strides(x, 1)) for name, x in given.items()}
            for name, value in make(g, values).items():
                g.output(name, value, _strides(outputs[name], 2 if value.type == "u4" else 1))
            chosen = self.options.backends if self.options.backends is not None else backends
            return compile(g.build(), threads=self.options.threads, backends=chosen,
                           require_fused=self.options.require_fused)

        compiled = self._kept.get((what, key, shapes), build)
        compiled.execute([tensors[port.name] for port in compiled.inputs],
                         [tensors[port.name] for port in compiled.outputs])
        self.compiled[what] = compiled

    def memory(self, name: str, out: np.ndarray | None, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """That of an output."""
        if out is None:
            return np.empty(shape, dtype)
        if out.shape != tuple(shape) or out.dtype != dtype:
            raise self.node.invalid(f"out[{name!r}] is {type_of(out)}{list(out.shape)}, but must be "
                                    f"{type_of(np.empty(0, dtype))}{list(shape)}")
        if not out.flags.writeable:
            raise self.node.invalid(f"out[{name!r}] is read-only")
        return out


def tidy(array: np.ndarray) -> np.ndarray:
    """With strides that graphs have: of whole elements, and more than 0 where there is more than one."""
    plain = all(step % array.itemsize == 0 and (step > 0 or size < 2) for size, step in zip(array.shape, array.strides))
    return array if plain else np.ascontiguousarray(array)


def same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both are the same elements in the same places."""
    return (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype) and (
        a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def _strides(array: np.ndarray, packed: int) -> list[int]:
    """In elements, of which ``packed`` are in one of the array's along the last axis."""
    steps = [step // array.itemsize if size > 1 else 1 for size, step in zip(array.shape, array.strides)]
    return [packed * step for step in steps[:-1]] + steps[-1:]
