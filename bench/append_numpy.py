"""Appends a prompt and single tokens to a cache: kvant beside numpy doing the same, in turns.

append_numpy.py [BUILD_DIR] [ROUNDS]. Both take one thread. Each line has the median times over the
rounds, the median ratio within a round and, for kvant, the share of memcpy's rate in that round.
"""
import json
import os
import statistics
import subprocess
import sys
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402: threads are chosen first

HEADS, SIZE, CAPACITY = 32, 128, 8192


class S8ByTokenHead:
    name = "s8_by_token_head"
    tokens = (1, 64, 4096)

    def __init__(self):
        self.codes = np.zeros((HEADS, CAPACITY, SIZE), np.int8)
        self.scales = np.zeros((HEADS, CAPACITY, 1), np.float16)

    def append(self, x, position):
        to = slice(position, position + x.shape[1])
        scales = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
        self.scales[:, to] = scales
        codes = np.rint(x / scales.astype(np.float32))
        self.codes[:, to] = np.clip(codes, -128, 127, out=codes)


class U4RealBy32:
    name = "u4_real_by_32"
    tokens = (1, 64, 4096)

    def __init__(self):
        self.codes = np.zeros((HEADS, CAPACITY, SIZE // 2), np.uint8)
        self.scales = np.zeros((HEADS, CAPACITY, SIZE // 32), np.float16)
        self.shifts = np.zeros_like(self.scales)

    def append(self, x, position):
        to = slice(position, position + x.shape[1])
        groups = x.reshape(HEADS, -1, SIZE // 32, 32)
        least = groups.min(-1)
        scales = ((groups.max(-1) - least) / np.float32(15)).astype(np.float16)
        shifts = (-least).astype(np.float16)
        self.scales[:, to], self.shifts[:, to] = scales, shifts
        codes = np.rint((groups + shifts[..., None].astype(np.float32)) /
                        scales[..., None].astype(np.float32))
        codes = np.clip(codes, 0, 15, out=codes).astype(np.uint8).reshape(x.shape)
        self.codes[:, to] = codes[..., ::2] | codes[..., 1::2] << 4


class U2Columns:
    name = "u2_columns"
    tokens = (32, 64, 4096)

    def __init__(self):
        self.codes = np.zeros((HEADS, CAPACITY, SIZE // 4), np.uint8)
        self.scales = np.zeros((HEADS, CAPACITY // 32, SIZE), np.float16)
        self.shifts = np.zeros_like(self.scales)

    def append(self, x, position):
        tokens = x.shape[1]
        to, at = slice(position, position + tokens), slice(position // 32, (position + tokens) // 32)
        groups = x.reshape(HEADS, -1, 32, SIZE)
        least = groups.min(2)
        scales = ((groups.max(2) - least) / np.float32(3)).astype(np.float16)
        shifts = (-least).astype(np.float16)
        self.scales[:, at], self.shifts[:, at] = scales, shifts
        codes = np.rint((groups + shifts[:, :, None].astype(np.float32)) /
                        scales[:, :, None].astype(np.float32))
        codes = np.clip(codes, 0, 3, out=codes).astype(np.uint8).reshape(x.shape)
        self.codes[:, to] = (codes[..., ::4] | codes[..., 1::4] << 2 | codes[..., 2::4] << 4 |
                             codes[..., 3::4] << 6)


class F16:
    name = "f16"
    tokens = (1, 64, 4096)

    def __init__(self):
        self.values = np.zeros((HEADS, CAPACITY, SIZE), np.float16)

    def append(self, x, position):
        self.values[:, position:position + x.shape[1]] = x


def numpy_seconds(cache, x):
    """Of one append: as many as take a tenth of a second, from position to position."""
    tokens, count, begin = x.shape[1], 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begin < 0.1:
        cache.append(x, count * tokens % CAPACITY)
        count += 1
    return (time.perf_counter() - begin) / count


def kvant_runs(build):
    """name -> (seconds, bytes per second)"""
    result = subprocess.run(
        [os.path.join(build, "kvant_bench"), "--benchmark_filter=^Append/",
         "--benchmark_min_time=0.1", "--benchmark_format=json"],
        check=True, capture_output=True, text=True)
    return {run["name"]: (run["real_time"] * 1e-9, run["bytes_per_second"])
            for run in json.loads(result.stdout)["benchmarks"]}


def main():
    build = sys.argv[1] if len(sys.argv) > 1 else "build"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    rng = np.random.default_rng(1)
    caches = [scheme() for scheme in (S8ByTokenHead, U4RealBy32, U2Columns, F16)]
    rows = {}
    for _ in range(rounds):
        kvant = kvant_runs(build)
        memcpy = kvant["Append/memcpy"][1]
        for cache in caches:
            for tokens in cache.tokens:
                x = rng.standard_normal((HEADS, tokens, SIZE), np.float32)
                name = f"Append/{cache.name}/{tokens}"
                rows.setdefault(name, []).append((*kvant[name], numpy_seconds(cache, x), memcpy))
    print(f"{'':32} {'kvant us':>10} {'numpy us':>10} {'ratio':>7} {'of memcpy':>10}")
    for name, runs in rows.items():
        middle = [statistics.median(column) for column in zip(
            *((k * 1e6, n * 1e6, n / k, rate / memcpy) for k, rate, n, memcpy in runs))]
        print(f"{name:32} {middle[0]:10.1f} {middle[1]:10.1f} {middle[2]:6.1f}x {middle[3]:9.0%}")


if __name__ == "__main__":
    main()
