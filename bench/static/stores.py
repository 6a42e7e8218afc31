"""What stores into caches, as graphs of their own: DynamicQuantize, Append, Hadamard; and
MergeAttention. Rows beside those of kernels.py, each of one launch.

Such kernels have no steady loop over tokens, and are counted whole: every instruction once, those of
branches that are rarely taken as well.
"""
import dataclasses
import json
import math

BATCH, HEADS, TOKENS, CAPACITY, HEAD_SIZE = 8, 8, 16, 4096, 128
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
       0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True)
class Store:
    name: str
    ops: tuple  # of the graph

    def graph(self):
        """JSON in oneDNN's format."""
        made = {t["id"] for op in self.ops for t in op["outputs"]}
        read = {t["id"] for op in self.ops for t in op["inputs"]}
        return json.dumps({"version": "3.13.0", "engine_kind": "cpu", "fpmath_mode": "strict",
                           "fpmath_mode_apply_to_int": "false", "input_ports": sorted(read - made),
                           "output_ports": sorted(made - read), "graph": list(self.ops)})


def _tensor(number, dtype, shape):
    stride = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    return {"id": number, "dtype": dtype, "shape": list(shape), "stride": stride,
            "layout_type": "strided", "property_type": "variable"}


def _op(number, kind, inputs, outputs, **attrs):
    types = {int: "s64", str: "string", tuple: "s64[]", list: "f32[]"}
    return {"id": number, "name": kind, "kind": kind, "inputs": inputs, "outputs": outputs,
            "attrs": {name: {"type": types[type(value)],
                             "value": list(value) if isinstance(value, tuple) else value}
                      for name, value in attrs.items()}}


def _append(name, codes, group=None, zps=None, src="f16", given=False, **attrs):
    numbers = (BATCH, HEADS, TOKENS, HEAD_SIZE)
    cache = (BATCH, HEADS, CAPACITY, HEAD_SIZE)
    inputs = [_tensor(0, src, numbers), _tensor(1, "s32", (BATCH,))]
    outputs = [_tensor(2, codes, cache)]
    if group:
        groups = [dim // of for dim, of in zip(cache, group)]
        parameters = inputs if given else outputs
        parameters.append(_tensor(3, "f16", groups))
        if zps:
            parameters.append(_tensor(4, zps, groups))
        attrs.update(qtype="per_group", group_shape=tuple(group))
    return Store(f"append {name}", (_op(0, "Append", inputs, outputs, token_axis=-2, **attrs),))


def _hadamard(block):
    shape = (BATCH, HEADS, TOKENS, max(HEAD_SIZE, block))
    return Store(f"Hadamard of {block}", (_op(0, "Hadamard", [_tensor(0, "f16", shape)],
                                              [_tensor(1, "f16", shape)], block=block),))


def _merge(parts, dtype):
    rows = (BATCH, 4 * HEADS, TOKENS)
    inputs = [_tensor(number, "f32" if number % 2 else dtype, (*rows, 1 if number % 2 else HEAD_SIZE))
              for number in range(2 * parts)]
    outputs = [_tensor(2 * parts, "f16", (*rows, HEAD_SIZE)), _tensor(2 * parts + 1, "f32", (*rows, 1))]
    return Store(f"merge of {parts} parts, {dtype}", (_op(0, "MergeAttention", inputs, outputs),))


G32, TOKEN, CHANNEL = (1, 1, 1, 32), (1, 1, 1, HEAD_SIZE), (1, 1, 16, 1)

STORES = (
    _append("u4 g32 zp", "u4", G32, "u4"),
    _append("u4 g32 shift", "u4", G32, "f16"),
    _append("s4 g32", "s4", G32),
    _append("s8", "s8", TOKEN),
    _append("s8, f32", "s8", TOKEN, src="f32"),
    _append("u2 by channel, shift", "u2", CHANNEL, "f16"),
    _append("u4 by channel, zp u8", "u4", CHANNEL, "u8"),
    _append("s8, static channels", "s8", (1, 1, CAPACITY, 1), given=True),
    _append("f8 e4m3", "f8_e4m3", TOKEN),
    _append("nf4", "u4", G32, codebook=list(NF4)),
    _append("ggml q4_0", "s4", G32, formula="ggml"),
    _append("ggml iq4_nl", "u4", G32, formula="ggml", codebook=[float(x) for x in IQ4_NL]),
    _append("f16 of f32", "f16", src="f32"),
    _hadamard(64),
    _hadamard(128),
    _hadamard(4096),
    _merge(4, "f32"),
    _merge(4, "f16"),
)
