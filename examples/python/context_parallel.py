"""A prompt whose tokens are spread over ranks, and tokens decoded behind it, beside one cache of all.

    torchrun --nproc-per-node 4 context_parallel.py     # on one machine; without torchrun it starts two ranks
"""

import os
import subprocess
import sys

try:
    import torch
    import torch.distributed as dist
except ImportError:
    sys.exit("context_parallel.py needs torch")

import kvant
from kvant.torch.context_parallel import ContextParallelCache, split

SCHEME, TOKENS, STEPS = "int4_g32", 1500, 20
SHAPE = dict(layers=1, heads=2, head_size=64)
QUERY_HEADS = 8


def tokens_of(seed, tokens):
    """q, k and v, the same on every rank: a model would compute each rank's own."""
    generator = torch.Generator().manual_seed(seed)
    heads = (QUERY_HEADS, SHAPE["heads"], SHAPE["heads"])
    return [torch.randn(1, each, tokens, SHAPE["head_size"], generator=generator) for each in heads]


def distance(a, b):
    return float((a - b).norm() / b.norm())


def main():
    dist.init_process_group("gloo")  # "nccl", and device="cuda:..", on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # As much to compute on each: those in front get more tokens, as their queries see fewer.
    counts = split(TOKENS, ranks)
    many = ContextParallelCache(SCHEME, capacity=TOKENS, **SHAPE)
    one = kvant.KvCache(SCHEME, capacity=TOKENS + STEPS, **SHAPE)

    prompt, begin = tokens_of(0, TOKENS), 0
    for chunk, count in enumerate(counts):
        q, k, v = (x[:, :, begin : begin + count].contiguous() for x in prompt)
        begin += count
        if chunk == rank:
            mine = many.prefill(0, q, k, v)
        want = one.attend(0, q, k=k, v=v)
        one.append(0, k, v)
        if chunk == rank:
            assert distance(mine, want) < 5e-3
    ring = many.sent.chunks

    for step in range(STEPS):
        q, k, v = tokens_of(1 + step, 1)
        o = many.attend(0, q, k, v)
        one.append(0, k, v)
        assert distance(o, one.attend(0, q)) < 5e-3
    print(
        f"rank {rank} of {ranks}: {counts[rank]} tokens of the prompt, {many.lengths()[rank][0]} now; "
        f"{ring} bytes of codes sent on, {many.sent.parts // STEPS} bytes for each step",
        flush=True,
    )
    assert many.length() == one.length() == TOKENS + STEPS
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
        os._exit(0)  # gloo's threads may meet an interpreter that is taken down: pytorch/pytorch#179291
    else:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        sys.exit(subprocess.run([sys.executable, *command], check=False).returncode)
