"""The other contestants, in this process: each is called in a CUDA graph over rotating buffers, as
kvant is. A peer that cannot run raises, and its sentence is reported."""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

CALLS = 20
MEMORY_SHARE = 0.2
# Scores of a slice that is computed again in f64.
MOST_SCORES = 5e7


def _copies(nbytes):
    """As many as four times the second-level cache, or as fit."""
    device = torch.cuda.get_device_properties(0)
    beyond = -(-4 * device.L2_cache_size // nbytes) + 1
    return int(max(1, min(beyond, MEMORY_SHARE * device.total_memory // nbytes)))


def _reference(q, k, v, causal):
    """Attention in f64 of q [rows of heads, Sq, D] that share k and v [S, D]."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(k.shape[0] - scores.shape[-2]), -torch.inf)
    return scores.softmax(-1) @ v


def _relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


class Captured:
    """Subclasses have call(copy) and error()."""

    def __init__(self, copies):
        self.copies = copies
        self.calls = max(CALLS, copies)

    def capture(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(3):
                self.call(i % self.copies)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                self.call(i % self.copies)
        torch.cuda.synchronize()

    def time(self, replays):
        """Microseconds of a call, of each replay."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times = []
        for _ in range(replays):
            events[0].record()
            self.graph.replay()
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3 / self.calls)
        return times


class Sdpa(Captured):
    """torch's scaled_dot_product_attention on bf16. Where nothing is masked, the query heads of a
    group are more queries of one head, which is the fastest way to call it."""

    def __init__(self, shape, backend):
        s = shape
        self.shape, self.backend = s, backend
        self.kv_bytes = 4 * s.batch * s.kv_heads * s.kv_len * s.head_size
        super().__init__(_copies(self.kv_bytes))
        made = {"dtype": torch.bfloat16, "device": "cuda"}
        kv = (s.batch, s.kv_heads, s.kv_len, s.head_size)
        self.kv = [[torch.randn(kv, **made) for _ in "kv"] for _ in range(self.copies)]
        rows = (s.heads, s.q_len) if s.causal else (s.kv_heads, s.ratio * s.q_len)
        self.q = torch.randn((s.batch, *rows, s.head_size), **made)
        self.arguments = {}
        if s.causal:
            self.arguments["enable_gqa"] = True
            if s.q_len == s.kv_len:
                self.arguments["is_causal"] = True
            else:
                self.arguments["attn_mask"] = causal_lower_right(s.q_len, s.kv_len)
        self.capture()

    def call(self, copy):
        k, v = self.kv[copy]
        with sdpa_kernel(self.backend):
            self.out = F.scaled_dot_product_attention(self.q, k, v, **self.arguments)

    def error(self):
        s = self.shape
        if s.ratio * s.q_len * s.kv_len > MOST_SCORES:
            return None
        rows = s.ratio if s.causal else 1
        self.call(0)
        k, v = self.kv[0]
        want = _reference(self.q[-1, :rows], k[-1, 0], v[-1, 0], s.causal)
        return _relative_error(self.out[-1, :rows], want)


class TritonInt4(Captured):
    def __init__(self, shape):
        import triton_int4

        s = self.shape = shape
        self.heads = s.batch * s.kv_heads
        queries = s.ratio * s.q_len
        self.decode = triton_int4.Decode(
            self.heads, s.kv_heads, queries, s.kv_len, s.head_size
        )
        lengths = s.lengths or [s.kv_len] * s.batch
        of_token = s.head_size + 8  # codes of K and V, two scales, two shifts
        self.kv_bytes = sum(lengths) * s.kv_heads * of_token
        super().__init__(_copies(self.heads * s.kv_len * of_token))
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.kv = [[self._stored() for _ in "kv"] for _ in range(self.copies)]
        size = (self.heads, queries, s.head_size)
        self.q = torch.randn(size, dtype=torch.float16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.capture()

    def _stored(self):
        rows = (self.heads, self.shape.kv_len)
        made = {"device": "cuda"}
        codes = torch.randint(256, (*rows, self.shape.head_size // 2), dtype=torch.uint8, **made)
        scales = (torch.rand(rows, **made) * 0.12 + 0.14).half()
        shifts = (torch.rand(rows, **made) * 0.6 + 1.2).half()
        return codes, scales, shifts

    def call(self, copy):
        self.decode(self.q, *self.kv[copy], self.lengths, self.out)

    def error(self):
        self.call(0)
        tokens = int(self.lengths[-1])
        kv = []
        for codes, scales, shifts in self.kv[0]:
            nibbles = torch.stack((codes[-1] & 15, codes[-1] >> 4), -1).flatten(-2).double()
            values = nibbles * scales[-1, :, None].double() - shifts[-1, :, None].double()
            kv.append(values[:tokens])
        return _relative_error(self.out[-1], _reference(self.q[-1], *kv, False))


def make(name, shape):
    if name == "torch flash bf16":
        return Sdpa(shape, SDPBackend.FLASH_ATTENTION)
    if name == "torch cuDNN bf16":
        return Sdpa(shape, SDPBackend.CUDNN_ATTENTION)
    return TritonInt4(shape)


def versions():
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuDNN": str(torch.backends.cudnn.version()),
    }


def clear():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
