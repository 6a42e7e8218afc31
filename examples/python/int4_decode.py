"""One decode step over an int4 cache: 8 KV heads with 4 query heads each, in groups of 32."""

import numpy as np

import kvant

HEADS, RATIO, TOKENS, SIZE, GROUP = 8, 4, 4096, 128, 32


def build():
    g = kvant.GraphBuilder(fpmath="f16", apply_to_int=True)
    q = g.input("q", "f32", [1, HEADS, RATIO, 1, SIZE])
    k, v = (g.input(name, "u4", [1, HEADS, 1, TOKENS, SIZE]) for name in "kv")
    groups = [1, HEADS, 1, TOKENS, SIZE // GROUP]
    k_scales, v_scales = (g.input(f"{name}_scales", "f32", groups) for name in "kv")
    keys = g.dynamic_dequantize(k, k_scales, group_shape=[1, 1, 1, 1, GROUP])
    values = g.dynamic_dequantize(v, v_scales, group_shape=[1, 1, 1, 1, GROUP])
    probabilities = g.softmax(g.matmul(q, keys, transpose_b=True) / 11.3)
    g.output("o", probabilities @ values)
    return g.build()


def dequantized(codes, scales):
    """f64 of codes that are packed two to a byte, the first in the low half."""
    values = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], SIZE)
    return values * np.repeat(scales.astype(np.float64), GROUP, -1)


def main():
    attention = kvant.compile(build(), require_fused=True)
    print(kvant.explain(attention))

    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, RATIO, 1, SIZE), np.float32)
    codes = rng.integers(0, 256, (2, 1, HEADS, 1, TOKENS, SIZE // 2), np.uint8)
    scales = rng.uniform(0.02, 0.1, (2, 1, HEADS, 1, TOKENS, SIZE // GROUP)).astype(np.float32)
    o = attention(q=q, k=codes[0], k_scales=scales[0], v=codes[1], v_scales=scales[1])

    scores = q @ np.swapaxes(dequantized(codes[0], scales[0]), -1, -2) / 11.3
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ dequantized(codes[1], scales[1])
    distance = np.linalg.norm(o - want) / np.linalg.norm(want)
    print(f"relative distance to f64: {distance:.1e}")
    assert distance < 2e-3


if __name__ == "__main__":
    main()
