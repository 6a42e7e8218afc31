"""torch.ops.kvant.attention: numbers, gradients, and what torch asks of an op."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvant  # noqa: E402
import kvant.torch  # noqa: E402
from kvant.torch import attention  # noqa: E402
from reference import attention as expected  # noqa: E402
from reference import dequantize, distance, numbers, unpack  # noqa: E402


def tensors(*shapes, seed=1, dtype=torch.float32):
    return [torch.from_numpy(numbers(*shape, seed=seed + i)).to(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_plain(dtype, bound):
    q, k, v = tensors((2, 6, 5, 48), (2, 3, 70, 48), (2, 3, 70, 20), dtype=dtype)
    out = attention(q, k, v)
    assert out.shape == (2, 6, 5, 20) and out.transpose(1, 2).is_contiguous() and out.dtype == dtype
    assert distance(out.float(), expected(q.float(), k.float(), v.float())) < bound


def test_masks_windows_cap_and_alibi():
    q, k, v = tensors((2, 4, 9, 32), (2, 2, 9, 32), (2, 2, 9, 32))
    distances = np.arange(9)[None] - np.arange(9)[:, None]
    mask = torch.rand(2, 1, 9, 9) > 0.4
    assert distance(attention(q, k, v, mask=mask), expected(q, k, v, mask=mask.numpy())) < 1e-5
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT * 32**-0.5).masked_fill(~mask, -0.5)
    assert distance(attention(q, k, v, mask=mask, mask_fill=-0.5),
                    torch.softmax(scores, -1) @ v.double().repeat_interleave(2, 1)) < 1e-5
    with pytest.raises(kvant.InvalidError, match="mask_fill is -0.5, but there is no mask"):
        attention(q, k, v, mask_fill=-0.5)
    bias = torch.randn(9, 9)
    assert distance(attention(q, k, v, bias=bias, scale=0.3),
                    expected(q, k, v, bias=bias.numpy(), scale=0.3)) < 1e-5
    assert distance(attention(q, k, v, right_window=0), expected(q, k, v, mask=distances <= 0)) < 1e-5
    last, far = q[:, :, 7:], distances[7:]  # the last queries of all tokens
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert distance(attention(last, k, v, right_window=0, left_window=5, bottom_right=True, alibi_slopes=slopes),
                    expected(last, k, v, bias=slopes.numpy()[:, None, None] * far, mask=(far <= 0) & (far >= -5))) < 1e-5
    band = (distances <= 1) & (distances >= -3)
    assert distance(attention(q, k, v, left_window=3, right_window=1), expected(q, k, v, mask=band)) < 1e-5
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.7])
    alibi = slopes.numpy()[:, None, None] * distances
    assert distance(attention(q, k, v, alibi_slopes=slopes), expected(q, k, v, bias=alibi)) < 1e-5
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 32**-0.5
    capped = torch.softmax(2 * torch.tanh(scores / 2), -1) @ v.double().repeat_interleave(2, 1)
    assert distance(attention(q, k, v, soft_cap=2.0), capped) < 1e-5


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("points", ["none", "codes", "real"])
def test_int4(group, points):
    q, v = tensors((1, 4, 3, 64), (1, 2, 50, 64))
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 256, (1, 2, 50, 32), np.uint8)
    scales = rng.uniform(0.01, 0.04, (1, 2, 50, 64 // group)).astype(np.float32)
    zeros = {"none": None, "codes": rng.integers(0, 16, scales.shape, np.uint8),
             "real": rng.uniform(0, 0.5, scales.shape).astype(np.float32)}[points]
    k = dequantize(unpack(codes, 4, signed=False), scales, zeros, real_zeros=points == "real")
    given = None if zeros is None else torch.from_numpy(zeros)
    out = attention(q, torch.from_numpy(codes), v, k_type="u4", k_scales=torch.from_numpy(scales),
                    k_zero_points=given)
    assert distance(out, expected(q, k, v)) < 2e-3


def test_strided_and_empty():
    q, k, v = tensors((1, 4, 3, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    turned = [x.transpose(1, 2) for x in (k, v)]
    assert distance(attention(q, *turned), expected(q, *(x.numpy() for x in turned))) < 1e-5
    assert attention(q[:, :, :0], *turned).shape == (1, 4, 0, 16)


def arguments(gradient, **changes):
    q, k, v, bias = (x.requires_grad_(gradient)
                     for x in tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), (4, 5, 7)))
    named = dict(q=q, k=k, v=v, k_scales=None, k_zero_points=None, v_scales=None, v_zero_points=None,
                 bias=bias, mask=None, alibi_slopes=None, sinks=None, k_type="", v_type="", scale=None, soft_cap=None,
                 mask_fill=-np.inf, left_window=-1, right_window=-1, bottom_right=False, tokens_first=True,
                 nan_rows=False)
    return tuple({**named, **changes}.values())


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tokens_first": False}, {"soft_cap": 3.0, "scale": 0.2}, {"bias": None, "right_window": 0}])
def test_opcheck(gradient, changes):
    torch.library.opcheck(torch.ops.kvant.attention.default, arguments(gradient, **changes))


def test_opcheck_of_codes():
    codes = torch.randint(0, 256, (2, 2, 7, 4), dtype=torch.uint8)
    scales = torch.rand(2, 2, 7, 1)
    torch.library.opcheck(torch.ops.kvant.attention.default,
                          arguments(False, k=codes, k_scales=scales, k_type="u4"))


@pytest.mark.parametrize("changes", [
    {}, {"mask": torch.rand(2, 1, 5, 7) > 0.3}, {"mask": torch.rand(4, 5, 7) > 0.3, "mask_fill": -1.5},
    {"bias": None, "mask": torch.rand(5, 7) > 0.3, "mask_fill": 0.5, "right_window": 1,
     "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, {"soft_cap": 1.5, "scale": 0.7},
    {"left_window": 2, "right_window": 1, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    {"left_window": 2, "right_window": 0, "bottom_right": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
])
def test_gradients(changes):
    given = arguments(True, **changes)
    out = torch.ops.kvant.attention(*given)
    weights = torch.from_numpy(numbers(*out.shape, seed=9))
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    ours = torch.autograd.grad((out * weights).sum(), leaves)
    q, k, v, *_, bias, mask, slopes, sinks, _, _, scale, cap, fill, left, right, bottom_right, _, _ = given
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact[:3]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * (8**-0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    far = torch.arange(7) - torch.arange(5)[:, None] - (2 if bottom_right else 0)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * far
    if bias is not None:
        scores = scores + exact[3]
    if mask is not None:
        scores = scores.masked_fill(~mask, fill)
    if right >= 0:
        hidden = far > right if left < 0 else (far < -left) | (far > right)
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, exact[-1][:, None, None].expand(2, 4, 5, 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    theirs = torch.autograd.grad(((torch.softmax(scores, -1).nan_to_num(0) @ v) * weights).sum(), exact)
    for a, b in zip(ours, theirs):
        assert distance(a, b) < 1e-4


def test_no_gradient_through_codes():
    codes = torch.randint(-9, 9, (2, 2, 7, 8), dtype=torch.int8)
    out = torch.ops.kvant.attention(*arguments(True, k=codes, k_scales=torch.rand(2, 2, 7, 1)))
    with pytest.raises(kvant.UnimplementedError, match="no gradient through compressed K and V"):
        out.sum().backward()


def test_traced_by_fx():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, right_window=0)

    given = tensors((1, 4, 3, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    assert torch.equal(torch.fx.symbolic_trace(Model())(*given), Model()(*given))


def test_refusals():
    q, k, v = tensors((1, 4, 3, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    codes = torch.zeros(1, 2, 9, 8, dtype=torch.uint8)
    scales = torch.ones(1, 2, 9, 1)
    for message, call in {
        "float64, which kvant lacks": lambda: attention(q.double(), k, v),
        r"must be \[batch, heads": lambda: attention(q[0], k, v),
        "k is torch.uint8 without scales": lambda: attention(q, codes, v),
        "must be one of": lambda: attention(q, codes, v, k_scales=scales, k_type="u5"),
        "do not divide k": lambda: attention(q, codes, v, k_scales=torch.ones(1, 2, 4, 1), k_type="u4"),
        "dense along channels": lambda: attention(q, codes.repeat(1, 1, 1, 2)[..., ::2], v, k_scales=scales,
                                                  k_type="u4"),
        "q is NoneType, not a tensor": lambda: attention(None, k, v),
        "k is on meta, but the others are on cpu": lambda: attention(q, k.to("meta"), v),
        "mask is on meta, but": lambda: attention(q, k, v, mask=torch.zeros(9, device="meta")),
        r"mask \[2, 9\] does not broadcast to \[1, 4, 3, 9\]": lambda: attention(q, k, v, mask=torch.zeros(2, 9)),
        r"bias \[5\] does not broadcast to \[1, 4, 3, 9\]": lambda: attention(q, k, v, bias=torch.zeros(5)),
        "mask is torch.float32; bias is added": lambda: attention(q, k, v, mask=torch.zeros(3, 9)),
        "bias is torch.bool; bias is added": lambda: attention(q, k, v, bias=torch.ones(3, 9, dtype=torch.bool)),
        r"sinks are \[4, 1\], but must be \[4\]": lambda: attention(q, k, v, sinks=torch.zeros(4, 1)),
        r"alibi_slopes are \[3\], but must be \[4\]": lambda: attention(q, k, v, alibi_slopes=torch.zeros(3)),
        "are not queries, keys and values of one batch": lambda: attention(q, k, v[:, :, :8]),
        "4 heads are no multiple of 3 KV heads": lambda: attention(q, k.repeat(1, 2, 1, 1)[:, :3], v.repeat(1, 2, 1, 1)[:, :3]),
    }.items():
        with pytest.raises(kvant.Error, match=message):
            call()
