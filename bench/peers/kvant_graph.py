"""A case as kvant takes it: a graph, and its inputs in a file."""
import json
import struct
import subprocess

import attention
import cases
import numpy as np

BITS = {cases.INT8: 8, cases.INT4: 4}


class Stored:
    """K and V in one of kvant's formats: the arrays for the graph, and what they stand for."""

    def __init__(self, data, kind):
        if kind == cases.F16:
            caches = [x.astype(np.float16) for x in (data.k, data.v)]
            self.arrays = [[x] for x in caches]
            self.kv = lambda h: [x[h] for x in caches]
            return
        zero_points = ":zp" in kind
        caches = [attention.Quantized(x, BITS[kind], zero_points) for x in (data.k, data.v)]
        self.arrays = [
            [attention.pack4(c.codes) if BITS[kind] == 4 else c.codes, c.scales]
            + ([c.zero_points] if zero_points else [])
            for c in caches
        ]
        self.kv = lambda h: [c.head(h) for c in caches]


def make_graph(binary, case, contestant):
    """The graph of a case, from `kvant make`, as parsed JSON."""
    options = {
        "heads": case.heads,
        "kv-heads": case.kv_heads,
        "q-len": case.q_len,
        "kv-len": case.kv_len,
        "head-size": case.head_size,
        "k": contestant.kind,
        "v": contestant.kind,
    }
    command = [binary, "make"] + [x for n, v in options.items() for x in (f"--{n}", str(v))]
    if case.causal:
        command.append("--causal=bottom-right")
    graph = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    graph["fpmath_mode"] = contestant.fpmath
    return graph


def _input_ids(graph, case):
    """Ids of the inputs by use, in the order of `Stored.arrays`: q, [k..], [v..], scalars {id: x}."""
    ops = graph["graph"]
    made = {t["id"] for op in ops for t in op["outputs"]}

    def given(op):
        return [t["id"] for t in op["inputs"] if t["id"] not in made]

    qk, pv = (op for op in ops if op["kind"] == "MatMul")
    loads = [op for op in ops if op["kind"] in ("DynamicDequantize", "TypeCast")]
    k, v = (given(op) for op in loads)
    scalars = {}
    for op in ops:
        if op["kind"] == "Divide":
            scalars[given(op)[0]] = np.float32(np.sqrt(case.head_size))
        elif op["kind"] == "Select":
            scalars[given(op)[-1]] = np.float32(-np.inf)
        elif op["kind"] == "Add":
            scalars[given(op)[0]] = np.int32(case.kv_len)
        elif op["kind"] == "Subtract":
            scalars[given(op)[0]] = np.int32(case.q_len)
    return qk["inputs"][0]["id"], k, v, scalars


def write_inputs(path, graph, data, stored):
    """The inputs as safetensors, each under its id; types are those of their bytes only."""
    q, k, v, scalars = _input_ids(graph, data.case)
    tensors = {q: data.q, **scalars}
    for ids, arrays in zip((k, v), stored.arrays):
        tensors.update(zip(ids, arrays, strict=True))
    header, offset = {}, 0
    for name, x in tensors.items():
        header[str(name)] = {
            "dtype": "U8",
            "shape": [x.nbytes],
            "data_offsets": [offset, offset + x.nbytes],
        }
        offset += x.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).data)


def read_output(path, case):
    out = np.fromfile(path, np.float32).astype(np.float64)
    return out.reshape(case.heads, case.q_len, case.head_size)
