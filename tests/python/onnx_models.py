"""ONNX models of one node, and what onnxruntime makes of them."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

DOMAINS = {"Attention": "", "GroupQueryAttention": "com.microsoft"}


def value_info(name, array, open_dims=False):
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    dims = [f"{name}_{at}" for at in range(array.ndim)] if open_dims else array.shape
    return helper.make_tensor_value_info(name, kind, dims)


def model_of(op, inputs, outputs, *, opset=25, initializers=(), open_dims=False, nodes=(), name="attn", **attributes):
    """A model of one node. inputs: arrays by name, in the op's order; a name that begins with "-" is one not given.

    outputs: ONNX types by name. ``initializers`` names inputs that the model holds itself. ``nodes`` come before it.
    """
    names = ["" if n.startswith("-") else n for n in inputs]
    node = helper.make_node(op, names, list(outputs), name=name, domain=DOMAINS.get(op, ""), **attributes)
    held = [onnx.numpy_helper.from_array(x, n) for n, x in inputs.items() if n in initializers]
    ports = [value_info(n, x, open_dims) for n, x in inputs.items() if n and x is not None and n not in initializers]
    results = [helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items() if n]
    graph = helper.make_graph([*nodes, node], "g", ports, results, held)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports)
    model.ir_version = 10
    return model


class Group:
    """A GroupQueryAttention, data for it, and its past."""

    def __init__(self, bits=8, per="PER_TENSOR", *, batch=2, heads=4, kv_heads=2, tokens=1, capacity=20, size=16,
                 lengths=None, total=None, seed=0, dtype="f4", packed=False, rotary=False, bias=None, sink=False, scale=None,
                 **attributes):
        rng = np.random.default_rng((bits, batch, heads, tokens, capacity, size, seed))

        def normal(*shape):  # magnitudes differ by channel
            return (rng.standard_normal(shape) * (1 + 3 * (np.arange(shape[-1]) % 5 == 2))).astype(dtype)

        if lengths is None:
            lengths = [capacity + tokens] * batch
        lengths = np.array(lengths, np.int32)
        total = int(lengths.max()) if total is None else total
        q, k, v = normal(batch, tokens, heads * size), *(normal(batch, tokens, kv_heads * size) for _ in "kv")
        past = [None, None]
        if capacity and bits == 8:
            past = [rng.integers(-128, 128, (batch, kv_heads, capacity, size)).astype(np.int8) for _ in "kv"]
        elif capacity and bits == 4:
            past = [rng.integers(0, 256, (batch, kv_heads, capacity, size // 2)).astype(np.uint8) for _ in "kv"]
        elif capacity:
            past = [normal(batch, kv_heads, capacity, size) for _ in "kv"]
        self.inputs = {
            "query": np.concatenate([q, k, v], -1) if packed else q, **({"-k": None, "-v": None} if packed else
                                                                        {"key": k, "value": v}),
            "past_key" if capacity else "-pk": past[0], "past_value" if capacity else "-pv": past[1],
            "seqlens_k": lengths - 1, "total": np.array(total, np.int32),
        }
        angles = rng.standard_normal((64, size // 2))
        tables = {"cos": np.cos(angles).astype(dtype), "sin": np.sin(angles).astype(dtype)}
        self.inputs.update(tables if rotary else {"-cos": None, "-sin": None})
        self.inputs["-ids"] = None
        self.inputs.update({"-bias": None} if bias is None else {"bias": normal(*bias, tokens, total)})
        self.inputs.update({"sink": normal(heads)} if sink else {"-sink": None})
        if bits:
            step = (0.02 if bits == 8 else 0.4) if scale is None else scale
            shape = (1,) if per == "PER_TENSOR" else (1, kv_heads, 1, size)
            for name in ("k_scale", "v_scale"):
                self.inputs[name] = rng.uniform(0.5 * step, step, shape).astype("f4")
            attributes |= {"k_quant_type": per, "v_quant_type": per, "kv_cache_bit_width": bits}
        self.lengths, self.prompt = lengths, tokens == total
        kind = TensorProto.FLOAT if dtype == "f4" else TensorProto.FLOAT16
        cache = {0: kind, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
        self.model = model_of("GroupQueryAttention", self.inputs,
                              {"out": kind, "present_key": cache, "present_value": cache}, num_heads=heads,
                              kv_num_heads=kv_heads, do_rotary=int(rotary), **attributes)

    @property
    def feeds(self):
        return {name: x for name, x in self.inputs.items() if x is not None}

    def real(self, out):
        """Of outputs what is not of a prompt's padding."""
        rows = np.arange(out.shape[1]) < self.lengths[:, None] if self.prompt else np.ones(out.shape[:2], bool)
        return out[rows]

    def held(self, present):
        """Of a present its tokens, row by row."""
        return np.concatenate([row[:, :length].ravel() for row, length in zip(present, self.lengths)])


def onnxruntime_of(group):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(group.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(("out", "present_key", "present_value"), session.run(None, group.feeds)))


def relative_l2(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
