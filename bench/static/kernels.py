"""The specialisations that CI compiles and counts: names, and what `kvant make` is given.

A row is there because it takes another way through the planner or the kernels: a type, a group
size, a kind of zero point, a head size, a number of query heads per KV head, a step on scores.
"""
import dataclasses

ARCHS = ("sm_80", "sm_90a", "sm_100a")


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    make: tuple  # arguments of kvant make
    kind: str  # decode or prefill
    # The row of the decode design's instruction table that this is measured against, for sm_90a:
    # {elements of a lane in a round: (of the ALU, of all pipes)}, per element of K and V and lane.
    # 256 are warp tiles of 32 tokens, 512 of 64.
    design: dict = dataclasses.field(default_factory=dict)

    def design_of(self, elements_per_lane):
        """That of such a round, else of the nearest; None without any."""
        nearest = min(self.design, key=lambda n: abs(n - elements_per_lane), default=None)
        return self.design.get(nearest)


def _decode(name, k, v=None, heads=8, head_size=128, dtype="f16", kv_len=8192, design=None, more=()):
    make = ["--batch", "32", "--heads", str(heads), "--kv-heads", "1", "--q-len", "1",
            "--kv-len", str(kv_len), "--head-size", str(head_size), "--dtype", dtype,
            "--k", k, "--v", v or k, *more]
    return Kernel(f"decode {name}", tuple(make), "decode", design or {})


def _prefill(name, k="f16", head_size=128, dtype="f16", q_len=2048, kv_len=2048, more=()):
    make = ["--batch", "1", "--heads", "8", "--kv-heads", "2", "--q-len", str(q_len),
            "--kv-len", str(kv_len), "--head-size", str(head_size), "--dtype", dtype,
            "--k", k, "--v", k, *more]
    return Kernel(f"prefill {name}", tuple(make), "prefill")


