"""torch.compile(backend="kvant") where what is written is nearly what kvant has: numbers are PyTorch's."""

import pytest

torch = pytest.importorskip("torch")

import kvant.torch  # noqa: E402
from compiled_torch import BATCH, GROUPED, HEADS, SIZE, TOKENS, cache, eight_bits, fresh, queries, run, sdpa  # noqa: E402, F401
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention  # noqa: E402


def test_boolean_masks_that_are_added():
    for mask in torch.rand(TOKENS, TOKENS) > 0.5, torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.5:
        report = run(lambda q, k, v, mask: torch.softmax(q @ k.mT + mask, -1) @ v, cache(), cache(), cache(), mask)
        assert not report.fused and "its mask is boolean and added" in report.text


def fills(fill):
    return (lambda scores, hidden: scores.masked_fill(hidden, fill),
            lambda scores, hidden: torch.where(hidden, fill, scores),
            lambda scores, hidden: torch.where(~hidden, scores, torch.full([], fill, dtype=scores.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_fill(dtype):
    """Where a row is all hidden, its tokens count alike."""
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.6
    hidden[0, 0, 3] = hidden[1, 0, :2] = True
    tensors = [100 * cache().to(dtype), cache().to(dtype), cache().to(dtype)]
    for fill in torch.finfo(dtype).min, torch.finfo(torch.float16).min, -1e9, -2.0, 3.0, -torch.inf:
        for mask in fills(fill)[::1 if fill == torch.finfo(dtype).min else 2]:
            hidden_rows = hidden if fill != -torch.inf else hidden & ~hidden.all(-1, keepdim=True)
            report = run(lambda q, k, v, hidden, mask=mask: torch.softmax(mask(q @ k.mT, hidden), -1) @ v, *tensors,
                         hidden_rows, bound=2e-5 if dtype == torch.float32 else 3e-2)
            assert report.fused, report


def test_fills_that_another_type_has_not():
    """They are -inf there: NaN in rows that are all hidden."""
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    hidden[3] = True
    q, k, v = (cache().bfloat16() for _ in range(3))
    low = torch.finfo(torch.float32).min
    for mask in (lambda s, h: torch.where(h, low, s), lambda s, h: s.float().masked_fill(h, low).bfloat16()):
        def function(q, k, v, h, mask=mask):
            return torch.softmax(mask(q @ k.mT, h), -1) @ v

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="kvant")
        want, got = function(q, k, v, hidden).double(), compiled(q, k, v, hidden).double()
        assert kvant.torch.reports_of(compiled)[-1].fused
        assert torch.equal(want.isnan(), got.isnan()) and got[:, :, 3].isnan().all()
        assert (got - want).nan_to_num().norm() / want.nan_to_num().norm() < 3e-2


def test_hidden_scores_that_are_not_finite():
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    hidden[:, 5] = True
    q, k, v = (cache() for _ in range(3))
    k[:, :, 5] = torch.nan
    for fill in torch.finfo(torch.float32).min, -1e4:
        report = run(lambda q, k, v, h, fill=fill: torch.softmax((q @ k.mT).masked_fill(h, fill), -1) @ v, q, k, v, hidden)
        assert report.fused, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_masks_after_one_another(dtype):
    q, k, v = (cache().to(dtype) for _ in range(3))
    bias, slopes = torch.randn(HEADS, TOKENS, TOKENS, dtype=dtype), torch.randn(BATCH, 1, 1, TOKENS, dtype=dtype)
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.6
    hidden[0, 0, 3] = True
    low = torch.zeros(TOKENS, TOKENS, dtype=dtype).masked_fill(torch.rand(TOKENS, TOKENS) > 0.9, torch.finfo(dtype).min)
    for scores in (lambda s: s * 0.3 + bias + slopes, lambda s: bias + (slopes + s), lambda s: s + low + low,
                   lambda s: (s + bias).masked_fill(hidden, -3.0), lambda s: s.masked_fill(hidden & ~hidden.all(-1, True),
                                                                                          -torch.inf) + bias,
                   lambda s: torch.where(hidden, torch.finfo(dtype).min, s + slopes + bias),
                   lambda s: (s + bias) * 0.5 + slopes, lambda s: torch.add(s - bias, slopes, alpha=0.5), lambda s: s.flatten(0, 1).view(s.shape) / 4 + bias,
                   lambda s: torch.where(hidden, torch.tensor(torch.finfo(dtype).min, dtype=dtype), s / 4) + slopes):
        report = run(lambda q, k, v, scores=scores: torch.softmax(scores(q @ k.mT), -1) @ v, q, k, v,
                     bound=2e-5 if dtype == torch.float32 else 3e-2)
        assert report.fused, report
    for scores, why in ((lambda s: s.masked_fill(hidden, -3.0) + bias, "-3.0, to which a bias is added"),
                        (lambda s: s.masked_fill(hidden, -3.0) * 0.5, "-3.0, which is multiplied")):
        report = run(lambda q, k, v, scores=scores: torch.softmax(scores(q @ k.mT), -1) @ v, q, k, v,
                     bound=2e-5 if dtype == torch.float32 else 3e-2)
        assert not report.fused and why in report.text, report
    # Where all is hidden twice, the lowest number stands alone.
    report = run(lambda q, k, v: torch.softmax(torch.where(hidden, torch.finfo(dtype).min, (q @ k.mT).masked_fill(
        hidden | (bias > 0), -torch.inf)) + slopes, -1) @ v, q, k, v, bound=2e-5 if dtype == torch.float32 else 3e-2)
    assert not report.fused, report
    # Infinity is not -inf any more, or NaN.
    for factor in -0.5, 0.0, torch.tensor([0.1, -0.2, 0.3], dtype=dtype).view(HEADS, 1, 1):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v, factor=factor: torch.softmax(
            (q @ k.mT).masked_fill(hidden, -torch.inf) * factor, -1) @ v, backend="kvant")
        compiled(q, k, v)
        (report,) = kvant.torch.reports_of(compiled)[-1:]
        assert not report.fused and "fills with -inf, which is multiplied" in report.text, report


def test_scores_that_a_mask_broadcasts():
    q, k, v, rows = torch.randn(BATCH, HEADS, 1, SIZE), cache(), cache(), torch.randn(7, TOKENS)
    report = run(lambda q, k, v: torch.softmax(q @ k.mT + rows, -1) @ v, q, k, v)
    assert not report.fused and "are broadcast to" in report.text, report
    heads = torch.randn(BATCH, HEADS, 7, TOKENS)
    report = run(lambda q, k, v: torch.softmax(q @ k.mT + heads, -1) @ v, cache()[:, :1, :7], k[:, :1], v)
    assert not report.fused, report


@pytest.mark.parametrize("of_windows", [[4, 1, 9, 9], [1, 4, 1, 9, 9], [2, 4, 3, 9, 9], [1, 1, 3, 9, 9], [3, 9, 9]])
def test_masks_of_windows(of_windows):
    """As Swin has them: windows are beside the batch, and seen where the mask is added."""
    q, k, v = (torch.randn(8, 3, 9, SIZE) for _ in range(3))
    bias, mask = torch.randn(1, 3, 9, 9), torch.randn(of_windows)
    mask = mask.unsqueeze(0) if mask.dim() == 4 else mask

    def attend(q, k, v, mask):
        scores = (q @ k.mT + bias).view(2, 4, 3, 9, 9) + mask
        return torch.softmax(scores.view(-1, 3, 9, 9), -1) @ v

    report = run(attend, q, k, v, mask)
    assert report.fused, report


def test_einsum():
    q, k, v = torch.randn(BATCH, HEADS, 7, SIZE), cache(), cache()
    hidden = torch.rand(BATCH, 1, 1, TOKENS) > 0.6

    def attend(scores, output):
        return lambda q, k, v: torch.einsum(output, torch.softmax(
            (torch.einsum(scores, q, k) * 0.2).masked_fill(hidden, -1e9), -1), v)

    assert run(attend("bhid,bhjd->bhij", "bhij,bhjd->bhid"), q, k, v).fused
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert run(attend("bihd,bjhd->bhij", "bhij,bjhd->bihd"), *tokens_first).fused
    for scores, output in (("bid,bjd->bij", "bij,bjd->bid"), ("bid,bdj->bij", "bij,bjd->bid")):
        flat = [x.flatten(0, 1) for x in (q, k.mT if "bdj" in scores else k, v)]
        assert run(lambda q, k, v, scores=scores, output=output: torch.einsum(
            output, torch.softmax(torch.einsum(scores, q, k), -1), v), *flat).fused
    grouped = torch.randn(BATCH, HEADS, GROUPED, 7, SIZE)
    assert run(lambda q, k, v: torch.einsum("bgrij,bgjd->bgrid", torch.softmax(
        torch.einsum("bgrid,bgjd->bgrij", q, k) * 0.2, -1), v), grouped, k, v).fused
    codes, scales = eight_bits(), torch.rand(BATCH, HEADS, TOKENS, 2) * 0.02
    report = run(lambda q, c, s, v: attend("bhid,bhjd->bhij", "bhij,bhjd->bhid")(
        q, (c.float().unflatten(-1, (2, -1)) * s[..., None]).flatten(-2), v), q, codes, scales, v, bound=2e-3)
    assert report.fused and "K is s8 with scales" in report.text
    # Not attention: queries and tokens are exchanged in between.
    for scores, output in (("bhid,bhjd->bhji", "bhij,bhjd->bhid"), ("bhid,bhjd->bhij", "bhij,bhid->bhjd")):
        square = [cache() for _ in range(3)]
        run(lambda q, k, v, scores=scores, output=output: torch.einsum(
            output, torch.softmax(torch.einsum(scores, q, k), -1), v), *square)


def test_modules_of_torch():
    """Which call scaled_dot_product_attention where Dynamo does not see it."""
    attend = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    decoder = torch.nn.TransformerDecoderLayer(64, 4, 32, batch_first=True).eval()
    x, memory, padded = torch.randn(2, 9, 64), torch.randn(2, 5, 64), torch.zeros(2, 9, dtype=torch.bool)
    padded[1, 6:] = True
    causal = torch.triu(torch.full((9, 9), -torch.inf), 1)
    for function, attentions in (
            (lambda x: attend(x, x, x, key_padding_mask=padded, need_weights=False)[0], 1),
            (lambda x: attend(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0], 1),
            (lambda x: attend(x, x, x, key_padding_mask=padded)[0], 1),
            (lambda x: decoder(x, memory, tgt_mask=causal, tgt_key_padding_mask=padded), 2)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, function=function: function(x), backend="kvant")
        torch.testing.assert_close(compiled(x), function(x))
        reports = kvant.torch.reports_of(compiled)[-attentions:]
        assert len(reports) == attentions and all(report.fused for report in reports), reports


def test_scales_that_are_tensors():
    """Alike for a head: SwinV2's, CodeGen's, and what dynamic=True makes of a module's float."""
    q, k, v = queries(TOKENS)[:, :HEADS].contiguous(), cache(), cache()
    one, of_heads, of_rows = torch.tensor(0.3), torch.rand(HEADS, 1, 1) + 0.5, torch.rand(TOKENS, 1) + 0.5
    hidden, bias = torch.rand(TOKENS, TOKENS) > 0.6, torch.randn(BATCH, 1, 1, TOKENS)
    for scores in (lambda s: s * one, lambda s: one * s / of_heads + bias, lambda s: (s * 0.5 + bias) * of_heads,
                   lambda s: (s * of_heads).masked_fill(hidden, -2.0), lambda s: torch.tanh(s * of_heads / 3) * 3 + bias,
                   lambda s: s * of_rows):
        report = run(lambda q, k, v, scores=scores: torch.softmax(scores(q @ k.mT), -1) @ v, q, k, v)
        assert report.fused, report
    for scores in (lambda s: s * bias, lambda s: s.masked_fill(hidden, -2.0) * one,
                   lambda s: torch.tanh(s / 3) * 3 * one):
        torch._dynamo.reset()
        report = run(lambda q, k, v, scores=scores: torch.softmax(scores(q @ k.mT), -1) @ v, q, k, v)
        assert not report.fused, report
    # In its own type the inverse would be infinite, or off by 2e-3.
    tiny, wide = torch.tensor(1e-5).half(), torch.tensor(13.0).bfloat16().view(1, 1, 1)
    assert run(lambda q, k, v: torch.softmax((q @ k.mT) / wide, -1) @ v, q, k, v).fused
    assert run(lambda q, k, v: torch.softmax((q @ k.mT) / tiny, -1) @ v, *(x.half() for x in (1e-3 * q, 0.1 * k, v)),
               bound=5e-3).fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_is_not_by_heads(dtype):
    """[batch, tokens, channels], and heads beside the batch, as SAM's image encoder has them."""
    q, k, v = (torch.randn(6, tokens, SIZE, dtype=dtype) for tokens in (7, TOKENS, TOKENS))
    bias, low = torch.randn(6, 7, TOKENS, dtype=dtype), torch.randn(7, TOKENS, dtype=dtype)
    hidden = torch.rand(6, 1, TOKENS) > 0.6
    bound = 2e-5 if dtype == torch.float32 else 3e-2
    for scores in (lambda s: s / 8, lambda s: s + bias + low, lambda s: s.masked_fill(hidden, -1e9) * 1.0,
                   lambda s: s * 0.1 + bias[:1], lambda s: (s.view(2, 3, 7, TOKENS) * 0.5).view(6, 7, TOKENS)):
        report = run(lambda q, k, v, scores=scores: torch.softmax(scores(q @ k.mT), -1) @ v, q, k, v, bound=bound)
        assert report.fused, report
    codes, scales = torch.randint(-127, 128, (6, TOKENS, SIZE), dtype=torch.int8), torch.rand(6, TOKENS, 2) * 0.02
    report = run(lambda q, codes, scales, v: torch.softmax(
        q.float() @ (codes.float().unflatten(-1, (2, -1)) * scales[..., None]).flatten(-2).mT, -1) @ v.float(), q, codes, scales, v,
                 bound=2e-2)
    assert report.fused and "K is s8 with scales" in report.text, report
    # As fairseq has it: heads are seen where the mask is added, and in the end.
    mask, key_bias = torch.randn(2, 1, 7, TOKENS, dtype=dtype), torch.randn(6, 1, TOKENS, dtype=dtype)
    heads = [x.view(2, 3, *x.shape[1:]) for x in (q, k, v)]

    def attend(q, k, v):
        q, k, v = (x.reshape(6, *x.shape[-2:]) for x in (q, k, v))
        scores = ((q @ k.mT) + key_bias).view(2, 3, 7, TOKENS) + mask
        return (torch.softmax(scores.flatten(0, 1), -1) @ v).view(2, 3, 7, SIZE)

    assert run(attend, *heads, bound=bound).fused
    report = run(lambda q, k, v: torch.softmax((torch.bmm(q, k.mT).view(2, 3, 7, TOKENS) + mask).flatten(0, 1), -1) @ v,
                 q, k, v, bound=bound)
    assert report.fused, report


def test_scores_in_another_type_than_the_result():
    """As GPT-J has them, whose next layer takes no other type."""
    q, k, v = (cache().bfloat16() for _ in range(3))
    layer = torch.nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
    for function in (lambda q, k, v: torch.softmax(q.float() @ k.float().mT, -1).bfloat16() @ v,
                     lambda q, k, v: torch.softmax(q @ k.mT, -1).float() @ v.float()):
        assert run(function, q, k, v, bound=2e-2).fused
    q, k, v = (x.double().bfloat16() for x in (q, k, v))
    compiled = torch.compile(lambda q, k, v: torch.softmax(q @ k.mT, -1).float() @ v.float(), backend="kvant")
    exact = torch.softmax(q.double() @ k.double().mT, -1) @ v.double()
    assert (compiled(q, k, v) - exact).norm() < 1e-4 * exact.norm(), "not rounded to bf16 in between"
    run(lambda q, k, v: layer(torch.softmax(q.float() @ k.float().mT, -1).bfloat16() @ v), q, k, v, bound=2e-2)


def test_products_that_are_added():
    q, k, v = (cache() for _ in range(3))
    low = torch.zeros(TOKENS, TOKENS).masked_fill(torch.rand(TOKENS, TOKENS) > 0.8, torch.finfo(torch.float32).min)

    def function(bias, scores=lambda s: s, **numbers):
        def attend(q, k, v):
            product = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, **numbers)
            return torch.softmax(scores(product.view(BATCH, HEADS, TOKENS, TOKENS)), -1) @ v

        return attend

    flat, full = torch.randn(BATCH * HEADS, 1, TOKENS), torch.randn(BATCH * HEADS, TOKENS, TOKENS)
    for attend in (function(flat), function(full, lambda s: s + low, beta=0.5, alpha=0.3),
                   function(flat, lambda s: s.masked_fill(low < 0, -7.0), beta=0, alpha=2), function(flat, lambda s: s * 2),
                   function(flat[0]), function(flat[:1])):
        report = run(attend, q, k, v)
        assert report.fused, report
    assert run(function(torch.full_like(full, torch.nan), beta=0), q, k, v).fused, "what is not read"
    # As starcoder's first has it: one head of keys, queries and heads beside each other.
    merged = torch.randn(BATCH, TOKENS * HEADS, SIZE)
    run(lambda q, k, v: (torch.softmax(torch.baddbmm(torch.zeros(BATCH, TOKENS * HEADS, TOKENS), q, k.mT, beta=1, alpha=0.25).view(
        BATCH, TOKENS, HEADS, TOKENS), -1).view(BATCH, TOKENS * HEADS, TOKENS) @ v).view(BATCH, TOKENS, HEADS, SIZE),
        merged, k[:, 0].contiguous(), v[:, 0].contiguous())
    report = run(function(flat, lambda s: torch.tanh(s / 3) * 3), q, k, v)
    assert not report.fused and "is added to a bias before it is capped" in report.text, report


