"""torch's tensors, through its exchange table."""

import numpy as np
import pytest
from reference import attention, dequantize, distance, numbers, pack

import kvant
from kvant.tensors import torch_like

torch = pytest.importorskip("torch")
SHAPE = [1, 2, 5, 8]


def compiled_attention(type):
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, type, SHAPE) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    return kvant.compile(g.build(), require_fused=True)


def tensors(dtype=torch.float32):
    return [torch.from_numpy(numbers(*SHAPE, seed=s)).to(dtype) for s in range(3)]


@pytest.mark.parametrize("type", [torch.float32, torch.float16, torch.bfloat16])
def test_real_types(type):
    qkv = tensors(type)
    o = compiled_attention(type)(dict(zip("qkv", qkv)))
    assert isinstance(o, torch.Tensor) and o.dtype == type
    want = attention(*(x.double().numpy() for x in qkv))
    assert distance(o.double().numpy(), want) < {torch.float32: 1e-5}.get(type, 1e-2)


def test_tensors_that_cannot_be_read():
    """torch's reasons are of many lines."""
    q, k, v = tensors()
    for bad in (q.to("meta"), q.to_sparse()):
        with pytest.raises(kvant.InvalidError, match="^input 'k', a Tensor, cannot be read: .+$") as error:
            compiled_attention("f32")(q=q, k=bad, v=v)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bool", "int8", "uint8", "int32"])
def test_other_types(name):
    dtype = getattr(torch, name)
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    g = kvant.GraphBuilder()
    g.output("y", g.transpose(g.input("x", dtype, [2, 3]), [1, 0]))
    y = kvant.compile(g.build(), backends="oracle")(x=x)
    assert y.dtype == dtype and torch.equal(y.float(), x.float().T)


def test_float8_keys_and_values():
    g = kvant.GraphBuilder(fpmath="f16", apply_to_int=True)
    q = g.input("q", "f32", [1, 2, 3, 16])
    made = {}
    for name, type in (("k", "f8_e4m3"), ("v", "f8_e5m2")):
        scales = g.input(name + "_scales", "f32", [1, 2, 7, 1])
        made[name] = g.dynamic_dequantize(
            g.input(name, type, [1, 2, 7, 16]), scales, group_shape=[1, 1, 1, 16]
        )
    o = g.softmax(g.matmul(q, made["k"], transpose_b=True) * 0.25) @ made["v"]
    g.output("o", o)
    compiled = kvant.compile(g.build(), require_fused=True)
    x = numbers(1, 2, 3, 16)
    k = torch.from_numpy(numbers(1, 2, 7, 16, seed=1)).to(torch.float8_e4m3fn)
    v = torch.from_numpy(numbers(1, 2, 7, 16, seed=2)).to(torch.float8_e5m2)
    ks, vs = (np.random.default_rng(s).uniform(0.5, 2, (1, 2, 7, 1)) for s in (3, 4))
    want = attention(x, k.double().numpy() * ks, v.double().numpy() * vs, 0.25)
    scales = {"k_scales": torch.from_numpy(ks).float(), "v_scales": torch.from_numpy(vs).float()}
    for keys, values in ((k, v), (k.view(torch.uint8), v.view(torch.uint8))):
        got = compiled(q=torch.from_numpy(x), k=keys, v=values, **scales)
        assert distance(got.numpy(), want) < 3e-3


def test_packed_int4():
    codes = np.random.default_rng(1).integers(0, 16, (2, 32))
    scales = np.float32([[0.5], [0.25]])
    g = kvant.GraphBuilder()
    x, s = g.input("x", "u4", [2, 32]), g.input("s", "f32", [2, 1])
    g.output("y", g.dynamic_dequantize(x, s, group_shape=[1, 32]))
    compiled = kvant.compile(g.build(), backends="oracle")
    y = compiled(x=torch.from_numpy(pack(codes, 4)), s=torch.from_numpy(scales))
    np.testing.assert_array_equal(y.numpy(), dequantize(codes, scales))


def test_outputs_are_where_inputs_are():
    x = torch.zeros(2)
    assert torch_like([np.zeros(2)]) is None and torch_like([np.zeros(2), x]) is x
    elsewhere = torch.zeros(2, device="meta")
    assert torch_like([x, elsewhere]) is elsewhere


def test_torch_and_numpy_together():
    q, k, v = tensors()
    compiled = compiled_attention("f32")
    o = compiled(q=q.numpy(), k=k, v=v.numpy())
    assert isinstance(o, torch.Tensor)
    assert isinstance(compiled(q=q.numpy(), k=k.numpy(), v=v.numpy()), np.ndarray)
    out = np.empty(SHAPE, np.float32)
    assert compiled(q=q, k=k, v=v, out=out) is out
    np.testing.assert_array_equal(out, o.numpy())


