"""What test_context_parallel.py runs: a rank, by torchrun; with the argument "lost", ranks that lose one."""

import contextlib
import datetime
import multiprocessing
import os
import socket
import sys
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist

import kvant
from kvant.torch import merge_attention
from kvant.torch.context_parallel import ContextParallelCache, SentBytes, split
from reference import distance, numbers

HEADS, QUERY_HEADS, SIZE, V_SIZE = 2, 6, 64, 32


def tokens_of(seed, batch, tokens, dtype):
    """q, k and v, the same on every rank."""
    shapes = (QUERY_HEADS, SIZE), (HEADS, SIZE), (HEADS, V_SIZE)
    return [torch.from_numpy(numbers(batch, heads, tokens, size, seed=seed + i)).to(dtype)
            for i, (heads, size) in enumerate(shapes)]


def chunks_of(ranks):
    """Of a prompt in uneven chunks, one of them empty where there are several."""
    return {1: [40], 2: [29, 11], 4: [17, 1, 0, 22]}[ranks]


def caches(scheme, batch, **more):
    shape = dict(batch=batch, heads=HEADS, head_size=SIZE, v_head_size=V_SIZE, layers=2)
    return ContextParallelCache(scheme, capacity=60, **shape, **more), kvant.KvCache(scheme, capacity=120, **shape)


def check_equals_one_process(scheme, dtype, bound, starts, group=None, **terms):
    """A prompt in chunks, single tokens, some at once, and single ones again, in both layers."""
    batch = len(starts)
    many, one = caches(scheme, batch, group=group)
    counts = chunks_of(many.ranks)
    sinks = terms.pop("sinks", None)
    logits = None if sinks is None else torch.linspace(-1, sinks, QUERY_HEADS)
    q, k, v = tokens_of(1, batch, sum(counts), dtype)
    for layer in range(2):
        begin = 0
        for rank, count in enumerate(counts):
            here = slice(begin, begin + count)
            begin += count
            # Rows begin within the first chunk.
            rows = starts if rank == 0 else [0] * batch
            piece = [x[:, :, here].contiguous() for x in (q, k, v)]
            if rank == many.rank:
                got = many.prefill(layer, *piece, starts=rows, sinks=logits, **terms)
                assert got.shape == (batch, QUERY_HEADS, count, V_SIZE) and got.dtype == dtype
            if count == 0:
                continue
            want = one.attend(layer, piece[0], k=piece[1], v=piece[2], starts=rows, sinks=logits, **terms)
            one.append(layer, *piece[1:], starts=rows)
            if rank == many.rank:
                for row, start in enumerate(rows):
                    assert distance(got[row, :, start:].float(), want[row, :, start:].float()) < bound
        assert many.length(layer, 0) == sum(counts) - starts[0] == one.length(layer, 0)
        for step, count in enumerate([1, 1, 1, 5, 1, 1]):
            q2, k2, v2 = tokens_of(100 + 10 * step, batch, count, dtype)
            got = many.attend(layer, q2, k2, v2, sinks=logits, **terms)
            if count == 1:
                one.append(layer, k2, v2)
                want = one.attend(layer, q2, sinks=logits, **terms)
            else:
                want = one.attend(layer, q2, k=k2, v=v2, sinks=logits, **terms)
                one.append(layer, k2, v2)
            assert got.dtype == dtype and distance(got.float(), want.float()) < bound, (step, distance(got, want))
        assert many.length(layer, batch - 1) == one.length(layer, batch - 1)
        # New tokens went where the fewest were.
        for rows in zip(*many.lengths(layer)):
            assert max(rows) - min(rows) <= max(counts) - min(counts), rows
    # Queries of no new token see all.
    q3 = tokens_of(7, batch, 2, dtype)[0]
    got, want = many.attend(0, q3), one.attend(0, q3, causal=False)
    assert distance(got.float(), want.float()) < bound
    many.reset()
    assert many.length() == 0


def check_groups():
    """Groups of one rank, and one of two of which neither is the first."""
    ranks = dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(ranks)]
    check_equals_one_process("f16", torch.float32, 1e-5, [1], group=alone[dist.get_rank()])
    if ranks == 4:
        odd = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            check_equals_one_process("f16", torch.float32, 1e-5, [0], group=odd)
        else:
            raises("this process is not in the group", lambda: caches("f16", 1, group=odd))


