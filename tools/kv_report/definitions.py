"""What each scheme is: codes, scales and read-back values in plain numpy, and who sees them when.

Written from the schemes' formulas and from nothing of kvant, so that it can judge
kvant: f64 throughout, scales and minima rounded to f16 before codes are computed,
half to even, except that the formats of ggml keep its own order in f32. Arrays are
[..., tokens, head size].
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Groups of an array: codes [..., groups, group size], the others [..., groups, 1].

    `values` are the codes read back, in the array's own shape. `zero` is an
    integer zero point or the minimum, None where the scheme has neither.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to store K or V: a quantizer of groups and what runs a group is.

    `group` elements share a scale: of one token along the head (0: the whole
    head), or, `per_channel`, of one channel along the tokens. `bits` counts a code,
    `metadata` the bits per group beside the codes. `rotated` values are multiplied
    by Hadamard's matrix before they are quantized and after they are read.
    `from_window`: what is quantized has been in a window first, as f16.
    """

    quantize: object  # groups [..., n] -> (codes, scale, zero, values)
    bits: int
    metadata: int
    group: int = 0
    per_channel: bool = False
    rotated: bool = False
    from_window: bool = False

    def bits_per_element(self, head_size):
        return self.bits + self.metadata / (self.group or head_size)

    def __call__(self, x):
        """Quantizes x [..., tokens, head size]; per channel, tokens are whole groups."""
        x = np.asarray(x, np.float64)
        matrix = hadamard(x.shape[-1]) if self.rotated else None
        rows = x @ matrix if self.rotated else x
        if self.from_window:
            rows = rows.astype(np.float16).astype(np.float64)
        if self.per_channel:
            rows = np.swapaxes(rows, -1, -2)
        size = self.group or rows.shape[-1]
        groups = rows.reshape(*rows.shape[:-1], -1, size)
        codes, scale, zero, values = self.quantize(groups)
        values = values.astype(np.float64).reshape(rows.shape)
        if self.per_channel:
            values = np.swapaxes(values, -1, -2)
        if self.rotated:
            values = values @ matrix  # symmetric and its own inverse
        return Quantized(codes, scale, zero, values)


def hadamard(size):
    """Sylvester's matrix over sqrt(size)."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


# --- Quantizers of groups [..., n] ---------------------------------------------


def as_f16(x):
    return x.astype(np.float16).astype(np.float64)


def divisor(scale):
    """Scales as stored; a group that has none (all zeros) divides by 1.

    Below f16's normal numbers upward, so that no group is beyond its codes.
    """
    subnormal = np.ceil(scale * 2.0**24) * 2.0**-24
    scale = np.where(scale < 2.0**-14, subnormal, as_f16(scale))
    return np.where(scale == 0, 1.0, scale)


def absmax(x):
    return np.abs(x).max(axis=-1, keepdims=True)


def bounds(x):
    return x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)


def symmetric(highest):
    """scale * q, scale = absmax / highest."""

    def quantize(x):
        scale = divisor(absmax(x) / highest)
        codes = np.clip(np.rint(x / scale), -highest - 1, highest)
        return codes, scale, None, scale * codes

    return quantize


def to_e4m3(x):
    """Nearest number of fp8 e4m3, half to even: 3 bits of mantissa, exponents from -6."""
    _, exponent = np.frexp(x)  # x = m 2^e, m in [0.5, 1)
    step = np.exp2(np.maximum(exponent - 1, -6) - 3.0)
    return np.clip(np.rint(x / step) * step, -448, 448)


def e4m3(x):
    """scale * q, scale = absmax / 448; codes are given as the numbers that they stand for."""
    scale = divisor(absmax(x) / 448)
    codes = to_e4m3(x / scale)
    return codes, scale, None, scale * codes


def min_max(bits):
    """scale * q + minimum, scale = (max - min) / (2^bits - 1)."""
    levels = 2**bits - 1

    def quantize(x):
        low, high = bounds(x)
        scale, minimum = divisor((high - low) / levels), as_f16(low)
        codes = np.clip(np.rint((x - minimum) / scale), 0, levels)
        return codes, scale, minimum, scale * codes + minimum

    return quantize


def zero_point(bits):
    """scale * (q - zp), zp an integer code; the range is widened to include 0."""
    levels = 2**bits - 1

    def quantize(x):
        low, high = bounds(x)
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = divisor((high - low) / levels)
        zero = np.clip(np.rint(-low / scale), 0, levels)
        codes = np.clip(np.rint(x / scale) + zero, 0, levels)
        return codes, scale, zero, scale * (codes - zero)

    return quantize


NF4 = np.array([  # quantiles of a normal distribution (bitsandbytes, QLoRA)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0])
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


def nearest(table, x):
    """Indices of the entries nearest to x; of two as near, the higher."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, x, side="right")


