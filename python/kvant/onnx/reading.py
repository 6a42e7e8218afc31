"""What of an ONNX model attention needs: its nodes, what they read, and what the file holds of that."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import google.protobuf.message
import numpy as np
import onnx
import onnx.checker
import onnx.numpy_helper

from ..errors import Error, invalid, make_error

# What ONNX calls types, and kvant's names. Others it has none for.
TYPES = {"FLOAT": "f32", "FLOAT16": "f16", "BFLOAT16": "bf16", "INT8": "s8", "UINT8": "u8", "INT32": "s32",
         "INT64": "s64", "BOOL": "boolean", "FLOAT8E4M3FN": "f8_e4m3", "FLOAT8E5M2": "f8_e5m2"}
_ATTRIBUTES = {int: onnx.AttributeProto.INT, float: onnx.AttributeProto.FLOAT, str: onnx.AttributeProto.STRING}


class Port(NamedTuple):
    """An input or output of a model. ``type`` is ONNX's ("FLOAT"), None if the model does not say.

    ``dims`` holds numbers, and a name or None where the model leaves one open; it is None where nothing is said.
    """

    name: str
    type: str | None
    dims: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        dims = "?" if self.dims is None else ",".join("?" if d is None else str(d) for d in self.dims)
        return f"{self.name} {self.type or '?'}[{dims}]"


@dataclasses.dataclass(frozen=True)
class Node:
    """An op of a model."""

    name: str
    op: str
    domain: str
    opset: int
    inputs: tuple[str, ...]  # "" for what is not given
    outputs: tuple[str, ...]
    attributes: Mapping[str, onnx.AttributeProto]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"

    def read(self, taken: Mapping[str, type]) -> dict[str, Any]:
        """Its attributes of these names and types: int, float or str. Any other is refused."""
        values = {}
        for name, attribute in self.attributes.items():
            if name not in taken:
                raise self.refuse(f"has the attribute {name}, which is not taken: {', '.join(sorted(taken))} are")
            wanted = taken[name]
            if attribute.type != _ATTRIBUTES[wanted]:
                have = onnx.AttributeProto.AttributeType.Name(attribute.type)
                raise self.invalid(f"its attribute {name} is {have}, but must be one {wanted.__name__}")
            value = onnx.helper.get_attribute_value(attribute)
            if wanted is float and not math.isfinite(value):
                raise self.invalid(f"its attribute {name} is {value}")
            values[name] = value.decode(errors="replace") if wanted is str else value
        return values

    def invalid(self, sentence: str) -> Error:
        """What is wrong with it."""
        return make_error("invalid_graph_op", f"{self}: {sentence}")

    def refuse(self, sentence: str) -> Error:
        """What it is that kvant has not."""
        return make_error("unimplemented", f"{self} {sentence}")


@dataclasses.dataclass(frozen=True)
class Source:
    """The nodes of a model that were asked for, in the order in which they can run."""

    nodes: list[Node]
    constants: dict[str, np.ndarray]
    inputs: list[Port]
    outputs: list[Port]


def read(model: Any, chosen: Collection[str] | None, taken: Mapping[str, Collection[str]]) -> Source:
    """Of a path, bytes or a ModelProto. ``taken``: ops by domain; any other that is to run is refused."""
    proto, folder = _proto(model)
    graph = proto.graph
    opsets = {_domain(each.domain): each.version for each in proto.opset_import}
    every = [_node(each, opsets) for each in graph.node]
    constants = {node.outputs[0]: node for node in every if node.op == "Constant" and not node.domain and node.outputs}
    if chosen is None:
        nodes = [node for node in every if node not in constants.values()]
    else:
        nodes = _chosen(every, chosen, taken)
    if not nodes:
        raise invalid("the model has no nodes")
    for node in nodes:
        _check_op(node, taken)
    initializers = {each.name: each for each in graph.initializer}
    sparse = {each.values.name for each in graph.sparse_initializer}
    known = {each.name: _port(each) for each in [*graph.input, *graph.value_info, *graph.output]}
    inputs: dict[str, Port] = {}
    if chosen is None:
        inputs = {each.name: known[each.name] for each in graph.input if each.name not in initializers}
    made: set[str] = set()
    values: dict[str, np.ndarray] = {}
    for node in nodes:
        for name in filter(None, node.inputs):
            if name in made or name in values or name in inputs:
                continue
            if name in sparse:
                raise node.refuse(f"reads the sparse initializer {name!r}, which is not taken")
            if name in initializers:
                values[name] = _initializer(node, initializers[name], folder)
            elif name in constants:
                values[name] = _constant(constants[name])
            elif chosen is not None:
                inputs[name] = known.get(name, Port(name, None, None))
            else:
                raise node.invalid(f"it reads {name!r}, which nothing before it makes")
        made.update(filter(None, node.outputs))
    names = [each.name for each in graph.output]
    if chosen is not None:
        names = [name for node in nodes for name in node.outputs if name]
    for name in names:
        if name not in made:
            raise invalid(f"the model's output {name!r} is made by no node of attention")
    return Source(nodes, values, list(inputs.values()), [known.get(name, Port(name, None, None)) for name in names])


def _chosen(every: list[Node], chosen: Collection[str], taken: Mapping[str, Collection[str]]) -> list[Node]:
    for name in chosen:
        found = sum(node.name == name for node in every)
        if found == 0:
            names = [repr(node.name) for node in every if node.op in taken.get(node.domain, ())]
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise invalid(f"the model has no node {name!r}; its nodes of attention are {shown or 'none'}")
        if found > 1:
            raise invalid(f"the model has {found} nodes {name!r}")
    return [node for node in every if node.name in chosen]


def _check_op(node: Node, taken: Mapping[str, Collection[str]]) -> None:
    if node.op not in taken.get(node.domain, ()):
        ops = ", ".join(op for each in taken.values() for op in each)
        raise node.refuse(f"of domain {node.domain or 'ai.onnx'!r} is not taken: {ops} are. from_onnx(.., nodes=[..]) "
                          "reads the nodes that it names, and leaves out all others")
    if node.opset == 0:
        raise node.invalid(f"the model imports no opset of domain {node.domain or 'ai.onnx'!r}")


def array_of(what: str, x: Any) -> np.ndarray:
    """x as numpy's, without a copy where it has one."""
    if isinstance(x, (bool, int, float)):
        raise invalid(f"{what} is {x!r}, not an array")
    try:
        array = np.asarray(x)
    except Exception as error:
        raise invalid(f"{what}, a {type(x).__name__}, cannot be read as a numpy array: {error}") from None
    if array.dtype.hasobject:
        raise invalid(f"{what} is a {type(x).__name__}, not an array of numbers")
    return array


