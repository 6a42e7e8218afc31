"""Graphs, their tensors and their partitions."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from typing import NamedTuple

from . import _core
from .checks import string
from .errors import invalid


class TensorInfo(NamedTuple):
    """What is known of a tensor of a graph.

    ``dims`` and ``strides`` (in elements) hold None where an extent is not known, and are None
    where nothing is; strides of None are dense. ``property`` is "variable", "constant" or
    "host_scalar". ``bytes`` is the memory that it takes, 0 where dims are not known.
    """

    name: str
    id: int
    type: str
    property: str
    dims: tuple[int | None, ...] | None
    strides: tuple[int | None, ...] | None
    bytes: int

    def __str__(self) -> str:
        known = ["?"] if self.dims is None else ["?" if d is None else str(d) for d in self.dims]
        return f"{self.name or self.id} {self.type}[{','.join(known)}]"


class Partition:
    """Ops of a graph that run as one kernel, or, of kind "ops", one by one.

    ``kind`` is "attention", "attention_backward", "store" (what is written into a cache), "merge"
    (attention over parts of the tokens into one) or "ops".
    ``pattern`` says what was recognised, ``notes`` why it is not more than it is, and ``ops`` are
    the ids of its ops.
    """

    def __init__(self, partitions: _core.Partitions, at: int) -> None:
        self.kind, self.pattern, notes, ops = partitions.at(at)
        self.notes: tuple[str, ...] = tuple(notes.splitlines())
        self.ops: tuple[int, ...] = tuple(ops)
        self._partitions, self._at = partitions, at

    def graph(self) -> Graph:
        """Its ops, as a graph of their own."""
        return Graph(self._partitions.graph(self._at))

    def __repr__(self) -> str:
        return f"<kvant.Partition {self.kind}: {self.pattern}, ops {list(self.ops)}>"


class Graph:
    """A finished graph. ``GraphBuilder.build``, ``from_json`` and ``from_json_file`` make one."""

    def __init__(self, core: _core.Graph) -> None:
        self._core = core

    @staticmethod
    def from_json(text: str) -> Graph:
        """Reads the format of oneDNN's graph dumps (docs/ops.md)."""
        return Graph(_core.Graph.from_json(string("from_json: text", text)))

    @staticmethod
    def from_json_file(path: str | os.PathLike[str]) -> Graph:
        """Reads a file of that format."""
        with open(path, encoding="utf-8") as file:
            return Graph.from_json(file.read())

    def to_json(self) -> str:
        """The graph as text that ``from_json`` reads."""
        return self._core.to_json()

    def to_dot(self) -> str:
        """The graph in Graphviz's language, with a box around each partition."""
        return self._core.to_dot()

    @functools.cached_property
    def inputs(self) -> list[TensorInfo]:
        """Inputs, in the order of an execution's."""
        return [TensorInfo(*each) for each in self._core.inputs()]

    @functools.cached_property
    def outputs(self) -> list[TensorInfo]:
        """Outputs, in the order of an execution's."""
        return [TensorInfo(*each) for each in self._core.outputs()]

    def partitions(self) -> list[Partition]:
        """What was recognised in the graph; every op is in one of them."""
        partitions = self._core.partitions()
        return [Partition(partitions, at) for at in range(len(partitions))]

    def explain(self) -> str:
        """Its partitions: a line each, and below it why it is not more than it is."""
        lines = []
        for at, partition in enumerate(self.partitions()):
            lines.append(f"{at}: {partition.pattern or partition.kind} (ops {list(partition.ops)})")
            lines += [f"   {note}" for note in partition.notes]
        return "\n".join(lines)

    def _repr_svg_(self) -> str | None:
        dot = shutil.which("dot")
        if dot is None:
            return None
        drawn = subprocess.run([dot, "-Tsvg"], input=self.to_dot(), capture_output=True, text=True)
        return drawn.stdout if drawn.returncode == 0 else None

    def __repr__(self) -> str:
        ports = (", ".join(map(str, each)) for each in (self.inputs, self.outputs))
        return f"<kvant.Graph {' -> '.join(ports)}>"


def find_port(ports: list[TensorInfo], key: str | int, what: str) -> int:
    """The position of a port that goes by this name, or id."""
    keys = [port.id if isinstance(key, int) else port.name for port in ports]
    found = [at for at, each in enumerate(keys) if each == key]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(str(ports[at].id) for at in found)
        raise invalid(f"{len(found)} {what}s are named {key!r}: use their ids, {ids}")
    raise invalid(f"no {what} is named {key!r}; {what}s are {names_of(ports)}")


def names_of(ports: list[TensorInfo]) -> str:
    """Names for an error; ids of those that have none."""
    return ", ".join(repr(port.name or port.id) for port in ports) or "none"
