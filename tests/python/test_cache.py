"""KvCache against numpy."""

import copy
import gc
import pickle

import numpy as np
import pytest
from filled_cache import filled
from reference import attention, dequantize, distance, numbers, unpack

import kvant


def test_f32_is_exact():
    cache, k, v = filled("f32", 40, batch=2)
    q = numbers(2, 6, 1, 64)
    o = cache.attend(0, q)
    assert o.dtype == np.float32 and distance(o, attention(q, k, v)) < 1e-5
    assert distance(cache.attend(0, q, scale=0.5), attention(q, k, v, 0.5)) < 1e-5


def test_several_queries_see_what_is_not_behind_them():
    cache, k, v = filled("f32", 10)
    q = numbers(1, 2, 4, 64)
    mask = np.tri(4, 10, 6, dtype=bool)
    assert distance(cache.attend(0, q), attention(q, k, v, mask=mask)) < 1e-5


def test_soft_cap_window_and_sinks():
    cache, k, v = filled("f32", 12, batch=2)
    q = numbers(2, 6, 3, 64)
    seen = np.tri(3, 12, 9, dtype=bool) & ~np.tri(3, 12, 5, dtype=bool)
    sinks = np.array([3, -1, 0.5, 6, 2, -40], np.float32)
    want = attention(q, k, v, mask=seen, sinks=sinks)
    assert distance(cache.attend(0, q, window=4, sinks=sinks), want) < 1e-5
    compiled = cache.attention(6, 3, window=4, sinks=True)
    assert distance(compiled(0, q, sinks=sinks), want) < 1e-5
    scores = np.tanh(q[:, :, 2:] @ np.repeat(k, 3, 1).swapaxes(2, 3) / 8 / 0.7) * 0.7
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert distance(cache.attend(0, q[:, :, 2:].copy(), soft_cap=0.7), weights @ np.repeat(v, 3, 1)) < 1e-5
    for wrong, message in (
        (dict(window=0), "window must not be 0$"),
        (dict(window=True), "window must be an integer, not "),
        (dict(scale=True), "scale must be a number, not "),
        (dict(scale=1e-50), "scale must not be 0, as 1e-50 is in f32"),
        (dict(soft_cap=1e-50), "soft_cap must not be 0, as 1e-50 is in f32"),
        (dict(soft_cap=-1.0), "soft cap of -1"),
        (dict(sinks=sinks[:4]), r"sinks is f32\[4\], but must be f32\[6\]"),
    ):
        with pytest.raises(kvant.Error, match=message):
            cache.attend(0, q, **wrong)
    with pytest.raises(kvant.Error, match="with sinks is executed without"):
        compiled(0, q)


def test_queries_before_the_first_token_give_zero():
    cache, k, v = filled("f32", 4)
    q = numbers(1, 2, 6, 64)
    o = cache.attend(0, q)
    assert not o[:, :, :2].any()
    mask = np.tri(4, dtype=bool)
    assert distance(o[:, :, 2:], attention(q[:, :, 2:], k, v, mask=mask)) < 1e-5


# What each may differ, as relative L2 distance of the output: its step over the range of a group.
@pytest.mark.parametrize(
    "scheme,bound",
    [
        ("f16", 1e-3),
        ("bf16", 8e-3),
        ("int8_th", 0.02),
        ("q8_0", 0.02),
        ("fp8_th", 0.08),
        ("int4_g32", 0.25),
        ("q4_0", 0.3),
        ("nf4_g32", 0.3),
        ("kivi4", 0.25),
        ("int4_g64_R128_s4", 0.25),
        ("rotKV4_g64_R128_s4", 0.25),
    ],
)
def test_quantized_schemes_stay_within_their_error(scheme, bound):
    cache, k, v = filled(scheme, 90)
    q = numbers(1, 6, 1, 64)
    got = cache.attend(0, q)
    assert distance(got, attention(q, k, v)) < bound
    o = np.empty_like(q)
    assert cache.attention(6)(0, q, o) is o
    np.testing.assert_array_equal(o, got)


def test_token_by_token_is_as_at_once():
    cache, k, v = filled("int8_th", 12)
    other = kvant.KvCache("int8_th", heads=2, head_size=64, capacity=96)
    for t in range(12):
        other.append(0, k[:, :, t : t + 1], v[:, :, t : t + 1])
    q = numbers(1, 2, 1, 64)
    np.testing.assert_array_equal(cache.attend(0, q), other.attend(0, q))


