"""torch.compile(backend="kvant"): forms of attention beside that of [batch, heads, tokens, channels]."""

import pytest

torch = pytest.importorskip("torch")

import kvant.torch  # noqa: E402
from compiled_torch import BATCH, HEADS, SIZE, TOKENS, cache, fresh, queries, run  # noqa: E402, F401
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("dims", [(), (6,), (2, 1, 3), (2, 2, 2, 3)])
def test_sdpa_of_any_dims(dims):
    q, k, v = torch.randn(*dims, 20, SIZE), torch.randn(*dims, 30, SIZE), torch.randn(*dims, 30, 32)
    masks = [torch.rand(20, 30) > 0.4, torch.randn(*dims, 1, 30), torch.rand(*dims, 20, 30) > 0.4]
    if len(dims) > 1:
        masks += [torch.randn(*[1] * (len(dims) - 1), 3, 20, 1), torch.rand(3, 1, 30) > 0.4]
    for mask in masks:
        report = run(lambda q, k, v, mask=mask: scaled_dot_product_attention(q, k, v, mask), q, k, v)
        assert report.fused and report.form == "scaled_dot_product_attention", report
    assert run(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), q, k, v).fused


def test_sdpa_of_grouped_heads_in_a_wider_batch():
    q, k, v = torch.randn(2, 2, 6, 5, SIZE), torch.randn(2, 2, 3, 9, SIZE), torch.randn(2, 2, 3, 9, SIZE)
    assert run(lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v).fused
    assert run(lambda q, k, v: scaled_dot_product_attention(q, k[0, 0, :1], v[0, 0, :1]), q[0, 0], k, v).fused


@pytest.mark.parametrize("dims", [((1, 6), (2, 6)), ((2, 6), (1, 6)), ((2, 1), (2, 6)), ((1,), (6,)), ((1, 2, 3), (2, 2, 3)),
                                  ((3,), ()), ((), (3,)), ((), (), (3,)), ((1,), (1,), (3,)), ((2, 1), (2, 1), (2, 3))])
def test_sdpa_that_broadcasts_a_batch_is_said(dims):
    """What comes behind is of the shape that PyTorch gives."""
    q, k, v = (torch.randn(*of, tokens, SIZE) for of, tokens in zip((*dims, dims[-1]), (5, 9, 9)))
    report = run(lambda q, k, v: scaled_dot_product_attention(q, k, v).flatten() * 2, q, k, v)
    assert not report.fused and "are not of one batch" in report.text, report


def test_einsum_of_one_query_or_head():
    for q, kv in ((queries(1), queries(9)), (queries()[:, :1], queries(9)[:, :1]), (queries()[:1], queries(9)[:1]),
                  (queries(1)[:1, :1], queries(9)[:1, :1])):
        report = run(lambda q, kv: torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, kv) / 8).softmax(-1), kv),
                     q, kv)
        assert report.fused, report
        report = run(lambda q, kv: torch.einsum("bhij,bjhd->bihd", torch.einsum("bihd,bjhd->bhij", q, kv).softmax(-1), kv),
                     q.transpose(1, 2), kv.transpose(1, 2))
        assert report.fused, report


@pytest.mark.parametrize("tokens", [7, TOKENS])
def test_values_on_the_left(tokens):
    """As autoencoders of diffusion models have them: channels before tokens."""
    q, k, v = torch.randn(BATCH, SIZE, tokens), torch.randn(BATCH, SIZE, TOKENS), torch.randn(BATCH, 32, TOKENS)
    hidden = torch.rand(BATCH, 1, TOKENS) > 0.6
    for attend in (lambda q, k, v: v @ (q.mT @ k / 8).softmax(-1).permute(0, 2, 1),
                   lambda q, k, v: torch.bmm(v, (q.mT @ k).masked_fill(hidden, -2.0).softmax(-1).mT.contiguous()),
                   lambda q, k, v: torch.einsum("bct,bst->bcs", v, torch.einsum("bcs,bct->bst", q * 0.3, k * 0.3).softmax(-1))):
        report = run(attend, q, k, v)
        assert report.fused, report
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))
    for attend in (lambda q, k, v: v @ (q.mT @ k / 8).softmax(-1).mT,
                   lambda q, k, v: (v @ (q.mT @ k + torch.arange(1., 3)[:, None, None] * hidden[:, None]).softmax(-1).mT).flatten(1, 2)):
        report = run(attend, q, k, v)
        assert report.fused, report


