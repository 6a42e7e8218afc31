"""onnxruntime's GroupQueryAttention over an int8 or int4 cache.

The operator appends the new tokens' K and V to the cache and attends causally. Past and present are
the same buffer, so that it writes those tokens only and copies nothing.
"""
import attention
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper


def version():
    return f"onnxruntime {ort.__version__}"


def _model(case, bits):
    code = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
    cache = [1, case.kv_heads, case.kv_len, case.head_size * bits // 8]
    new = [1, case.q_len, case.kv_heads * case.head_size]
    queries = [1, case.q_len, case.heads * case.head_size]
    inputs = {
        "query": (TensorProto.FLOAT, queries),
        "key": (TensorProto.FLOAT, new),
        "value": (TensorProto.FLOAT, new),
        "past_key": (code, cache),
        "past_value": (code, cache),
        "seqlens_k": (TensorProto.INT32, [1]),
        "total_sequence_length": (TensorProto.INT32, []),
        "k_scale": (TensorProto.FLOAT, [1]),
        "v_scale": (TensorProto.FLOAT, [1]),
    }
    outputs = {
        "output": (TensorProto.FLOAT, queries),
        "present_key": (code, cache),
        "present_value": (code, cache),
    }
    names = list(inputs)
    unused = [""] * 5  # rotary caches, positions, attention bias, head sink
    node = helper.make_node(
        "GroupQueryAttention",
        names[:7] + unused + names[7:],
        list(outputs),
        domain="com.microsoft",
        num_heads=case.heads,
        kv_num_heads=case.kv_heads,
        k_quant_type="PER_TENSOR",
        v_quant_type="PER_TENSOR",
        kv_cache_bit_width=bits,
    )
    infos = [
        [helper.make_tensor_value_info(name, *info) for name, info in group.items()]
        for group in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", *infos), opset_imports=opsets)
    model.ir_version = 10
    return model.SerializeToString()


def _tokens_first(x):
    """[heads, tokens, size] as [1, tokens, heads * size]."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(1, x.shape[1], -1)


class GroupQueryAttention:
    def __init__(self, data, bits, threads):
        case = self.case = data.case
        self.bits = bits
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(
            _model(case, bits), options, providers=["CPUExecutionProvider"]
        )
        self.scales = {}
        inputs = {
            "query": _tokens_first(data.q),
            "seqlens_k": np.array([case.kv_len - 1], np.int32),
            "total_sequence_length": np.array(case.kv_len, np.int32),
        }
        caches = {}
        for name, x in (("key", data.k), ("value", data.v)):
            scale = self.scales[name] = np.float32(np.abs(x).max() / (2 ** (bits - 1) - 1))
            inputs[name] = _tokens_first(x[:, case.kv_len - case.q_len :])
            inputs[f"{name[0]}_scale"] = np.array([scale], np.float32)
            codes = np.rint(x / scale).astype(np.int8)
            # The new tokens' codes are for the operator to write.
            codes[:, case.kv_len - case.q_len :] = 0
            caches[name] = codes[None] if bits == 8 else attention.pack4(codes + 8)[None]
        self.bytes = 2 * data.q.nbytes + sum(c.nbytes for c in caches.values())
        self.rotation = [self._bind(inputs, caches) for _ in range(attention.copies(self.bytes))]
        self.runs = 0
        self.detail = "past and present share one buffer"

    def _bind(self, inputs, caches):
        binding = self.session.io_binding()
        for name, x in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x))
        values = {n: ort.OrtValue.ortvalue_from_numpy(c) for n, c in caches.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        values["output"] = ort.OrtValue.ortvalue_from_numpy(np.zeros_like(inputs["query"]))
        binding.bind_ortvalue_output("output", values["output"])
        return binding, values

    def run(self):
        self.binding, self.values = self.rotation[self.runs % len(self.rotation)]
        self.session.run_with_iobinding(self.binding)
        self.runs += 1

    def output(self):
        out = self.values["output"].numpy().astype(np.float64)
        return out.reshape(self.case.q_len, self.case.heads, -1).transpose(1, 0, 2)

    def kv(self, head):
        """From the cache as the run left it: with the new tokens, as the operator rounded them."""
        return [self._dequantize(name, head) for name in ("key", "value")]

    def _dequantize(self, name, head):
        codes = self.values[name].numpy()[0, head]
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1) - 8.0
        return codes.astype(np.float64) * float(self.scales[name])


def make(data, kind, threads):
    return GroupQueryAttention(data, {"int8": 8, "int4": 4}[kind], threads)
