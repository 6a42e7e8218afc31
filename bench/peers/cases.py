"""What is timed: the cases (shapes) and, for each, the contestants."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of attention: f32 queries [heads, q_len, head_size] over kv_len tokens.

    `causal` masks as a chunk at the end of the cache does (bottom-right).
    """

    name: str
    kv_heads: int
    kv_len: int
    q_len: int = 1
    causal: bool = False
    heads: int = 32
    head_size: int = 128

    @property
    def title(self):
        what = f"{self.q_len} causal queries" if self.prefill else "one query"
        return f"{what}, {self.heads} heads on {self.kv_heads} KV heads, {self.kv_len} tokens"

    @property
    def ratio(self):
        return self.heads // self.kv_heads

    @property
    def prefill(self):
        return self.q_len > 1

    @property
    def gflop(self):
        """Of both products over the whole rectangle, masked or not."""
        return 4e-9 * self.heads * self.q_len * self.kv_len * self.head_size


CASES = (
    Case("decode-r4", 8, 32768),
    Case("decode-r1", 32, 8192),
    Case("decode-r8", 4, 65536),
    Case("prefill", 8, 4096, 512, True),
    Case("small", 8, 512),
)


def quick(case):
    """The same case, small enough for a look at whether everything runs."""
    return dataclasses.replace(
        case, kv_len=min(case.kv_len, 512), q_len=64 if case.prefill else 1
    )


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    family: which worker runs it. kind: how K and V are stored there, for the worker.
    format: the same in words. bits: per element of K and V, scales and zero points included.
    against: the kvant contestants that its times are divided by.
    """

    name: str
    family: str
    kind: str
    format: str
    bits: float
    against: tuple = ()
    fpmath: str = "strict"  # kvant and oneDNN
    isa: str = ""  # kvant: forces a lower instruction set; empty: the best

    @property
    def worker(self):
        return (self.family, self.isa)


INT8, INT4, F16 = "s8:g32:sf16", "u4:g32:zp:sf16", "f16"
WORDS = {
    INT8: ("int8, groups of 32, f16 scales", 8.5),
    INT4: ("int4, groups of 32, f16 scales, zero points", 4.75),
    F16: ("f16, uncompressed", 16.0),
}
STATIC = "one static scale for all of K and one for V, symmetric, no zero points"


def kvant(name, kind, **options):
    words, bits = WORDS[kind]
    return Contestant(f"kvant {name}", "kvant", kind, words, bits, **options)


def ggml(family, int8, int4, f16):
    """What ggml and its fork both have."""
    q8_0 = "int8, groups of 32, f16 scales; 8-bit queries"
    q4_0 = "int4, groups of 32, f16 scales, no zero points; 8-bit queries"
    return (
        Contestant(f"{family} f16", family, "f16", "f16, uncompressed", 16, f16),
        Contestant(f"{family} q8_0", family, "q8_0", q8_0, 8.5, int8),
        Contestant(f"{family} q4_0", family, "q4_0", q4_0, 4.5, int4),
    )


def peers(int8, int4, f16, bf16):
    """The others; each argument names the kvant contestants that one storage compares with."""
    dense = "uncompressed"
    return (
        Contestant("onnxruntime int8", "onnxruntime", "int8", f"int8, {STATIC}", 8, int8),
        Contestant("onnxruntime int4", "onnxruntime", "int4", f"int4, {STATIC}", 4, int4),
        *ggml("ggml", int8, int4, f16),
        *ggml("ik_llama", int8, int4, f16),
        Contestant("ik_llama bf16", "ik_llama", "bf16", f"bf16, {dense}", 16, bf16),
        Contestant("torch f32", "torch", "f32", f"f32, {dense}", 32, f16),
        Contestant("torch bf16", "torch", "bf16", f"bf16, {dense}; bf16 queries", 16, bf16),
        Contestant("torch int8", "torch", "int8", "int8, groups of 32, f16 scales; dequantized to "
                   "f32, then SDPA", 8.5, int8),
        Contestant("oneDNN f32", "onednn", "f32", f"f32, {dense}", 32, f16),
        Contestant("oneDNN bf16", "onednn", "bf16", f"bf16, {dense}; bf16 queries", 16, bf16),
        Contestant("oneDNN int8", "onednn", "int8", "int8, groups of 32, f32 scales", 9, int8),
        Contestant("oneDNN int4", "onednn", "int4", "int4, groups of 32, f32 scales, zero points",
                   5.25, int4),
    )


def contestants(case):
    """In the order in which they take turns, kvant's first."""
    if not case.prefill:
        mine = tuple(
            kvant(f"{name}{suffix}", kind, isa=isa, against=(f"kvant {name}",) if isa else ())
            for suffix, isa in (("", ""), (" AVX2", "avx2"))
            for name, kind in (("int4", INT4), ("int8", INT8), ("f16", F16))
        )
        return mine + peers(("kvant int8",), ("kvant int4",), ("kvant f16",), ("kvant f16",))
    mine = tuple(
        kvant(f"{name}{suffix}", kind, fpmath=fpmath)
        for suffix, fpmath in (("", "strict"), (" bf16 math", "bf16"))
        for name, kind in (("int4", INT4), ("int8", INT8))
    )
    exact = ("kvant int8", "kvant int4")
    fast = ("kvant int8 bf16 math", "kvant int4 bf16 math")
    return mine + peers(exact[:1], exact[1:], exact, fast)


def why_left_out(case, contestant):
    """A sentence if it would take too long; empty if it takes part."""
    compressed = contestant.kind in ("int8", "int4")
    if contestant.family == "onednn" and compressed and case.prefill:
        # Some 20 million multiplications a second and thread.
        return "oneDNN runs it in its reference code, a quarter of an hour per call"
    return ""