def codebook(table):
    """scale * table[q], scale = absmax / the largest entry."""

    def quantize(x):
        scale = divisor(absmax(x) / np.abs(table).max())
        codes = nearest(table, x / scale)
        return codes, scale, None, scale * table[codes]

    return quantize


def inverse(scale):
    """1 / scale, and 0 of 0, as ggml has it."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def signed_absmax(x):
    """Of each group the element of the largest magnitude, with its sign; the first of equals."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


# ggml divides by the scale before that is rounded to f16, and reads back with the rounded one.


def ggml_q8_0(x):
    x = x.astype(np.float32)
    scale = absmax(x) / np.float32(127)
    y = x * inverse(scale)
    codes = np.trunc(y + np.copysign(np.float32(0.5), y))  # roundf: half away from zero
    return codes, as_f16(scale), None, as_f16(scale) * codes


def ggml_q4_0(x):
    x = x.astype(np.float32)
    scale = signed_absmax(x) / np.float32(-8)
    codes = np.minimum(np.trunc(x * inverse(scale) + np.float32(8.5)), 15)
    return codes, as_f16(scale), None, as_f16(scale) * (codes - 8)


def ggml_q4_1(x):
    x = x.astype(np.float32)
    low, high = bounds(x)
    scale = (high - low) / np.float32(15)
    codes = np.minimum(np.trunc((x - low) * inverse(scale) + np.float32(0.5)), 15)
    return codes, as_f16(scale), as_f16(low), as_f16(scale) * codes + as_f16(low)


def ggml_iq4_nl(x):
    """Nearest entries for a first scale; stored is the scale that fits them best, weighted by x^2.

    The entries stay those of the first scale, as in ggml's quantize_row_iq4_nl_ref,
    which is what it fills a cache with. (Its quantizer of weights searches scales.)
    """
    x = x.astype(np.float32)
    codes = nearest(IQ4_NL, x * inverse(signed_absmax(x) / np.float32(IQ4_NL[0])))
    entries, weights = IQ4_NL[codes].astype(np.float32), x * x
    products = (weights * entries * x).sum(axis=-1, keepdims=True)
    squares = (weights * entries * entries).sum(axis=-1, keepdims=True)
    scale = as_f16(products * inverse(squares))
    return codes, scale, None, scale * IQ4_NL[codes]


def rounded_to_f16(x):
    return as_f16(x), np.ones_like(x[..., :1]), None, as_f16(x)


def exact(x):
    return x, np.ones_like(x[..., :1]), None, x


# --- Schemes -------------------------------------------------------------------

NO_TAIL, SLIDING, BULK = "none", "sliding", "bulk"


