#!/usr/bin/env python3
"""Makes tests/data/onednn_types.txt: which data types oneDNN's Graph API takes for which op.

    scripts/bench --install --only onednn
    LD_LIBRARY_PATH=.peers/venv/lib .peers/venv/bin/python scripts/make_onednn_types.py

Adds each op to a graph with every combination of types and writes down those for which add_op
succeeds. See tests/data/README.md. Tests need only the file.
"""

import ctypes
import itertools
import pathlib
import re
import sys

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "onednn_types.txt"
HEADER = pathlib.Path(sys.prefix) / "include" / "oneapi" / "dnnl" / "dnnl_graph_types.h"
TYPES = "f32 bf16 f16 f8_e5m2 f8_e4m3 s8 u8 s4 u4 s32 s64 boolean".split()
UNARY = "Exp Tanh ReLU Sigmoid Sqrt Square Abs Reciprocal Log GELU Reorder TypeCast".split()
BINARY = "Add Subtract Multiply Divide Maximum Minimum GreaterEqual SoftMaxBackward".split()
REDUCTIONS = "ReduceSum ReduceMax ReduceMean".split()
CPU, ANY_LAYOUT, NO_PROPERTY, UNKNOWN_RANK = 1, 1, 0, -1
SUCCESS, INVALID_GRAPH_OP = 0, 8


def forms():
    """(op, inputs, outputs, attributes): with and without what is optional."""
    for op in UNARY:
        yield op, 1, 1, {}
    yield "GELU", 1, 1, {"mode": "gelu_tanh"}
    for op in BINARY:
        yield op, 2, 1, {}
    for op in REDUCTIONS:
        yield op, 1, 1, {}
        yield op, 1, 1, {"axes": [0]}
    yield "MatMul", 2, 1, {}
    yield "MatMul", 3, 1, {}
    yield "SoftMax", 1, 1, {}
    yield "SoftMax", 1, 2, {}
    yield "Select", 3, 1, {}
    yield "GenIndex", 1, 1, {"axis": 0}
    yield "StaticReshape", 1, 1, {"shape": [1], "special_zero": False}
    yield "StaticTranspose", 1, 1, {"order": [0]}
    for inputs in (1, 2, 3):
        yield "Concat", inputs, 1, {"axis": 0}
    yield "Dropout", 4, 1, {}
    yield "Dropout", 4, 2, {}
    for op in ("Quantize", "Dequantize"):
        for zps in ({}, {"zps": [1]}):
            for qtype in ("per_tensor", "per_channel"):
                yield op, 1, 1, {"qtype": qtype, "scales": [1.0], **zps}
    for op in ("DynamicQuantize", "DynamicDequantize"):
        for inputs in (2, 3):
            for qtype in ("per_tensor", "per_channel"):
                yield op, inputs, 1, {"qtype": qtype}
            yield op, inputs, 1, {"qtype": "per_group", "group_shape": [1]}
    for outputs in (2, 3):
        yield "DynamicQuantize", 1, outputs, {}
    yield "End", 1, 0, {}
    yield "Wildcard", 1, 1, {}


def combinations(op, ports):
    """All; of a Dropout those that differ from what its documentation says in up to two ports."""
    if op != "Dropout":
        yield from itertools.product(TYPES, repeat=ports)
        return
    base = ["f32", "s64", "s64", "f32", "f32", "u8"][:ports]
    seen = set()
    for first in TYPES:
        for places in itertools.combinations(range(ports), 2):
            for types in itertools.product(TYPES, repeat=2):
                row = [first, *base[1:4], first, *base[5:]]
                for place, kind in zip(places, types):
                    row[place] = kind
                if tuple(row) not in seen:
                    seen.add(tuple(row))
                    yield tuple(row)


class LogicalTensor(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_size_t),
        ("ndims", ctypes.c_int),
        ("dims", ctypes.c_int64 * 12),
        ("data_type", ctypes.c_int),
        ("property", ctypes.c_int),
        ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * 12),
    ]


def enumerators(text, prefix, first):
    """Values of the enum of `text` in which `first` is, by name without the prefix."""
    body = re.search(r"enum \{((?:(?!enum \{).)*?\b%s\b.*?)\}" % first, text, re.DOTALL)[1]
    value, values = -1, {}
    for name, given in re.findall(r"^\s*%s(\w+)(?:\s*=\s*(\w+))?," % prefix, body, re.MULTILINE):
        value = int(given, 0) if given else value + 1
        values[name] = value
    return values


