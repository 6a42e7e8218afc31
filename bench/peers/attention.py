"""The data of a case, ways to store K and V, and attention in f64 to judge results by."""
import glob
import math
import os
import pathlib

import numpy as np

GROUP = 32


class Data:
    """f32 queries [heads, q_len, head_size], keys and values [kv_heads, kv_len, head_size].

    The same for everyone: normal, with means that differ per head and channel.
    """

    def __init__(self, case):
        rng = np.random.default_rng(1)
        self.case = case
        self.q = rng.standard_normal((case.heads, case.q_len, case.head_size), np.float32)
        self.k, self.v = (self._cache(rng) for _ in range(2))

    def _cache(self, rng):
        case = self.case
        x = rng.standard_normal((case.kv_heads, case.kv_len, case.head_size), np.float32)
        x += 0.5 * rng.standard_normal((case.kv_heads, 1, case.head_size), np.float32)
        return x


class Quantized:
    """Codes [heads, tokens, size] of x, with f16 scales (and integer zero points) for groups of 32
    along the last axis. Symmetric codes are int8, the others uint8."""

    def __init__(self, x, bits, zero_points):
        heads, tokens, size = x.shape
        groups = size // GROUP
        low, high = (0, 2**bits - 1) if zero_points else (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        self.codes = np.empty(x.shape, np.uint8 if zero_points else np.int8)
        self.scales = np.empty((heads, tokens, groups), np.float16)
        self.zero_points = np.zeros((heads, tokens, groups), np.uint8) if zero_points else None
        for h in range(heads):  # one at a time: the temporaries are as large as x
            rows = x[h].reshape(tokens, groups, GROUP)
            if zero_points:
                least = np.minimum(rows.min(-1), 0)
                span = np.maximum(rows.max(-1), 0) - least
            else:
                least, span = None, np.abs(rows).max(-1) * 2
            self.scales[h] = span / (high - low)
            scales = np.maximum(self.scales[h].astype(np.float32), 1e-8)
            codes = np.rint(rows / scales[..., None])
            if zero_points:
                self.zero_points[h] = np.rint(-least / scales)
                codes += self.zero_points[h][..., None]
            self.codes[h] = np.clip(codes, low, high).reshape(tokens, size)

    def head(self, h):
        """What the codes of one head stand for, in f64."""
        tokens, size = self.codes.shape[1:]
        codes = self.codes[h].astype(np.float64).reshape(tokens, -1, GROUP)
        if self.zero_points is not None:
            codes -= self.zero_points[h][..., None]
        return (codes * self.scales[h].astype(np.float64)[..., None]).reshape(tokens, size)


def pack4(codes):
    """Two codes per byte along the last axis, the first in the low half."""
    codes = codes.view(np.uint8) & 15
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def to_bf16(x):
    """The nearest bf16 of each f32, as the uint16 that holds it."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def causal_mask(case):
    """[q_len, kv_len], true where a query may not look."""
    last = np.arange(case.q_len)[:, None] + case.kv_len - case.q_len
    return np.arange(case.kv_len)[None, :] > last


def attention(case, q, kv):
    """f64 [heads, q_len, head_size]; kv(h) gives K and V of one KV head, [kv_len, head_size]."""
    out = np.empty((case.heads, case.q_len, case.head_size))
    for h in range(case.kv_heads):
        k, v = (x.astype(np.float64) for x in kv(h))
        for head in range(h * case.ratio, (h + 1) * case.ratio):
            scores = q[head].astype(np.float64) @ k.T / math.sqrt(case.head_size)
            if case.causal:
                scores[causal_mask(case)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[head] = scores @ v / scores.sum(-1, keepdims=True)
    return out


def relative_error(got, want):
    """sqrt(sum (got - want)^2 / sum want^2)."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def last_level_cache():
    """Bytes of the largest cache of the first CPU, or 64 MiB if the system names none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        text = pathlib.Path(path).read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1], 1))
    return max(sizes, default=64 << 20)


def beyond_caches():
    """How many bytes of buffers are taken in turn so that none is cached when its turn comes: twice
    the last-level cache. Some forty contestants of a case have buffers at the same time, so it is no
    more than a 64th of memory; where the cache is larger than that, it may hold some."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(2 * last_level_cache(), memory // 64)


def copies(num_bytes):
    """How many copies of buffers that is: as kvant's own tools/rotation.cc counts them."""
    return max(2, min(beyond_caches() // num_bytes + 1, 4096))
