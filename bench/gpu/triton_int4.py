"""Decoding over an int4 cache as a user of Triton would write it: split-K, dequantized to f16 in
registers, products by tl.dot. Row-wise: codes [heads, tokens, D / 2], two per byte, and an f16
scale and shift per row; a value is code * scale - shift."""
import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 4, 2), (64, 4, 3), (128, 4, 3))
]


@triton.jit
def _dequantized(codes, scales, shifts, row, live, half, HALF: tl.constexpr):
    """The even and the odd channels of a tile, which are the low and the high nibbles."""
    at = codes + row[:, None] * HALF + half[None, :]
    bytes_ = tl.load(at, mask=live[:, None], other=0)
    scale = tl.load(scales + row, mask=live, other=0.0)[:, None]
    shift = tl.load(shifts + row, mask=live, other=0.0)[:, None]
    even = (bytes_ & 15).to(tl.float16) * scale - shift
    odd = (bytes_ >> 4).to(tl.float16) * scale - shift
    return even, odd


@triton.autotune(configs=CONFIGS, key=["ROWS", "HALF", "capacity"])
@triton.jit
def _split(q, k, k_scales, k_shifts, v, v_scales, v_shifts, lengths, partial, sums,
           capacity, scale, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
           HALF: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of all sequences' key heads
    split = tl.program_id(1)
    tokens = tl.load(lengths + head // KV_HEADS)
    run = tl.cdiv(tl.cdiv(tokens, SPLITS), BLOCK) * BLOCK
    rows = tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    at_q = q + (head * QUERIES + rows[:, None]) * 2 * HALF + 2 * half[None, :]
    q_even = tl.load(at_q, mask=rows[:, None] < QUERIES, other=0.0)
    q_odd = tl.load(at_q + 1, mask=rows[:, None] < QUERIES, other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o_even = tl.zeros([ROWS, HALF], tl.float32)
    o_odd = tl.zeros([ROWS, HALF], tl.float32)
    end = tl.minimum((split + 1) * run, tokens)
    for start in range(split * run, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        live = token < end
        row = head * capacity + token
        even, odd = _dequantized(k, k_scales, k_shifts, row, live, half, HALF)
        scores = (tl.dot(q_even, tl.trans(even)) + tl.dot(q_odd, tl.trans(odd))) * scale
        scores = tl.where(live[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        top = higher
        even, odd = _dequantized(v, v_scales, v_shifts, row, live, half, HALF)
        weights = p.to(tl.float16)
        o_even = o_even * shrink[:, None] + tl.dot(weights, even)
        o_odd = o_odd * shrink[:, None] + tl.dot(weights, odd)
    place = (head * SPLITS + split) * ROWS + rows
    at_o = partial + place[:, None] * 2 * HALF + 2 * half[None, :]
    tl.store(at_o, o_even)
    tl.store(at_o + 1, o_odd)
    tl.store(sums + 2 * place, top)
    tl.store(sums + 2 * place + 1, total)


@triton.jit
def _join(partial, sums, out, QUERIES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    place = (head * SPLITS + tl.arange(0, SPLITS)) * ROWS + row
    top = tl.load(sums + 2 * place)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + 2 * place + 1), 0)
    channel = tl.arange(0, D)
    parts = tl.load(partial + place[:, None] * D + channel[None, :])
    o = tl.sum(parts * weight[:, None], 0) / total
    tl.store(out + (head * QUERIES + row) * D + channel, o.to(tl.float16))


class Decode:
    """Calls on q [heads, queries, D] f16; `heads` are all sequences' key heads."""

    def __init__(self, heads, kv_heads, queries, capacity, head_size):
        device = torch.cuda.get_device_properties(0)
        wanted = -(-4 * device.multi_processor_count // heads)
        self.splits = min(64, 1 << (wanted - 1).bit_length(), max(1, capacity // 256))
        self.rows = max(16, 1 << (queries - 1).bit_length())
        self.shape = (heads, kv_heads, queries, capacity, head_size)
        self.scale = head_size**-0.5 * 1.4426950408889634
        places = heads * self.splits * self.rows
        self.partial = torch.empty(places * head_size, dtype=torch.float32, device="cuda")
        self.sums = torch.empty(places * 2, dtype=torch.float32, device="cuda")

    def __call__(self, q, k, v, lengths, out):
        """k and v: (codes, scales, shifts)."""
        heads, kv_heads, queries, capacity, head_size = self.shape
        _split[heads, self.splits](q, *k, *v, lengths, self.partial, self.sums, capacity,
                                   self.scale, KV_HEADS=kv_heads, QUERIES=queries, ROWS=self.rows,
                                   HALF=head_size // 2, SPLITS=self.splits)  # fmt: skip
        _join[heads, queries](self.partial, self.sums, out, QUERIES=queries, ROWS=self.rows,
                              D=head_size, SPLITS=self.splits)  # fmt: skip
