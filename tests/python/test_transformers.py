"""KvantCache in transformers: with scheme f32 it gives DynamicCache's tokens, in every mode."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvant  # noqa: E402
from kvant.transformers import KvantCache  # noqa: E402

SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96,
             num_hidden_layers=3, vocab_size=199, max_position_embeddings=512, bos_token_id=1, eos_token_id=None,
             pad_token_id=0)
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 9, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32},
    "Afmoe": {"sliding_window": 9, "num_dense_layers": 3},
    "Phimoe": {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},  # in its masks alone
    "GptOss": {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},
}
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
}


def model_of(name="Llama", seed=0, **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, name + "Config")(**{**SIZES, **MODELS.get(name, {}), **changes})
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)  # so that tokens depend on what is attended to
    return model


def prompts(batch=2, tokens=17, padding=0):
    torch.manual_seed(7)
    ids = torch.randint(2, 199, (batch, tokens))
    mask = torch.ones_like(ids)
    ids[-1, :padding] = 0
    mask[-1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, cache, inputs, tokens=20, **mode):
    return generate_with_logits(model, cache, inputs, tokens, **mode)[0]


def generate_with_logits(model, cache, inputs, tokens=20, **mode):
    torch.manual_seed(5)
    model.set_attn_implementation("eager" if isinstance(cache, transformers.DynamicCache) else "kvant")
    made = model.generate(**inputs, past_key_values=cache, max_new_tokens=tokens, return_dict_in_generate=True,
                          output_logits=True, **mode)
    return made.sequences, torch.stack(made.logits)


def dynamic(model):
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_a_dynamic_cache(name, mode, padding):
    model, inputs = model_of(name), prompts(padding=padding)
    want, exact = generate_with_logits(model, dynamic(model), inputs, **MODES[mode])
    got, logits = generate_with_logits(model, KvantCache(model.config, "f32", capacity=64), inputs, **MODES[mode])
    assert torch.equal(got, want)
    assert (logits - exact).norm() < 1e-4 * exact.norm()


def test_windows_caps_and_sinks_matter():
    """Else the test above would not notice one that is missing."""

    def logits(model):
        return generate_with_logits(model, KvantCache(model.config, "f32", capacity=64), prompts(), tokens=1)[1]

    for name, change in {"Mistral": {"sliding_window": 400}, "Gemma2": {"attn_logit_softcapping": 500.0}}.items():
        of_model, of_other = logits(model_of(name)), logits(model_of(name, **change))
        assert (of_model - of_other).norm() > 0.01 * of_model.norm()
    model = model_of("GptOss")
    before = logits(model)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(9)
    assert (logits(model) - before).norm() > 0.01 * before.norm()


@torch.no_grad()
def test_windows_of_which_config_and_model_differ_are_refused():
    """As of a model that was converted to Llama's form: its attention sees all tokens."""
    model = model_of(sliding_window=9)
    model.set_attn_implementation("kvant")
    for inputs in prompts(), prompts(padding=6):
        with pytest.raises(kvant.Error, match="layer 0 attends to all tokens, but its config has a sliding_window of 9"):
            model(**inputs, past_key_values=KvantCache(model.config))
    model = model_of("Phimoe", layer_types=["full_attention"] * 3)
    model.set_attn_implementation("kvant")
    with pytest.raises(kvant.Error, match="layer 0 attends within a window, of which its config's layer_types do not"):
        model(**prompts(), past_key_values=KvantCache(model.config))


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 3}, {"assistant": 1}])
def test_assisted_generation(mode):
    model, inputs = model_of(), prompts(batch=1)
    if "assistant" in mode:
        mode = {"assistant_model": model_of(seed=3, num_hidden_layers=1)}
    want = generate(model, dynamic(model), inputs, do_sample=False)
    cache = KvantCache(model.config, "f32", capacity=64)
    if "assistant_model" in mode:
        mode["assistant_model"].set_attn_implementation("eager")
    assert torch.equal(generate(model, cache, inputs, do_sample=False, **mode), want)


