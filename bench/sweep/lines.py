"""What the sweep times: formats, layouts, head sizes, masks and numbers of queries.

A line is timed with each number of queries. Times are compared per element of K and V with the best
line of the same bits and queries.
"""
import dataclasses

QUERIES = (1, 4, 8, 32, 512)
HEADS, KV_HEADS, TOKENS = 8, 2, 4096
BITS = {"f32": 32, "f16": 16, "bf16": 16, "f8_e4m3": 8, "f8_e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "s2": 2,
        "u2": 2}


@dataclasses.dataclass(frozen=True)
class Line:
    family: str
    name: str
    k: str
    v: str
    more: tuple = ()
    head_size: int = 128

    def bits(self):
        return tuple(BITS[side.split(":")[0]] for side in (self.k, self.v))

    def may_be_best(self):
        """Whether all tokens that there is room for exist, and products are as exact as those of others."""
        return self.family != "masks and loads" and not {"--page-size", "bf16"} & set(self.more)

    def elements(self):
        """Of K and V."""
        return 2 * KV_HEADS * TOKENS * self.head_size

    def make(self, queries):
        # Constant scales stand in the graph.
        sides = () if "--static-int8" in self.more else ("--k", self.k, "--v", self.v)
        return ["--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--kv-len", str(TOKENS), "--head-size",
                str(self.head_size), "--q-len", str(queries), *sides, *self.more]


FORMATS = (
    "f32", "f16", "bf16",
    "s8:token", "s8:g32", "s8:g128", "u8:g32:zp", "u8:token:zp", "u8:g32:rzp", "s8:tensor", "s8:head", "s8:all_heads",
    "s8:channel", "s8:channel:g32", "u8:channel:g64:zp", "u8:channel:g64:rzp",
    "s8:block:g32", "u8:block:g32:zp", "f8_e4m3:block:g32",
    "f8_e4m3:tensor", "f8_e4m3:token", "f8_e4m3:g32", "f8_e5m2:token", "f8_e5m2:g32", "f8_e4m3:channel:g32",
    "u4:g32:zp", "u4:g64:zp", "u4:g32:rzp", "u4:g32:pzp", "u4:g16:zp", "u4:token:zp", "u4:all_heads:zp", "s4:g32",
    "s4:token", "s4:tensor", "s4:channel", "u4:channel:g32:zp", "u4:channel:g64:rzp",
    "s4:block:g32", "u4:block:g64:zp", "u4:g32:nf4", "u4:token:nf4",
    "u2:g32:zp", "u2:g32:rzp", "u2:token:zp", "s2:g32", "u2:channel:g32:zp", "u2:channel:g32:rzp",
)
MIXTURES = (("s8:token", "u4:g32:zp"), ("u4:g32:zp", "s8:token"), ("f16", "s8:g32"), ("s8:g32", "f16"),
            ("u4:channel:g32:rzp", "u4:g32:rzp"), ("u2:channel:g32:rzp", "u4:g32:zp"), ("f8_e4m3:g32", "u4:g32:zp"),
            ("u2:channel:g32:zp", "u2:g32:zp"), ("bf16", "u4:token:zp"))
HEAD_SIZES = (64, 72, 80, 88, 96, 104, 112, 120, 136, 160, 192, 224, 256)
MASKS = (("causal", ("--causal=bottom-right",)), ("mask", ("--mask",)), ("mask of each head", ("--mask=NxHxQxS",)),
         ("select", ("--select",)), ("soft cap", ("--soft-cap",)), ("statistics", ("--stats",)),
         ("sinks", ("--op", "--sinks")), ("ALiBi", ("--op", "--alibi")), ("KV lengths", ("--kv-lengths",)),
         ("ring", ("--ring",)), ("pages of 16", ("--page-size", "16")), ("pages of 64", ("--page-size", "64")),
         ("sinks and window apart", ("--sink-tokens", "4", "--window-tokens", "128")),
         ("rotated", ("--hadamard", "128")), ("dropout", ("--dropout",)))
STATIC = (("heads apart", ()), ("heads of a token side by side", ("--token-major",)), ("mask", ("--mask",)))
LAYOUTS = (("K's tokens innermost", ("--k-layout", "channels")), ("K transposed", ("--k-layout", "transposed")),
           ("heads of a token side by side", ("--token-major",)),
           ("pages of 16, likewise", ("--token-major", "--page-size", "16")), ("output by query", ("--transpose-output",)))
# Parameters in every place, where tokens lie apart.
PLACES = tuple((side, 128) for side in (
    "u4:g32:pzp", "u4:token:pzp", "s8:tensor", "s8:head", "u4:head:zp", "f8_e4m3:tensor", "f8_e4m3:head", "s8:block:g16",
    "s8:channel", "u4:channel:g16:zp", "f8_e4m3:channel:g16")) + (("u4:g32:zp", 96), ("u4:g32:pzp", 96), ("s8:g16", 256))
APART = (("heads side by side", ("--token-major",)), ("pages of 16", ("--page-size", "16")),
         ("pages of 16, heads side by side", ("--token-major", "--page-size", "16")))
DTYPES = (("f16 queries", ("--dtype", "f16")), ("bf16 queries", ("--dtype", "bf16")))


def all_lines():
    for side in FORMATS:
        yield Line("formats", side, side, side)
    for k, v in MIXTURES:
        yield Line("mixtures", f"K {k}, V {v}", k, v)
    for size in HEAD_SIZES:
        for side in ("f16", "s8:token", "u4:token:zp"):
            yield Line("head sizes", f"{size}, {side}", side, side, head_size=size)
    for side, size in PLACES:
        for name, more in APART:
            yield Line("places of parameters", f"{name}, {side}, heads of {size}", side, side, more, size)
    for name, more in STATIC:
        yield Line("static int8", name, "s8", "s8", ("--static-int8", *more))
    for family, variants in (("masks and loads", MASKS), ("layouts", LAYOUTS), ("queries", DTYPES)):
        for name, more in variants:
            for side in ("f16", "s8:g32", "u4:g32:zp"):
                yield Line(family, f"{name}, {side}", side, side, more)
