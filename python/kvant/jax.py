"""kvant's compiled graphs in JAX, as custom calls of XLA.

    attention = kvant.jax.compile(graph)
    o = jax.jit(lambda q, k, v: attention(q=q, k=k, v=v))(q, k, v)

docs/jax.md tells more.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _core
from .checks import boolean, strings
from .checks import threads as checked_threads
from .compiled import Compiled
from .compiled import compile as compile_graph
from .dtypes import NAMES, framework_name
from .errors import Error, invalid, make_error, shown
from .graph import Graph, TensorInfo, find_port, names_of
from .kept import Kept

__all__ = ["Function", "compile"]

# kvant's types as JAX has them, those of less than a byte too.
_TYPES = {name: jnp.dtype({"s4": "int4", "u4": "uint4", "s2": "int2", "u2": "uint2"}.get(name)
                          or framework_name(name, numpy=False)) for name in NAMES}


class _Call(NamedTuple):
    """What a custom call is told."""

    name: str  # for errors
    graph: str
    key: str
    inputs: int
    threads: int
    backends: str
    outputs: tuple[tuple[tuple[int, ...], Any], ...]  # dims and type of each
    # Of outputs whose memory comes with values: which argument has it.
    aliases: tuple[tuple[int, int], ...]
    host_scalar: str  # an input that the host reads; ""


class Function:
    """A graph as a function of JAX arrays. ``compile`` makes one.

    It may be called under ``jax.jit`` and outside of it. Tracing it compiles the graph for the shapes at hand,
    and raises kvant.Error where they do not fit. What is wrong with values (a length beyond the capacity) is an
    error of the execution, with kvant's sentence in it.
    """

    def __init__(
        self, graph: Graph, threads: int | None, backends: str | Sequence[str] | None, require_fused: bool,
        name: str,
    ) -> None:
        self.graph = graph
        """The graph."""
        self._options = {"threads": threads, "backends": backends, "require_fused": require_fused}
        self._name = name
        self._compiled: Kept[tuple[Compiled, _Call]] = Kept(256)
        parsed = json.loads(graph.to_json())
        self._partial = _partial_outputs(parsed)
        # Of one call after another; a trace of JAX's own takes the calls in it as its own.
        self._jitted = jax.jit(_primitive.bind, static_argnames=("call",))

    def __call__(self, inputs: Mapping[str | int, Any] | None = None, /, **named: Any) -> Any:
        """Executes with inputs by name, or id.

        An output that the graph writes only a part of (of Append, AppendPages and ragged queries) is given
        by its name as well: the result is it with that part written, in its place if it is donated. Without it,
        the rest is zeros.

        Returns:
          Outputs by name; of a graph with one output that output.
        """
        if inputs is not None and not isinstance(inputs, Mapping):
            raise invalid(f"inputs must be a dict of arrays by name, not {type(inputs).__name__}")
        given: dict[str | int, Any] = {**(inputs or {}), **named}
        ports = self.graph.inputs
        partial = [port for port in self.graph.outputs if port.id in self._partial]
        arrays: dict[int, Any] = {}
        for key, value in given.items():
            port = _find(ports, partial, key)
            if port.id in arrays:
                raise invalid(f"input {key!r} is given twice")
            arrays[port.id] = jnp.asarray(value) if not hasattr(value, "dtype") else value
        missing = [port for port in ports if port.id not in arrays]
        if missing:
            raise invalid(f"input {names_of(missing)} is missing; inputs are {names_of(ports)}")
        compiled, call = self._compile(arrays)
        operands = [_operand(port, arrays[port.id], "input") for port in compiled.inputs]
        for output, _ in call.aliases:
            port = compiled.outputs[output]
            dims, dtype = call.outputs[output]
            array = arrays.get(port.id)
            operands.append(jnp.zeros(dims, dtype) if array is None else _operand(port, array, "output"))
        results = self._jitted(*operands, call=call)
        if len(results) == 1:
            return results[0]
        return {port.name or port.id: result for port, result in zip(compiled.outputs, results)}

    def explain(self) -> str:
        """What runs on the CPU, of a graph whose shapes are all known, and why."""
        return self._compile({})[0].explain()

    def _compile(self, arrays: dict[int, Any]) -> tuple[Compiled, _Call]:
        """For the shapes of arrays where the graph leaves them open."""
        shapes = {}
        for what, ports in (("input", self.graph.inputs), ("output", self.graph.outputs)):
            for port in ports:
                if port.id in arrays and (port.dims is None or None in port.dims):
                    shapes[port.id] = _open_dims(port, arrays[port.id], what)
        return self._compiled.get(tuple(shapes.items()), lambda: self._compile_for(shapes))

    def _compile_for(self, shapes: dict[int, tuple[int, ...]]) -> tuple[Compiled, _Call]:
        compiled = compile_graph(self.graph, shapes=shapes, **self._options)
        for port in compiled.inputs + compiled.outputs:
            if port.strides is not None and not _dense(port):
                raise invalid(f"{self._name}: {port.name or port.id} has strides {list(port.strides)}, but JAX's "
                              "arrays are dense")
        text = compiled.graph.to_json()
        threads, backends = self._options["threads"], self._options["backends"]
        words = "" if backends is None else ",".join(strings("backends", backends))
        aliases = [at for at, port in enumerate(compiled.outputs) if port.id in self._partial]
        scalars = [port.name for port in compiled.inputs if port.property == "host_scalar"]
        key = hashlib.sha256(f"{_core.version()} {threads} {words} {text}".encode()).hexdigest()
        outputs = tuple((tuple(port.dims), _TYPES[port.type]) for port in compiled.outputs)
        return compiled, _Call(
            self._name, text, key, len(compiled.inputs), threads or 0, words, outputs,
            tuple((output, len(compiled.inputs) + i) for i, output in enumerate(aliases)), "".join(scalars[:1]))

    def __repr__(self) -> str:
        return f"<kvant.jax.Function {self._name}: {self.graph!r}>"


def compile(
    graph: Graph,
    *,
    threads: int | None = None,
    backends: str | Sequence[str] | None = None,
    require_fused: bool = False,
    name: str = "kvant graph",
) -> Function:
    """A function of JAX arrays that executes a graph, under ``jax.jit`` or outside of it.

    Args:
      threads: of the CPU; None: all.
      backends: names to ask, in order; None: the device's.
      require_fused: raise where something would run op by op, with the reasons.
      name: what errors call it.
    """
    if not isinstance(graph, Graph):
        raise invalid(f"compile takes a kvant.Graph, not {shown(graph)}")
    return Function(graph, checked_threads(threads), backends, boolean("require_fused", require_fused), str(name))


def _partial_outputs(graph: dict[str, Any]) -> set[int]:
    """Ids of outputs of which a graph (in JSON) may leave elements as they are."""
    ops = graph["graph"]
    partial = {tensor["id"] for op in ops if op["kind"] in ("Append", "AppendPages") for tensor in op["outputs"]}
    ragged = any("query_offsets" in op["attrs"].get("optional_inputs", {}).get("value", "") for op in ops)
    return partial | set(graph["output_ports"]) if ragged else partial & set(graph["output_ports"])


def _find(inputs: list[TensorInfo], partial: list[TensorInfo], key: str | int) -> TensorInfo:
    names = {port.name: port for port in partial} | {port.id: port for port in partial}
    if key in names and key not in {name for port in inputs for name in (port.name, port.id)}:
        return names[key]
    return inputs[find_port(inputs, key, "input")]


def _dims_of(port: TensorInfo, array: Any) -> list[int]:
    """An array's, or if bytes hold its elements, of these."""
    dims = list(array.shape)
    bits = _core.type_bits(port.type)
    if dims and bits < 8 and jnp.dtype(array.dtype) == jnp.uint8:
        dims[-1] *= 8 // bits
    return dims