def check_windows():
    """Each rank keeps sinks and a window of its own: as attention over a cache for each, merged."""
    scheme = "u4:g32:rzp+sinks2+window6"
    many, _ = caches(scheme, 1)
    counts = chunks_of(many.ranks)
    q, k, v = tokens_of(3, 1, sum(counts), torch.float32)
    each = [caches_of_one(scheme) for _ in counts]
    begin = 0
    for rank, (cache, count) in enumerate(zip(each, counts)):
        piece = [x[:, :, begin:begin + count].contiguous() for x in (q, k, v)]
        begin += count
        if rank == many.rank:
            got = many.prefill(1, *piece)
        if count == 0:
            continue
        parts = [caches_of_one(scheme).attend(0, piece[0], k=piece[1], v=piece[2], stats=True)]
        parts += [before.attend(0, piece[0], causal=False, stats=True) for before in each[:rank] if before.length()]
        if rank == many.rank:
            assert distance(got, merge_attention(parts)[0]) < 1e-5
        cache.append(0, *piece[1:])
    for step in range(9):
        q2, k2, v2 = tokens_of(50 + 10 * step, 1, 1, torch.float32)
        shortest = min(each, key=lambda cache: cache.length())
        shortest.append(0, k2, v2)
        parts = [cache.attend(0, q2, causal=False, stats=True) for cache in each]
        assert distance(many.attend(1, q2, k2, v2), merge_attention(parts)[0]) < 1e-5


def caches_of_one(scheme):
    return kvant.KvCache(scheme, heads=HEADS, head_size=SIZE, v_head_size=V_SIZE, capacity=60)


@contextlib.contextmanager
def counted():
    """The bytes that leave a rank, as torch.distributed is told: of gathers, and from rank to rank."""
    count = {"headers": 0, "parts": 0, "chunks": 0}
    real = dist.all_gather, dist.all_gather_into_tensor, dist.batch_isend_irecv

    def all_gather(every, own, *more, **named):
        count["headers"] += own.numel() * own.element_size() * (len(every) - 1)
        return real[0](every, own, *more, **named)

    def all_gather_into_tensor(every, own, *more, **named):
        count["parts"] += (every.numel() - own.numel()) * own.element_size()
        return real[1](every, own, *more, **named)

    def batch_isend_irecv(operations):
        count["chunks"] += sum(each.tensor.numel() for each in operations if each.op is dist.isend)
        return real[2](operations)

    dist.all_gather, dist.all_gather_into_tensor, dist.batch_isend_irecv = (
        all_gather, all_gather_into_tensor, batch_isend_irecv)
    try:
        yield count
    finally:
        dist.all_gather, dist.all_gather_into_tensor, dist.batch_isend_irecv = real


def check_bytes():
    """What is sent is what docs/context_parallel.md says, and codes are less than a third of f16."""
    chunks = {}
    for scheme in ("f16", "int4_g32"):
        many, _ = caches(scheme, 2)
        counts = [32] * many.ranks
        q, k, v = tokens_of(5, 2, 32, torch.float16)
        with counted() as count:
            many.prefill(0, q, k, v)
            many.attend(0, q[:, :, :1], k[:, :, :1], v[:, :, :1])
        others = many.ranks - 1
        assert many.sent == SentBytes(**count), (many.sent, count)
        assert many.sent.parts == others * 2 * QUERY_HEADS * (V_SIZE + 1) * 4
        # Each chunk goes through all ranks behind its own: the last passes on none.
        bytes_of_chunk = many.cache.saved_bytes(0, [32, 32])
        passed = 0 if many.rank == others else many.rank + 1
        assert many.sent.chunks == passed * bytes_of_chunk
        chunks[scheme] = bytes_of_chunk
        assert sum(counts) == many.length(0) - 1
    elements = 2 * HEADS * 32 * (SIZE + V_SIZE)
    assert chunks["f16"] == 2 * elements
    assert chunks["f16"] > 3.1 * chunks["int4_g32"]


def raises(words, call):
    """On this rank an error with these words, of kvant's own."""
    try:
        call()
    except kvant.Error as error:
        assert words in str(error), (words, str(error))
        return
    raise AssertionError(f"no error with {words!r}")


