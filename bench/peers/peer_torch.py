"""torch's scaled_dot_product_attention on f32 and bf16, and on int8 that is dequantized first."""
import attention
import torch
import torch.nn.functional as F


def version():
    return f"torch {torch.__version__}"


class Sdpa:
    """`load` makes K and V as [1, kv_heads, kv_len, head_size] from one copy of the buffers."""

    def __init__(self, case, q, buffers, load, kv):
        self.case = case
        self.load = load
        self.kv = kv
        q = torch.from_numpy(q).to(torch.bfloat16 if load is _bf16 else torch.float32)
        self.bytes = 2 * q.nbytes + sum(b.nbytes for b in buffers)
        self.rotation = [[b.clone() for b in buffers] for _ in range(attention.copies(self.bytes))]
        self.runs = 0
        # The query heads of a group as more queries of one head: faster here than enable_gqa, which
        # copies K and V.
        self.q = q.reshape(1, case.kv_heads, case.ratio * case.q_len, case.head_size)
        self.mask = None
        if case.causal:
            masked = torch.from_numpy(attention.causal_mask(case)).repeat(case.ratio, 1)
            self.mask = torch.zeros(masked.shape, dtype=q.dtype).masked_fill_(masked, -torch.inf)
        self.detail = "query heads of a group as queries of one head"

    def run(self):
        k, v = self.load(self.rotation[self.runs % len(self.rotation)])
        self.out = F.scaled_dot_product_attention(self.q, k, v, attn_mask=self.mask)
        self.runs += 1

    def output(self):
        shape = (self.case.heads, self.case.q_len, self.case.head_size)
        return self.out.double().numpy().reshape(shape)


def _f32(buffers):
    return buffers


def _bf16(buffers):
    return buffers


def _int8(buffers):
    k, k_scales, v, v_scales = buffers
    return _dequantize(k, k_scales), _dequantize(v, v_scales)


def _dequantize(codes, scales):
    groups = codes.view(*scales.shape, attention.GROUP).to(torch.float32)
    return (groups * scales.to(torch.float32)[..., None]).view(codes.shape)


def make(data, kind, threads):
    torch.set_num_threads(threads)
    if kind == "int8":
        stored = [attention.Quantized(x, 8, zero_points=False) for x in (data.k, data.v)]
        buffers = [torch.from_numpy(b)[None] for q in stored for b in (q.codes, q.scales)]
        return Sdpa(data.case, data.q, buffers, _int8, lambda h: [q.head(h) for q in stored])
    dtype, load = {"f32": (torch.float32, _f32), "bf16": (torch.bfloat16, _bf16)}[kind]
    buffers = [torch.from_numpy(x)[None].to(dtype) for x in (data.k, data.v)]

    def kv(h):
        return [b[0, h].double().numpy() for b in buffers]

    return Sdpa(data.case, data.q, buffers, load, kv)
