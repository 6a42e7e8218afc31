"""GroupQueryAttention of one token over a quantized cache, past and present one buffer: kvant.from_onnx and onnxruntime in turns.

onnx_decode.py [ROUNDS]. 32 query heads over 8 of 128, two threads each; onnxruntime's do not spin, which would take kvant's
processors. Caches are taken in turns, so that none comes from the processor's own. Medians in milliseconds, ratios are
medians of those of a round, and the read bandwidth (numpy's sum, of two threads) is that of the same rounds.
"""
import concurrent.futures
import statistics
import sys
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import kvant

HEADS, KV_HEADS, SIZE, THREADS = 32, 8, 128, 2


def model_of(bits, per, tokens):
    info = helper.make_tensor_value_info
    cache = (TensorProto.INT8 if bits == 8 else TensorProto.UINT8, [1, KV_HEADS, tokens, SIZE * bits // 8])
    scales = (TensorProto.FLOAT, [1] if per == "PER_TENSOR" else [1, KV_HEADS, 1, SIZE])
    query, key = ((TensorProto.FLOAT, [1, 1, heads * SIZE]) for heads in (HEADS, KV_HEADS))
    ports = {"query": query, "key": key, "value": key, "past_key": cache, "past_value": cache,
             "seqlens_k": (TensorProto.INT32, [1]), "total": (TensorProto.INT32, []), "k_scale": scales, "v_scale": scales}
    names = [*ports][:7] + [""] * 5 + [*ports][7:]
    outputs = {"out": query, "present_key": cache, "present_value": cache}
    node = helper.make_node("GroupQueryAttention", names, list(outputs), domain="com.microsoft", num_heads=HEADS,
                            kv_num_heads=KV_HEADS, k_quant_type=per, v_quant_type=per, kv_cache_bit_width=bits)
    graph = helper.make_graph([node], "g", *([info(name, *port) for name, port in each.items()] for each in (ports, outputs)))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def milliseconds(function, *arguments, **named):
    start = time.perf_counter()
    function(*arguments, **named)
    return (time.perf_counter() - start) * 1e3


def measure(bits, per, tokens, rounds, pool):
    proto, rng = model_of(bits, per, tokens), np.random.default_rng(0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    model = kvant.from_onnx(proto, threads=THREADS, require_fused=True)
    shape = [1, KV_HEADS, tokens, SIZE * bits // 8]
    size = 2 * int(np.prod(shape))
    sets = []
    for _ in range(max(2, -(-128_000_000 // size))):
        scales = [1] if per == "PER_TENSOR" else [1, KV_HEADS, 1, SIZE]
        inputs = {name: rng.standard_normal((1, 1, heads * SIZE)).astype("f4")
                  for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))}
        inputs |= {"seqlens_k": np.array([tokens - 1], np.int32), "total": np.array(tokens, np.int32)}
        inputs |= {name: np.full(scales, 0.01, np.float32) for name in ("k_scale", "v_scale")}
        caches = {name: rng.integers(0, 256, shape, np.uint8).view(np.int8 if bits == 8 else np.uint8) for name in ("key", "value")}
        binding, kept = session.io_binding(), []
        for name, x in inputs.items():
            kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(x))
            binding.bind_ortvalue_input(name, kept[-1])
        out = np.zeros((1, 1, HEADS * SIZE), np.float32)
        binding.bind_ortvalue_output("out", onnxruntime.OrtValue.ortvalue_from_numpy(out))
        for name, x in caches.items():
            kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(x))
            binding.bind_ortvalue_input(f"past_{name}", kept[-1])
            binding.bind_ortvalue_output(f"present_{name}", kept[-1])
        sets.append((binding, kept, inputs | {f"past_{name}": x for name, x in caches.items()},
                     {"out": out, **{f"present_{name}": x for name, x in caches.items()}}))
    rows = []
    for at in range(rounds + 2):
        binding, _, inputs, outputs = sets[at % len(sets)]
        halves = [outputs[f"present_{name}"].view(np.uint64) for name in ("key", "value")]
        rows.append((milliseconds(session.run_with_iobinding, binding), milliseconds(model, inputs, out=outputs),
                     milliseconds(lambda: list(pool.map(np.sum, halves)))))
    theirs, ours, read = zip(*rows[2:])
    ratio = statistics.median(a / b for a, b, _ in rows[2:])
    print(f"| int{bits} {per.lower()} | {tokens} | {statistics.median(theirs):.2f} | {statistics.median(ours):.2f} | {ratio:.2f} | "
          f"{size / statistics.median(ours) / 1e6:.1f} of {size / statistics.median(read) / 1e6:.1f} GB/s |", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print("| cache | tokens | onnxruntime | kvant | ratio | kvant reads |\n|---|--:|--:|--:|--:|--:|")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for tokens in (64, 1024, 8192, 32768):
            for bits in (8, 4):
                for per in ("PER_TENSOR", "PER_CHANNEL"):
                    measure(bits, per, tokens, rounds, pool)


if __name__ == "__main__":
    main()
