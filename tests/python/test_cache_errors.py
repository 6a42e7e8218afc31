"""What KvCache refuses, in words."""

import numpy as np
import pytest
from filled_cache import filled
from reference import numbers

import kvant


def test_wrong_arguments_are_said():
    cache, k, v = filled("f16", 5, batch=2, rollback=4)
    q = numbers(2, 2, 1, 64)
    for call, words in [
        (lambda: cache.append(0, k[:1], v[:1]), ["2", "1"]),
        (lambda: cache.append(0, k[:, :, :, :32], v), ["64"]),
        (lambda: cache.append(0, k, v[:, :, :3]), ["3", "5"]),
        (lambda: cache.append(0, k.astype(np.float64), v), ["k"]),
        (lambda: cache.append(0, k[0], v[0]), ["k"]),
        (lambda: cache.append(0, None, v), ["k", "NoneType"]),
        (lambda: cache.append(1, k, v), ["1"]),
        (lambda: cache.append(-1, k, v), ["-1"]),
        (lambda: cache.append("0", k, v), ["layer"]),
        (lambda: cache.append(0, k, v, counts=[1]), ["2", "1"]),
        (lambda: cache.append(0, k, v, counts=[1, 6]), ["6"]),
        (lambda: cache.append(0, k, v, counts=[1, -1]), ["-1"]),
        (lambda: cache.append(0, k * np.nan, v), ["nan|NaN|finite"]),
        (lambda: cache.append(0, k * 1e6, v), ["65504"]),
        (lambda: cache.attend(0, q[:1]), ["q"]),
        (lambda: cache.attend(0, q[..., :32]), ["64"]),
        (lambda: cache.attend(0, q[0]), ["q"]),
        (lambda: cache.attend(0, q.repeat(2, 3)[..., ::2]), ["^q .*must have strides", r"\]; make it dense$"]),
        (lambda: cache.attend(0, q.astype(np.int32)), ["q"]),
        (lambda: cache.attend(0, q.astype(np.float64)), ["q", "float64"]),
        (lambda: cache.attend(0, [1.0]), ["q", "list"]),
        (lambda: cache.attend(5, q), ["5"]),
        (lambda: cache.attend(0, numbers(2, 3, 1, 64)), ["3"]),
        (lambda: cache.attend(0, q, out=q[:1]), ["out"]),
        (lambda: cache.attend(0, q, out=q.astype(np.float16)), ["out"]),
        (lambda: cache.attend(0, q, scale="1"), ["scale"]),
        (lambda: cache.attend(0, q, scale=0), ["scale"]),
        (lambda: cache.attend(0, numbers(2, 2, 64, 2).swapaxes(2, 3)), ["q"]),
        (lambda: cache.attention(3), ["3"]),
        (lambda: cache.attention(2, type="s8"), ["s8"]),
        (lambda: cache.attention(2, type="f12"), ["f12"]),
        (lambda: cache.crop(6), ["5", "6"]),
        (lambda: cache.crop(-1), ["-1"]),
        (lambda: cache.crop([1]), ["2", "1"]),
        (lambda: cache.crop([1, 2, 3]), ["2", "3"]),
        (lambda: cache.crop("all"), ["tokens"]),
        (lambda: cache.reorder([]), ["0 rows for a batch of 2"]),
        (lambda: cache.reorder([0]), ["1 rows for a batch of 2"]),
        (lambda: cache.reorder([0, 2]), ["2"]),
        (lambda: cache.scheme(1), ["1"]),
        (lambda: cache.part(0, False, "code"), ["code", "window"]),
        (lambda: cache.part(0, 1, "codes"), ["values"]),
        (lambda: cache.part(3, False, "codes"), ["3"]),
        (lambda: kvant.KvCache("int5", head_size=8, capacity=8), ["int5"]),
        (lambda: kvant.KvCache(5, head_size=8, capacity=8), ["scheme", "5"]),
        (lambda: kvant.KvCache(["f16"] * 2, layers=3, head_size=8, capacity=8), ["3", "2"]),
        (lambda: kvant.KvCache([], head_size=8, capacity=8), ["1", "0"]),
        (lambda: kvant.KvCache("f16", head_size=0, capacity=8), ["0"]),
        (lambda: kvant.KvCache("f16", head_size=8, capacity=0), ["0"]),
        (lambda: kvant.KvCache("f16", layers=0, head_size=8, capacity=8), ["0 layers"]),
        (lambda: kvant.KvCache("f16", batch=-1, head_size=8, capacity=8), ["-1 seq"]),
        (lambda: kvant.KvCache("f16", head_size=8.5, capacity=8), ["head_size", "8.5"]),
        (lambda: kvant.KvCache("int4_g32", head_size=40, capacity=8), ["40"]),
        (lambda: kvant.KvCache("int8_channel", head_size=8, capacity=8), ["scale"]),
        (
            lambda: kvant.KvCache("int8_channel", head_size=8, capacity=8, k_scales=[[1] * 7],
                                  v_scales=[[1] * 8]),
            ["7"],
        ),
        (lambda: kvant.KvCache("f16", head_size=8, capacity=8, k_scales=[1.0]), ["k_scales"]),
        (lambda: kvant.KvCache("f16", head_size=8, capacity=8, v_scales=1.0), ["v_scales", "a list of lists of numbers"]),
        (lambda: cache.reorder(np.array(1)), ["rows must be a list of integers"]),
        (lambda: cache.attend(0, q.data), ["q is a memoryview", "give out"]),
        (lambda: cache.attend(0, [1.0], out=np.empty_like(q), stats=True), ["q", "list"]),
        (lambda: kvant.KvCache("f16", head_size=8, capacity=8, device="cuda"), ["cuda"]),
        (lambda: kvant.scheme_bits("int5"), ["int5"]),
        (lambda: kvant.scheme_bits([]), ["scheme must be a string"]),
        (lambda: kvant.scheme_bits("int4_g32", 48), ["groups of 32 do not divide the head size 48"]),
        (lambda: kvant.scheme_bits("int4_g32", heads=0), ["0 heads"]),
    ]:
        with pytest.raises(kvant.Error, match="(?s)" + ".*".join(words)):
            call()
    assert cache.length() == 5


def test_read_only_output():
    cache, *_ = filled("f32", 5)
    q = numbers(1, 2, 1, 64)
    o = np.empty_like(q)
    o.flags.writeable = False
    with pytest.raises(kvant.Error, match="out is read-only"):
        cache.attend(0, q, o)