def test_numbers_of_dims_that_are_alike():
    """Where one of two may be taken for the other: batch, heads, repeats, queries; and of what does not go together."""
    same, tokens = 3, 5
    q, k, v = torch.randn(same, same, same, SIZE), torch.randn(same, same, tokens, SIZE), torch.randn(same, same, tokens, SIZE)
    sinks, columns = 3 * torch.randn(same), torch.rand(same, 1, 1) + 0.5
    of_tokens, flags = torch.randn(tokens), torch.rand(tokens + 1) > 0.5
    grouped, many = torch.randn(same, 2, same, 4, SIZE), 3 * torch.randn(2 * same)

    def of_groups(q, k, v, many):
        scores = torch.einsum("bgrid,bgjd->bgrij", q, k).flatten(1, 2)
        column = many.reshape(1, -1, 1, 1).expand(same, -1, 4, -1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1].view(same, 2, same, 4, tokens)
        return torch.einsum("bgrij,bgjd->bgrid", weights, v)

    def behind_sinks(q, k, v, sinks):
        column = sinks.reshape(1, -1, 1, 1).expand(same, -1, same, -1)
        return torch.softmax(torch.cat([q @ k.mT, column], -1) + flags, -1)[..., :-1] @ v

    for function, arguments in (
            (of_groups, (grouped, k[:, :2], v[:, :2], many)), (behind_sinks, (q, k, v, sinks)),
            (lambda q, k, v, c: torch.softmax(((q @ k.mT).squeeze(1).unsqueeze(0) * c).squeeze(0).unsqueeze(1), -1) @ v,
             (q[:, :1], k[:, :1], v[:, :1], columns)),
            (lambda q, k, v: torch.softmax((q @ k.mT + columns).flatten(0, 1) + of_tokens + torch.cat([columns] * same), -1)
             @ v.flatten(0, 1), (q, k, v)),
            (lambda q, k, v: torch.softmax(of_tokens - q @ k.mT, -1) @ v, (q, k, v)),
            (lambda q, k, v: torch.softmax(torch.add(of_tokens, q @ k.mT, alpha=2), -1) @ v, (q, k, v)),
            (lambda q, k, v: torch.softmax((q @ k.mT).double(), -1).float() @ v, (q, k, v))):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x, function=function: function(*x), backend="kvant")
        want = function(*arguments)
        assert (compiled(*arguments) - want).norm() < 2e-5 * want.norm()
        assert kvant.torch.reports_of(compiled)[-1].text
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, s: with_sinks(q @ k.mT, s, v), backend="kvant", dynamic=True)
    torch.testing.assert_close(compiled(q, k, v, sinks), with_sinks(q @ k.mT, sinks, v))
    scaled = lambda q, k, v: torch.softmax(torch.baddbmm(  # noqa: E731
        torch.zeros(q.shape[0], 1, 1), q, k.mT, alpha=q.shape[-1] ** -0.5), -1) @ v
    compiled = torch.compile(scaled, backend="kvant", dynamic=True)
    torch.testing.assert_close(compiled(q[0], k[0], v[0]), scaled(q[0], k[0], v[0]))


