"""The attention of an ONNX model, GroupQueryAttention over int4 caches, decoded in place, beside onnxruntime."""

import pathlib
import sys
import tempfile

import numpy as np

try:
    import onnx
    from onnx import TensorProto, helper
except ImportError:
    sys.exit("onnx_decode.py needs onnx")

import kvant

try:
    import onnxruntime
except ImportError:  # then there is nothing to compare with
    onnxruntime = None

HEADS, KV_HEADS, SIZE, CAPACITY, PROMPT, STEPS = 8, 2, 64, 256, 200, 20
CACHE = [1, KV_HEADS, CAPACITY, SIZE // 2]  # two codes in a byte


def a_model(path):
    """A layer as a model of a language has it, its scales in another file."""
    rng = np.random.default_rng(0)
    scales = [rng.uniform(0.3, 0.6, (1, KV_HEADS, 1, SIZE)).astype("f4") for _ in "kv"]
    held = [onnx.numpy_helper.from_array(x, f"{name}_scale") for x, name in zip(scales, "kv")]
    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "", "", "", "", "",
              "k_scale", "v_scale"]
    attention = helper.make_node(
        "GroupQueryAttention", inputs, ["attended", "present_key", "present_value"], name="/layers.0/attn",
        domain="com.microsoft", num_heads=HEADS, kv_num_heads=KV_HEADS, k_quant_type="PER_CHANNEL",
        v_quant_type="PER_CHANNEL", kv_cache_bit_width=4)
    f32, u8, s32 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32
    ports = [("query", f32, [1, "tokens", HEADS * SIZE])]
    ports += [(name, f32, [1, "tokens", KV_HEADS * SIZE]) for name in ("key", "value")]
    ports += [(f"past_{name}", u8, CACHE) for name in ("key", "value")]
    ports += [("seqlens_k", s32, [1]), ("total_sequence_length", s32, [])]
    results = [("out", f32, [1, "tokens", HEADS * SIZE])] + [(f"present_{name}", u8, CACHE) for name in ("key", "value")]
    infos = [[helper.make_tensor_value_info(*port) for port in each] for each in (ports, results)]
    graph = helper.make_graph([attention, helper.make_node("Relu", ["attended"], ["out"], name="/layers.0/mlp")], "layer", *infos,
                              held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save_model(model, path, save_as_external_data=True, location="scales.bin", size_threshold=0)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "layer.onnx")
        a_model(path)
        model = kvant.from_onnx(path, nodes="/layers.0/attn", require_fused=True)
        session = None
        if onnxruntime is not None:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    cache = {name: np.zeros(CACHE, np.uint8) for name in ("key", "value")}
    theirs = {f"past_{name}": x.copy() for name, x in cache.items()}
    length, worst = 0, 0.0
    for tokens in [PROMPT] + [1] * STEPS:
        length += tokens
        inputs = {name: rng.standard_normal((1, tokens, heads * SIZE)).astype("f4")
                  for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))}
        inputs |= {"seqlens_k": np.array([length - 1], np.int32), "total_sequence_length": np.array(length, np.int32)}
        # Past and present are the same memory, so that tokens are written into it and nothing is copied.
        got = model(inputs | {f"past_{name}": x for name, x in cache.items()},
                    out={f"present_{name}": x for name, x in cache.items()})
        assert got["present_key"] is cache["key"]
        if session is not None:
            out, key, value = session.run(None, inputs | theirs)
            theirs = {"past_key": key, "past_value": value}
            difference = np.linalg.norm(np.maximum(got["attended"], 0) - out) / np.linalg.norm(out)
            worst = max(worst, float(difference))
    print(model.explain())
    print(f"{length} tokens in {sum(x.nbytes for x in cache.values())} bytes; differs from onnxruntime by {worst:.1e}")
    assert worst < 1e-3
    if session is not None:
        assert all(np.array_equal(x[:, :, :length], theirs[f"past_{name}"][:, :, :length]) for name, x in cache.items())


if __name__ == "__main__":
    main()