def type_of(array: np.ndarray) -> str:
    """ONNX's name of its type."""
    return _type_name(array.dtype)


@functools.lru_cache(maxsize=64)
def _type_name(dtype: np.dtype) -> str:
    try:
        return onnx.TensorProto.DataType.Name(onnx.helper.np_dtype_to_tensor_dtype(dtype))
    except (KeyError, ValueError):
        return str(dtype)


def check(port: Port, array: np.ndarray, sizes: dict[str, int]) -> None:
    """That it is what the model says; ``sizes``: what names of dims stand for so far."""
    if port.type is not None and type_of(array) != port.type:
        raise invalid(f"{port.name} is {type_of(array)}, but must be {port.type}")
    if port.dims is None:
        return
    fits = len(port.dims) == array.ndim
    for want, have in zip(port.dims, array.shape):
        if isinstance(want, str):
            want = sizes.setdefault(want, have)
        fits = fits and want in (None, have)
    if not fits:
        known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise invalid(f"{port.name} is {list(array.shape)}, but must be {port}" + (f" with {known}" if known else ""))


def _proto(model: Any) -> tuple[onnx.ModelProto, str | None]:
    """The model, and the folder that its external data is in."""
    if isinstance(model, onnx.ModelProto):
        return model, None
    what = "the bytes are"
    try:
        if isinstance(model, (bytes, bytearray, memoryview)):
            return onnx.load_model_from_string(bytes(model)), None
        if isinstance(model, (str, os.PathLike)):
            path = os.fspath(model)
            what = f"{path!r} is"
            return onnx.load_model(path, format="protobuf", load_external_data=False), os.path.dirname(os.path.abspath(path))
    except google.protobuf.message.DecodeError as error:
        raise invalid(f"{what} no ONNX model: {error}") from None
    raise invalid(f"from_onnx takes a path, bytes or an onnx.ModelProto, not {type(model).__name__}")


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _node(proto: onnx.NodeProto, opsets: Mapping[str, int]) -> Node:
    outputs = tuple(proto.output)
    name = proto.name or next(filter(None, outputs), "")
    domain = _domain(proto.domain)
    return Node(name, proto.op_type, domain, opsets.get(domain, 0), tuple(proto.input), outputs,
                {each.name: each for each in proto.attribute})


def _constant(node: Node) -> np.ndarray:
    (name, attribute), *_ = [*node.attributes.items(), ("", None)]
    kinds: dict[str, Any] = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
                             "value_ints": np.int64}
    if name == "value":
        return _array(node, "its value", attribute.t)
    if name not in kinds:
        raise node.refuse(f"has the attribute {name or 'none'}; value, {', '.join(kinds)} are taken")
    return np.array(onnx.helper.get_attribute_value(attribute), kinds[name])


def _initializer(node: Node, tensor: onnx.TensorProto, folder: str | None) -> np.ndarray:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return _array(node, f"its input {tensor.name!r}", tensor)
    file = next((each.value for each in tensor.external_data if each.key == "location"), "")
    what = f"its input {tensor.name!r} is in the file {file!r}"
    if folder is None:
        raise node.invalid(f"{what}, and where that is only the model's own path says: give from_onnx that path")
    return _array(node, what, tensor, folder)


def _array(node: Node, what: str, tensor: onnx.TensorProto, folder: str = "") -> np.ndarray:
    try:
        if min(tensor.dims, default=0) < 0:
            raise ValueError("a dim is negative")
        return onnx.numpy_helper.to_array(tensor, folder)
    except (KeyError, TypeError, ValueError, OSError, RuntimeError, onnx.checker.ValidationError) as error:
        if not folder:
            what += f", of data type {tensor.data_type} and dims {list(tensor.dims)}"
        raise node.invalid(f"{what}, which cannot be read: {error}") from None


def _port(info: onnx.ValueInfoProto) -> Port:
    if info.type.WhichOneof("value") != "tensor_type":
        return Port(info.name, None, None)
    tensor = info.type.tensor_type
    number, types = tensor.elem_type, onnx.TensorProto.DataType
    # That of a newer ONNX has no name here.
    kind = (types.Name(number) if number in types.values() else str(number)) if number else None
    if not tensor.HasField("shape"):
        return Port(info.name, kind, None)
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
    return Port(info.name, kind, tuple(dims))