def test_probabilities_that_are_turned_are_not_the_left_side():
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, SIZE) for _ in range(3))
    report = run(lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, q, k, v)
    assert not report.fused and "are not the right side of a product" in report.text, report
    report = run(lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1), q, k, v)
    assert not report.fused and "are not the left side of a product" in report.text, report
    report = run(lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT.reshape(BATCH, TOKENS, HEADS, TOKENS).transpose(1, 2), q, k, v)
    assert not report.fused, report


@pytest.mark.parametrize("fill", [-torch.inf, LOWEST])
def test_hidden_probabilities_that_become_zero(fill):
    """Rows in which all are hidden become 0: those of -inf are NaN before."""
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.6
    hidden[0, 0, 3] = hidden[1, 0, :2] = True
    shown, at = ~hidden, torch.randint(0, TOKENS, (BATCH, HEADS, TOKENS, TOKENS))
    for attend in (lambda q, k, v: (q @ k.mT).masked_fill(hidden, fill).softmax(-1).masked_fill(hidden, 0) @ v,
                   lambda q, k, v: torch.where(hidden, 0, torch.where(hidden, fill, q @ k.mT / 8).softmax(-1)) @ v,
                   lambda q, k, v: torch.where(shown, torch.where(shown, q @ k.mT, fill).softmax(-1), 0.) @ v,
                   lambda q, k, v: torch.where(hidden, 0, torch.where(hidden, fill, q @ k.mT / 8 + torch.gather(
                       q @ v.mT, -1, at) / 8).softmax(-1)) @ v,
                   lambda q, k, v: (q @ k.mT).masked_fill(hidden, fill).softmax(-1).nan_to_num(0.0) @ v):
        report = run(attend, cache(), cache(), cache())
        assert report.fused, report
    low = torch.where(torch.rand(BATCH, 1, 1, TOKENS) > 0.5, LOWEST, 0.)  # where a row sees nothing else, it shares
    hidden[0, 0, 4] = low[0, 0, 0] == 0
    for bias in low, torch.randn(HEADS, TOKENS, TOKENS):
        report = run(lambda q, k, v: (q @ k.mT + bias).masked_fill(hidden, fill).softmax(-1).masked_fill(hidden, 0) @ v,
                     cache(), cache(), cache())
        assert not report.fused and "its probabilities go into" in report.text, report
    report = run(lambda q, k, v: (q @ k.mT).masked_fill(hidden, fill).clamp(LOWEST).softmax(-1).masked_fill(hidden, 0) @ v,
                 cache(), cache(), cache())
    assert not report.fused, report


def test_probabilities_that_become_zero_where_no_fill_hid_them():
    hidden, others = torch.rand(2, BATCH, 1, TOKENS, TOKENS) > 0.6
    hidden[0, 0, 3] = True
    for attend in (lambda s: s.softmax(-1).masked_fill(hidden, 0), lambda s: (s + hidden.float()).softmax(-1).masked_fill(hidden, 0),
                   lambda s: s.masked_fill(others, LOWEST).softmax(-1).masked_fill(hidden, 0),
                   lambda s: s.masked_fill(hidden, LOWEST).softmax(-1).masked_fill(~hidden, 0),
                   lambda s: s.masked_fill(hidden, LOWEST).softmax(-1).masked_fill(hidden, 1),
                   lambda s: s.masked_fill(hidden, -3.0).softmax(-1).masked_fill(hidden, 0),
                   lambda s: s.masked_fill(hidden, LOWEST).masked_fill(others, LOWEST).softmax(-1).masked_fill(hidden, 0),
                   lambda s: (s.masked_fill(hidden, LOWEST) + hidden * 2).softmax(-1).masked_fill(hidden, 0),
                   lambda s: s.masked_fill(hidden, LOWEST).softmax(-1).mT.masked_fill(hidden, 0).mT,
                   lambda s: s.masked_fill(hidden, LOWEST).softmax(-1).nan_to_num(1.0).mul(2)):
        report = run(lambda q, k, v: attend(q @ k.mT) @ v, cache(), cache(), cache())
        assert not report.fused and "its probabilities go into" in report.text, report


