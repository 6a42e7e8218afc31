"""torch.compile(backend="kvant"): what it finds, what it leaves, and what it says."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import kvant  # noqa: E402
import kvant.torch  # noqa: E402
from compiled_torch import (  # noqa: E402, F401
    BATCH, GROUP, GROUPED, HEADS, SIZE, TOKENS, cache, eight_bits, fresh, queries, run, sdpa)


def repeat_kv(x):
    batch, heads, tokens, size = x.shape
    wide = x[:, :, None].expand(batch, heads, GROUPED, tokens, size)
    return wide.reshape(batch, heads * GROUPED, tokens, size)


def test_sdpa():
    report = run(sdpa, queries(), cache(), cache())
    assert report.fused and report.form == "scaled_dot_product_attention"
    assert report.where.startswith("compiled_torch.py:")
    assert run(lambda q, k, v: sdpa(q, repeat_kv(k), repeat_kv(v), is_causal=True), queries(), cache(), cache()).fused


@pytest.mark.parametrize("mask", [torch.randn(BATCH, 1, 5, TOKENS), torch.rand(5, TOKENS) > 0.3])
def test_sdpa_with_a_mask(mask):
    assert run(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, scale=0.2), queries(), cache(), cache(), mask).fused


def eager(q, k, v, mask=None, scale=0.125):
    """As models of transformers write it."""
    weights = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * scale
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def test_eager():
    assert run(eager, queries(), cache(), cache()).form == "softmax of a product"
    assert run(eager, queries(), cache(), cache(), torch.randn(BATCH, 1, 5, TOKENS)).fused


def test_eager_in_bf16():
    bf16 = [x.bfloat16() for x in (queries(), cache(), cache())]
    assert run(eager, *bf16, bound=2e-2).fused


def test_eager_with_masked_fill_and_division():
    def function(q, k, v, hidden):
        weights = q @ repeat_kv(k).transpose(-1, -2) / 8.0
        return torch.softmax(weights.masked_fill(hidden, float("-inf")), -1) @ repeat_kv(v)

    assert run(function, queries(), cache(), cache(), torch.rand(BATCH, 1, 5, TOKENS) > 0.7).fused


def test_probabilities_that_others_read():
    def function(q, k, v):
        probabilities = torch.softmax(q @ k.mT, -1)
        return probabilities @ v + probabilities.sum(-1, keepdim=True)

    report = run(function, cache(), cache(), cache())
    assert not report.fused and "its probabilities have 2 users" in report.text


@pytest.mark.parametrize("function", [
    lambda q, k, v: v.mT @ torch.softmax(q @ k.mT, -1),
    lambda q, k, v: torch.softmax((q @ k.mT).int().float(), -1) @ v,
    lambda q, k, v: torch.softmax((q @ k.mT).flatten(2) * 3, -1).view(BATCH, HEADS, TOKENS, TOKENS) @ v,
    lambda q, k, v: torch.softmax((q @ k.mT).flatten(0, 1).masked_fill(
        k.flatten(0, 1)[:, None, :, 0] > 1, -torch.inf), -1).view(BATCH, HEADS, TOKENS, TOKENS) @ v,
    lambda q, k, v: (torch.softmax(q @ k.mT, -1) * 5).int().float() @ v,
    lambda q, k, v: torch.softmax(torch.add(q @ k.mT, q.sum(-1, keepdim=True) * k.sum(-1)[:, :, None], alpha=2), -1) @ v,
    lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v.view(HEADS, BATCH, TOKENS, SIZE).view(v.shape),
    lambda q, k, v: (torch.softmax(q.view(-1, TOKENS, SIZE) @ k.reshape(HEADS, BATCH, TOKENS, SIZE).view(-1, TOKENS, SIZE).mT, -1)
                     @ v.view(-1, TOKENS, SIZE)).view(v.shape),
    lambda q, k, v: torch.softmax((q.flatten(0, 1) @ k.flatten(0, 1).mT) + v.sum((2, 3)).flatten()[:, None, None] *
                                  torch.arange(TOKENS), -1).view(BATCH, HEADS, TOKENS, TOKENS) @ v,
])
def test_numbers_of_what_is_nearly_attention(function):
    """Taken or not, numbers are PyTorch's."""
    compiled = torch.compile(lambda *x: function(*x), backend="kvant", fullgraph=True)
    q, k, v = cache(), cache(), cache()
    want = function(q, k, v)
    assert (compiled(q, k, v) - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("dequantize", [
    lambda k, s: (k.float() * s).to(torch.int8).float(),
    lambda k, s: (k.float() - s).to(torch.int8).float() * s,
    lambda k, s: (k.float() - s).int() * s,
    lambda k, s: ((k.float() - s) * s).to(torch.float8_e4m3fn).float(),
    lambda k, s: (k.float() - s).to(torch.float8_e5m2).float() * s,
])
def test_numbers_that_are_cut_are_not_codes(dequantize):
    report = run(lambda q, k, s, v: sdpa(q, dequantize(k, s), v), queries(), eight_bits(),
                 torch.rand(BATCH, HEADS, TOKENS, 1) * 0.1, cache())
    assert "K is s8" not in report.text


def packed():
    return (torch.randint(0, 256, (BATCH, HEADS, TOKENS, SIZE // 2), dtype=torch.uint8),
            torch.rand(BATCH, HEADS, TOKENS, SIZE // GROUP) * 0.03 + 0.01,
            torch.randint(0, 16, (BATCH, HEADS, TOKENS, SIZE // GROUP), dtype=torch.uint8))


def int4(codes, scales, zeros):
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(BATCH, HEADS, TOKENS, SIZE // GROUP, GROUP)
    return ((pairs.float() - zeros[..., None].float()) * scales[..., None]).view(BATCH, HEADS, TOKENS, SIZE)


def test_int4_chains():
    def function(q, *kv):
        return sdpa(q, repeat_kv(int4(*kv[:3])), repeat_kv(int4(*kv[3:])))

    report = run(function, queries(), *packed(), *packed(), bound=2e-3)
    assert report.fused and "K is u4" in report.text and "V is u4" in report.text
    assert "compressed K and V" in report.text


def test_int4_with_zero_points_of_numbers():
    codes, scales, zeros = packed()
    report = run(lambda q, c, s, z, v: sdpa(q, int4(c, s, z), v), queries(), codes, scales, zeros + 0.37, cache(),
                 bound=2e-3)
    assert "K is u4" in report.text and "zero points" in report.text
    report = run(lambda q, c, s, v: sdpa(q, int4(c, s, torch.full_like(s, 8)), v), queries(), codes, scales, cache(),
                 bound=2e-3)
    assert "K is u4" in report.text


@pytest.mark.parametrize("dims", [(BATCH, HEADS, TOKENS, 1), (1, HEADS, 1, SIZE), (1, 1, 1, 1)])
def test_int8_by_token_channel_and_tensor(dims):
    report = run(lambda q, k, s, v: sdpa(q, k.float() * s, v), queries(), eight_bits(), torch.rand(dims) * 0.02, cache(),
                 bound=2e-3)
    assert "K is s8 with scales" in report.text


def test_int8_as_torchao_and_quanto_write_it():
    groups = (BATCH, HEADS, TOKENS, SIZE // GROUP)
    scales, zeros = torch.rand(groups) * 0.02, torch.randint(-5, 5, groups, dtype=torch.int8)

    def torchao(q, k, s, z, v):
        wide = k.view(*groups, GROUP).to(torch.float32) - z.view(*groups, 1).to(torch.float32)
        return sdpa(q, (wide * s.view(*groups, 1)).view(k.shape), v)

    def quanto(q, k, s, z, v):
        return sdpa(q, (s[..., None] * k.view(*groups, GROUP) - z[..., None]).view(k.shape), v)

    assert "K is s8" in run(torchao, queries(), eight_bits(), scales, zeros, cache(), bound=2e-3).text
    assert "K is s8" in run(quanto, queries(), eight_bits(), scales, zeros.float(), cache(), bound=2e-3).text


def test_one_scale_of_two_shapes():
    groups = (BATCH, HEADS, TOKENS, SIZE // GROUP)

    def function(q, k, s, v):
        wide = s[..., None] * torch.ones(GROUP // 2)  # read before, in another shape
        values = v + wide.mean()
        return sdpa(q, (k.view(*groups, GROUP).float() * s[..., None]).view(k.shape), values)

    assert "K is s8" in run(function, queries(), eight_bits(), torch.rand(groups) * 0.02, cache(), bound=2e-3).text


def test_int8_with_tokens_before_heads():
    codes = torch.randint(-127, 128, (BATCH, TOKENS, HEADS, SIZE), dtype=torch.int8)
    report = run(lambda q, k, s, v: sdpa(q, (k.float() * s).transpose(1, 2), v), queries(), codes,
                 torch.rand(BATCH, TOKENS, HEADS, 1) * 0.02, cache(), bound=2e-3)
    assert "K is s8" in report.text


def test_codes_that_are_not_read_are_said():
    codes, scales, zeros = packed()

    def high_first(q, c, s, z, v):
        pairs = torch.stack([c >> 4, c & 15], -1).view(BATCH, HEADS, TOKENS, SIZE // GROUP, GROUP)
        k = ((pairs.float() - z[..., None]) * s[..., None]).view(BATCH, HEADS, TOKENS, SIZE)
        return sdpa(q, k, v)

    report = run(high_first, queries(), codes, scales, zeros, cache())
    assert report.fused and "not a byte & 15 and the same byte >> 4" in report.text

    def divided(q, c, s, v):
        return sdpa(q, c.float() / s, v)

    report = run(divided, queries(), U8, 100 * (1 + scales[..., :1]), cache())
    assert "K is computed from bytes, but by no chain that is read as codes" in report.text
    # A rotary embedding is arithmetic, but not of bytes.
    report = run(lambda q, k, cos, sin, v: sdpa(q, k * cos + k.roll(1, -1) * sin, v), queries(), cache(), cache(), cache(),
                 cache())
    assert "bytes" not in report.text


U8 = torch.randint(0, 256, (BATCH, HEADS, TOKENS, SIZE), dtype=torch.uint8)
Z8 = torch.randint(-128, 128, (BATCH, HEADS, TOKENS, 1), dtype=torch.int8)


@pytest.mark.parametrize("integers", [
    lambda u8, s8: (u8 - 128).float(),
    lambda u8, s8: (s8 - Z8).float(),
    lambda u8, s8: (s8 - 8).float(),
    lambda u8, s8: (s8 - -100).float(),
    lambda u8, s8: u8.to(torch.int8).float(),
    lambda u8, s8: (u8.to(torch.int8) - 1).float(),
    lambda u8, s8: s8.to(torch.uint8).float(),
    lambda u8, s8: u8.int().to(torch.int8).float(),
    lambda u8, s8: u8.to(torch.bool).float(),
    lambda u8, s8: (s8.int() - 100).to(torch.int8).float(),
])
def test_what_wraps_around_is_not_codes(integers):
    report = run(lambda q, u8, s8, s, v: sdpa(q, integers(u8, s8) * s, v), queries(), U8, eight_bits(),
                 torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02, cache())
    assert "K is s8" not in report.text and "K is u8" not in report.text


@pytest.mark.parametrize("integers", [
    lambda u8, s8: (s8.int() - Z8).float(),
    lambda u8, s8: (u8.to(torch.int16) - 128).float(),
    lambda u8, s8: s8.to(torch.int16).half().float() - 8,
    lambda u8, s8: s8.bfloat16() - Z8.float(),
])
def test_what_holds_all_codes_is(integers):
    report = run(lambda q, u8, s8, s, v: sdpa(q, integers(u8, s8) * s, v), queries(), U8, eight_bits(),
                 torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02, cache(), bound=2e-3)
    assert "K is s8" in report.text or "K is u8" in report.text


def test_zero_points_that_are_stacked_may_wrap_around():
    codes, scales, _ = packed()
    zeros = torch.randint(-128, 128, (2, BATCH, HEADS, TOKENS), dtype=torch.int8)

    def dequantized(q, c, s, z, v):
        pairs = torch.stack([c & 15, c >> 4], -1).view(BATCH, HEADS, TOKENS, SIZE // GROUP, GROUP).to(torch.int8)
        k = (pairs - torch.stack([z[0], z[1]], -1)[..., None]).float() * s[..., None]
        return sdpa(q, k.view(BATCH, HEADS, TOKENS, SIZE), v)

    report = run(dequantized, queries(), codes, scales, zeros, cache())
    assert "may wrap around in torch.int8" in report.text


@pytest.mark.parametrize("scales, zeros", [((BATCH, HEADS, TOKENS, 1), (HEADS, TOKENS, 1)), ((1,), (BATCH, 1, 1, 1))])
def test_codes_that_all_sequences_share_are_said(scales, zeros):
    report = run(lambda q, k, s, z, v: sdpa(q, (k.float() - z) * s, v), queries(), eight_bits()[:1],
                 torch.rand(scales) * 0.02, torch.rand(zeros), cache())
    assert "codes [1, 3, 40, 64] are broadcast to [2, 3, 40, 64] by their scales or zero points" in report.text


def test_channels_that_are_no_whole_bytes_are_said():
    def function(q, c, s, v):
        return sdpa(q, torch.stack([c & 15, c >> 4], -1).view(1, 2, 4, 9) * s, v)

    report = run(function, torch.randn(1, 2, 3, 9), torch.randint(0, 256, (1, 2, 2, 9), dtype=torch.uint8), torch.rand(4, 1),
                 torch.randn(1, 2, 4, 9))
    assert "9 channels of 4 bits are not whole bytes" in report.text


def test_groups_of_whole_tokens_and_one_for_all():
    def function(groups):
        return lambda q, k, s, v: sdpa(q, (k.view(-1, groups) * s).view(k.shape), v)

    for tokens in (2, TOKENS):
        rows = BATCH * HEADS * TOKENS // tokens
        report = run(function(tokens * SIZE), queries(), eight_bits(), torch.rand(rows, 1) * 0.02, cache(), bound=2e-3)
        assert f"K is s8 with scales [2, 3, {TOKENS // tokens}, 1]" in report.text
    report = run(function(SIZE), queries(), eight_bits(), torch.tensor(0.02), cache(), bound=2e-3)
    assert "K is s8 with scales [1, 1, 1, 1]" in report.text
    report = run(function(3 * SIZE), queries(), eight_bits(), torch.rand(80, 1) * 0.02, cache())
    assert "are no groups of [batch, heads, tokens, channels]" in report.text


def test_groups_along_tokens_and_channels():
    groups = TOKENS // 8

    def function(q, k, s, z, v):
        k = (k.float().view(BATCH, HEADS, groups, 8, SIZE) - z) * s
        return sdpa(q, k.view(BATCH, HEADS, TOKENS, SIZE), v)

    zeros = torch.randint(-9, 9, (BATCH, HEADS, groups, 1, SIZE), dtype=torch.int8)
    report = run(function, queries(), eight_bits(), torch.rand(BATCH, HEADS, groups, 1, SIZE) * 0.02, zeros, cache(), bound=2e-3)
    assert f"K is s8 with scales [2, 3, {groups}, {SIZE}], zero points" in report.text

    def blocks(q, k, s, v):
        k = k.float().view(BATCH, HEADS, groups, 8, SIZE // GROUP, GROUP) * s
        return sdpa(q, k.view(BATCH, HEADS, TOKENS, SIZE), v)

    report = run(blocks, queries(), eight_bits(), torch.rand(HEADS, groups, 1, SIZE // GROUP, 1) * 0.02, cache(), bound=2e-3)
    assert f"K is s8 with scales [1, 3, {groups}, 2]" in report.text
    scales = torch.rand(BATCH, HEADS, groups, 1, SIZE // GROUP, 1) * 0.02
    report = run(blocks, queries(), eight_bits(), scales, cache(), bound=2e-3)
    assert f"K is s8 with scales [2, 3, {groups}, 2]" in report.text
    # One for each place within a run.
    report = run(function, queries(), eight_bits(), torch.rand(BATCH, HEADS, 1, 8, SIZE) * 0.02, zeros, cache())
    assert f"[2, 3, 1, 8, {SIZE}] of [2, 3, {groups}, 8, {SIZE}] are no groups of" in report.text


def test_scales_that_are_numbers():
    report = run(lambda q, k, v: sdpa(q, k * 0.01, (v.float() - 3) * 0.02), queries(), eight_bits(), eight_bits(), bound=2e-3)
    assert "K is s8 with scales [1, 1, 1, 1]; V is s8 with scales [1, 1, 1, 1], zero points" in report.text


@pytest.mark.parametrize("type", [torch.int8, torch.uint8, torch.int32])
def test_whole_numbers_that_are_subtracted_after_scaling_are_no_codes(type):
    zeros = torch.randint(0, 4, (BATCH, HEADS, TOKENS, 1), dtype=type)
    report = run(lambda q, k, s, z, v: sdpa(q, k.float() * s - z.float(), v), queries(), eight_bits(),
                 torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02, zeros, cache(), bound=2e-3)
    assert f"K is s8 with scales [2, 3, {TOKENS}, 1], zero points" in report.text


@pytest.mark.parametrize("scales, zeros, both", [
    (None, (BATCH, HEADS, TOKENS, 1), f"[2, 3, {TOKENS}, 1]"),
    ((1,), (BATCH, HEADS, TOKENS, 1), f"[2, 3, {TOKENS}, 1]"),
    ((HEADS, 1, SIZE), (1, SIZE), f"[1, 3, 1, {SIZE}]"),
    ((BATCH, HEADS, TOKENS, 1), (), f"[2, 3, {TOKENS}, 1]"),
])
@pytest.mark.parametrize("type", [torch.int8, torch.float32])
def test_scales_and_zero_points_of_different_groups(scales, zeros, both, type):
    scale = 0.02 if scales is None else torch.rand(scales) * 0.02
    report = run(lambda q, k, z, v: sdpa(q, (k.float() - z) * scale, v), queries(), eight_bits(),
                 torch.randint(-9, 9, zeros).to(type), cache(), bound=2e-3)
    assert f"K is s8 with scales {both}, zero points" in report.text


def test_one_scale_for_zero_points_of_symbolic_groups():
    report = run(lambda q, k, z, v: sdpa(q, (k.float() - z) * 0.02, v), queries(), eight_bits(),
                 torch.randint(-9, 9, (BATCH, HEADS, TOKENS, 1), dtype=torch.int8), cache(), bound=2e-3, dynamic=True)
    assert "K is s8 with scales" in report.text and "zero points" in report.text


def test_groups_of_which_none_divides_the_other_are_said():
    report = run(lambda q, k, s, z, v: sdpa(q, (k.float() - z) * s, v), queries(), eight_bits(),
                 torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02, torch.randint(-9, 9, (1, SIZE)), cache())
    assert f"scales [2, 3, {TOKENS}, 1] and zero points [1, 1, 1, {SIZE}] are of different groups" in report.text


@pytest.mark.parametrize("refused", [0, 1])
def test_codes_stay_where_the_others_are_refused(refused):
    """Zero points of f64 are not taken."""
    zeros = torch.rand(BATCH, HEADS, TOKENS, 1, dtype=torch.float64)
    scales = torch.rand(BATCH, HEADS, TOKENS, 1) * 0.02

    def function(q, k, v, s, z):
        both = [k * s, v * s]
        both[refused] = ((k, v)[refused] - z).float() * s
        return sdpa(q, *both)

    report = run(function, queries(), eight_bits(), eight_bits(), scales, zeros, bound=2e-3)
    assert f"{'VK'[refused]} is s8" in report.text and f"{'KV'[refused]} is s8" not in report.text
    assert f"{'kv'[refused]}_zero_points is torch.float64, which kvant lacks" in report.text


def test_a_view_of_the_output():
    report = run(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m).view(BATCH, -1), queries(), cache(), cache(),
                 torch.randn(5, TOKENS))
    assert report.fused


def test_rows_that_see_nothing_are_as_in_torch():
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    hidden[3] = True

    def by_hand(q, k, v, h):
        return torch.softmax((q @ k.mT).masked_fill(h, -torch.inf), -1) @ v

    compiled = torch.compile(by_hand, backend="kvant", fullgraph=True)
    x = cache()
    torch.testing.assert_close(compiled(x, x, x, hidden), by_hand(x, x, x, hidden), equal_nan=True)
    assert kvant.torch.reports_of(compiled)[-1].fused


def test_random_numbers_are_left_to_torch():
    compiled = torch.compile(lambda q: F.dropout(sdpa(q, q, q), 0.5, True) + torch.rand_like(q), backend="kvant")
    assert compiled(queries(TOKENS)).isfinite().all()
    assert kvant.torch.reports_of(compiled)[-1].fused


def test_scores_that_are_not_read_are_said():
    report = run(lambda q, k, v: torch.softmax(torch.tanh(q @ k.mT * 0.1) * 5, -1) @ v, cache(), cache(), cache())
    assert not report.fused and "its scores are computed by" in report.text


def test_flex():
    slopes = torch.rand(HEADS * GROUPED) * 0.1

    def window(batch, head, query, key):
        return (query >= key) & (query - key < 10)

    def capped(score, batch, head, query, key):
        return 20 * torch.tanh(score / 20) - slopes[head] * (query - key)

    mask = create_block_mask(window, None, None, TOKENS, TOKENS, device="cpu")
    q, k, v = queries(TOKENS), cache(), cache()
    report = run(lambda q, k, v: flex_attention(q, k, v, capped, mask, enable_gqa=True), q, k, v)
    assert report.fused and report.form == "FlexAttention"
    assert run(lambda q, k, v: flex_attention(q, k, v, capped, enable_gqa=True), q, k, v).fused
    assert run(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: 20 * torch.tanh(s * 0.05), enable_gqa=True),
               q, k, v).fused
    for score, why in [(lambda s, b, h, i, j: 20 * torch.tanh((s - slopes[h] * (i - j)) / 20), "not as cap"),
                       (lambda s, b, h, i, j: 20 * torch.tanh(s / 10), "not as cap"),
                       (lambda s, b, h, i, j: 20 * s, "no tanh of them")]:
        report = run(lambda q, k, v, score=score: flex_attention(q, k, v, score, enable_gqa=True), q, k, v)
        assert not report.fused and why in report.text
    report = run(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.1 * (j % 3), mask, enable_gqa=True),
                 q, k, v)
    assert not report.fused and "slopes[head] * (key - query)" in report.text

    def even(batch, head, query, key):
        return (query >= key) & (key % 2 == 0)

    odd = create_block_mask(even, None, None, TOKENS, TOKENS, device="cpu")
    report = run(lambda q, k, v: flex_attention(q, k, v, None, odd, enable_gqa=True), q, k, v)
    assert not report.fused and "its mask has eq" in report.text


def test_growing_cache_is_compiled_twice():
    def step(q, k, v, new_k, new_v):
        k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        return sdpa(q, k, v), k, v

    counters.clear()
    compiled = torch.compile(step, backend="kvant", fullgraph=True)
    k, v = cache(), cache()
    for _ in range(8):
        arguments = queries(1), k, v, cache()[:, :, :1], cache()[:, :, :1]
        want, k, v = step(*arguments)
        torch.testing.assert_close(compiled(*arguments)[0], want, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_model_says_all_of_its_attentions():
    class Layer(torch.nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first, self.project = first, torch.nn.Linear(SIZE, SIZE)

        def forward(self, x):
            y = self.project(x)
            return sdpa(y, y, y) if self.first else eager(y, y[:, :HEADS], y[:, :HEADS]).transpose(1, 2)

    model = torch.nn.Sequential(Layer(True), Layer(False))
    compiled = torch.compile(model, backend="kvant", fullgraph=True)
    assert "it was not called yet" in kvant.explain(compiled)
    x = queries()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    reports = kvant.torch.reports_of(compiled)
    assert [report.form for report in reports] == ["scaled_dot_product_attention", "softmax of a product"]
    assert all(report.fused for report in reports)


def test_no_attention_is_said():
    compiled = torch.compile(torch.nn.Linear(SIZE, 3), backend="kvant")
    compiled(queries())
    assert "there is no attention" in kvant.explain(compiled)


def test_what_kvant_lacks_is_left():
    report = run(lambda q, k, v: sdpa(q.double(), k.double(), v.double()), queries(), cache(), cache())
    assert not report.fused and "float64, which kvant lacks" in report.text


def test_training_is_left_to_torch():
    with torch.enable_grad():
        q, k, v = (x.requires_grad_() for x in (queries(), cache(), cache()))
        compiled = torch.compile(lambda q, k, v: sdpa(q, k, v), backend="kvant", fullgraph=True)
        compiled(q, k, v).sum().backward()
    assert q.grad is not None
    (report,) = kvant.torch.reports_of(compiled)
    assert not report.fused and "gradients" in report.text
    with torch.enable_grad():
        compiled = torch.compile(lambda q, k: torch.softmax(q @ k.mT, -1) @ k, backend="kvant", fullgraph=True)
        compiled(q[:, :HEADS], k)
    (report,) = kvant.torch.reports_of(compiled)
    assert report.form == "softmax" and not report.fused and "gradients" in report.text


def test_options_are_checked():
    compiled = torch.compile(sdpa, backend="kvant", options={"fast": True})
    with pytest.raises(Exception, match="has no options, but was given"):
        compiled(queries(), cache(), cache())