def check_errors():
    many, _ = caches("f16", 1)
    rank, last = many.rank, many.ranks - 1
    q, k, v = tokens_of(1, 1, 4, torch.float32)
    odd = rank == last
    h = lambda x: x.half() if odd else x  # noqa: E731
    raises("ranks disagree about the type of q: it is 'torch.float32' on rank 0 and 'torch.float16' on rank "
           f"{last}", lambda: many.prefill(0, h(q), h(k), h(v)))
    raises(f"ranks disagree about layer: it is 0 on rank 0 and 1 on rank {last}",
           lambda: many.attend(int(odd), q, k, v))
    raises(f"ranks disagree about method: it is 'prefill' on rank 0 and 'attend' on rank {last}",
           lambda: many.attend(0, q, k, v) if odd else many.prefill(0, q, k, v))
    raises(f"ranks disagree about tokens: it is 4 on rank 0 and 3 on rank {last}",
           lambda: many.attend(0, *(x[:, :, :3] if odd else x for x in (q, k, v))))
    raises(f"ranks disagree about query heads: it is 6 on rank 0 and 4 on rank {last}",
           lambda: many.prefill(0, q[:, :4] if odd else q, k, v))
    raises(f"ranks disagree about scale: it is None on rank 0 and 0.5 on rank {last}",
           lambda: many.prefill(0, q, k, v, scale=0.5 if odd else None))
    raises(f"ranks disagree about whether there are sinks: it is 0 on rank 0 and 1 on rank {last}",
           lambda: many.prefill(0, q, k, v, sinks=torch.zeros(6) if odd else None))
    wrong = f"rank {last} of {many.ranks} has failed, and says why there"
    raises("k must be [1, 2, 4, 64] of torch.float32, not [1, 2, 3, 64] of torch.float32" if odd else wrong,
           lambda: many.prefill(0, q, k[:, :, :3] if odd else k, v))
    raises("there is no layer 7" if odd else wrong, lambda: many.prefill(7 if odd else 0, q, k, v))
    raises("row 0 starts at token 9 of 4" if odd else wrong,
           lambda: many.prefill(0, q, k, v, starts=[9 if odd else 0]))
    raises("k and v go together" if odd else wrong, lambda: many.attend(0, q, k, None if odd else v))
    # What a cache would refuse once others have begun.
    half = torch.zeros(6, dtype=torch.bfloat16 if odd else torch.float32)
    raises("sinks must be [6] of torch.float32, not [6] of torch.bfloat16" if odd else wrong,
           lambda: many.prefill(0, q, k, v, sinks=half))
    raises("scale must not be 0" if odd else wrong,
           lambda: many.prefill(0, q, k, v, scale=0.0 if odd else None))
    with_gradient = q.clone().requires_grad_(odd)
    raises("q requires grad" if odd else wrong, lambda: many.prefill(0, with_gradient, k, v))
    assert many.cache.length(0) == 0 and many.length(0) == 0
    # A number that one rank's cache refuses.
    nan = k.clone()
    if odd:
        nan[0, 1, 2, 3] = float("nan")
    raises("not finite" if odd else wrong, lambda: many.prefill(0, q, nan, v))
    assert many.cache.length(0) == 0 and many.length(0) == 0
    many.prefill(0, q, k, v)
    raises("prefill: layer 0 has tokens already", lambda: many.prefill(0, q, k, v))
    one = [x[:, :, :1] for x in (q, k, v)]
    before = many.cache.length(0)
    raises("attention with a soft cap of -1", lambda: many.attend(0, *one, soft_cap=-1.0))
    raises("sinks must be [6]", lambda: many.attend(0, *one, sinks=torch.zeros(5)))
    assert many.cache.length(0) == before and many.length(0) == 4 * many.ranks
    raises(f"rank 0 of {many.ranks} has failed" if rank else "not finite",
           lambda: many.attend(0, q[:, :, :1], torch.full_like(k[:, :, :1], float("inf")), v[:, :, :1]))
    many.reset()
    big = [torch.zeros(1, x.shape[1], 61, x.shape[3]) for x in (q, k, v)]
    raises(f"row 0 of layer 0 gets 61 tokens on rank {last}, more than its capacity of 60",
           lambda: many.prefill(0, *(x if odd else x[:, :, :1] for x in big)))
    raises("no rank has room for 61 more", lambda: many.attend(0, *big))
    # Caches that are not of one kind.
    make = lambda **changes: ContextParallelCache(  # noqa: E731
        **{"scheme": "f16", "heads": 2, "head_size": 64, "capacity": 10, **(changes if odd else {})})
    raises("a cache over ranks: ranks disagree about the scheme of layer 0: it is 'f16",
           lambda: make(scheme="int8_th"))
    raises(f"ranks disagree about heads: it is 2 on rank 0 and 4 on rank {last}", lambda: make(heads=4))
    raises(f"rank {last} of {many.ranks} makes no cache: ", lambda: make(scheme="int3_what"))
    # Capacities may differ: what has no room elsewhere goes where there is some.
    uneven = make(capacity=3)
    for _ in range(12):
        uneven.attend(0, q[:, :2, :1], k[:, :, :1], k[:, :, :1])
    assert uneven.lengths()[last] == [3] and uneven.length() == 12