@dataclasses.dataclass(frozen=True)
class Storage:
    """A format and which tokens stay in full precision.

    sliding: the last `residual`. bulk: up to `residual`, which are then quantized
    all at once. The first `sinks` always do.
    """

    format: Format
    tail: str = NO_TAIL
    residual: int = 0
    sinks: int = 0

    def __post_init__(self):
        through = dataclasses.replace(self.format, from_window=self.tail != NO_TAIL)
        object.__setattr__(self, "format", through)  # frozen for all others

    def quantized_end(self, query):
        """Query t (its own token is t, and in the cache) reads tokens below this as quantized."""
        if self.tail == NO_TAIL:
            return query + 1
        if self.tail == SLIDING:
            return max(0, query - self.residual)
        return self.residual * (query // self.residual)

    def read_back(self, x):
        """Quantized values of x [..., tokens, head size] where any query sees them, x elsewhere.

        Groups are frozen once written, so one pass over all tokens gives what
        quantizing token by token or block by block does.
        """
        end = self.quantized_end(x.shape[-2] - 1)
        values = np.array(x, np.float64)
        values[..., self.sinks : end, :] = self.format(values[..., self.sinks : end, :]).values
        return values

    def bytes(self, tokens, head_size):
        """Per head, with `tokens` in the cache; what is not quantized counts as f16."""
        quantized = max(0, self.quantized_end(tokens - 1) - self.sinks)
        packed = quantized * head_size * self.format.bits_per_element(head_size)
        return (packed + (tokens - quantized) * head_size * min(self.format.bits, 16)
                if self.tail == NO_TAIL else packed + (tokens - quantized) * head_size * 16) / 8


@dataclasses.dataclass(frozen=True)
class Scheme:
    k: Storage
    v: Storage
    what: str  # for the report

    def bits_per_element(self, head_size):
        """Of what is quantized, K and V on average, scales and zero points included."""
        return sum(s.format.bits_per_element(head_size) for s in (self.k, self.v)) / 2

    def bytes(self, tokens, head_size):
        """Of one KV head's K and V, with `tokens` in the cache."""
        return self.k.bytes(tokens, head_size) + self.v.bytes(tokens, head_size)


def _int(bits, group, **options):
    return Format(min_max(bits), bits, 32, group, **options)


def _scheme(what, k, v=None, tail=NO_TAIL, residual=0, sinks=0):
    storage = lambda f: f if isinstance(f, Storage) else Storage(f, tail, residual, sinks)
    return Scheme(storage(k), storage(k if v is None else v), what)


def _kivi(bits):
    return _scheme(
        f"KIVI-{bits}: K per channel by 32 tokens, 128 at once; V in groups of 32, the last 128 exact",
        Storage(_int(bits, 32, per_channel=True), BULK, 128), Storage(_int(bits, 32), SLIDING, 128))


_INT8 = Format(symmetric(127), 8, 16)
_ROT32, _ROT64 = _int(4, 32, rotated=True), _int(4, 64, rotated=True)
_TAIL = dict(tail=SLIDING, residual=128)

SCHEMES = {
    "f32": _scheme("not quantized", Format(exact, 32, 0)),
    "f16": _scheme("rounded to f16", Format(rounded_to_f16, 16, 0)),
    "int8_th": _scheme("int8, a scale per token and head", _INT8),
    "q8_0": _scheme("ggml's q8_0", Format(ggml_q8_0, 8, 16, 32)),
    "fp8_th": _scheme("fp8 e4m3, a scale per token and head", Format(e4m3, 8, 16)),
    "k8th_v4g32": _scheme("K int8 per token and head, V int4 in groups of 32", _INT8, _int(4, 32)),
    "int4_g32": _scheme("int4 in groups of 32, minimum and scale", _int(4, 32)),
    "int4_g64": _scheme("int4 in groups of 64, minimum and scale", _int(4, 64)),
    "int4zp_g32": _scheme("int4 in groups of 32, integer zero point of 4 bits",
                          Format(zero_point(4), 4, 20, 32)),
    "int4zp_g64": _scheme("int4 in groups of 64, integer zero point of 4 bits",
                          Format(zero_point(4), 4, 20, 64)),
    "k4ch32_v4g32": _scheme("K int4 per channel by 32 tokens, at once; V int4 in groups of 32",
                            Storage(_int(4, 32, per_channel=True), BULK, 32), _int(4, 32)),
    "rotK4_g32_v4g32": _scheme("int4 in groups of 32, K rotated", _ROT32, _int(4, 32)),
    "rotKV4_g32": _scheme("int4 in groups of 32, K and V rotated", _ROT32),
    "rotKV4_g64": _scheme("int4 in groups of 64, K and V rotated", _ROT64),
    "q4_0": _scheme("ggml's q4_0", Format(ggml_q4_0, 4, 16, 32)),
    "q4_1": _scheme("ggml's q4_1", Format(ggml_q4_1, 4, 32, 32)),
    "iq4_nl": _scheme("ggml's iq4_nl", Format(ggml_iq4_nl, 4, 16, 32)),
    "nf4_g32": _scheme("NF4 in groups of 32", Format(codebook(NF4), 4, 16, 32)),
    "int2_g32": _scheme("int2 in groups of 32, minimum and scale", _int(2, 32)),
    "int2_g32_R128": _scheme("int2 in groups of 32, the last 128 tokens exact", _int(2, 32), **_TAIL),
    "kivi2": _kivi(2),
    "kivi4": _kivi(4),
    "int4_g64_R128_s4": _scheme("int4 in groups of 64, the first 4 and last 128 tokens exact",
                                _int(4, 64), sinks=4, **_TAIL),
    "rotKV4_g64_R128_s4": _scheme("the same, K and V rotated", _ROT64, sinks=4, **_TAIL),
}


# --- Quantizing again --------------------------------------------------------------


def requantized(quantize, x, prompt, residual):
    """x [heads, tokens, head size] as a cache reads it that never freezes a group.

    As transformers' QuantizedCache does it: the prompt is quantized whole, and whenever
    `residual` more tokens have come, all that is read back, as f16, and they are
    quantized together. Returns the tokens that have been quantized.
    """
    end, stored = prompt, as_f16(quantize(x[:, :prompt]))
    while end + residual <= x.shape[1]:
        stored = np.concatenate([stored, x[:, end : end + residual]], axis=1)
        stored = as_f16(quantize(stored))
        end += residual
    return stored


def runs_across_heads(bits, group):
    """quanto's axis -1: runs of a channel's tokens through all heads, whose ends move with the
    length. What does not fill a run stays as it is."""

    def quantize(x):
        rows = x.reshape(-1, x.shape[-1]).T.copy()
        whole = rows.shape[1] // group * group
        groups = rows[:, :whole].reshape(len(rows), -1, group)
        rows[:, :whole] = min_max(bits)(groups)[3].reshape(len(rows), -1)
        return rows.T.reshape(x.shape)

    return quantize


# --- Attention -----------------------------------------------------------------


def attention(scheme, q, k, v, block=256):
    """Causal attention, each query over the cache as it was when its token was the last.

    q [query heads, T, D], k and v [heads, T, D], all f32; scale 1 / sqrt(D); query
    head h reads KV head h // (query heads / heads). Returns what q is like.

    Exact for every scheme and for whole runs of queries at a time: which tokens are
    quantized only ever grows, and their values are frozen. For a run of queries,
    tokens below `low` are quantized for all of them, from `high` on for none, and
    between them scores and products are taken from both and selected.
    """
    heads, tokens, size = k.shape
    rows = np.float32(1 / np.sqrt(size)) * q.reshape(heads, -1, tokens, size)
    k_read = scheme.k.read_back(k).astype(np.float32)
    v_read = scheme.v.read_back(v).astype(np.float32)
    output = np.empty_like(rows)
    future = np.triu(np.full((block, block), -np.inf, np.float32), 1)
    for begin in range(0, tokens, block):
        end = min(begin + block, tokens)
        for h in range(heads):
            scores = _scores(scheme.k, begin, end, rows[h, :, begin:end], k_read[h], k[h])
            scores[..., begin:] += future[: end - begin, : end - begin]
            scores -= scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores, out=scores)
            products = _products(scheme.v, begin, end, weights, v_read[h], v[h])
            output[h, :, begin:end] = products / weights.sum(axis=-1, keepdims=True)
    return output.reshape(q.shape)