def test_numbers_that_are_added_to_all_scores():
    hidden, cap = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.6, 3.0
    for scores in (lambda s: s + 1.5, lambda s: (s + 0 - 2.5) * 0.5, lambda s: (s - 4).masked_fill(hidden, -torch.inf),
                   lambda s: s.masked_fill(hidden, -3.0) + 0, lambda s: cap * torch.tanh(s / cap) + 2):
        assert run(lambda q, k, v: scores(q @ k.mT).softmax(-1) @ v, queries(TOKENS)[:, :HEADS], cache(), cache()).fused
    for scores in (lambda s: (s + 1.5).masked_fill(hidden, -3.0), lambda s: cap * torch.tanh((s + 2) / cap),
                   lambda s: torch.cat([s + 2, torch.ones(HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)], -1)):
        report = run(lambda q, k, v: scores(q @ k.mT).softmax(-1)[..., :TOKENS] @ v, cache(), cache(), cache())
        assert not report.fused, report


@pytest.mark.parametrize("hides", [-torch.inf, LOWEST])
def test_the_least_of_scores(hides):
    """Where all of a row are hidden, they count alike."""
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.6
    hidden[0, 0, 3] = hidden[1, 0, :2] = True
    mask = torch.zeros(BATCH, 1, TOKENS, TOKENS).masked_fill(hidden, hides)
    for scores in (lambda s: torch.max(s + mask, torch.tensor(LOWEST)), lambda s: (s + mask + mask).clamp(LOWEST),
                   lambda s: s.masked_fill(hidden, hides).clamp_min(LOWEST),
                   lambda s: torch.maximum((s / 8 + mask) * 0.5, torch.tensor(LOWEST)),
                   lambda s: (s + mask.half()).clamp(LOWEST), lambda s: (s + mask).clamp(-torch.inf).clamp(LOWEST),
                   lambda s: (s + mask).clamp(LOWEST).clamp(-torch.inf)):
        report = run(lambda q, k, v: scores(q @ k.mT).softmax(-1) @ v, cache(), cache(), cache())
        assert report.fused, report
    for scores in (lambda s: torch.max(s + mask, torch.tensor(-9.0)), lambda s: (s + mask).clamp(LOWEST, 2.0),
                   lambda s: s.clamp_max(2.0), lambda s: s.clamp(LOWEST) + mask.clamp(LOWEST)):
        report = run(lambda q, k, v: scores(q @ k.mT).softmax(-1) @ v, cache(), cache(), cache())
        assert not report.fused and "no scale or mask" in report.text, report


def same_where_nothing_is_seen(scores):
    q, k, v = cache(), cache(), cache()
    compiled = torch.compile(lambda q, k, v: scores(q @ k.mT).softmax(-1).to(v.dtype) @ v, backend="kvant")
    want, got = scores(q @ k.mT).softmax(-1).to(v.dtype) @ v, compiled(q, k, v)
    assert want.isnan().any() and torch.equal(want.isnan(), got.isnan())
    assert (got - want).nan_to_num().norm() <= 2e-2 * want.nan_to_num().norm()