@torch.no_grad()
def test_a_conversation_and_a_prompt_in_chunks():
    model = model_of()
    cache, other = KvantCache(model.config, "f32", capacity=96), dynamic(model)
    inputs = prompts(padding=4)
    for turn in range(3):
        want, got = (generate(model, x, inputs, tokens=6, do_sample=False) for x in (other, cache))
        assert torch.equal(got, want)
        told = torch.cat([want, prompts(tokens=5 + turn)["input_ids"]], 1)
        inputs = {"input_ids": told, "attention_mask": torch.ones_like(told)}
        inputs["attention_mask"][-1, :4] = 0
    assert cache.get_seq_length() == other.get_seq_length()
    ids = prompts(batch=1, tokens=40)["input_ids"]
    model.set_attn_implementation("kvant")
    cache = KvantCache(model.config, "f32", capacity=40)
    pieces = [model(piece, past_key_values=cache).logits for piece in ids.split(11, 1)]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits, rtol=1e-3, atol=1e-3)


def test_sequences_outgrow_the_capacity():
    model, inputs = model_of("Mistral"), prompts(padding=3)
    want = generate(model, dynamic(model), inputs, do_sample=False)
    cache = KvantCache(model.config, "f32", capacity=4)
    assert torch.equal(generate(model, cache, inputs, do_sample=False), want)
    assert cache.cache.capacity == 68 and cache.cache.length() == 36  # 17 tokens, twice as many, again


@torch.no_grad()
def test_batches_change():
    model, inputs = model_of(), prompts(batch=3, padding=5)
    model.set_attn_implementation("kvant")
    cache = KvantCache(model.config, "f32", capacity=32)
    model(**inputs, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 3]))
    token, rows = torch.tensor([[11], [12], [13]]), [2, 0, 1]
    mask = torch.cat([inputs["attention_mask"][rows], torch.ones(3, 1, dtype=torch.long)], 1)
    got = model(token, attention_mask=mask, past_key_values=cache).logits[:, -1]
    model.set_attn_implementation("eager")
    told = {"input_ids": torch.cat([inputs["input_ids"][rows], token], 1), "attention_mask": mask}
    torch.testing.assert_close(got, model(**told).logits[:, -1], rtol=1e-3, atol=1e-3)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert cache.cache.batch == 2 and cache.cache.length(0, 0) == 13


@torch.no_grad()
def test_layers_with_a_window_keep_no_more():
    model = model_of("Gemma2")
    cache = KvantCache(model.config, "f16", capacity=4000, rollback=0)
    model.set_attn_implementation("kvant")
    model(**prompts(tokens=40), past_key_values=cache)
    kinds = model.config.layer_types
    slots = [cache.cache.part(layer, False, "codes").shape[2] for layer in range(3)]
    assert slots == [9 if kind == "sliding_attention" else 4000 for kind in kinds]
    assert 9 in slots and 4000 in slots


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("scheme", ["int2_g32", "rotKV4_g32"])
def test_a_prompt_reads_its_own_tokens_as_they_are(scheme, padding):
    model, inputs = model_of(), prompts(tokens=30, padding=padding)
    model.set_attn_implementation("eager")
    want = model(**inputs).logits
    model.set_attn_implementation("kvant")
    cache = KvantCache(model.config, scheme, capacity=32)
    got = model(**inputs, past_key_values=cache).logits
    shown = inputs["attention_mask"].bool()
    assert (got - want)[shown].norm() < 1e-4 * want[shown].norm()