class OneDnn:
    def __init__(self):
        self.lib = ctypes.CDLL("libdnnl.so.3")
        text = HEADER.read_text()
        self.kinds = enumerators(text, "dnnl_graph_op_", "dnnl_graph_op_abs")
        self.attributes = enumerators(text, "dnnl_graph_op_attr_", "dnnl_graph_op_attr_undef")
        common = HEADER.with_name("dnnl_common_types.h").read_text()
        self.types = enumerators(common, "dnnl_", "dnnl_data_type_undef")
        self.tensors = {}

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != SUCCESS:
            raise RuntimeError(f"{name} returned {status}")

    def version(self):
        class Version(ctypes.Structure):
            _fields_ = [(name, ctypes.c_int) for name in ("major", "minor", "patch")]

        self.lib.dnnl_version.restype = ctypes.POINTER(Version)
        version = self.lib.dnnl_version().contents
        return f"{version.major}.{version.minor}.{version.patch}"

    def tensor(self, tensor_id, data_type):
        if (tensor_id, data_type) not in self.tensors:
            tensor = LogicalTensor()
            number = self.types[data_type]
            self.call(
                "dnnl_graph_logical_tensor_init",
                ctypes.byref(tensor),
                ctypes.c_size_t(tensor_id),
                number,
                UNKNOWN_RANK,
                ANY_LAYOUT,
                NO_PROPERTY,
            )
            assert (tensor.id, tensor.data_type) == (tensor_id, number)
            self.tensors[tensor_id, data_type] = tensor
        return ctypes.byref(self.tensors[tensor_id, data_type])

    def set_attribute(self, op, name, value):
        if isinstance(value, bool):
            kind, data, count = "bool", ctypes.byref(ctypes.c_uint8(value)), 1
        elif isinstance(value, str):
            kind, data, count = "str", value.encode(), len(value)
        else:
            numbers = value if isinstance(value, list) else [value]
            is_float = isinstance(numbers[0], float)
            kind, element = ("f32", ctypes.c_float) if is_float else ("s64", ctypes.c_int64)
            data, count = (element * len(numbers))(*numbers), len(numbers)
        self.call(f"dnnl_graph_op_set_attr_{kind}", op, self.attributes[name], data, count)

    def takes(self, kind, inputs, outputs, attributes):
        graph, op = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("dnnl_graph_graph_create", ctypes.byref(graph), CPU)
        number = self.kinds[kind]
        self.call("dnnl_graph_op_create", ctypes.byref(op), ctypes.c_size_t(0), number, b"op")
        for i, data_type in enumerate(inputs):
            self.call("dnnl_graph_op_add_input", op, self.tensor(i, data_type))
        for i, data_type in enumerate(outputs):
            self.call("dnnl_graph_op_add_output", op, self.tensor(len(inputs) + i, data_type))
        for name, value in attributes.items():
            self.set_attribute(op, name, value)
        status = self.lib.dnnl_graph_add_op(graph, op)
        self.call("dnnl_graph_op_destroy", op)
        self.call("dnnl_graph_graph_destroy", graph)
        if status not in (SUCCESS, INVALID_GRAPH_OP):
            raise RuntimeError(f"{kind}: add_op returned {status}")
        return status == SUCCESS


def snake(op):
    special = {"ReLU": "relu", "GELU": "gelu", "SoftMax": "softmax", "MatMul": "matmul"}
    if op in special:
        return special[op]
    return re.sub(r"(?<!^)([A-Z])", r"_\1", op.replace("SoftMax", "Softmax")).lower()


def text_of(value):
    if isinstance(value, list):
        value = value[0]
    return value if isinstance(value, str) else f"{value:g}"


def main():
    onednn = OneDnn()
    lines = [
        f"# Types that oneDNN {onednn.version()} takes, made by scripts/make_onednn_types.py; README.md",
        "types " + " ".join(TYPES),
    ]
    for op, inputs, outputs, attributes in forms():
        words = [f"{name}={text_of(value)}" for name, value in attributes.items()]
        lines.append(" ".join([op, str(inputs), "->", str(outputs), *words]))
        for row in combinations(op, inputs + outputs):
            if onednn.takes(snake(op), row[:inputs], row[inputs:], attributes):
                lines.append("  " + " ".join([*row[:inputs], "->", *row[inputs:]]))
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