def test_rows_of_which_nothing_is_left():
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    hidden[3] = True
    low = torch.tensor(-1e5).half().float()
    for scores in (lambda s: s.masked_fill(hidden, -torch.inf).clamp_min(LOWEST).bfloat16(),  # -inf there
                   lambda s: (x := s.masked_fill(hidden, -torch.inf)).sub(x.amax(-1, keepdim=True)).clamp_min(LOWEST),
                   lambda s: torch.where(hidden, torch.tensor(-1e5).half().float(), s), lambda s: torch.where(hidden, low, s),
                   lambda s: torch.add(s, 1e38, alpha=100)):
        torch._dynamo.reset()
        same_where_nothing_is_seen(scores)


def test_softmaxes_that_are_of_no_attention():
    for function, shapes in ((lambda x: torch.nn.functional.pad(x, (1, 0)).softmax(-1), [(4, 4)]),
                             (lambda x: torch.nn.functional.pad(x @ x.mT, (0, 1)).softmax(-1) @ torch.ones(5, 2), [(4, 4)]),
                             (lambda x, y: torch.cat([x, y], -1).softmax(-1), [(4,), (1,)])):
        torch._dynamo.reset()
        arguments = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(torch.compile(function, backend="kvant")(*arguments), function(*arguments))


def test_scales_on_keys_and_biases_of_products():
    """As DeBERTa has them: operands are never seen as of heads, and the mask is."""
    q, k, v, positions = (torch.randn(BATCH * HEADS, 20, SIZE) for _ in range(4))
    at, hidden = torch.randint(0, 20, (BATCH * HEADS, 20, 20)), torch.rand(BATCH, 1, 20, 20) > 0.7

    def attend(q, k, v, positions):
        scores = torch.bmm(q, k.mT / torch.tensor(8.0)) + torch.gather(q @ positions.mT, -1, at) / 8
        scores = scores.view(-1, HEADS, 20, 20).masked_fill(hidden, LOWEST)
        return (scores.softmax(-1).view(-1, 20, 20) @ v).view(-1, HEADS, 20, SIZE).permute(0, 2, 1, 3).flatten(2)

    report = run(attend, q, k, v, positions)
    assert report.fused, report


@pytest.mark.parametrize("mask", [(1, 3, 16, 20), (5, 1, 16, 20), (2, 1, 1, 1, 20), (2, 5, 3, 16, 20)])
def test_products_of_five_dims(mask):
    """As MaxViT has them."""
    q, k, v = torch.randn(2, 5, 3, 16, SIZE), torch.randn(2, 5, 3, 20, SIZE), torch.randn(2, 5, 3, 20, 32)
    mask = torch.randn(mask)
    report = run(lambda q, k, v: ((q @ k.mT / 8 + mask).softmax(-1) @ v).permute(0, 1, 3, 2, 4).flatten(3), q, k, v)
    assert report.fused, report
    report = run(lambda q, k, v: torch.einsum("bghij,bghjd->bghid", torch.where(
        mask > 0, torch.einsum("bghid,bghjd->bghij", q, k), -9.0).softmax(-1), v), q, k, v)
    assert report.fused, report


HIDDEN = torch.rand(9, 40) > 0.6
SLOPES = torch.arange(1.0, 4.0)[:, None, None]


@pytest.mark.parametrize("masked", [
    lambda s: s / 8, lambda s: s * 0.3 + torch.arange(40.0), lambda s: s.masked_fill(HIDDEN, -torch.inf),
    lambda s: torch.tanh(s / 5) * 5 + SLOPES * HIDDEN, lambda s: s * SLOPES])
def test_heads_that_einsum_makes_rows_of_one_product(masked):
    q, kv = torch.randn(2, 9, 2, 3, SIZE) / 4, torch.randn(2, TOKENS, 2, SIZE)
    for weighted in "bqgrd", "bgrqd", "bgqrd":
        report = run(lambda q, kv: torch.einsum(f"bgrqk,bkgd->{weighted}", masked(torch.einsum(
            "bqgrd,bkgd->bgrqk", q, kv)).softmax(-1), kv), q, kv)
        assert report.fused, report
    for weighted in "bhqd", "bqhd":  # of one KV head
        report = run(lambda q, kv: torch.einsum(f"bhqk,bkd->{weighted}", masked(torch.einsum(
            "bhqd,bkd->bhqk", q, kv)).softmax(-1), kv), q[:, :, 0].transpose(1, 2), kv[:, :, 0])
        assert report.fused, report