@torch.no_grad()
def test_copies_go_on_from_one_prompt():
    model, inputs = model_of(), prompts(padding=4)
    model.set_attn_implementation("kvant")
    with torch.inference_mode():
        prompt = KvantCache(model.config, "f32", capacity=40)
        model(**inputs, past_key_values=prompt)
    copies = [copy.deepcopy(prompt) for _ in range(2)]
    assert all(x.layers[0].module() is model.model.layers[0].self_attn for x in copies)
    for cache in copies:
        assert torch.equal(generate(model, cache, inputs_with(inputs, 11), do_sample=False),
                           generate(model, dynamic(model), inputs_with(inputs, 11), do_sample=False))
    assert prompt.get_seq_length() == 17 and prompt.cache.length() == 17


def inputs_with(inputs, token):
    ids = torch.cat([inputs["input_ids"], torch.full((2, 1), token)], 1)
    return {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)}


@torch.no_grad()
def test_padding_goes_with_its_prompt():
    """One that is taken back, or was refused, leaves none to a prompt that has no mask."""
    model, inputs = model_of(), prompts(padding=6)
    taken_back, refused = KvantCache(model.config, "f32"), KvantCache(model.config, "f32", capacity=8, max_capacity=16)
    model.set_attn_implementation("kvant")
    model(**inputs, past_key_values=taken_back)
    taken_back.crop(-17)
    with pytest.raises(kvant.Error, match="a sequence of 17 tokens"):
        model(**inputs, past_key_values=refused)
    ids = inputs["input_ids"][:, :16]
    got = [model(ids, past_key_values=cache).logits for cache in (taken_back, refused)]
    model.set_attn_implementation("eager")
    want = model(ids).logits
    for logits in got:
        torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_an_interrupted_forward_is_noticed():
    model, inputs = model_of(), prompts()
    model.set_attn_implementation("kvant")
    cache = KvantCache(model.config, "f32", capacity=64)
    model(**inputs, past_key_values=cache)
    last = model.model.layers[-1].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs["input_ids"][:, :1], past_key_values=cache)
    last.remove()
    for _ in range(2):
        with pytest.raises(kvant.Error, match="layer 2 has fewer tokens than layer 0: a forward was interrupted"):
            model(inputs["input_ids"][:, :1], past_key_values=cache)
        assert [cache.cache.length(layer) for layer in range(3)] == [18, 18, 17]
    cache.reset()
    model(**inputs, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("scheme, bound", [("f16", 1e-2), ("int8_th", 0.05), ("int4_g32", 0.5), ("int4_g32_R128", 1e-2)])
def test_compressed_schemes_stay_near(scheme, bound):
    model, inputs = model_of(), prompts(tokens=60, padding=9)
    model.set_attn_implementation("eager")
    want = model(**inputs).logits[:, -1]
    model.set_attn_implementation("kvant")
    if scheme == "int4_g32_R128":
        scheme = "s4:g32+window128"
    cache = KvantCache(model.config, scheme, capacity=60)
    got = model(**inputs, past_key_values=cache).logits[:, -1]
    assert (got - want).norm() / want.norm() < bound
    assert cache.cache.length(2, 0) == 60 and cache.cache.length(2, 1) == 51
    cache.reset()
    assert cache.get_seq_length() == 0
    model(**prompts(batch=3), past_key_values=cache)
    assert cache.cache.batch == 3


@pytest.mark.parametrize("padding", [5, 13])
def test_prompts_in_chunks_with_padding(padding):
    """The first chunks of a row may be padding alone."""
    model, inputs = model_of("Mistral"), prompts(padding=padding)
    want = generate(model, dynamic(model), inputs, do_sample=False)
    cache = KvantCache(model.config, "f32", capacity=9)
    assert torch.equal(generate(model, cache, inputs, do_sample=False, prefill_chunk_size=4), want)


def test_a_row_that_is_cropped_into_its_padding_begins_anew():
    model, inputs = model_of(), prompts(tokens=10, padding=8)
    mask = torch.cat([inputs["attention_mask"][:, :4], torch.ones(2, 2).long()], 1)
    logits = []
    for cache in dynamic(model), KvantCache(model.config, "f32"):
        model.set_attn_implementation("eager" if isinstance(cache, transformers.DynamicCache) else "kvant")
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            cache.crop(-6)
            logits.append(model(inputs["input_ids"][:, :2], attention_mask=mask, position_ids=torch.tensor([[4, 5], [0, 1]]),
                                past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_padding_takes_no_room():
    model, inputs = model_of(), prompts(tokens=40, padding=30)
    inputs["input_ids"][0, :25] = inputs["attention_mask"][0, :25] = 0
    want = generate(model, dynamic(model), inputs, tokens=5, do_sample=False)
    cache = KvantCache(model.config, "f32", capacity=8, max_capacity=20)
    assert torch.equal(generate(model, cache, inputs, tokens=5, do_sample=False), want)
    assert cache.batch_size == 2 and cache.is_initialized and cache.cache.capacity == 20


@torch.no_grad()
def test_a_model_that_attends_to_keys_twice_is_refused():
    config = transformers.DiffLlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    model = transformers.DiffLlamaForCausalLM(config).eval()
    model.set_attn_implementation("kvant")
    with pytest.raises(kvant.Error, match="attends to the same keys twice"):
        model(**prompts(), past_key_values=KvantCache(config, "f32"))


@torch.no_grad()
def test_bf16():
    model = model_of().bfloat16()
    inputs = prompts()
    model.set_attn_implementation("kvant")
    got = model(**inputs, past_key_values=KvantCache(model.config, "bf16", capacity=32)).logits
    model.set_attn_implementation("eager")
    want = model(**inputs).logits
    assert (got - want).float().norm() / want.float().norm() < 0.05


@pytest.mark.parametrize("part", ["q_proj.weight", "k_proj.weight", "v_proj.weight", "sinks"])
def test_gradients_of_any_part_are_refused(part):
    model, inputs = model_of("GptOss"), prompts()
    model.set_attn_implementation("kvant")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(part))
    with torch.enable_grad(), pytest.raises(kvant.Error, match="gradients are asked for"):
        model(inputs["input_ids"], past_key_values=KvantCache(model.config))


@torch.no_grad()
def test_a_decoder_that_makes_a_mask_for_an_encoder_it_has_not():
    torch.manual_seed(0)
    model = transformers.BartForCausalLM(transformers.BartConfig(
        vocab_size=199, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, pad_token_id=0,
        eos_token_id=None, forced_eos_token_id=None)).eval()
    with pytest.raises(kvant.Error, match="neither causal nor a causal window"):
        model.set_attn_implementation("kvant")
        model(prompts()["input_ids"], encoder_hidden_states=torch.randn(2, 9, 64), past_key_values=KvantCache(model.config))
    want = generate(model, dynamic(model), prompts(), do_sample=False)
    assert torch.equal(generate(model, KvantCache(model.config, "f32"), prompts(), do_sample=False), want)


@torch.no_grad()
def test_layers_that_are_not_alike_are_refused():
    model = model_of()
    model.set_attn_implementation("kvant")
    wide = model_of(num_key_value_heads=4)
    wide.set_attn_implementation("kvant")
    model.model.layers[2].self_attn = wide.model.layers[2].self_attn
    with pytest.raises(kvant.Error, match="layer 2 has 4 KV heads of 32 and 32 channels .K and V., layer 0 has 2 of 32 and 32"):
        model(**prompts(), past_key_values=KvantCache(model.config))
    model = model_of()
    model.set_attn_implementation("kvant")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(kvant.Error, match="cannot serve attention that is not causal"):
        model(prompts()["input_ids"], past_key_values=KvantCache(model.config))
    model = model_of()
    model.set_attn_implementation("kvant")
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, given: (args, {**given, "attention_mask": torch.ones(2, 1, 17, 17)}), with_kwargs=True)
    with pytest.raises(kvant.Error, match="cannot take an attention_mask of 4 dims"):
        model(**prompts(), past_key_values=KvantCache(model.config))


@torch.no_grad()
def test_refusals():
    model, inputs = model_of(), prompts()
    cache = KvantCache(model.config, "f32", capacity=20, max_capacity=30)
    other = model_of(seed=4)
    other.set_attn_implementation("kvant")

    def refused(message, call, model=model):
        model.set_attn_implementation("kvant")
        with pytest.raises(kvant.Error, match=message):
            call()

    refused("KvantCache has no tokens yet", lambda: cache.cache)
    refused("reads a KvantCache", lambda: model(**inputs))
    refused("reads a KvantCache", lambda: model(**inputs, past_key_values=dynamic(model)))
    right = prompts()
    right["attention_mask"][0, -3:] = 0
    refused("padding that is not on the left", lambda: model(**right, past_key_values=cache))
    refused(r"attention_mask is \[3, 17\], where there are 2 rows of 17 tokens", lambda: model(
        inputs["input_ids"], attention_mask=torch.ones(3, 17).long(), past_key_values=cache))
    refused("takes a model's config, not a LlamaForCausalLM", lambda: KvantCache(model))
    model(**inputs, past_key_values=cache)
    refused("a batch of 1 for a cache of 2 rows", lambda: model(inputs["input_ids"][:1, :2], past_key_values=cache))
    middle = torch.ones(2, 19, dtype=torch.long)
    middle[1, 17] = 0
    refused("padding that is not on the left", lambda: model(inputs["input_ids"][:, :2], attention_mask=middle,
                                                            past_key_values=cache))
    middle[1, :18] = torch.arange(18) > 1
    refused("2 tokens of padding in row 1, which had 0", lambda: model(inputs["input_ids"][:, :2], attention_mask=middle,
                                                                      past_key_values=cache))
    refused("a sequence of 34 tokens for a KvantCache of at most 30", lambda: model(inputs["input_ids"],
                                                                                   past_key_values=cache))
    refused("tokens of one model and is given to another", lambda: other(inputs["input_ids"][:, :1],
                                                                         past_key_values=cache))
    whisper = transformers.WhisperConfig()
    refused("KvantCache is of a decoder's own tokens; a model of WhisperConfig", lambda: KvantCache(whisper))
    refused("a model of MllamaTextConfig has attention to others", lambda: KvantCache(transformers.MllamaTextConfig()))
    refused("cannot be pickled: copy.deepcopy copies it", lambda: pickle.dumps(KvantCache(model.config)))
    refused("a capacity of 40, of at most 30", lambda: KvantCache(model.config, capacity=40, max_capacity=30))
    for message, options in (
        ("a cache with capacity of -1", {"capacity": -1}), ("capacity must be an integer, not 'a'", {"capacity": "a"}),
        ("max_capacity must be an integer, not '9'", {"max_capacity": "9"}), ("'foo'", {"scheme": "foo"}),
        ("scheme must be a string or a list of strings, not None", {"scheme": None}),
        ("3 layers need as many schemes, not 2", {"scheme": ["f16", "f16"]}), ("a rollback of -1", {"rollback": -1}),
        ("threads must be at least 1", {"threads": 0}), ("allow_non_finite must be", {"allow_non_finite": 1}),
    ):
        refused(message, lambda: KvantCache(model.config, **options))
    refused("rows are integers or a mask", lambda: cache.batch_select_indices(torch.tensor([0.5])))
    refused("a mask of 1 rows for a cache of 2", lambda: cache.batch_select_indices(torch.tensor([True])))
    refused("cannot be offloaded", lambda: cache.offload(0))
    refused("there is no batch row 2: the cache has 2", lambda: cache.batch_select_indices(torch.tensor([2])))
    refused("below 0, not 3", lambda: cache.crop(3))
    model.train()
    with torch.enable_grad():
        refused("gradients are asked for", lambda: model(inputs["input_ids"], past_key_values=KvantCache(model.config)))
    model.eval()
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        with pytest.raises(kvant.Error, match='which attention "kvant" alone reads'):
            model(inputs["input_ids"][:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 17