def test_two_fills():
    q, k, v = (cache() for _ in range(3))
    causal, padded = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1), torch.rand(BATCH, 1, 1, TOKENS) > 0.8
    padded[..., 0] = False
    low = torch.finfo(torch.float32).min
    for first, second, fused in ((-torch.inf, -torch.inf, True), (low, low, True), (-1e9, -2.0, False), (low, -torch.inf, False)):
        report = run(lambda q, k, v, first=first, second=second: torch.softmax((q @ k.mT).masked_fill(
            padded, first).masked_fill(causal, second), -1) @ v, q, k, v)
        assert report.fused == fused, report
    assert run(lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(causal, torch.tensor(-1e9)), -1) @ v, q, k, v).fused


def lowered(scores):
    return scores - scores.max(-1, keepdim=True).values


def with_sinks(scores, sinks, v, cut=1):
    column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1) if sinks.dim() == 1 else sinks
    logits = torch.cat([scores, column], -1)
    logits = logits - logits.max(-1, keepdim=True).values
    return torch.softmax(logits, -1)[..., :-cut] @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype):
    q, k, v = (cache().to(dtype) for _ in range(3))
    sinks, bias = torch.tensor([0.5, 3.0, -2.0], dtype=dtype), torch.randn(TOKENS, TOKENS, dtype=dtype)
    hidden = torch.rand(TOKENS, TOKENS) > 0.6
    hidden[3] = True
    bound = 2e-5 if dtype == torch.float32 else 3e-2
    for scores in (lambda s: s * 0.2, lambda s: s + bias, lambda s: s.masked_fill(hidden, -torch.inf)):
        report = run(lambda q, k, v, sinks, scores=scores: with_sinks(scores(q @ k.mT), sinks, v), q, k, v, sinks, bound=bound)
        assert report.fused, report
    # The sinks are not less that maximum.
    assert run(lambda q, k, v, sinks: with_sinks(q @ k.mT - (q @ k.mT).amax(-1, True), sinks, v), q, k, v, sinks, bound=bound).fused
    report = run(lambda q, k, v, sinks: with_sinks(lowered(q @ k.mT), sinks, v), q, k, v, sinks, bound=bound)
    assert not report.fused and "are computed from its scores" in report.text, report
    # Nearly so: a logit for each query, one column more cut off.
    for function in (lambda q, k, v, sinks: with_sinks(q @ k.mT, q[..., :1] + sinks[:, None, None], v),
                     lambda q, k, v, sinks: with_sinks(q @ k.mT, sinks, v[:, :, 1:], 2)):
        report = run(function, q, k, v, sinks, bound=bound)
        assert not report.fused, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps(dtype):
    q, k, v = (cache().to(dtype) for _ in range(3))
    mask = torch.zeros(TOKENS, TOKENS, dtype=dtype).masked_fill(torch.rand(TOKENS, TOKENS) > 0.8, torch.finfo(dtype).min)
    bias = torch.randn(TOKENS, TOKENS, dtype=dtype)
    for capped, fused in ((lambda s: torch.tanh(s / 5) * 5 + mask, True), (lambda s: 3.0 * torch.tanh(s / 8 / 3.0), True),
                          (lambda s: torch.tanh(s) + mask, True), (lambda s: torch.tanh(s / 5) * 4 + mask, False),
                          (lambda s: torch.tanh((s + bias) / 5) * 5, False), (lambda s: 5 * torch.tanh(s / 5) * 2, False)):
        report = run(lambda q, k, v, capped=capped: torch.softmax(capped(q @ k.mT), -1) @ v, q, k, v,
                     bound=2e-5 if dtype == torch.float32 else 3e-2)
        assert report.fused == fused, report


