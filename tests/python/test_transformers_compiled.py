"""Models compiled with KvantCache: one graph for a prompt, and one for all steps behind it."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import kvant  # noqa: E402
from kvant.transformers import KvantCache, _stores  # noqa: E402
from test_transformers import MODELS, dynamic, generate_with_logits, model_of, prompts  # noqa: E402


def compiled(model, backend="eager"):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model.set_attn_implementation("kvant")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=counter)
    return counter


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_serves_all_steps_and_caches(name, padding):
    model, inputs = model_of(name), prompts(padding=padding)
    want, exact = generate_with_logits(model, dynamic(model), inputs, do_sample=False)
    counter = compiled(model)
    for _ in range(2):
        cache = KvantCache(model.config, "f32", capacity=16)  # it grows
        got, logits = generate_with_logits(model, cache, inputs, do_sample=False)
        assert torch.equal(got, want)
        assert (logits - exact).norm() < 1e-4 * exact.norm()
        assert counter.frame_count == 2  # the prompt's, and that of a token


@pytest.mark.parametrize("backend", ["inductor", "kvant"])
def test_whole_compilers(backend):
    model, inputs = model_of("Gemma2"), prompts(padding=2)
    want, _ = generate_with_logits(model, dynamic(model), inputs, do_sample=False)
    counter = compiled(model, backend)
    got, _ = generate_with_logits(model, KvantCache(model.config, "f32"), inputs, do_sample=False)
    assert torch.equal(got, want)
    assert counter.frame_count == 2


@torch.no_grad()
def test_compressed_tokens_are_those_without_compilation():
    model, inputs = model_of(), prompts(tokens=40, padding=3)
    model.set_attn_implementation("kvant")
    want, exact = generate_with_logits(model, KvantCache(model.config, "s8:g32+sinks2+window8"), inputs)
    compiled(model)
    got, logits = generate_with_logits(model, KvantCache(model.config, "s8:g32+sinks2+window8"), inputs)
    assert torch.equal(got, want) and torch.equal(logits, exact)


def test_the_op_behaves_as_pytorch_asks():
    cache = KvantCache(model_of(num_hidden_layers=1).config, "f32")
    q, k, v = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32)
    mask = torch.tensor([[True, True, True], [False, True, True]])
    arguments = (q, k, v, cache._store.number, torch.tensor(0), mask, 0, 0.0, 0.0, 0, None)
    torch.library.opcheck(torch.ops.kvant.cached_attention.default, arguments)
    step = tuple(x[:, :, :1] for x in (q, k, v))
    arguments = (*step, cache._store.number, torch.tensor(3), None, 0, 0.25, 5.0, 2, torch.randn(4))
    torch.library.opcheck(torch.ops.kvant.cached_attention.default, arguments)
    # The same again gives the same, and what was there before is not appended twice.
    first, again = (torch.ops.kvant.cached_attention(*arguments) for _ in range(2))
    assert torch.equal(first, again) and cache.cache.length(0, 0) == 4 and cache.cache.length(0, 1) == 3


@torch.no_grad()
def test_a_cache_that_is_gone_is_refused():
    cache = KvantCache(model_of().config, "f32")
    number = cache._store.number
    del cache
    assert int(number) not in _stores
    x = torch.randn(1, 2, 1, 32)
    with pytest.raises(kvant.Error, match="a KvantCache that is gone"):
        torch.ops.kvant.cached_attention(x, x, x, number, torch.tensor(0), None, 0, 0.0, 0.0, 0, None)