KERNELS = (
    # Formats, head size 128, 8 query heads per KV head.
    _decode("u4", "u4:token", design={256: (0.75, 1.21), 512: (0.72, 1.12)}),
    _decode("u4 shift", "u4:token:rzp", design={256: (0.75, 1.31), 512: (0.72, 1.22)}),
    _decode("u4 zp", "u4:token:zp", design={256: (0.81, 1.36), 512: (0.76, 1.22)}),
    _decode("u4 g32 zp", "u4:g32:zp", design={256: (0.86, 1.79), 512: (0.79, 1.61)}),
    _decode("u4 g32", "u4:g32", design={256: (0.76, 1.52), 512: (0.73, 1.41)}),
    _decode("u8", "u8:token", design={256: (0.64, 1.18)}),
    _decode("s8", "s8:token", design={256: (0.89, 1.45)}),
    _decode("s4", "s4:token"),
    _decode("s4 g64 zp", "s4:g64:zp"),
    _decode("u4 g64", "u4:g64"),
    _decode("u4 g32 shift", "u4:g32:rzp"),
    _decode("u4 head", "u4:head:zp"),
    _decode("s8 g32", "s8:g32"),
    _decode("u8 g32 zp", "u8:g32:zp"),
    _decode("s8 tensor", "s8:tensor"),
    _decode("u2 g32 zp", "u2:g32:zp"),
    _decode("u2 g32 shift, bf16 queries", "u2:g32:rzp", dtype="bf16"),
    _decode("s2", "s2:token"),
    _decode("u4 packed zp, bf16 queries", "u4:token:pzp", dtype="bf16"),
    _decode("s4 g16", "s4:g16"),
    _decode("f8 e4m3", "f8_e4m3:token"),
    # Beside sinks and a window, which tiles have in the same launch: the loop on packed codes.
    _decode("u4 g64 shift beside a window, bf16", "u4:g64:rzp", dtype="bf16",
            more=("--sink-tokens", "4", "--window-tokens", "128")),
    _decode("s8 beside a window", "s8:token", more=("--sink-tokens", "4", "--window-tokens", "128")),
    _decode("u4 g32 zp beside a window, f32 queries", "u4:g32:zp", dtype="f32",
            more=("--sink-tokens", "4", "--window-tokens", "128")),
    _decode("f8 e5m2 tensor", "f8_e5m2:tensor"),
    _decode("K s8, V u4 g32 zp", "s8:token", "u4:g32:zp"),
    _decode("K u4 by channel, V u4 zp", "u4:channel:g32:zp", "u4:token:zp"),
    _decode("K s8 by channel, V s8", "s8:channel", "s8:token"),
    _decode("K s8 by channel of 128, V s8, bf16 queries", "s8:channel:g128", "s8:token", dtype="bf16"),
    _decode("K u2 by channel, V u2 shift", "u2:channel:g32:rzp", "u2:token:rzp"),
    _decode("s4 by channel, static scales, bf16 queries", "s4:channel:sf16", dtype="bf16"),
    # The codes of kivi2 and kivi4.
    _decode("K u2 by channel, V u2 g32, shifts, bf16 queries", "u2:channel:g32:rzp:sf16", "u2:g32:rzp:sf16",
            dtype="bf16"),
    _decode("K u4 by channel, V u4 g32, shifts, bf16 queries", "u4:channel:g32:rzp:sf16", "u4:g32:rzp:sf16",
            dtype="bf16"),
    _decode("K u4 by channel, V u4 zp, f32 queries", "u4:channel:g32:zp", "u4:token:zp", dtype="f32"),
    _decode("K u4 by channel, V u4 zp, 16 rows", "u4:channel:g32:zp", "u4:token:zp", heads=16),
    _decode("K u4 with tokens innermost", "u4:g32:zp", more=("--k-layout", "channels")),
    _decode("f16", "f16"),
    _decode("bf16", "bf16", dtype="bf16"),
    # bf16 queries have bf16 scales, and f32 queries f32 ones.
    _decode("u4 g32 zp, bf16 queries", "u4:g32:zp", dtype="bf16"),
    _decode("u4 g32 packed zp, bf16 queries", "u4:g32:pzp", dtype="bf16"),
    _decode("u4 g32 shift, bf16 queries", "u4:g32:rzp", dtype="bf16"),
    _decode("s4 g64 zp, bf16 queries", "s4:g64:zp", dtype="bf16"),
    _decode("u8 g64 zp, bf16 queries", "u8:g64:zp", dtype="bf16"),
    _decode("s8 g128, bf16 queries", "s8:token", dtype="bf16"),
    _decode("s8 g32, bf16 queries", "s8:g32", dtype="bf16"),
    _decode("u4 g32 zp, f32 queries", "u4:g32:zp", dtype="f32"),
    _decode("u4 g32 shift, f32 queries", "u4:g32:rzp", dtype="f32"),
    _decode("u4 g64 shift, f32 queries, f16 math", "u4:g64:rzp", dtype="f32", more=("--fpmath", "f16")),
    _decode("s8, f32 queries", "s8:token", dtype="f32"),
    _decode("s8 g32, f32 queries", "s8:g32", dtype="f32"),
    # What caches have beside: codebooks, rings, rotations.
    _decode("nf4 g32", "u4:g32:nf4"),
    _decode("u4 g16 nf4, head 80", "u4:g16:nf4", head_size=80),
    _decode("u4 g32 shift, ranges", "u4:g32:rzp", more=("--ring",)),
    _decode("s8, ranges", "s8:token", more=("--ring",)),
    _decode("u4 g32 zp, pages", "u4:g32:zp", more=("--page-size", "16")),
    _decode("u4 g32 shift, pages, bf16 queries", "u4:g32:rzp", dtype="bf16",
            more=("--page-size", "64")),
    _decode("s8, pages", "s8:token", more=("--page-size", "16")),
    _decode("K u4 by channel, V u4 zp, ranges", "u4:channel:g32:zp", "u4:token:zp",
            more=("--ring",)),
    _decode("u4 g32 shift, rotated, ranges", "u4:g32:rzp", more=("--hadamard", "128", "--ring")),
    # Head sizes and query heads per KV head.
    _decode("u4 g32 zp, head 64", "u4:g32:zp", head_size=64),
    _decode("u4 g16 zp, head 80", "u4:g16:zp", head_size=80),
    _decode("u4 zp, head 80", "u4:token:zp", head_size=80),
    _decode("s8, head 80, bf16 queries", "s8:token", head_size=80, dtype="bf16"),
    _decode("u4 g32 zp, head 96", "u4:g32:zp", head_size=96),
    _decode("s8, head 96, bf16 queries", "s8:token", head_size=96, dtype="bf16"),
    _decode("u4 g32 zp, head 192, bf16 queries", "u4:g32:zp", head_size=192, dtype="bf16"),
    _decode("s8, head 192", "s8:token", head_size=192),
    _decode("u4 g32 zp, head 256", "u4:g32:zp", head_size=256),
    # Latents: V is 512 of K's 576 channels.
    _decode("s8, V in K, head 576, bf16 queries", "s8:token", heads=16, head_size=576, dtype="bf16",
            more=("--v-head-size", "512", "--latent")),
    _decode("f8 e4m3, V in K, head 576, bf16 queries", "f8_e4m3:token", heads=16, head_size=576, dtype="bf16",
            more=("--v-head-size", "512", "--latent")),
    _decode("s8, head 512, bf16 queries", "s8:token", head_size=512, dtype="bf16"),
    _decode("u4 zp, head 512, bf16 queries", "u4:token:zp", head_size=512, dtype="bf16"),
    _decode("f16, head 256", "f16", head_size=256),
    _decode("u4 g32 zp, 1 row", "u4:g32:zp", heads=1),
    _decode("u4 g32 zp, 4 rows", "u4:g32:zp", heads=4),
    _decode("u4 g32 zp, 16 rows", "u4:g32:zp", heads=16),
    # Steps on scores.
    _decode("s8, mask and cap", "s8:token", more=("--mask=Nx1x1xS", "--soft-cap")),
    _decode("s8, op with all", "s8:token",
            more=("--op", "--kv-lengths", "--sinks", "--alibi", "--causal=bottom-right",
                  "--left-window", "4096", "--soft-cap", "--stats")),
    # Prefill.
    _prefill("f16"),
    _prefill("f16 causal", more=("--causal",)),
    _prefill("bf16 causal", k="bf16", dtype="bf16", more=("--causal",)),
    _prefill("f32 causal", k="f32", dtype="f32", more=("--causal",)),
    _prefill("s8 causal", k="s8:token", more=("--causal",)),
    _prefill("s8 causal, bf16 queries", k="s8:token", dtype="bf16", more=("--causal",)),
    _prefill("u4 g32 zp causal", k="u4:g32:zp", more=("--causal",)),
    _prefill("u4 g32 zp causal, bf16 queries", k="u4:g32:zp", dtype="bf16", more=("--causal",)),
    _prefill("u4 g32 packed zp causal, bf16 queries", k="u4:g32:pzp", dtype="bf16", more=("--causal",)),
    _prefill("u8 g32 zp causal", k="u8:g32:zp", more=("--causal",)),
    _prefill("u8 g32 zp causal, bf16 queries", k="u8:g32:zp", dtype="bf16", more=("--causal",)),
    _prefill("u4 g16 zp causal", k="u4:g16:zp", more=("--causal",)),
    _prefill("f8 e4m3 causal", k="f8_e4m3:token", more=("--causal",)),
    _prefill("f8 e5m2 g32 causal, bf16 queries", k="f8_e5m2:g32", dtype="bf16", more=("--causal",)),
    _prefill("u4 by channel g64 shift causal", k="u4:channel:g64:rzp", more=("--causal",)),
    _prefill("s8 by channel g128 causal, bf16 queries", k="s8:channel:g128", dtype="bf16", more=("--causal",)),
    _prefill("u2 g32 shift causal", k="u2:g32:rzp", more=("--causal",)),
    _prefill("u4 g32 zp, 512 of 32768", k="u4:g32:zp", q_len=512, kv_len=32768,
             more=("--causal=bottom-right",)),
    _prefill("f16, head 64", head_size=64, more=("--causal",)),
    _prefill("f16, head 256", head_size=256),
    _prefill("f16, mask", more=("--mask",)),
    _prefill("f16, select and statistics", more=("--select", "--stats")),
    _prefill("f16, cap, ALiBi and sinks",
             more=("--op", "--causal", "--soft-cap", "--alibi", "--sinks")),
    _prefill("f16, dropout", more=("--dropout",)),
    _prefill("nf4 g32 causal", k="u4:g32:nf4", more=("--causal",)),
    _prefill("nf4 g32 causal, bf16 queries", k="u4:g32:nf4", dtype="bf16", more=("--causal",)),
    _prefill("u4 g32 zp causal, rotated, ranges", k="u4:g32:zp",
             more=("--causal", "--hadamard", "128", "--ring")),
)


def file_name(kernel):
    """Of graphs and cubins: letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in kernel.name)
