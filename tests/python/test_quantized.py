"""Compressed keys and values, and what writes and reads caches."""

import json

import numpy as np
import pytest
from reference import attention, dequantize, distance, expand, numbers, pack, unpack

import kvant

ANY = "cpu,oracle"
RNG = np.random.default_rng(7)


def codes_of(shape, low, high):
    return RNG.integers(low, high + 1, shape)


def test_int4_decode_with_groups_and_zero_points():
    """Codes, scales and zero points that differ per head, token and group."""
    heads, ratio, tokens, size, group = 2, 3, 50, 64, 16
    g = kvant.GraphBuilder(fpmath="f16", apply_to_int=True)
    q = g.input("q", "f32", [2, heads, ratio, 1, size])
    shape = [2, heads, 1, tokens, size]
    groups = [2, heads, 1, tokens, size // group]

    def cache(name):
        codes = g.input(name, "u4", shape)
        scales = g.input(name + "_scales", "f16", groups)
        zeros = g.input(name + "_zeros", "u4", groups)
        return g.dynamic_dequantize(
            codes, scales, zeros, group_shape=[1, 1, 1, 1, group], type="f32"
        )

    keys, values = cache("k"), cache("v")
    scores = g.matmul(q, keys, transpose_b=True) / 8
    g.output("o", g.softmax(scores) @ values)
    compiled = kvant.compile(g.build(), require_fused=True)
    x = numbers(2, heads, ratio, 1, size)
    inputs, real = {"q": x}, {}
    for name in "kv":
        codes, zeros = codes_of(shape, 0, 15), codes_of(groups, 0, 15)
        scales = RNG.uniform(0.05, 0.2, groups).astype(np.float16)
        real[name] = dequantize(codes, scales, zeros)
        inputs |= {name: pack(codes, 4), name + "_scales": scales, name + "_zeros": pack(zeros, 4)}
    o = compiled(inputs)
    assert o.shape == x.shape and o.dtype == np.float32
    flat = [y[:, :, 0] for y in (real["k"], real["v"])]
    want = attention(x[:, :, :, 0].reshape(2, heads * ratio, 1, size), *flat, 1 / 8)
    assert distance(o.reshape(want.shape), want) < 2e-3


@pytest.mark.parametrize("type,bits", [("s8", 8), ("u8", 8), ("s4", 4), ("s2", 2), ("u2", 2)])
def test_dequantize_by_token(type, bits):
    shape = [1, 2, 6, 16]
    low = -(2 ** (bits - 1)) if type[0] == "s" else 0
    codes = codes_of(shape, low, low + 2**bits - 1)
    scales = RNG.uniform(0.1, 1, [1, 2, 6, 1]).astype(np.float32)
    g = kvant.GraphBuilder()
    x, s = g.input("x", type, shape), g.input("s", "f32", scales.shape)
    g.output("y", g.dynamic_dequantize(x, s, group_shape=[1, 1, 1, 16]))
    stored = pack(codes, bits) if bits < 8 else codes.astype("int8" if type == "s8" else "uint8")
    y = kvant.compile(g.build(), backends=ANY)(x=stored, s=scales)
    np.testing.assert_allclose(y, dequantize(codes, scales), rtol=1e-6)


def test_dequantize_by_channel_and_codebook():
    codes = codes_of([4, 8], 0, 15)
    book = np.sort(RNG.uniform(-1, 1, 16))
    scales = RNG.uniform(0.1, 1, 8).astype(np.float32)
    g = kvant.GraphBuilder()
    x, s = g.input("x", "u4", [4, 8]), g.input("s", "f32", [8])
    g.output("y", g.dynamic_dequantize(x, s, axis=1, codebook=book))
    y = kvant.compile(g.build(), backends=ANY)(x=pack(codes, 4), s=scales)
    np.testing.assert_allclose(y, book[codes] * scales, rtol=1e-6)


@pytest.mark.parametrize("zero_point_type", [None, "f32", "u4"])
def test_dynamic_quantize_is_within_half_a_step(zero_point_type):
    x = numbers(2, 3, 32)
    g = kvant.GraphBuilder()
    made = g.dynamic_quantize(
        g.input("x", "f32", x.shape),
        "u4" if zero_point_type else "s4",
        group_shape=[1, 1, 16],
        zero_point_type=zero_point_type,
    )
    assert made.codes.dims == (2, 3, 32) and made.scales.dims == (2, 3, 2)
    g.output("codes", made.codes)
    g.output("scales", made.scales)
    if made.zero_points:
        g.output("zeros", made.zero_points)
    got = kvant.compile(g.build())(x=x)
    assert got["codes"].dtype == np.uint8 and got["codes"].shape == (2, 3, 16)
    codes = unpack(got["codes"], 4, signed=not zero_point_type)
    zeros = got.get("zeros")
    if zero_point_type == "u4":
        zeros = unpack(zeros, 4, signed=False)
    y = dequantize(codes, got["scales"], zeros, real_zeros=zero_point_type == "f32")
    # An integer zero point is itself rounded, by up to half a step.
    steps = 1.01 if zero_point_type == "u4" else 0.51
    assert (np.abs(y - x) <= steps * expand(got["scales"], x.shape)).all()


def test_append_writes_its_tokens_and_no_others():
    capacity, group = 8, 8
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [2, 3, 2, 16])
    positions = g.input("positions", "s32", [2])
    made = g.append(
        x, positions, capacity, "u4", group_shape=[1, 1, 1, group], zero_point_type="f32"
    )
    assert made.codes.dims == (2, 3, capacity, 16)
    assert made.scales.dims == made.zero_points.dims == (2, 3, capacity, 2)
    for name, value in zip(("codes", "scales", "zeros"), made):
        g.output(name, value)
    compiled = kvant.compile(g.build())
    out = {
        "codes": RNG.integers(0, 256, (2, 3, capacity, 8)).astype(np.uint8),
        "scales": numbers(2, 3, capacity, 2, seed=1),
        "zeros": numbers(2, 3, capacity, 2, seed=2),
    }
    before = {name: a.copy() for name, a in out.items()}
    new = numbers(2, 3, 2, 16, seed=3)
    got = compiled(x=new, positions=np.array([5, -1], np.int32), out=out)
    assert got["codes"] is out["codes"]
    codes = unpack(out["codes"], 4, signed=False)
    y = dequantize(codes, out["scales"], out["zeros"], real_zeros=True)
    steps = expand(out["scales"], codes.shape)
    assert (np.abs(y[0, :, 5:7] - new[0]) <= 0.51 * steps[0, :, 5:7]).all()
    for name, a in out.items():
        a[0, :, 5:7] = before[name][0, :, 5:7]
        np.testing.assert_array_equal(a, before[name])
    with pytest.raises(kvant.Error, match="7"):
        compiled(x=new, positions=np.array([7, 0], np.int32), out=out)
    np.testing.assert_array_equal(out["codes"], before["codes"])


