"""One decoding step over int4 K and V through torch.compile: backend kvant beside inductor alone, in turns.

torch_compile.py [ROUNDS]. Each line has the median times of both over the rounds, the median ratio within a
round, and the rate at which kvant's step reads the cache, as a share of that of a sum over as many bytes in
the same round. Run it where the package kvant and torch are installed.
"""
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import kvant.torch

HEADS, KV_HEADS, SIZE, GROUP = 32, 8, 128, 32


def int4(codes, scales, zeros):
    batch, heads, tokens, half = codes.shape
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(batch, heads, tokens, 2 * half // GROUP, GROUP)
    return ((pairs.float() - zeros[..., None].float()) * scales[..., None]).view(batch, heads, tokens, 2 * half)


def step(q, *cache):
    return F.scaled_dot_product_attention(q, int4(*cache[:3]), int4(*cache[3:]), enable_gqa=True)


def cache_of(tokens):
    groups = (1, KV_HEADS, tokens, SIZE // GROUP)
    return (torch.randint(0, 256, (1, KV_HEADS, tokens, SIZE // 2), dtype=torch.uint8),
            torch.rand(groups) * 0.02, torch.randint(0, 16, groups, dtype=torch.uint8))


def milliseconds(function, *arguments):
    start = time.perf_counter()
    for _ in range(3):
        function(*arguments)
    return (time.perf_counter() - start) / 3 * 1e3


@torch.no_grad()
def main(rounds=15):
    print("| tokens | kvant, ms | inductor, ms | inductor / kvant | of the rate of a sum |\n|---|---|---|---|---|")
    for tokens in (512, 4096, 32768):
        torch._dynamo.reset()
        q, cache = torch.randn(1, HEADS, 1, SIZE), (*cache_of(tokens), *cache_of(tokens))
        ours = torch.compile(lambda *x: step(*x), backend="kvant", fullgraph=True)
        theirs = torch.compile(lambda *x: step(*x), fullgraph=True)
        want = step(q, *cache)
        for compiled in (ours, theirs):
            assert (compiled(q, *cache) - want).norm() < 2e-3 * want.norm()
        assert kvant.torch.reports_of(ours)[-1].fused, kvant.explain(ours)
        size = sum(x.nbytes for x in cache)
        memory = torch.ones(size // 4)
        times = [(milliseconds(ours, q, *cache), milliseconds(theirs, q, *cache), milliseconds(memory.sum))
                 for _ in range(rounds)]
        own, other, reading = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(b / a for a, b, _ in times)
        share = statistics.median(c / a for a, _, c in times)
        print(f"| {tokens} | {own:.2f} | {other:.2f} | {ratio:.1f} | {share:.2f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