def test_masks_that_fill_with_infinity():
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for mask in fills(torch.inf):
        report = run(lambda q, k, v, rows, mask=mask: torch.softmax(mask(q @ k.mT, rows), -1) @ v, cache(), cache(),
                     cache(), hidden)
        assert not report.fused and "its mask fills with inf" in report.text


def test_masks_times_a_number():
    mask = torch.randn(TOKENS, TOKENS)
    for alpha in 0, 0.5, 3:
        run(lambda q, k, v, mask, alpha=alpha: torch.softmax(torch.add(q @ k.mT, mask, alpha=alpha), -1) @ v,
            cache(), cache(), cache(), mask)


def test_a_cache_that_was_empty():
    """Whose strides are others once the empty tensor is gone, also where attention is not fused."""
    q, k, v = queries(), torch.randn(BATCH, TOKENS, HEADS * 2, SIZE), torch.randn(BATCH, TOKENS, HEADS * 2, SIZE)

    def function(q, k, v):
        k, v = (torch.cat([torch.tensor([]), x.transpose(1, 2)], -2) for x in (k, v))
        return torch.softmax((q @ k.mT).exp(), -1) @ v, k

    compiled = torch.compile(function, backend="kvant")
    torch.testing.assert_close(compiled(0.1 * q, k, v), function(0.1 * q, k, v))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    q, k, v = queries(), cache()[:, :, :tokens], cache()[:, :, :tokens]
    q = q[:, :HEADS].contiguous()
    function = lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v  # noqa: E731
    compiled = torch.compile(function, backend="kvant")
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))