def test_append_begins_with_zeros_and_converts():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [1, 2, 3, 4])
    made = g.append(x, g.input("at", "s32", [1]), 6, "f16")
    assert made.scales is None and made.codes.dims == (1, 2, 6, 4)
    g.output("cache", made.codes)
    new = numbers(1, 2, 3, 4)
    want = np.zeros((1, 2, 6, 4), np.float16)
    want[:, :, 2:5] = new
    got = kvant.compile(g.build())(x=new, at=np.array([2], np.int32))
    np.testing.assert_array_equal(got, want)


def op_of(g):
    """Attributes of the graph's one op, and the types and dims of its inputs and outputs."""
    (op,) = json.loads(g.build().to_json())["graph"]
    ports = [[(each["dtype"], each["shape"]) for each in op[side]] for side in ("inputs", "outputs")]
    return {name: each["value"] for name, each in op["attrs"].items()}, *ports


def test_what_ops_that_quantize_are_given_is_in_the_graph():
    g = kvant.GraphBuilder()
    g.dynamic_quantize(g.input("x", "f32", [2, 32]), "s8", group_shape=[1, 16], scale_type="f16",
                       power_of_two_scales=True, scale_floor=0.5)
    attributes, _, outputs = op_of(g)
    assert attributes["power_of_two_scales"] and attributes["scale_floor"] == 0.5
    assert outputs == [("s8", [2, 32]), ("f16", [2, 2])]
    g = kvant.GraphBuilder()
    g.dynamic_quantize(g.input("x", "f32", [2, 32]), "s4", group_shape=[1, 32], scale_type="f16", formula="ggml")
    assert op_of(g)[0]["formula"] == "ggml"
    g, book = kvant.GraphBuilder(), [i / 16 for i in range(16)]
    g.dynamic_quantize(g.input("x", "f32", [2, 32]), "u4", group_shape=[1, 32], codebook=book)
    assert op_of(g)[0]["codebook"] == book
    g = kvant.GraphBuilder()
    x, s, z = g.input("x", "f32", [2, 32]), g.input("s", "f32", [2, 1]), g.input("z", "u8", [2, 1])
    made = g.dynamic_quantize(x, "u8", scales=s, zero_points=z, group_shape=[1, 32])
    assert made.scales is None and made.zero_points is None
    assert op_of(g)[1:] == ([("f32", [2, 32]), ("f32", [2, 1]), ("u8", [2, 1])], [("u8", [2, 32])])
    g = kvant.GraphBuilder()
    codes, s = g.input("x", "s8", [2, 32]), g.input("s", "f32", [2, 1])
    assert g.dynamic_dequantize(codes, s, group_shape=[1, 32], type="f16").type == "f16"


