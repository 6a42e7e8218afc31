"""torch.compile(backend="kvant") over codes in planes, as HQQ and quanto pack them, and over what nearly is such.

Each chain is written by hand, as these packages have it, and taken from the package itself where it is installed.
"""

import pytest

torch = pytest.importorskip("torch")

import kvant.torch  # noqa: E402
from compiled_torch import (  # noqa: E402, F401
    BATCH, GROUP, HEADS, SIZE, TOKENS, cache, eight_bits, fresh, queries, run, sdpa)

SHAPE = (BATCH, HEADS, TOKENS, SIZE)
ROWS = BATCH * HEADS * TOKENS * SIZE // GROUP
DTYPES = [(torch.float32, 2e-3), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]


def planes(bits=4, columns=GROUP, rows=ROWS):
    """Bytes, scales and zero points in codes, that are not whole."""
    return (torch.randint(0, 256, (rows * bits // 8, columns), dtype=torch.uint8), torch.rand(rows, 1) * 0.03 + 0.01,
            torch.rand(rows, 1) * (1 << bits))


def hqq_unpacked(data, bits, dtype):
    """The first rows are the highest bits."""
    step, planes_ = data.shape[0], 8 // bits
    codes = torch.empty([planes_ * step, data.shape[1]], dtype=dtype)
    for plane in range(planes_ - 1):
        low = 8 - bits * (plane + 1)
        codes[plane * step:(plane + 1) * step] = (data & ((1 << bits) - 1 << low)) >> low
    codes[(planes_ - 1) * step:] = data & (1 << bits) - 1
    return codes


def hqq(data, scales, zeros, bits=4, shape=SHAPE):
    return ((hqq_unpacked(data, bits, scales.dtype) - zeros) * scales).reshape(shape)


def quanto(data, scales, shifts, bits=4, shape=SHAPE):
    """The first rows are the lowest bits, and shifts are subtracted last."""
    parts = [(data & (1 << low + bits) - 1) >> low for low in range(0, 8, bits)]
    values = scales * torch.cat(parts).to(torch.uint8)[:scales.shape[0]]
    values -= shifts
    return values.view(shape)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dequantize", [hqq, quanto])
def test_planes(dequantize, bits, dtype, bound):
    k, v = ([x if x.dtype == torch.uint8 else x.to(dtype) for x in planes(bits)] for _ in "kv")
    report = run(lambda q, *kv: sdpa(q, dequantize(*kv[:3], bits), dequantize(*kv[3:], bits)), queries().to(dtype), *k, *v,
                 bound=bound)
    said = f"is u{bits} with scales [2, 3, 40, 2], zero points, its planar codes repacked at each call"
    assert report.fused and f"K {said}; V {said}; fused attention" in report.text


def test_planes_are_exact():
    """A query that points to one token and one channel finds the code that was packed there."""
    codes = torch.randint(0, 16, (1, 1, 32, 32), dtype=torch.uint8)
    rows = codes.view(32, 32)
    q = torch.eye(32)[None, None] * 1000

    def function(unpacked):
        return lambda data: torch.ops.kvant.sdpa(q, q, unpacked(data).view(codes.shape) * torch.ones(1), None, None, None,
                                                 None, -1, -1, False, False)

    for unpacked, data in ((lambda x: hqq_unpacked(x, 4, torch.float32), rows[:16] << 4 | rows[16:]),
                           (lambda x: torch.cat([x & 15, x >> 4]), rows[16:] << 4 | rows[:16])):
        compiled = torch.compile(function(unpacked), backend="kvant", fullgraph=True)
        assert torch.equal(compiled(data).round(), codes.float())
        assert "V is u4 with scales [1, 1, 1, 1], its planar codes repacked" in kvant.explain(compiled)


@pytest.mark.parametrize("bits", [4, 2])
def test_hqq_itself(bits):
    quantizer = pytest.importorskip("hqq.core.quantize").Quantizer
    for dtype, bound in DTYPES:
        packed = []
        for _ in "kv":
            data, meta = quantizer.quantize(cache(), nbits=bits, group_size=GROUP, axis=1, device="cpu")
            meta.update(compute_dtype=dtype, scale=meta["scale"].to(dtype), zero=meta["zero"].to(dtype))
            packed.append((data, meta))

        def function(q, k, v):
            return sdpa(q, quantizer.dequantize(k, packed[0][1]), quantizer.dequantize(v, packed[1][1]))

        report = run(function, queries().to(dtype), packed[0][0], packed[1][0], bound=bound)
        assert report.text.count(f"is u{bits} with scales [2, 3, 40, 2], zero points, its planar codes repacked") == 2


def test_hqq_of_other_widths():
    quantizer = pytest.importorskip("hqq.core.quantize").Quantizer

    def of(**options):
        # Of three bits HQQ itself takes two dims only.
        data, meta = quantizer.quantize(cache().view(-1, SIZE), group_size=GROUP, device="cpu", **options)
        meta["compute_dtype"] = torch.float32
        return run(lambda q, k, v: sdpa(q, quantizer.dequantize(k, meta).view(SHAPE), v), queries(), data, cache(),
                   bound=2e-3).text

    assert "K is u8 with scales [2, 3, 40, 2], zero points; fused" in of(nbits=8, axis=1)
    assert "taken out of torch.int32 by masks and shifts that are not the halves or quarters" in of(nbits=3, axis=1)
    assert "taken out of torch.uint8 by masks and shifts that are not the halves or quarters" in of(nbits=1, axis=1)
    assert "are no groups of [batch, heads, tokens, channels]" in of(nbits=4, axis=0)
    assert "K is u4 with scales [1, 1, 1, 1]" in of(nbits=4, axis=1, channel_wise=False)


def threes(data):
    """Ten codes of 32 bits, as HQQ has those of three bits; the rows beyond all are cut off."""
    codes = torch.empty([10 * data.shape[0], data.shape[1]])
    for plane in range(10):
        low = 27 - 3 * plane
        codes[plane * data.shape[0]:(plane + 1) * data.shape[0]] = (data & 7 << low) >> low
    return codes[:ROWS]


def test_other_packings_are_said():
    data, scales, zeros = planes()
    small = torch.randint(0, 2**30, (ROWS // 10, GROUP), dtype=torch.int32)
    across = torch.rand(1, GROUP)
    said = "by masks and shifts that are not the halves or quarters of bytes, in planes"
    for function, arguments, why in (
            (lambda c, s, z: hqq(c, s, z, 1), planes(1), f"K is not read as codes: codes are taken out of torch.uint8 {said}"),
            (k_of(threes), (small, scales, zeros), f"K is not read as codes: codes are taken out of torch.int32 {said}"),
            (hqq, (data, across, across), "scales or zero points [1, 32] of [480, 32] are no groups of"),
            (lambda c, s, z: ((torch.cat([c & 15, c >> 4]).to(torch.int8) - z.to(torch.int8)) * s).view(SHAPE),
             (data, scales, zeros.to(torch.uint8)), "codes less their zero point may wrap around in torch.int8")):
        report = run(lambda q, v, *x: sdpa(q, function(*x), v), queries(), cache(), *arguments)
        assert report.fused and why in report.text


def test_planes_beside_other_tokens_are_said():
    """As transformers' QuantizedCache has them: its last tokens are floats."""
    arguments = queries(), *planes(), cache()
    report = run(lambda q, c, s, z, v: sdpa(q, torch.cat([hqq(c, s, z), v], 2), torch.cat([v, v], 2)), *arguments)
    assert "K is computed from bytes, but by no chain that is read as codes" in report.text


@pytest.mark.parametrize("bits", [4, 2])
def test_quanto_itself(bits):
    package = pytest.importorskip("optimum.quanto")
    kind = {4: package.qint4, 2: package.qint2}[bits]
    for dtype, bound in DTYPES:
        scale, shift = package.MaxOptimizer()(cache().to(dtype), kind, 0, GROUP)
        k, v = (package.quantize_weight(cache().to(dtype), kind, 0, scale, shift, GROUP) for _ in "kv")
        report = run(lambda q, k, v: sdpa(q, k.dequantize(), v.dequantize()), queries().to(dtype), k, v, bound=bound)
        assert report.text.count(f"is u{bits} with scales [2, 3, 40, 2], zero points, its planar codes repacked") == 2


def test_quanto_of_other_kinds():
    package = pytest.importorskip("optimum.quanto")

    def of(k):
        return run(lambda q, k, v: sdpa(q, k.dequantize(), v), queries(), k, cache(), bound=2e-3).text

    for axis, dims in ((0, [2, 1, 1, 1]), (-1, [1, 1, 1, 64])):
        scale = package.AbsmaxOptimizer()(cache(), package.qint8, axis)
        assert f"K is s8 with scales {dims}" in of(package.quantize_weight(cache(), package.qint8, axis, scale))
    whole = package.quantize_activation(cache(), package.qint8, package.absmax_scale(cache()))
    assert "K is s8 with scales [1, 1, 1, 1]" in of(whole)
    # Groups along the axis that is not the last are of other tokens and heads.
    scale, shift = package.MaxOptimizer()(cache(), package.qint4, -1, 16)
    text = of(package.quantize_weight(cache(), package.qint4, -1, scale, shift, 16))
    assert "K is computed from bytes, but by no chain that is read as codes" in text
    scale, shift = package.MaxOptimizer()(cache(), package.qint4, 0, GROUP, zeropoint=True)
    text = of(package.quantize_weight(cache(), package.qint4, 0, scale, shift, GROUP))
    assert "codes less their zero point may wrap around in torch.int8" in text


@pytest.mark.parametrize("kind, low, high", [(torch.int8, None, None), (torch.uint8, 0, 15)])
@pytest.mark.parametrize("zeros", [torch.int32, torch.int8, torch.float32, None])
def test_torchao_itself(kind, low, high, zeros):
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    for block, dims in (((1, 1, 1, GROUP), [2, 3, 40, 2]), ((1, 1, 1, SIZE), [2, 3, 40, 1]), ((1, 1, TOKENS, 1), [2, 3, 1, 64])):
        scale, zero = ao.choose_qparams_affine(cache(), ao.MappingType.ASYMMETRIC, block, kind, low, high,
                                               zero_point_dtype=torch.int32)
        codes = ao.quantize_affine(cache(), block, scale, zero, kind, low, high)
        zero = None if zeros is None else zero.to(zeros)
        for dtype, bound in DTYPES:

            def function(q, k, s, z, v):
                return sdpa(q, ao.dequantize_affine(k, block, s, z, kind, low, high, output_dtype=dtype), v)

            report = run(function, queries().to(dtype), codes, scale, zero, cache().to(dtype), bound=bound)
            name = "s8" if kind == torch.int8 else "u8"
            assert f"K is {name} with scales {dims}{', zero points' if zeros else ''}; fused" in report.text


def k_of(unpacked):
    """Dequantized by hand, rows by groups."""
    return lambda data, scales, zeros: ((unpacked(data) - zeros) * scales).view(SHAPE)


def assigned(*parts, base=torch.empty):
    """Rows written one after another into others: where each starts, and what is written there."""
    def unpacked(x):
        codes = base([ROWS, GROUP])
        for start, part in parts:
            codes[start:start + len(x)] = part(x)
        return codes
    return unpacked


def booleans(dims):
    return torch.empty(dims, dtype=torch.bool)


@pytest.mark.parametrize("unpacked", [
    lambda x: torch.cat([x >> 4, x & 15]).float(),
    lambda x: torch.cat([x & 15, x >> 4]).float(),
    lambda x: torch.cat([(x >> 4).half(), (x & 15).half()]).float(),
    lambda x: torch.cat([x >> 4 & 15, (x & 255) & 15]),
    lambda x: torch.cat([(x.int() >> 4) & 15, x.int() & 15]),
    lambda x: torch.cat([x & 15, x >> 4]).to(torch.int8),
    lambda x: torch.cat([x >> 4, x & 15]).view(-1, 2 * GROUP).clone().view(ROWS, GROUP),
    assigned((0, lambda x: x & 15), (ROWS // 2, lambda x: x >> 4)),
    assigned((ROWS // 2, lambda x: x & 15), (0, lambda x: x >> 4), base=torch.ones),
])
def test_other_spellings_of_planes(unpacked):
    report = run(lambda q, c, s, z, v: sdpa(q, k_of(unpacked)(c, s, z), v), queries(), *planes(), cache(), bound=2e-3)
    assert "K is u4" in report.text and "repacked" in report.text


def test_planes_along_the_channels_and_heads():
    data = torch.randint(0, 256, (BATCH, HEADS, TOKENS, SIZE // 2), dtype=torch.uint8)
    scales = torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02
    report = run(lambda q, c, s, v: sdpa(q, torch.cat([c >> 4, c & 15], -1) * s, v), queries(), data, scales, cache(),
                 bound=2e-3)
    assert "K is u4" in report.text and "repacked" in report.text
    one = torch.randint(0, 256, (BATCH, 1, TOKENS, SIZE), dtype=torch.uint8)
    report = run(lambda q, c, s, v: sdpa(q, torch.cat([c & 15, c >> 4], 1) * s, v[:, :2]), queries()[:, :4], one, scales[:, :2],
                 cache(), bound=2e-3)
    assert "K is u4" in report.text and "repacked" in report.text


def test_four_codes_of_a_byte_side_by_side():
    data = torch.randint(0, 256, (BATCH, HEADS, TOKENS, SIZE // 4), dtype=torch.uint8)

    def function(order):
        def dequantized(q, c, s, v):
            parts = [c & 3, c >> 2 & 3, c >> 4 & 3, c >> 6]
            return sdpa(q, torch.stack([parts[i] for i in order], -1).view(SHAPE) * s, v)
        return dequantized

    arguments = queries(), data, torch.rand(BATCH, HEADS, TOKENS, 1) * 0.1, cache()
    report = run(function((0, 1, 2, 3)), *arguments, bound=2e-3)
    assert "K is u2" in report.text and "repacked" not in report.text
    assert "codes are stacked" in run(function((1, 0, 2, 3)), *arguments).text


def side_by_side(x):
    return torch.stack([x & 15, x >> 4], -1)


def quanto_unpacked(x):
    return torch.cat([x & 15, x >> 4 & 15])


@pytest.mark.parametrize("unpacked", [
    lambda x: torch.cat([x >> 4, x & 7]),
    lambda x: torch.cat([x >> 3, x & 15]),
    lambda x: torch.cat([x >> 5, x & 15]),
    lambda x: torch.cat([x & 240, x & 15]),
    lambda x: torch.cat([x >> 4, x >> 4]),
    lambda x: torch.cat([x & 15, x & 15]),
    lambda x: torch.cat([x >> 4, x.flip(0) & 15]),
    lambda x: torch.cat([x >> 4, x.view(GROUP, -1).t().reshape(x.shape) & 15]),
    lambda x: torch.cat([x >> 4, x[:1].expand(x.shape) & 15]),
    lambda x: torch.cat([x.view(torch.int8) >> 4, x.view(torch.int8) & 15]),
    lambda x: torch.cat([x.to(torch.int8) >> 4, x & 15]),
    lambda x: torch.cat([x >> 4, x & -1]),
    lambda x: torch.cat([(x << 1) >> 5, x & 15]),
    lambda x: torch.cat([(x + 1) >> 4, x & 15]),
    lambda x: torch.cat([(x >> 4).bool(), (x & 15).bool()]).float(),
    lambda x: torch.cat([x[:100] >> 4, x & 15, x[100:] >> 4]),
    lambda x: torch.cat([x >> 4 & 3, x & 3]),
    lambda x: quanto_unpacked(x.int() * 5),
    lambda x: torch.stack([x & 15, x >> 4]).view(ROWS, GROUP),
    lambda x: torch.stack([x & 15, x >> 4], 1).view(ROWS, GROUP),
    lambda x: side_by_side(torch.cat([x, x]))[:len(x)].view(ROWS, GROUP),
    lambda x: quanto_unpacked(torch.cat([x, x]))[:ROWS + 8][:ROWS],
    lambda x: torch.cat([x >> 4, x & 15]).flip(0),
    lambda x: torch.cat([x >> 4, x & 15, x >> 4])[len(x):],
    lambda x: torch.cat([x >> 4, x & 15, x >> 4, x & 15])[::2],
    lambda x: torch.cat([x >> 4, x & 15]).t().reshape(ROWS, GROUP),
    assigned((0, lambda x: x >> 4), base=torch.ones),
    assigned((0, lambda x: x >> 4), (0, lambda x: x & 15), base=torch.ones),
    assigned((0, lambda x: x >> 4), (5, lambda x: x & 15), base=torch.ones),
    assigned((0, lambda x: x[:1] >> 4), (ROWS // 2, lambda x: x & 15)),
    assigned((0, lambda x: x >> 4), (ROWS // 2, lambda x: x & 15), (7, lambda x: x & 15)),
    lambda x: assigned((0, lambda x: x >> 4), (ROWS // 2, lambda x: x & 15), base=booleans)(x).float(),
])
def test_numbers_of_what_is_nearly_planes(unpacked):
    """Read as bytes or not read: the numbers are PyTorch's."""
    report = run(lambda q, c, s, z, v: sdpa(q, k_of(unpacked)(c, s, z), v), queries(), *planes(), cache(), bound=2e-3)
    assert "u4" not in report.text and "u2" not in report.text and report.fused


def test_rows_and_columns_that_are_cut_off():
    q, v, rows = torch.randn(1, 1, 3, GROUP), torch.randn(1, 1, 7, GROUP), 7
    data, scales, zeros = torch.randint(0, 256, (4, GROUP), dtype=torch.uint8), torch.rand(rows, 1) * 0.03, torch.rand(rows, 1)
    report = run(lambda q, c, s, z, v: sdpa(q, quanto(c, s, z, 4, (1, 1, rows, GROUP)), v), q, data, scales, zeros, v, bound=2e-3)
    assert "K is u4 with scales [1, 1, 7, 1], zero points, its planar codes repacked" in report.text
    for cut in (lambda x: x[1:], lambda x: x[:, :GROUP][:7].flip(1), lambda x: x[:7, 2:]):
        def function(q, c, s, z, v):
            x = cut(torch.cat([c & 15, c >> 4]))
            return sdpa(q[..., :x.shape[1]], (x * s - z)[None, None], v)

        assert "u4" not in run(function, q, data, scales, zeros, v, bound=2e-3).text


def test_columns_that_are_no_whole_words_are_said():
    data, scales, zeros = planes(columns=4, rows=BATCH * HEADS * TOKENS * SIZE // 4)
    report = run(lambda q, c, s, z, v: sdpa(q, hqq(c, s, z), v), queries(), data, scales, zeros, cache())
    assert "codes in planes of 4 columns are not known to be whole words of 8 bytes" in report.text


def test_bytes_that_begin_anywhere():
    """Memory that is no multiple of eight bytes away, and rows that are not side by side."""
    compiled = torch.compile(lambda q, c, s, z, v: sdpa(q, hqq(c, s, z), v), backend="kvant", fullgraph=True)
    q, (data, scales, zeros), v = queries(), planes(), cache()
    wide = torch.randint(0, 256, (ROWS // 2, GROUP + 3), dtype=torch.uint8)
    shifted = [wide.view(-1)[by:by + data.numel()].view(data.shape) for by in (5, 8, 16)]
    for bytes_ in (data, *shifted, wide[:, 3:], data.flip(0), torch.from_numpy(data.numpy())):
        want = sdpa(q, hqq(bytes_, scales, zeros), v)
        assert (compiled(q, bytes_, scales, zeros, v) - want).norm() < 2e-3 * want.norm()
    assert all("K is u4" in report.text for report in kvant.torch.reports_of(compiled))


def test_bytes_that_the_graph_computes():
    """What is read of their memory is not written over by what comes later, with gradients off or only not asked for."""
    def function(q, c, s, z, v):
        first, second = sdpa(q, hqq(c ^ 85, s, z), v), sdpa(q, hqq(c ^ 90, s, z), v)
        return first + sdpa(second, hqq(c ^ 17, s, z), v)

    compiled = torch.compile(function, backend="kvant", fullgraph=True)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            arguments = queries(), *planes(), cache()
            want = function(*arguments)
            assert (compiled(*arguments) - want).norm() < 2e-3 * want.norm()
    assert all("K is u4" in report.text for report in kvant.torch.reports_of(compiled))


def test_bytes_that_the_graph_computes_and_cuts():
    """Rows of eight bytes, of which the first is cut off: memory begins at a word, and at no two of them."""
    rows = BATCH * HEADS * TOKENS * SIZE // 8
    data, scales, zeros = planes(columns=8, rows=rows + 2)
    report = run(lambda q, c, s, z, v: sdpa(q, hqq((c ^ 85)[1:], s, z), v) + (c ^ 85).float().mean(), queries(), data,
                 scales[2:], zeros[2:], cache(), bound=2e-3)
    assert "K is u4" in report.text


def test_what_others_read_stays():
    """The bytes, the codes and the values are all read by others too."""
    def function(q, c, s, z, v):
        codes = hqq_unpacked(c, 4, torch.float32)
        k = ((codes - z) * s).view(SHAPE)
        return sdpa(q, k, v) + c.float().mean() * 0.01 + codes.std() + k[:, :1, :5].mean()

    report = run(function, queries(), *planes(), cache(), bound=2e-3)
    assert "K is u4" in report.text


def test_bytes_that_change_after_they_are_read():
    data, scales, zeros = planes()
    want, got = data.clone(), data.clone()

    def function(q, c, s, z, v):
        o = sdpa(q, hqq(c, s, z), v)
        c += 3
        return o + sdpa(q, hqq(c, s, z), v)

    q, v = queries(), cache()
    compiled = torch.compile(function, backend="kvant", fullgraph=True)
    for _ in range(2):
        a, b = function(q, want, scales, zeros, v), compiled(q, got, scales, zeros, v)
        assert (a - b).norm() < 2e-3 * a.norm() and torch.equal(want, got)


@pytest.mark.parametrize("dequantize", [hqq, quanto])
def test_planes_of_any_number_of_tokens(dequantize):
    """One graph for all lengths, as of a cache that grows."""
    def function(q, c, s, z, k):
        shape = k.shape
        return sdpa(q, dequantize(c, s, z, 4, shape), k)

    compiled = torch.compile(function, backend="kvant", fullgraph=True)
    for tokens in (8, 24, 40, 16):
        rows = BATCH * HEADS * tokens * SIZE // GROUP
        arguments = queries(), *planes(rows=rows), torch.randn(BATCH, HEADS, tokens, SIZE)
        want = function(*arguments)
        assert (compiled(*arguments) - want).norm() < 2e-3 * want.norm()
    static, symbolic = kvant.torch.reports_of(compiled)
    assert "K is u4 with scales [2, 3, 8, 2]" in static.text
    assert "K is u4 with scales [2, 3, s" in symbolic.text and "repacked" in symbolic.text
