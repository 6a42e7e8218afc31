"""MergeAttention from Python: the builder's method, and torch's op."""

import numpy as np
import pytest
from reference import distance, numbers

import kvant


def parts_of(count, shape=(2, 3, 5, 16)):
    """Outputs and statistics, some of them without tokens; and what they are merged, in f64."""
    outputs = [numbers(*shape, seed=i) for i in range(count)]
    stats = [3 * numbers(*shape[:-1], 1, seed=100 + i) for i in range(count)]
    for i, stat in enumerate(stats):
        stat[0, i % shape[1]] = -np.inf
        stat[1, 0] = -np.inf  # of all
        outputs[i][1, 0] = np.nan
    o, s = (np.stack(x).astype(np.float64) for x in (outputs, stats))
    most = s.max(0)
    weights = np.exp(s - np.where(np.isfinite(most), most, 0))
    total = weights.sum(0)
    merged = (np.where(weights > 0, o, 0) * weights).sum(0) / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return outputs, stats, merged, most + np.log(np.where(total > 0, total, 1))


@pytest.mark.parametrize("count", [1, 3, 70])
def test_builder(count):
    outputs, stats, merged, merged_stats = parts_of(count)
    g = kvant.GraphBuilder()
    parts = [(g.input(f"o{i}", "f32", outputs[0].shape), g.input(f"s{i}", "f32", stats[0].shape))
             for i in range(count)]
    o, s = g.merge_attention(parts, stats=True)
    g.output("o", o)
    g.output("s", s)
    graph = g.build()
    assert [partition.kind for partition in graph.partitions()] == ["merge"]
    compiled = kvant.compile(graph, require_fused=True)
    assert f"merge of {count} parts" in kvant.explain(compiled)
    given = {f"o{i}": x for i, x in enumerate(outputs)} | {f"s{i}": x for i, x in enumerate(stats)}
    got = compiled(given)
    assert distance(got["o"], merged) < 1e-6
    np.testing.assert_allclose(got["s"], merged_stats, rtol=1e-6, atol=1e-6)


def test_builder_refuses():
    g = kvant.GraphBuilder()
    with pytest.raises(ValueError, match="merge_attention needs a part"):
        g.merge_attention([])
    with pytest.raises(ValueError, match=r"tensor 2 'c' \[2,4\] is no part beside parts whose outputs are \[3,4\]"):
        g.merge_attention([(g.input("a", "f32", [3, 4]), g.input("b", "f32", [3, 1])),
                           (g.input("c", "f32", [2, 4]), g.input("d", "f32", [2, 1]))])


torch = pytest.importorskip("torch")
from kvant.torch import merge_attention  # noqa: E402


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_op(dtype, bound):
    outputs, stats, merged, merged_stats = parts_of(3)
    # Heads and tokens exchanged in memory, as kvant.torch.attention has them.
    parts = [(torch.from_numpy(o).to(dtype).transpose(1, 2).contiguous().transpose(1, 2), torch.from_numpy(s))
             for o, s in zip(outputs, stats)]
    out, out_stats = merge_attention(parts, dtype=torch.float32)
    assert out.dtype == torch.float32 and distance(out, merged) < bound
    np.testing.assert_allclose(out_stats, merged_stats, rtol=1e-6, atol=1e-6)
    out, _ = merge_attention(parts)
    assert out.dtype == dtype and distance(out.float(), merged) < bound


def test_merges_can_be_merged():
    outputs, stats, merged, merged_stats = parts_of(4)
    parts = [tuple(map(torch.from_numpy, part)) for part in zip(outputs, stats)]
    out, out_stats = merge_attention([merge_attention(parts[:1]), merge_attention(parts[1:])])
    assert distance(out, merged) < 1e-6
    np.testing.assert_allclose(out_stats, merged_stats, rtol=1e-6, atol=1e-6)


def test_op_is_an_op_of_torch():
    tensors = [torch.randn(2, 3, 8).requires_grad_(i % 2 == 0) for i in range(3)]
    stats = [torch.randn(2, 3, 1).requires_grad_(i < 2) for i in range(3)]
    torch.library.opcheck(torch.ops.kvant.merge_attention.default, (tensors, stats, None))
    torch.library.opcheck(torch.ops.kvant.merge_attention.default,
                          ([x.detach() for x in tensors], [x.detach() for x in stats], torch.float16))


def test_gradients():
    outputs = [torch.randn(2, 3, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    stats = [torch.randn(2, 3, 1, dtype=torch.float64) for _ in range(3)]
    stats[1][0, 1] = -torch.inf
    stats = [x.requires_grad_() for x in stats]

    def definition(*tensors):
        s = torch.stack(tensors[3:])
        weights = torch.softmax(s, 0)
        return (weights * torch.stack(tensors[:3])).sum(0), torch.logsumexp(s, 0)

    weights = torch.randn(2, 3, 8), torch.randn(2, 3, 1)
    want = torch.autograd.grad([(x * w).sum() for x, w in zip(definition(*outputs, *stats), weights)], outputs + stats)
    floats = [x.detach().float().requires_grad_() for x in outputs + stats]
    got = merge_attention(list(zip(floats[:3], floats[3:])))
    got = torch.autograd.grad([(x * w).sum() for x, w in zip(got, weights)], floats)
    for a, b in zip(got, want):
        assert distance(a, b) < 1e-5


def test_op_is_traced_by_fx():
    class Model(torch.nn.Module):
        def forward(self, a, b, stats):
            return merge_attention([(a, stats), (b, stats)])[0]

    given = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 1)
    assert torch.equal(torch.fx.symbolic_trace(Model())(*given), Model()(*given))


def test_op_refuses():
    o, s = torch.zeros(2, 8), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="needs a part"):
        merge_attention([])
    for parts in ([o, s], [(o, s, s)], [(o, 0.0)]):
        with pytest.raises(ValueError, match=r"part 0 is no pair of tensors, \(output, statistics\)"):
            merge_attention(parts)
    with pytest.raises(ValueError, match="statistics 1 is on meta, but the others are on cpu"):
        merge_attention([(o, s), (o, s.to("meta"))])
    assert torch.equal(merge_attention(part for part in [(o + 1, s)])[0], o + 1)
    with pytest.raises(ValueError, match="2 outputs, but 1 statistics"):
        torch.ops.kvant.merge_attention([o, o], [s])
    with pytest.raises(ValueError, match=r"output 1 are \[3, 8\], but must be \[2, 8\]"):
        merge_attention([(o, s), (torch.zeros(3, 8), s)])
    with pytest.raises(ValueError, match=r"statistics 0 are \[2\], but must be \[2, 1\]"):
        merge_attention([(o, s[:, 0])])
    with pytest.raises(kvant.Error, match="float64, which kvant lacks"):
        merge_attention([(o.double(), s)])
    with pytest.raises(kvant.Error, match=r"src \(tensor 2 'output 1'\) is f16 but src \(tensor 0 'output 0'\) is f32"):
        merge_attention([(o, s), (o.half(), s)])
    with pytest.raises(kvant.Error, match=r"stats \(tensor 1 'statistics 0'\) is f16, not f32"):
        merge_attention([(o, s.half())])