def test_layers_have_schemes_of_their_own():
    schemes = ["f32", "int4_g32", "int4_g32"]
    cache = kvant.KvCache(schemes, layers=3, heads=1, head_size=32, capacity=8)
    assert [cache.scheme(i) for i in range(3)] == schemes
    assert "layers 1-2: int4_g32" in kvant.explain(cache)
    text = kvant.explain(cache.attention(2, type="f16"))
    assert "layers 0:" in text and "layers 1-2:" in text and "cpu" in text
    assert "cpu" in cache.attention(2).explain(1)


def test_counts_and_lengths():
    cache = kvant.KvCache("f32", batch=2, heads=1, head_size=8, capacity=8)
    k, v = numbers(2, 1, 3, 8), numbers(2, 1, 3, 8, seed=1)
    cache.append(0, k, v, counts=[3, 1])
    assert [cache.length(0, row) for row in range(2)] == [3, 1]
    q = numbers(2, 1, 1, 8, seed=2)
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)[:, None, None]
    assert distance(cache.attend(0, q), attention(q, k, v, mask=mask)) < 1e-5
    assert cache.length(9, 9) == 0


def test_values_of_another_size():
    cache = kvant.KvCache("f32", heads=2, head_size=16, v_head_size=24, capacity=8)
    k, v, q = numbers(1, 2, 5, 16), numbers(1, 2, 5, 24), numbers(1, 4, 1, 16)
    cache.append(0, k, v)
    o = cache.attend(0, q)
    assert o.shape == (1, 4, 1, 24) and distance(o, attention(q, k, v)) < 1e-5


def test_crop_reset_and_reorder():
    cache, k, v = filled("f32", 10, batch=2)
    q = numbers(2, 2, 1, 64)
    cache.reorder([1, 0])
    assert distance(cache.attend(0, q), attention(q, k[::-1], v[::-1])) < 1e-5
    cache.crop(7)
    assert distance(cache.attend(0, q), attention(q, k[::-1, :, :7], v[::-1, :, :7])) < 1e-5
    cache.crop(np.array(7))
    cache.crop(np.array([7, 3]))
    assert [cache.length(row=row) for row in range(2)] == [7, 3]
    cache.reset()
    assert cache.length() == 0 and cache.used_bytes == 0
    assert not cache.attend(0, q).any()


def test_a_fork_goes_its_own_way():
    cache, k, v = filled("int8_th", 5)
    fork = cache.fork()
    before = cache.attend(0, q := numbers(1, 2, 1, 64)).copy()
    fork.append(0, k, v)
    assert (cache.length(), fork.length()) == (5, 10)
    np.testing.assert_array_equal(cache.attend(0, q), before)
    assert fork.capacity == cache.capacity and fork.scheme() == cache.scheme()
    copied = copy.deepcopy(cache)
    copied.crop(2)
    assert (cache.length(), copied.length()) == (5, 2)
    del cache
    gc.collect()
    assert fork.attend(0, q).shape == q.shape


def test_bytes():
    cache, *_ = filled("int4_g64_R128_s4", 90)
    assert cache.bytes.total == sum(cache.bytes[:4]) >= cache.used_bytes > 0
    again = kvant.KvCache.bytes_for("int4_g64_R128_s4", heads=2, head_size=64, capacity=96)
    assert again == cache.bytes
    cache.attend(0, numbers(1, 2, 1, 64))
    assert cache.scratch_bytes > 0


def test_parts_are_what_is_stored():
    cache, k, v = filled("int8_th", 5)
    for values, x in ((False, k), (True, v)):
        codes = cache.part(0, values, "codes")[:, :, :5]
        scales = cache.part(0, values, "scales")[:, :, :5]
        assert codes.dtype == np.int8 and scales.dtype == np.float16
        assert (np.abs(dequantize(codes, scales) - x) <= 0.51 * scales.astype(float)).all()
        assert cache.part(0, values, "window") is None
    with pytest.raises(ValueError):
        codes[0] = 0