@pytest.mark.parametrize("within", [True, False])
def test_autocast(within):
    q, k, v, w = queries(), cache(), cache(), torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    mask = torch.randn(5, TOKENS)

    def attend(q, k, v, w):
        if not within:
            return sdpa(q, k, v, attn_mask=mask) @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = sdpa(q, k, v, attn_mask=mask)
        return o @ w

    compiled = torch.compile(attend, backend="kvant", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not within):
        want, got = attend(q, k, v, w), compiled(q, k, v, w)
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_of_another_type_are_not_rounded(dtype):
    mask = torch.randn(5, TOKENS)
    mask[1], mask[2], mask[3, 4] = -1e9, torch.finfo(torch.float32).min, 1e5
    run(lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), *(x.to(dtype) for x in (queries(), cache(), cache())), mask,
        bound=1e-2)


def flex(score=None, mask=None):
    # Compiled by inductor: without a compiler torch looks at no blocks.
    function = lambda q, k, v: flex_attention(q, k, v, score, mask, enable_gqa=True)  # noqa: E731
    q, k, v = torch.randn(1, HEADS, 256, SIZE), torch.randn(1, HEADS, 256, SIZE), torch.randn(1, HEADS, 256, SIZE)
    want = torch.compile(function, backend="inductor")(q, k, v)
    torch._dynamo.reset()
    got = torch.compile(function, backend="kvant")(q, k, v)
    assert (got - want).norm() < 2e-5 * want.norm()