def check_split():
    for ranks in (1, 2, 3, 8):
        for tokens in (0, 1, 7, 4096):
            for balance in ("compute", "memory"):
                counts = split(tokens, ranks, balance)
                assert len(counts) == ranks and sum(counts) == tokens and min(counts) >= 0
    # Products of queries and keys, of which each rank should have a quarter.
    counts = split(1 << 20, 4)
    done, products = 0, []
    for count in counts:
        products.append(count * done + count * count / 2)
        done += count
    np.testing.assert_allclose(products, 2**39 / 4, rtol=1e-4)
    raises("a prompt of -1 tokens", lambda: split(-1, 2))
    raises("balance must be", lambda: split(1, 2, "time"))


def check_all():
    check_split()
    check_equals_one_process("f32", torch.float32, 1e-5, [0, 3])
    check_equals_one_process("f16", torch.float16, 2e-3, [2, 0], scale=0.2, soft_cap=4.0)
    check_equals_one_process("f16", torch.float32, 1e-5, [0], sinks=2.0)
    check_equals_one_process("int4_g32", torch.float32, 3e-3, [5, 0, 1])
    check_equals_one_process("nf4_g32", torch.bfloat16, 2e-2, [0])
    check_groups()
    check_windows()
    check_bytes()
    check_errors()


def check_a_lost_rank(method, how):
    """Rank 1 leaves, or hangs, when it is its turn; the others are told within the timeout."""
    many, _ = caches("int4_g32", 1)
    q, k, v = tokens_of(1, 1, 4, torch.float32)

    def lost(*_):
        if how == "hangs":
            time.sleep(40)
        os._exit(0)

    if method == "attend":
        many.prefill(0, q, k, v)
        call, where = many.attend, "attend in layer 0"
        if many.rank == 1:
            lost()
    else:
        call, where = many.prefill, "hop 1 of chunks of layer 0"
        if many.rank == 1:
            dist.batch_isend_irecv = lost
    began = time.monotonic()
    raises(f"rank {many.rank} of {many.ranks}: {where} failed, as when a rank is gone", lambda: call(0, q, k, v))
    assert time.monotonic() - began < 20


def rank_of_a_group(rank, port, method, how):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="3", RANK=str(rank))
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
        check_a_lost_rank(method, how)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the group cannot be left in good order


def check_lost_ranks():
    """Groups of three beside each other, in forks of this process: each would take seconds to import torch."""
    fork = multiprocessing.get_context("fork")
    ranks = {}
    for case in [(method, how) for method in ("prefill", "attend") for how in ("leaves", "hangs")]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(3):
            ranks[case, rank] = fork.Process(target=rank_of_a_group, args=(rank, port, *case))
            ranks[case, rank].start()
    told = {name: process for name, process in ranks.items() if name[1] != 1}
    for process in told.values():
        process.join(60)
    codes = {name: process.exitcode for name, process in told.items()}
    for process in ranks.values():
        process.kill()
        process.join()
    assert set(codes.values()) == {0}, codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["lost"]:
        check_lost_ranks()
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        check_all()
        dist.barrier()
        dist.destroy_process_group()
        # gloo's threads may still let go of tensors. They need Python's lock for it, and a thread that asks for
        # it while the interpreter is taken down ends the process: pytorch/pytorch#179291.
        os._exit(0)