def test_gradients_are_not_lost():
    q, k, v = tensors()
    compiled = compiled_attention("f32")
    for bad in (q.clone().requires_grad_(), torch.nn.Parameter(q), q.clone().requires_grad_() * 2):
        with pytest.raises(kvant.Error, match="input 'q' requires grad"):
            compiled(q=bad, k=k, v=v)
        with pytest.raises(kvant.Error, match="output 'o' requires grad"):
            compiled(q=q, k=k, v=v, out=bad)
        want = compiled(q=bad.detach(), k=k, v=v)
        # torch records nothing here either.
        with torch.no_grad():
            assert torch.equal(compiled(q=bad, k=k, v=v), want)
        with torch.inference_mode():
            assert torch.equal(compiled(q=bad, k=k, v=v), want)
    cache = kvant.KvCache("f32", heads=2, head_size=8, capacity=8)
    grad = k.clone().requires_grad_()
    for call, name in [
        (lambda: cache.append(0, grad, v), "k"),
        (lambda: cache.append(0, k, grad), "v"),
        (lambda: cache.attend(0, grad), "q"),
    ]:
        with pytest.raises(kvant.Error, match=f"{name} requires grad"):
            call()
    assert cache.length() == 0


def test_negative_bits_are_refused():
    q, k, v = tensors()
    compiled = compiled_attention("f32")
    negative = torch.complex(q, -q).conj().imag
    with pytest.raises(kvant.Error, match="input 'q' has torch's negative bit set.*resolve_neg"):
        compiled(q=negative, k=k, v=v)
    with pytest.raises(kvant.Error, match="output 'o' has torch's negative bit set"):
        compiled(q=q, k=k, v=v, out=negative)
    assert torch.equal(compiled(q=negative.resolve_neg(), k=k, v=v), compiled(q=q, k=k, v=v))


def test_strides():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [1, 2, 5, 8], strides=[80, 8, 16, 1]) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v), strides=[80, 8, 16, 1])
    compiled = kvant.compile(g.build(), require_fused=True)
    dense = tensors()
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense]
    o = compiled(dict(zip("qkv", views)))
    assert o.stride() == (80, 8, 16, 1)
    assert distance(o.numpy(), attention(*(x.numpy() for x in dense))) < 1e-5
    with pytest.raises(kvant.Error, match="input 'q'.*strides"):
        compiled(dict(zip("qkv", dense)))
    with pytest.raises(kvant.Error, match="strides"):
        compiled_attention("f32")(dict(zip("qkv", views)))
    # A part of a larger tensor, at an offset.
    wide = [torch.cat([x, x + 1])[1:] for x in dense]
    o = compiled_attention("f32")(dict(zip("qkv", wide)))
    assert distance(o.numpy(), attention(*(x.numpy() + 1 for x in dense))) < 1e-5


def test_wrong_tensors():
    q, k, v = tensors()
    compiled = compiled_attention("f32")
    for bad, words in [
        (v.double(), "input 'v'.*f32"),
        (v.half(), "input 'v' is f16"),
        (v[0], "input 'v' is f32"),
        (v.to_sparse(), "input 'v', a Tensor"),
        (v.to("meta"), "input 'v'"),
        (torch.complex(v, v), "input 'v'"),
        (v.expand(3, 2, 5, 8)[:1, :, :, :1].expand(1, 2, 5, 8), "input 'v'.*strides"),
    ]:
        with pytest.raises(kvant.Error, match=words):
            compiled(q=q, k=k, v=bad, out=torch.empty(SHAPE))


def test_subclasses_and_many_types():
    """More types than are remembered, and types that are gone."""
    q, k, v = tensors()
    compiled = compiled_attention("f32")
    want = compiled(q=q, k=k, v=v)
    for _ in range(40):
        kind = type("Mine", (torch.Tensor,), {})
        o = compiled(q=q.as_subclass(kind), k=k, v=v)
        assert torch.equal(o.as_subclass(torch.Tensor), want)


def test_cache():
    cache = kvant.KvCache("f16", batch=2, heads=2, head_size=16, capacity=16)
    k, v = (torch.from_numpy(numbers(2, 2, 9, 16, seed=s)).bfloat16() for s in (1, 2))
    cache.append(0, k, v)
    # As a model has it: [batch, tokens, heads, size].
    more = [x[:, :, :3].transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    cache.append(0, *more)
    q = torch.from_numpy(numbers(2, 4, 1, 16)).bfloat16()
    o = cache.attend(0, q)
    assert o.dtype == torch.bfloat16 and o.shape == q.shape
    keys, values = (torch.cat(pair, 2).double().numpy() for pair in zip((k, v), more))
    assert distance(o.double().numpy(), attention(q.double().numpy(), keys, values)) < 8e-3
    out = torch.empty_like(q)
    assert cache.attend(0, q, out) is out and torch.equal(out, o)


def test_threads_follow_torch(monkeypatch):
    from kvant.compiled import engine_for

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert engine_for("cpu", None, None) is engine_for("cpu", 3, None)