def test_parts_of_sub_byte_codes_with_a_window():
    cache, k, _ = filled("u4:g32:rzp+sinks2+window8", 30)
    ranges = cache.ranges(0, False)
    assert ranges.sinks == (0, 2) and ranges.quantized.tokens + ranges.window.tokens == 28
    n = ranges.quantized.tokens
    codes = unpack(cache.part(0, False, "codes")[:, :, :n], 4, signed=False)
    scales, zeros = (cache.part(0, False, p)[:, :, :n] for p in ("scales", "zero_points"))
    y = dequantize(codes, scales, zeros, real_zeros=True)
    assert np.abs(y - k[:, :, 2 : 2 + n]).max() < np.abs(scales).max()
    sinks = cache.part(0, False, "sinks")
    np.testing.assert_array_equal(sinks, k[:, :, :2].astype(np.float16))


def test_a_part_keeps_its_cache():
    cache, k, _ = filled("f32", 5)
    codes = cache.part(0, False, "codes")
    del cache
    gc.collect()
    np.testing.assert_array_equal(codes[:, :, :5], k)


def test_static_scales():
    k, v = numbers(1, 2, 6, 16), numbers(1, 2, 6, 16, seed=1)
    scales = [[float(np.abs(x[:, h, :, d]).max() / 127) for h in range(2) for d in range(16)]
              for x in (k, v)]
    cache = kvant.KvCache(
        "int8_channel", heads=2, head_size=16, capacity=8, k_scales=scales[:1], v_scales=scales[1:]
    )
    cache.append(0, k, v)
    q = numbers(1, 2, 1, 16)
    o = cache.attend(0, q)
    assert distance(o, attention(q, k, v)) < 0.02
    of_arrays = kvant.KvCache("int8_channel", heads=2, head_size=16, capacity=8, k_scales=np.array(scales[:1]),
                              v_scales=np.array(scales[1:]))
    of_arrays.append(0, k, v)
    np.testing.assert_array_equal(of_arrays.attend(0, q), o)


def test_strided_input():
    cache = kvant.KvCache("f32", heads=2, head_size=8, capacity=8)
    k, v = (numbers(1, 5, 2, 8, seed=s).transpose(0, 2, 1, 3) for s in (1, 2))
    cache.append(0, k, v)
    q = numbers(1, 2, 1, 8)
    assert distance(cache.attend(0, q), attention(q, k, v)) < 1e-5


def test_schemes():
    schemes = kvant.schemes()
    assert len(schemes) > 30 and "int8_th" in schemes and all(schemes.values())
    assert kvant.scheme_bits("kivi4") == 5 and kvant.scheme_bits("int8_th", 64) == 8.25
    for name in schemes:
        assert kvant.scheme_bits(name) > 0



def test_a_full_cache():
    cache, k, v = filled("int8_th", 90)
    with pytest.raises(kvant.Error, match="96"):
        cache.append(0, k, v)
    assert cache.length() == 90
    cache.append(0, k[:, :, :6], v[:, :, :6])
    with pytest.raises(kvant.Error, match="96"):
        cache.append(0, k[:, :, :1], v[:, :, :1])


def test_crop_beyond_the_window():
    cache, *_ = filled("int8_th", 1)
    cache = kvant.KvCache("s8:token+window8", heads=1, head_size=16, capacity=64, rollback=2)
    k = numbers(1, 1, 40, 16)
    cache.append(0, k, k)
    cache.crop(38)
    with pytest.raises(kvant.Error, match="20"):
        cache.crop(20)
    assert cache.length() == 38


def test_more_memory_than_there_is():
    with pytest.raises(MemoryError) as error:
        kvant.KvCache("f16", layers=1000, heads=1000, head_size=256, capacity=2**20)
    assert isinstance(error.value, kvant.Error) and error.value.kind == "out_of_memory"