def test_positions_that_have_channels_of_their_own():
    """As DeepSeek's latent attention has them: two products are added."""
    q, kv = torch.randn(2, 9, 3, SIZE) / 4, torch.randn(2, TOKENS, SIZE)
    for heads in "bhqk", "bqhk":
        report = run(lambda q, kv, low: torch.einsum(f"{heads},bkd->bqhd", (torch.einsum(f"bqhd,bkd->{heads}", q, kv) + torch.einsum(
            f"bqhr,bkr->{heads}", q[..., :8], low)).softmax(-1), kv), q, kv, torch.randn(2, TOKENS, 8))
        assert report.fused, report


def test_heads_of_one_product_of_any_number_of_tokens():
    torch._dynamo.reset()
    attend = lambda q, kv: torch.einsum("bgrqk,bkgd->bqgrd", torch.einsum("bqgrd,bkgd->bgrqk", q, kv).softmax(-1), kv)  # noqa: E731
    compiled = torch.compile(attend, backend="kvant", fullgraph=True)
    for tokens in 5, 7, 9:
        q, kv = torch.randn(2, tokens, 2, 3, SIZE) / 4, torch.randn(2, tokens + 4, 2, SIZE)
        torch.testing.assert_close(compiled(q, kv), attend(q, kv))
    assert all(report.fused for report in kvant.torch.reports_of(compiled))


def test_rows_that_are_no_heads():
    q, kv, bias, added = torch.randn(2, 4, 4, SIZE), torch.randn(2, 4, SIZE), torch.randn(4, 4, 1, 4), torch.randn(2, 16, 4)
    scores = lambda q, kv: torch.einsum("bhqd,bkd->bhqk", q, kv)  # noqa: E731
    for attend in (lambda q, kv: torch.einsum("bhqk,bkd->bhqd", (scores(q, kv).transpose(0, 1)[:2]).transpose(0, 1).softmax(-1), kv),
                   lambda q, kv: torch.einsum("hbqk,bkd->hbqd", scores(q, kv).softmax(-1)[:, :2], kv),
                   lambda q, kv: (scores(q, kv).transpose(1, 2) + bias[:2]).softmax(-1).flatten(1, 2) @ kv,
                   lambda q, kv: torch.baddbmm(added, q.flatten(1, 2), kv.mT).view(2, 4, 4, 4).softmax(-1).flatten(1, 2) @ kv):
        report = run(attend, q, kv)
        assert not report.fused, report


def test_sinks_in_front_and_of_one_number():
    column = lambda: torch.arange(-1.0, 2.0)[:, None, None].expand(BATCH, HEADS, TOKENS, 1)  # noqa: E731
    for join, of_tokens in ((lambda s: torch.cat([column(), s], -1), slice(1, None)), (lambda s: torch.cat([s, column()], -1), slice(TOKENS)),
                            (lambda s: torch.nn.functional.pad(s, (1, 0)), slice(1, None)),
                            (lambda s: torch.nn.functional.pad(s, (0, 1), value=1.5), slice(0, -1))):
        report = run(lambda q, k, v: join(q @ k.mT / 8).softmax(-1)[..., of_tokens] @ v, cache(), cache(), cache())
        assert report.fused, report
        wrong = slice(None, -1) if of_tokens.start == 1 else slice(1, None)
        report = run(lambda q, k, v: join(q @ k.mT / 8).softmax(-1)[..., wrong] @ v, cache(), cache(), cache())
        assert not report.fused and "the probabilities of its sinks are read" in report.text, report


