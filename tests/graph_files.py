"""Graphs and safetensors files for tests of the kvant command."""

import json
import pathlib
import struct


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    data = raw[8 + size:]
    tensors = {}
    for name, entry in json.loads(raw[8:8 + size]).items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def dense(shape):
    strides, step = [], 1
    for dim in reversed(shape):
        strides.insert(0, step)
        step *= dim
    return strides


def tensor(tid, dtype, shape, stride=None):
    return {"id": tid, "dtype": dtype, "shape": shape,
            "stride": dense(shape) if stride is None else stride,
            "layout_type": "strided", "property_type": "undef"}


def one_op(kind, attrs, inputs, outputs):
    return {"version": "3.13.0", "engine_kind": "cpu", "fpmath_mode": "strict",
            "graph": [{"id": 0, "name": "op", "kind": kind, "attrs": attrs, "inputs": inputs,
                       "outputs": outputs}]}
