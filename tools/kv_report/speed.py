"""What a scheme saves: bytes, peak memory, and time per decoded token.

Each measurement is a process of its own, so that its peak is the scheme's alone:

    python3 -m kv_report.speed SCHEME TOKENS

prints a JSON object. The shapes are the model's, all layers, one sequence. A decoded
token is, layer by layer, one append and one attention, so that a layer's cache has
left the CPU's own caches when its turn comes again, as it would between the model's
other weights.
"""

import json
import resource
import subprocess
import sys
import time

import numpy as np

from . import kvant_kv
from .packages import ROOT

LAYERS, QUERY_HEADS, HEADS, HEAD_SIZE = 30, 9, 3, 64
LENGTHS = (512, 1024, 2048, 4096, 8192, 32768)
BASELINE = "f16"
FILL_TOKENS = 256  # appended at a time: input arrays stay small beside the cache
SECONDS = 1.0
MIN_ROUNDS, MAX_ROUNDS = 7, 200


def measure(scheme, tokens, threads):
    """Fills a cache with `tokens` and decodes, in turns with one that holds f16.

    The peak is taken before the other cache exists. `ratio` is the median over
    rounds of this scheme's time to the other's in the same round, so what else the
    machine does moves both.
    """
    library = kvant_kv.Library()
    shape = dict(batch=1, heads=HEADS, head_size=HEAD_SIZE, layers=LAYERS, threads=threads,
                 capacity=tokens + MAX_ROUNDS + 1)
    before = _peak()
    with library.cache(scheme, **shape) as cache:
        _fill(cache, tokens)
        result = {"bytes": cache.used_bytes, "storage": cache.bytes}
        _decode(cache)
        result |= {"kernel": cache.kernel, "peak_rss": _peak(), "peak_before": before}
        with library.cache(BASELINE, **shape) as baseline:
            _fill(baseline, tokens)
            _decode(baseline)
            times = []
            start = time.monotonic()
            while len(times) < MIN_ROUNDS or (
                    len(times) < MAX_ROUNDS - 1 and time.monotonic() - start < SECONDS):
                times.append((_decode(cache), _decode(baseline)))
    own, other = np.array(times).T
    return result | {
        "ms_per_token": 1e3 * float(np.median(own)),
        "f16_ms_per_token": 1e3 * float(np.median(other)),
        "ratio": float(np.median(own / other)),
    }


def _fill(cache, tokens):
    # A few channels of K are larger, as in models. The same chunk again and again:
    # time does not depend on the values, but quantizing does on there being any.
    generator = np.random.default_rng(1)
    k, v = generator.standard_normal((2, 1, HEADS, FILL_TOKENS, HEAD_SIZE), np.float32)
    k[..., 42:52] *= 8
    for layer in range(LAYERS):
        for begin in range(0, tokens, FILL_TOKENS):
            count = min(FILL_TOKENS, tokens - begin)
            cache.append(layer, *(np.ascontiguousarray(x[:, :, :count]) for x in (k, v)))


_generator = np.random.default_rng(2)


def _decode(cache):
    """Seconds for one token in all layers."""
    q = _generator.standard_normal((1, QUERY_HEADS, 1, HEAD_SIZE), np.float32)
    k, v = _generator.standard_normal((2, 1, HEADS, 1, HEAD_SIZE), np.float32)
    start = time.perf_counter()
    for layer in range(LAYERS):
        cache.append(layer, k, v)
        cache.attend(layer, q)
    return time.perf_counter() - start


def _peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(scheme, tokens, threads):
    """measure() in a new process."""
    printed = subprocess.run(
        [sys.executable, "-m", "kv_report.speed", scheme, str(tokens), str(threads)],
        check=True, stdout=subprocess.PIPE, cwd=ROOT / "tools").stdout
    return json.loads(printed)


def crossover(ratios):
    """The cache length from which a scheme is faster than f16 on, or None.

    ratios: [(tokens, time / f16's time)] by length; between two lengths, the line
    through both over the logarithm of the length.
    """
    if not ratios or ratios[-1][1] >= 1:
        return None
    for (low, above), (high, below) in reversed(list(zip(ratios, ratios[1:]))):
        if above >= 1:
            return round(float(low * (high / low) ** ((above - 1) / (above - below))))
    return ratios[0][0]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