def test_maxima_that_are_subtracted_before_masks():
    hidden, bias = torch.rand(TOKENS, TOKENS) > 0.6, torch.randn(TOKENS, TOKENS)
    for scores in (lambda s: (s - s.amax(-1, keepdim=True)) * 0.5 + bias,
                   lambda s: (s - s.max(-1, keepdim=True).values).masked_fill(hidden, -torch.inf)):
        assert run(lambda q, k, v: scores(q @ k.mT).softmax(-1) @ v, cache(), cache(), cache()).fused


def test_masks_that_are_computed_from_the_scores():
    """They would be computed for these alone."""
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    for scores in (lambda s: s.masked_fill(s < s.topk(5).values[..., -1:], -torch.inf), lambda s: s + s.roll(1, -1),
                   lambda s: s * s.amax(-1, keepdim=True), lambda s: (s - s.amax(-1, keepdim=True)).masked_fill(hidden, -3.0)):
        report = run(lambda q, k, v: scores(q @ k.mT).softmax(-1) @ v, cache(), cache(), cache())
        assert not report.fused and "are computed from its scores" in report.text, report
    report = run(lambda q, k, v: (torch.tanh((q @ k.mT + hidden.float()) / 5) * 5).softmax(-1) @ v, cache(), cache(), cache())
    assert not report.fused and "aten.add.Tensor" in report.text, report


def test_scales_that_are_those_of_queries():
    lengths = torch.arange(1.0, TOKENS + 1).log()[:, None]
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    for scores in (lambda s: s * lengths, lambda s: (s + SLOPES * hidden) / (lengths + 1), lambda s: torch.tanh(s * lengths) * 1, lambda s: -(s * lengths),
                   lambda s: (s * lengths * SLOPES).masked_fill(hidden, -2.0)):
        report = run(lambda q, k, v: scores(q @ k.mT / 8).softmax(-1) @ v, cache(), cache(), cache())
        assert report.fused, report
    report = run(lambda q, k, v: (q @ k.mT * torch.arange(1., TOKENS + 1)).softmax(-1) @ v, cache(), cache(), cache())
    assert not report.fused, report


def test_fills_and_biases_that_are_written_in_place():
    hidden, bias = torch.rand(TOKENS, TOKENS) > 0.6, torch.randn(HEADS, TOKENS, TOKENS)

    def written(q, k, v):
        scores = q @ k.mT
        scores[:, :, 0:, 0:] = scores + bias
        return scores.softmax(-1) @ v

    assert run(written, cache(), cache(), cache()).fused
    for fill in lambda s: torch.ones_like(s) * (-2**32 + 1), torch.zeros_like, lambda s: torch.full_like(s, -7.0):
        report = run(lambda q, k, v: torch.where(hidden, fill(q @ k.mT), q @ k.mT).softmax(-1) @ v, cache(), cache(), cache())
        assert report.fused, report


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoders_of_torch(norm_first, activation):
    """In evaluation a layer is one op of PyTorch's."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, activation=activation, batch_first=True, norm_first=norm_first,
                                             layer_norm_eps=1e-3).eval()
    for parameter in layer.parameters():
        parameter.uniform_(-0.3, 0.3)
    x, padding, hidden = torch.randn(3, 10, 64), torch.rand(3, 10) > 0.7, torch.rand(10, 10) > 0.7
    causal = torch.nn.Transformer.generate_square_subsequent_mask(10)
    padding[:, 0] = hidden[:, 0] = False
    for masks in ({}, {"src_key_padding_mask": padding}, {"src_mask": hidden}, {"src_mask": causal, "is_causal": True},
                  {"src_mask": hidden, "src_key_padding_mask": padding}):
        assert run(lambda x: layer(x, **masks), x).fused


def test_a_layer_hides_where_a_mask_of_numbers_is_not_zero():
    """So does PyTorch's op, which makes bits of them."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()
    mask = torch.randn(10, 10).relu()
    mask[:, 0] = 0
    assert run(lambda x: layer(x, src_mask=mask), torch.randn(2, 10, 64)).fused