def attention_in_f64(q, k, v, bias=0.0):
    """q [heads, tokens, size], k and v of one KV head; a query sees what is not behind its token."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(q.shape[-1]) + bias
    behind = np.arange(len(k)) > len(k) - q.shape[1] + np.arange(q.shape[1])[:, None]
    scores[:, behind] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)


def test_prompts_that_are_padded_on_the_left_and_read_their_own_tokens():
    random = np.random.default_rng(1)
    cache = kvant.KvCache("int2_g32", head_size=32, capacity=40, batch=2)
    starts = [0, 5]
    q, k, v = (random.standard_normal((2, heads, 12, 32), dtype=np.float32) for heads in (3, 1, 1))
    bias = random.standard_normal((2, 3, 12, cache.columns + 12), dtype=np.float32)
    out = cache.attend(0, q, k=k, v=v, starts=starts, bias=bias)
    for row, start in enumerate(starts):
        want = attention_in_f64(q[row, :, start:], k[row, 0, start:], v[row, 0, start:],
                                bias[row, :, start:, :12 - start])
        np.testing.assert_allclose(out[row, :, start:], want, atol=1e-5)
    ready = cache.attention(3, 12, new_tokens=True, bias=bias.shape)
    np.testing.assert_array_equal(ready(0, q, bias=bias, k=k, v=v, starts=starts), out)
    cache.append(0, k, v, starts=starts)
    assert [cache.length(0, row) for row in (0, 1)] == [12, 7]
    cache.append(0, k, v, counts=[2, 1], starts=[1, 11])
    assert [cache.length(0, row) for row in (0, 1)] == [14, 8]
    with pytest.raises(kvant.Error, match="batch row 1 begins at token 13 of 12"):
        cache.append(0, k, v, starts=[0, 13])
    with pytest.raises(kvant.Error, match="starts must be of 2 rows, not 1"):
        cache.append(0, k, v, starts=[0])
    with pytest.raises(kvant.Error, match="keys of new tokens is executed without them"):
        cache.attend(0, q, v=v)
    with pytest.raises(kvant.Error, match="a bias of"):
        cache.attend(0, q, bias=bias[..., :20])
    with pytest.raises(kvant.Error, match="has 3 dims"):
        cache.attend(0, q, bias=bias[0])


def test_forks_of_other_rows_and_capacities():
    cache = kvant.KvCache("f32", head_size=32, capacity=6, batch=2, layers=2)
    k = np.arange(2 * 4 * 32, dtype=np.float32).reshape(2, 1, 4, 32)
    for layer in (0, 1):
        cache.append(layer, k, k)
    fork = cache.fork([1, 0, 1], capacity=9)
    assert (fork.batch, fork.capacity, fork.columns) == (3, 9, 9)
    np.testing.assert_array_equal(fork.part(1, True, "codes")[:, :, :4], k[[1, 0, 1]])
    fork.crop([1, 2, 3], layer=1)
    assert [fork.length(layer, 2) for layer in (0, 1)] == [4, 3]
    fork.reorder([2, 2, 2], layer=0)
    np.testing.assert_array_equal(fork.part(0, False, "codes")[1, :, :4], k[1])
    for call, message in (
        (lambda: cache.fork([2]), "there is no batch row 2: the cache has 2"),
        (lambda: cache.fork([]), "a fork of no rows"),
        (lambda: cache.fork(capacity=3), "has 4 tokens, more than a capacity of 3"),
        (lambda: cache.fork(capacity=0), "a fork with a capacity of 0"),
        (lambda: cache.crop(1, layer=2), "there is no layer 2"),
        (lambda: cache.reorder([0, 1], layer=-1), "there is no layer -1"),
        (lambda: pickle.dumps(cache), "a KvCache cannot be pickled"),
    ):
        with pytest.raises(kvant.Error, match=message):
            call()


def test_layers_keep_the_last_tokens():
    random = np.random.default_rng(2)
    options = dict(head_size=32, capacity=1000, layers=2)
    cache = kvant.KvCache("f32", keep=[20, None], **options)
    assert cache.bytes.codes == 2 * 4 * 32 * 1020
    assert kvant.KvCache.bytes_for("f32", keep=20, **options).codes == 2 * 4 * 32 * 40
    k, v = random.standard_normal((2, 1, 1, 300, 32), dtype=np.float32)
    cache.append(0, k, v)
    q = random.standard_normal((1, 2, 1, 32), dtype=np.float32)
    out = cache.attend(0, q, window=20)
    np.testing.assert_allclose(out[0], attention_in_f64(q[0], k[0, 0, -20:], v[0, 0, -20:]), atol=1e-5)
    with pytest.raises(kvant.Error, match="of the 300 tokens of batch row 0 the last 20 are kept"):
        cache.attend(0, q)
    assert kvant.KvCache.bytes_for("f32", keep=np.array(20), **options).codes == 2 * 4 * 32 * 40
    with pytest.raises(kvant.Error, match="2 layers need as many numbers of tokens to keep, not 3"):
        kvant.KvCache("f32", keep=[1, 2, 3], **options)


def test_zero_points_that_share_bytes_are_flat():
    random = np.random.default_rng(3)
    cache = kvant.KvCache("int4zp_g64", heads=2, batch=2, head_size=64, capacity=20, keep=7)
    k, v = random.standard_normal((2, 2, 2, 5, 64), dtype=np.float32)
    cache.append(0, k, v)
    flat = cache.part(0, False, "zero_points")
    assert flat.shape == (14,)
    points = np.stack([flat & 15, flat >> 4], -1).reshape(2, 2, 7)[..., :5]
    codes = cache.part(0, False, "codes")[:, :, :5]
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(2, 2, 5, 64).astype(np.float64)
    scales = cache.part(0, False, "scales")[:, :, :5].astype(np.float64)
    np.testing.assert_allclose((codes - points[..., None]) * scales, k, atol=scales.max())


def test_attention_of_no_tokens_is_refused():
    with pytest.raises(kvant.Error, match="attention of 0 query tokens"):
        kvant.KvCache("f16", head_size=16, capacity=5).attention(1, 0)


@pytest.mark.parametrize("scheme", ["f16", "int4_g32", "u4:g32:rzp+sinks2+window7"])
def test_saves_and_loads(scheme, tmp_path):
    cache, k, v = filled(scheme, 30, batch=2, rollback=12)
    cache.crop([30, 18])
    assert cache.saved_bytes(0) == cache.saved_bytes(0, [30, 18]) < cache.saved_bytes(0, [30, 30])
    cache.save(0).tofile(tmp_path / "layer")
    other = kvant.KvCache(scheme, layers=3, batch=2, heads=2, head_size=64, capacity=50)
    other.append(2, *numbers(2, 2, 2, 40, 64))
    other.load(2, np.fromfile(tmp_path / "layer", np.uint8), [30, 18])
    q = numbers(2, 4, 1, 64)
    assert [other.length(2, row) for row in range(2)] == [30, 18]
    # Up to the order of sums, which is that of slots.
    assert distance(other.attend(2, q), cache.attend(0, q)) < 1e-6
    for each, layer in ((cache, 0), (other, 2)):
        each.append(layer, k[:, :, :9], v[:, :, :9])
    assert distance(other.attend(2, q), cache.attend(0, q)) < 1e-6


def test_saving_refuses():
    cache, _, _ = filled("f16", 30)
    with pytest.raises(ValueError, match="its sequences take 15360 bytes, but 7 are given"):
        cache.save(0, out=np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="there is no layer 3: the cache has 1"):
        cache.save(3)
    with pytest.raises(ValueError, match=r"data is f32\[3840\], but must be u8\[3840\]"):
        cache.load(0, np.zeros(3840, np.float32), [30])
    with pytest.raises(ValueError, match="lengths must be of 1 rows, not 2"):
        cache.load(0, cache.save(0), [30, 30])
    with pytest.raises(ValueError, match="of 97 tokens, where the capacity is 96"):
        cache.load(0, cache.save(0), [97])


def test_statistics_merge_parts():
    """Of queries that come after all tokens: the logarithm of the sum of exponentials."""
    cache, k, v = filled("f32", 20, batch=2)
    q = numbers(2, 4, 3, 64)
    out, stats = cache.attend(0, q, causal=False, stats=True)
    assert stats.shape == (2, 4, 3, 1) and distance(out, attention(q, k, v)) < 1e-5
    scores = q.astype(np.float64) @ np.repeat(k, 2, 1).swapaxes(2, 3) / 8
    np.testing.assert_allclose(stats, np.log(np.exp(scores).sum(-1, keepdims=True)), rtol=1e-5)
    np.testing.assert_array_equal(cache.attend(0, q, causal=False, stats=False), out)
    compiled = cache.attention(4, 3, causal=False, stats=True)
    given = np.empty_like(stats)
    again, same = compiled(0, q, stats=given)
    assert same is given and (given == stats).all() and (again == out).all()
    empty = kvant.KvCache("f32", batch=2, heads=2, head_size=64, capacity=4)
    out, stats = empty.attend(0, q, causal=False, stats=True)
    assert (out == 0).all() and (stats == -np.inf).all()
    for wrong, message in ((dict(window=3), "sees all tokens with a window"),
                           (dict(k=k[:, :, :3], v=v[:, :, :3]), "sees all tokens with new tokens")):
        with pytest.raises(kvant.Error, match=message):
            cache.attend(0, q, causal=False, **wrong)
    with pytest.raises(kvant.Error, match="with statistics is executed without them"):
        compiled(0, q)
