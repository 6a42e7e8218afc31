"""A KvCache beside one in f32: a prompt, decoded tokens, and a few of them taken back."""

import numpy as np

import kvant

LAYERS, HEADS, QUERY_HEADS, SIZE, CAPACITY = 2, 4, 8, 64, 1024
SCHEME = "int4_g64_R128_s4"


def make(scheme):
    return kvant.KvCache(
        scheme, layers=LAYERS, heads=HEADS, head_size=SIZE, capacity=CAPACITY, rollback=16
    )


def main():
    print(f"{SCHEME}: {kvant.schemes()[SCHEME]}, {kvant.scheme_bits(SCHEME, SIZE)} bits")
    rng = np.random.default_rng(0)
    cache, exact = make(SCHEME), make("f32")
    for tokens in (600, 1, 1, 1):
        for layer in range(LAYERS):
            k, v = rng.standard_normal((2, 1, HEADS, tokens, SIZE), np.float32)
            q = rng.standard_normal((1, QUERY_HEADS, tokens, SIZE), np.float32)
            outputs = []
            for each in (cache, exact):
                each.append(layer, k, v)
                outputs.append(each.attend(layer, q))
            o, want = outputs
            distance = np.linalg.norm(o - want) / np.linalg.norm(want)
            print(f"layer {layer}, {cache.length(layer)} tokens: differs by {distance:.3f}")
            assert distance < 0.15
    cache.crop(601)
    assert cache.length() == 601
    print(kvant.explain(cache))
    print(f"{exact.used_bytes / cache.used_bytes:.1f} times smaller than f32")


if __name__ == "__main__":
    main()