def test_axes_of_tokens():
    """Of caches [batch, tokens, heads, size]; scales of groups of tokens."""
    g = kvant.GraphBuilder()
    x, at = g.input("x", "f32", [1, 4, 2, 8]), g.input("at", "s32", [1])
    made = g.append(x, at, 12, "u4", token_axis=1, group_shape=[1, 4, 1, 1])
    assert made.codes.dims == (1, 12, 2, 8) and made.scales.dims == (1, 3, 2, 8)
    plain = g.append(x, at, 12, "f16", token_axis=1)
    assert plain.codes.dims == (1, 12, 2, 8)
    g = kvant.GraphBuilder()
    x, slots = g.input("x", "f32", [4, 2, 8]), g.input("slots", "s64", [4])
    made = g.append_pages(x, slots, 3, 16, "s8", token_axis=1, group_shape=[1, 1, 1, 8])
    assert made.codes.dims == (3, 16, 2, 8) and made.scales.dims == (3, 16, 2, 1)
    x = numbers(2, 6, 3, 4)
    g = kvant.GraphBuilder()
    g.output("y", g.load_tokens(g.input("x", "f32", x.shape), g.input("n", "s32", [2]), token_axis=1))
    want = x.copy()
    want[0, 2:] = 0
    np.testing.assert_array_equal(kvant.compile(g.build(), backends=ANY)(x=x, n=np.array([2, 6], np.int32)), want)
    for make in (lambda g, x, n: g.load_tokens(x, n, token_axis=1, token_group=2),
                 lambda g, x, n: g.load_pages(x, g.input("table", "s32", [2, 1]), n, token_axis=1, token_group=2)):
        g = kvant.GraphBuilder()
        make(g, g.input("x", "f32", x.shape), g.input("n", "s32", [2]))
        attributes = op_of(g)[0]
        assert (attributes["token_axis"], attributes["token_group"]) == (1, 2)
    g = kvant.GraphBuilder()
    g.load_ranges([g.input("x", "f32", x.shape)], g.input("ranges", "s32", [2, 1, 2]), token_axis=1)
    assert op_of(g)[0]["token_axis"] == 1


def test_append_with_given_scales():
    scales = RNG.uniform(0.02, 0.05, [1, 2, 1, 4]).astype(np.float32)
    g = kvant.GraphBuilder()
    x, at = g.input("x", "f32", [1, 2, 3, 4]), g.input("at", "s32", [1])
    s = g.input("s", "f32", scales.shape)
    g.output("cache", g.append(x, at, 6, "s8", scales=s, group_shape=[1, 1, 6, 1]).codes)
    new = numbers(1, 2, 3, 4)
    got = kvant.compile(g.build())(x=new, at=np.array([1], np.int32), s=scales)
    want = np.clip(np.rint(new.astype(float) / scales), -128, 127)
    assert np.abs(got[:, :, 1:4] - want).max() <= 1 and (got[:, :, [0, 4, 5]] == 0).all()


def test_tokens_that_do_not_exist():
    x, y, z = numbers(2, 4, 1, 16), numbers(2, 2, 9, 16, seed=1), numbers(2, 2, 9, 16, seed=2)
    g = kvant.GraphBuilder()
    q = g.input("q", "f32", x.shape)
    k, v = (g.input(n, "f32", y.shape) for n in "kv")
    lengths, first = g.input("lengths", "s32", [2]), g.input("first", "s32", [2])
    loaded = [g.load_tokens(t, lengths, first) for t in (k, v)]
    o = g.scaled_dot_product_attention(q, *loaded, kv_lengths=lengths, kv_first=first)
    g.output("o", o)
    ends, begins = np.array([9, 4], np.int32), np.array([2, 0], np.int32)
    compiled = kvant.compile(g.build(), require_fused=True)
    y[1, :, 4:] = np.nan
    got = compiled(q=x, k=y, v=z, lengths=ends, first=begins)
    at = np.arange(9)
    mask = ((at < ends[:, None]) & (at >= begins[:, None]))[:, None, None]
    assert distance(got, attention(x, np.nan_to_num(y), z, mask=mask)) < 1e-5
    with pytest.raises(kvant.Error, match="10"):
        compiled(q=x, k=y, v=z, lengths=np.array([10, 4], np.int32), first=begins)


