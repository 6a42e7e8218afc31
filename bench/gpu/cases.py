"""What is timed: shapes, and who takes part in each with which storage of K and V."""
import dataclasses

# kvant's K and V (cache/number_format.h). Row-wise: an f16 scale and an f16 shift per token and head.
INT4_ROW = "u4:token:rzp:sf16"
INT4_GROUPS = "u4:g32:zp:sf16"
INT8 = "s8:token:sf16"
KVANT = {"kvant int4 row-wise": INT4_ROW, "kvant int4 g32 zp": INT4_GROUPS, "kvant int8": INT8}
KVANT_PREFILL = {"kvant int4 g32 zp": INT4_GROUPS, "kvant int8": INT8, "kvant f16": "f16"}
PEERS = ["torch flash bf16", "torch cuDNN bf16", "triton int4 split-K"]
# What the others' times are compared with.
BASE = "torch flash bf16"


@dataclasses.dataclass
class Shape:
    name: str
    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    q_len: int = 1
    head_size: int = 128
    causal: bool = False  # the last query sees all keys
    lengths: list = dataclasses.field(default_factory=list)  # real ones of a ragged batch

    @property
    def ratio(self):
        return self.heads // self.kv_heads

    @property
    def prefill(self):
        return self.q_len > 64

    @property
    def kvant(self):
        return KVANT_PREFILL if self.prefill else KVANT

    @property
    def peers(self):
        if self.prefill:
            return PEERS[:2]
        # A dense batch is all that torch takes, and powers of two are all that Triton takes.
        peers = PEERS[2:] if self.lengths else PEERS
        return [p for p in peers if "triton" not in p or self.head_size != 96]

    @property
    def flops(self):
        """Of both products, masked scores left out."""
        seen = self.kv_len - (self.q_len - 1) / 2 if self.causal else self.kv_len
        return 4 * self.batch * self.heads * self.q_len * seen * self.head_size

    def request(self, kv_format):
        fields = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_size", "causal", "lengths")
        case = {name: getattr(self, name) for name in fields}
        return {**case, "k": kv_format, "v": kv_format, "dtype": "f16"}

    def make(self, kv_format):
        """The same, as arguments of the kvant command."""
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_size")
        sizes = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in names]
        flags = ["--causal=bottom-right"] * self.causal + ["--kv-lengths"] * bool(self.lengths)
        formats = ["--dtype=f16", f"--k={kv_format}", f"--v={kv_format}"]
        return ["make", "--op", *formats, *sizes, *flags]


def _ragged(batch, most):
    """Lengths from a few tokens to all, most of them short."""
    return [max(1, int(most * ((7 * i + 3) % batch / (batch - 1)) ** 2)) for i in range(batch)]


def _all():
    k = 1024
    shapes = [Shape(f"B={b} 8/1 S=8k", b, 8, 1, 8 * k) for b in (32, 64, 128, 256, 512)]
    shapes += [Shape(f"B=1 32/8 S={s}k", 1, 32, 8, s * k) for s in (8, 32, 128)]
    shapes += [Shape("B=16 32/8 S=8k", 16, 32, 8, 8 * k)]
    shapes += [Shape(f"prefill {n}", 1, 32, 8, n, q_len=n, causal=True) for n in (512, 2048, 8192)]
    shapes += [Shape("prefill 512 over 32k", 1, 32, 8, 32 * k, q_len=512, causal=True)]
    shapes += [Shape("ragged B=128 8/1 S<=8k", 128, 8, 1, 8 * k, lengths=_ragged(128, 8 * k))]
    shapes += [Shape(f"Sq={n} B=128 8/1 S=8k", 128, 8, 1, 8 * k, q_len=n) for n in (2, 4, 8)]
    shapes += [Shape(f"R={r} B=16 {8 * r}/8 S=8k", 16, 8 * r, 8, 8 * k) for r in (1, 6, 7, 8, 16)]
    shapes += [Shape(f"D={d} B=64 8/1 S=8k", 64, 8, 1, 8 * k, head_size=d) for d in (64, 96, 256)]
    shapes += [Shape(f"B={b} 32/32 S=4k", b, 32, 32, 4 * k) for b in (1, 16)]
    return shapes


SHAPES = _all()
