"""One decoding step over int4 K and V through torch.compile: backend kvant beside inductor alone, in turns.

torch_compile.py [ROUNDS]. First with the codes of a byte side by side, then with them in planes, as HQQ has them, which
kvant repacks at each step. Each line has the median times of both over the rounds, the median ratio within a round, and the
rate at which kvant's step reads the cache, as a share of that of a sum over as many bytes in the same round. Run it where
the package kvant and torch are installed.
"""
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import kvant.torch

HEADS, KV_HEADS, SIZE, GROUP = 32, 8, 128, 32


def side_by_side(codes, scales, zeros, tokens):
    """Groups are the rows of all, and codes [rows, bytes of a group]."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(-1, GROUP)
    return ((pairs.float() - zeros) * scales).view(1, KV_HEADS, tokens, SIZE)


def planes(codes, scales, zeros, tokens):
    """The high halves are the first half of the rows."""
    step = codes.shape[0]
    rows = torch.empty([2 * step, GROUP])
    rows[:step] = (codes & 240) >> 4
    rows[step:] = codes & 15
    return ((rows - zeros) * scales).view(1, KV_HEADS, tokens, SIZE)


def step(int4, q, tokens, *cache):
    return F.scaled_dot_product_attention(q, int4(*cache[:3], tokens), int4(*cache[3:], tokens), enable_gqa=True)


def cache_of(int4, tokens):
    groups = KV_HEADS * tokens * SIZE // GROUP
    packed = (groups, GROUP // 2) if int4 is side_by_side else (groups // 2, GROUP)
    return (torch.randint(0, 256, packed, dtype=torch.uint8), torch.rand(groups, 1) * 0.02, torch.rand(groups, 1) * 15)


def milliseconds(function, *arguments):
    start = time.perf_counter()
    for _ in range(3):
        function(*arguments)
    return (time.perf_counter() - start) / 3 * 1e3


@torch.no_grad()
def main(rounds=15):
    print("| codes | tokens | kvant, ms | inductor, ms | inductor / kvant | of the rate of a sum |\n|---|---|---|---|---|---|")
    for int4 in (side_by_side, planes):
        for tokens in (512, 4096, 32768):
            measure(int4, tokens, rounds)


def measure(int4, tokens, rounds):
    torch._dynamo.reset()
    q, cache = torch.randn(1, HEADS, 1, SIZE), (*cache_of(int4, tokens), *cache_of(int4, tokens))
    ours = torch.compile(lambda *x: step(int4, q, tokens, *x), backend="kvant", fullgraph=True)
    theirs = torch.compile(lambda *x: step(int4, q, tokens, *x), fullgraph=True)
    want = step(int4, q, tokens, *cache)
    for compiled in (ours, theirs):
        assert (compiled(*cache) - want).norm() < 2e-3 * want.norm()
    report = kvant.torch.reports_of(ours)[-1]
    assert "K is u4" in report.text and "V is u4" in report.text, report
    size = sum(x.nbytes for x in cache)
    memory = torch.ones(size // 4)
    times = [(milliseconds(ours, *cache), milliseconds(theirs, *cache), milliseconds(memory.sum)) for _ in range(rounds)]
    own, other, reading = (statistics.median(column) for column in zip(*times))
    ratio = statistics.median(b / a for a, b, _ in times)
    share = statistics.median(c / a for a, _, c in times)
    name = int4.__name__.replace("_", " ")
    print(f"| {name} | {tokens} | {own:.2f} | {other:.2f} | {ratio:.1f} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