def _mixed(storage, begin, end):
    """(low, high, chosen) of queries [begin, end), over tokens [0, end).

    Tokens below low are read back for every query, those from high on for none;
    chosen [queries, high - low] says for which in between. Sinks count as read
    back, since what is read back of them is what they were.
    """
    if storage.tail == NO_TAIL:
        return end, end, None  # the diagonal too; what lies above it is hidden anyway
    ends = np.array([max(storage.sinks, storage.quantized_end(t)) for t in range(begin, end)])
    low, high = min(ends[0], end), min(ends[-1], end)
    return low, high, np.arange(low, high) < ends[:, None]


def _scores(storage, begin, end, rows, read, plain):
    low, high, chosen = _mixed(storage, begin, end)
    scores = rows @ read[:end].T
    if low < end:
        exact_scores = rows @ plain[low:end].T
        scores[..., high:] = exact_scores[..., high - low :]
        if low < high:
            np.copyto(scores[..., low:high], exact_scores[..., : high - low], where=~chosen)
    return scores


def _products(storage, begin, end, weights, read, plain):
    low, high, chosen = _mixed(storage, begin, end)
    products = weights[..., :low] @ read[:low]
    if low < high:
        products += (weights[..., low:high] * chosen) @ read[low:high]
        products += (weights[..., low:high] * ~chosen) @ plain[low:high]
    if high < end:
        products += weights[..., high:] @ plain[high:end]
    return products