def test_flex_with_blocks_of_its_own():
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    flex(mask=BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128))


@pytest.mark.parametrize("score", [
    lambda s, b, h, q, k: torch.add(s, SLOPES[h] * (k - q), alpha=3),
    lambda s, b, h, q, k: torch.sub(s, SLOPES[h] * (k - q), alpha=2),
    lambda s, b, h, q, k: s.add(SLOPES[h] * (k - q), alpha=3),
    lambda s, b, h, q, k: s.add(other=SLOPES[h] * (k - q)),
    lambda s, b, h, q, k: 20 * torch.tanh(s.div(20, rounding_mode="floor")),
    lambda s, b, h, q, k: 20 * torch.tanh(torch.div(s, 20, rounding_mode="floor")),
    lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
])
def test_flex_scores(score):
    flex(score)


SLOPES = torch.rand(HEADS + 4) * 0.1  # more than there are heads


@pytest.mark.parametrize("mask", [
    lambda b, h, q, k: torch.sub(q, k, alpha=2) <= 20,
    lambda b, h, q, k: (q >= k) & True,
    lambda b, h, q, k: torch.ge(input=q, other=k),
    lambda b, h, q, k: q.ge(other=k),
])
def test_flex_masks(mask):
    flex(mask=create_block_mask(mask, None, None, 256, 256, device="cpu"))