def test_a_cache_in_pages():
    pages, page, heads, size, table = 6, 4, 2, 16, np.array([[5, 0], [2, 3]], np.int32)
    lengths, tokens = np.array([7, 3], np.int32), 10

    g = kvant.GraphBuilder()
    x, slots = g.input("x", "f32", [tokens, heads, size]), g.input("slots", "s64", [tokens])
    made = g.append_pages(x, slots, pages, page, "s8", group_shape=[1, 1, 1, size])
    assert made.codes.dims == (pages, heads, page, size)
    assert made.scales.dims == (pages, heads, page, 1)
    g.output("codes", made.codes)
    g.output("scales", made.scales)
    write = kvant.compile(g.build())

    g = kvant.GraphBuilder(fpmath="f16", apply_to_int=True)
    q = g.input("q", "f32", [2, heads, 1, size])
    codes = g.input("codes", "s8", [pages, heads, page, size])
    scales = g.input("scales", "f32", [pages, heads, page, 1])
    where, ends = g.input("table", "s32", [2, 2]), g.input("lengths", "s32", [2])
    pool = g.dynamic_dequantize(codes, scales, group_shape=[1, 1, 1, size])
    kv = g.load_pages(pool, where, ends)
    assert kv.dims == (2, heads, 2 * page, size)
    g.output("o", g.scaled_dot_product_attention(q, kv, kv, kv_lengths=ends))
    read = kvant.compile(g.build(), require_fused=True)

    new = numbers(tokens, heads, size)
    places = [table[n, t // page] * page + t % page for n in range(2) for t in range(lengths[n])]
    cache = write(x=new, slots=np.array(places, np.int64))
    query = numbers(2, heads, 1, size, seed=1)
    o = read(q=query, table=table, lengths=lengths, **cache)
    for n, rows in enumerate((slice(0, 7), slice(7, 10))):
        kv = new[rows].transpose(1, 0, 2)[None]
        assert distance(o[n : n + 1], attention(query[n : n + 1], kv, kv)) < 0.02
    with pytest.raises(kvant.Error, match="24"):
        write(x=new, slots=np.array([24] * tokens, np.int64))


def test_rings():
    segments = [numbers(1, 2, 4, 8, seed=1), numbers(1, 2, 3, 8, seed=2)]
    ranges = np.array([[[3, 2], [1, 3]]], np.int32)
    g = kvant.GraphBuilder()
    a, b = (g.input(n, "f32", s.shape) for n, s in zip("ab", segments))
    tokens, lengths = g.load_ranges([a, b], g.input("ranges", "s32", ranges.shape), lengths=True)
    g.output("tokens", tokens)
    g.output("lengths", lengths)
    got = kvant.compile(g.build(), backends=ANY)(a=segments[0], b=segments[1], ranges=ranges)
    assert got["lengths"].tolist() == [5]
    want = np.concatenate([segments[0][:, :, [3, 0]], segments[1][:, :, [1, 2, 0]]], 2)
    np.testing.assert_array_equal(got["tokens"][:, :, :5], want)
    assert not got["tokens"][:, :, 5:].any()


def test_attention_over_a_cache_may_be_computed_in_bf16():
    k, v = numbers(1, 2, 100, 32), numbers(1, 2, 100, 32)
    q = numbers(1, 4, 64, 32)
    results, kernels = [], []
    for fpmath in ("strict", "bf16"):
        cache = kvant.KvCache("int8_g32", heads=2, head_size=32, capacity=100, fpmath=fpmath)
        cache.append(0, k, v)
        results.append(cache.attend(0, q))
        kernels.append(cache.attention(4, 64).explain())
    assert "f32 products of tiles" in kernels[0]
    # Not every CPU has them.
    by_pairs = "bf16 products of tiles" in kernels[1]
    assert distance(results[1], results[0]) < 1e-2
    assert by_pairs != np.array_equal(*results)