def _open_dims(port: TensorInfo, array: Any, what: str) -> tuple[int, ...]:
    """An array's dims for a port that leaves some open; those that it has are the array's as well."""
    dims = _dims_of(port, array)
    if port.dims is not None:
        if len(dims) != len(port.dims) or any(d not in (None, given) for d, given in zip(port.dims, dims)):
            raise _misfit(port, array, what)
    return tuple(dims)


def _operand(port: TensorInfo, array: Any, what: str) -> Any:
    """An array that fits the port; of bytes, where they hold its elements."""
    wanted, dims = _TYPES[port.type], list(port.dims)
    dtype = jnp.dtype(array.dtype)
    if dtype == wanted and list(array.shape) == dims:
        return array
    is_bytes = dtype == jnp.uint8 and (_core.type_bits(port.type) < 8 or port.type.startswith("f8"))
    if is_bytes and what == "input" and _dims_of(port, array) == dims:
        return array
    raise _misfit(port, array, what)


def _misfit(port: TensorInfo, array: Any, what: str) -> Error:
    hint = "; jax_enable_x64 is off" if port.type == "s64" and not jax.config.jax_enable_x64 else ""
    dims = ", ".join("?" if d is None else str(d) for d in port.dims or ())
    return invalid(f"{what} {port.name or port.id!r} is {jnp.dtype(array.dtype)}{list(array.shape)}, but must be "
                   f"{_TYPES[port.type]}[{dims}]{hint}")


def _dense(port: TensorInfo) -> bool:
    step = 1
    for dim, stride in zip(reversed(port.dims), reversed(port.strides)):
        if dim != 1 and stride != step:
            return False
        step *= dim
    return True


_primitive = Primitive("kvant")
_primitive.multiple_results = True


@_primitive.def_abstract_eval
def _abstract(*operands: Any, call: _Call) -> list[Any]:
    return [jax.core.ShapedArray(dims, dtype) for dims, dtype in call.outputs]


def _lower(ctx: Any, *operands: Any, call: _Call, platform: str) -> Any:
    _register(platform)
    if call.host_scalar and platform != "cpu":
        raise make_error("unimplemented", f"{call.name}: {call.host_scalar!r} is a scalar that the host reads, but "
                         "JAX has it on the GPU; make it a constant of the graph, or an input")
    aliases = {operand: output for output, operand in call.aliases}
    rule = jax.ffi.ffi_lowering("kvant", operand_output_aliases=aliases)
    return rule(ctx, *operands, graph=call.graph, key=call.key, backends=call.backends,
                inputs=np.int64(call.inputs), threads=np.int64(call.threads))


@functools.cache
def _register(platform: str) -> None:
    xla_platform = "cpu" if platform == "cpu" else "CUDA"
    jax.ffi.register_ffi_target("kvant", _core.xla_handler(xla_platform), platform=xla_platform)


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_primitive, functools.partial(_lower, platform=_platform), platform=_platform)


def _no_gradient(primals: Any, tangents: Any, *, call: _Call) -> Any:
    raise make_error("unimplemented", f"{call.name}: there is no gradient through it; jax.lax.stop_gradient around "
                     "what it takes says that none is wanted")


def _no_batch(operands: Any, dims: Any, *, call: _Call) -> Any:
    raise make_error("unimplemented", f"{call.name}: jax.vmap has no rule for it; its batch is a dim of the graph's "
                     "tensors, and jax.lax.map calls it for one after another")


ad.primitive_jvps[_primitive] = _no_gradient
batching.primitive_batchers[_primitive] = _no_batch
