"""kvant.from_onnx against onnx's node cases and reference, and onnxruntime."""

import os
import re

import numpy as np
import pytest

import kvant

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference.ops.op_attention import _compute_attention  # noqa: E402

from onnx_models import Group, model_of  # noqa: E402
from reference import numbers  # noqa: E402

F32 = TensorProto.FLOAT


@pytest.fixture(scope="module")
def cases():
    """The node cases of Attention; those of its expansion into other ops are not about it."""
    from onnx.backend.test.case.node import collect_testcases

    with np.errstate(all="ignore"):
        found = collect_testcases("Attention")
    return [case for case in found if not case.name.endswith("_expanded")]


def relative_l2(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def rounding(model):
    """The error that the model's kernels state, which is for any data, or 5e-4, which does for these."""
    stated = max((compiled.rounding for op in model._ops for compiled in op.compiled.values()), default=0.0)
    return min(stated, 5e-4)


def run_case(case):
    """How it ran. The tolerance is the case's own, two steps of bf16 as onnx's runner has it."""
    names = [port.name for port in case.model.graph.output]
    ((inputs, wanted),) = case.data_sets
    try:
        model = kvant.from_onnx(case.model)
        got = model({port.name: x for port, x in zip(case.model.graph.input, inputs)})
    except kvant.UnimplementedError as error:
        return f"refused: {error}"
    got = got if len(names) > 1 else {names[0]: got}
    for name, want in zip(names, wanted):
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), (case.name, name)
        x, y = got[name].astype("f4"), want.astype("f4")
        step = max(case.rtol, 2**-6 if want.dtype.name == "bfloat16" else 0)
        slack = rounding(model) * np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=step, atol=case.atol + slack, err_msg=f"{case.name}: {name}")
    (op,) = model._ops
    if "oracle" in op.compiled["Y"].explain():
        return "all on the oracle, in f64, as `softmax_precision` is double"
    assert op.compiled["Y"].fused, case.name
    if "qk_matmul_output" in op.compiled:
        return "`Y` fused; `qk_matmul_output` op by op, on the oracle"
    return "fused"


def test_node_cases(cases, source):
    """All of onnx's; docs/onnx.md says how each runs."""
    assert len(cases) == 93
    how = {}
    for case in cases:
        how.setdefault(run_case(case), []).append(case.name.removeprefix("test_attention_"))
    assert sum(len(names) for way, names in how.items() if not way.startswith("refused")) >= 80
    rows = [f"| {way} | {len(names)} | {', '.join(names)} |" for way, names in how.items()]
    page = source / "docs/onnx.md"
    text = page.read_text()
    table = re.compile(r"(<!-- cases: begin -->\n\| how \| cases \| names \|\n\|---\|---\|---\|\n).*?(<!-- cases: end -->)", re.S)
    made = table.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], text)
    if os.environ.get("KVANT_UPDATE_DOCS"):
        page.write_text(made)
    assert page.read_text() == made, "KVANT_UPDATE_DOCS=1 rewrites the table of docs/onnx.md"


def random_attention(seed):
    """Inputs and attributes of one of many kinds."""
    rng = np.random.default_rng((7, seed))
    batch, kv_heads, group, size, width = (int(rng.integers(1, n)) for n in (4, 4, 4, 40, 40))
    queries, tokens, past = int(rng.integers(1, 9)), int(rng.integers(1, 30)), int(rng.integers(0, 3) * rng.integers(1, 20))
    heads, flat = kv_heads * group, bool(rng.integers(2))
    lengths = rng.integers(0, tokens + 1, batch).astype(np.int64) if not past and rng.integers(2) else None

    def normal(*shape):
        return (rng.standard_normal(shape) * (1 + 9 * (np.arange(shape[-1]) % 7 == 3))).astype("f4")

    def tensor(of, rows, columns):
        return normal(batch, rows, of * columns) if flat else normal(batch, of, rows, columns)

    inputs = {"Q": tensor(heads, queries, size), "K": tensor(kv_heads, tokens, size), "V": tensor(kv_heads, tokens, width)}
    total = past + tokens
    mask = int(rng.integers(0, 4))
    if mask:
        shape = [int(rng.choice([1, n])) for n in (batch, heads, queries)]
        columns = total
        if mask == 3:
            columns = int(rng.integers(1 if lengths is None else max(1, lengths.max()), total + 1))
        shape = [*shape, columns][int(rng.integers(0, 4)):]
        hidden = rng.random(shape) < 0.3
        inputs["attn_mask"] = ~hidden if rng.integers(2) else np.where(hidden, -np.inf, normal(*shape)).astype("f4")
    else:
        inputs["-mask"] = None
    if past:
        inputs |= {"past_key": normal(batch, kv_heads, past, size), "past_value": normal(batch, kv_heads, past, width)}
    elif lengths is not None:
        inputs |= {"-pk": None, "-pv": None, "nonpad_kv_seqlen": lengths}
    attributes = {"is_causal": int(rng.integers(2)), "left_window_size": int(rng.integers(-1, 12)),
                  "right_window_size": int(rng.integers(-1, 6))}
    if flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    if rng.integers(2):
        attributes |= {"softcap": float(rng.uniform(1, 30)), "scale": float(rng.uniform(0.05, 0.5))}
    if rng.integers(2):
        attributes["qk_matmul_output_mode"] = int(rng.integers(4))
    return inputs, attributes


@pytest.mark.parametrize("seed", range(8))
def test_attention_as_the_reference(seed):
    """Masks, windows, lengths, pasts, soft caps and groups of heads, drawn at random, against onnx's reference in f64."""
    for draw in range(12):
        inputs, attributes = random_attention(100 * seed + draw)
        mode = attributes.get("qk_matmul_output_mode")
        outputs = {"Y": F32, "present_key": F32, "present_value": F32}
        if mode is not None:
            outputs["qk"] = F32
        given = {name: x for name, x in inputs.items() if x is not None}
        model = kvant.from_onnx(model_of("Attention", inputs, outputs, open_dims=bool(draw % 2), **attributes))
        got = model(given)
        wide = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in given.items()}
        with np.errstate(all="ignore"):
            wanted = list(_compute_attention(**wide, **attributes))
            if mode == 0:  # before the soft cap, says ONNX's text, and so do its expansion and onnxruntime
                wanted[3] = _compute_attention(**wide, **{**attributes, "softcap": 0.0})[3]
        what = f"{ {n: x.shape for n, x in given.items()} } {attributes}"
        for name, want in zip(outputs, wanted):
            assert got[name].shape == want.shape, what
            finite = np.isfinite(want)
            assert np.array_equal(np.isfinite(got[name]), finite), f"{name}: {what}"
            error = relative_l2(got[name][finite], want[finite])
            assert error < 2e-6 + rounding(model), f"{name}: {error:.1e} {what}"


@pytest.mark.parametrize("flat", [False, True])
def test_nothing_is_copied_where_the_present_holds_the_past(flat):
    """Tokens that are appended to a buffer, whose older ones lie where they are."""
    batch, heads, size, capacity = 2, 3, 16, 12
    buffers = [np.full((batch, heads, capacity, size), np.nan, "f4") for _ in "kv"]
    attributes = {"q_num_heads": heads, "kv_num_heads": heads} if flat else {}
    tokens = numbers(3, batch, heads, capacity, size)
    for buffer, x in zip(buffers, tokens[1:]):
        buffer[:, :, :5] = x[:, :, :5]

    def laid(x):
        return x.transpose(0, 2, 1, 3).reshape(batch, x.shape[2], -1) if flat else np.ascontiguousarray(x)

    outputs = {"Y": F32, "present_key": F32, "present_value": F32}
    for first, end in ((5, 6), (6, 9), (9, 12)):
        q, k, v = (laid(x[:, :, first:end]) for x in tokens)
        past = [buffer[:, :, :first] for buffer in buffers]
        inputs = {"Q": q, "K": k, "V": v, "-mask": None, "past_key": past[0], "past_value": past[1]}
        model = kvant.from_onnx(model_of("Attention", inputs, outputs, is_causal=1, **attributes))
        got = model({n: x for n, x in inputs.items() if x is not None},
                    out={"present_key": buffers[0][:, :, :end], "present_value": buffers[1][:, :, :end]})
        assert got["present_key"].base is buffers[0]
        seen = [x[:, :, :end].astype("f8") for x in tokens[1:]]
        want, *_ = _compute_attention(tokens[0][:, :, first:end].astype("f8"), seen[0][:, :, first:], seen[1][:, :, first:],
                                      past_key=seen[0][:, :, :first], past_value=seen[1][:, :, :first], is_causal=1)
        assert relative_l2(got["Y"], laid(want)) < 2e-6
    for buffer, x in zip(buffers, tokens[1:]):
        np.testing.assert_array_equal(buffer, x)


def onnxruntime_of(group):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(group.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(("out", "present_key", "present_value"), session.run(None, group.feeds)))


GROUPS = {
    "one token": {},
    "one token of many heads": {"size": 64, "heads": 8, "capacity": 300},
    "rows of different lengths": {"lengths": [13, 16]},
    "a prompt": {"tokens": 6, "capacity": 8, "lengths": [6, 6]},
    "a padded prompt": {"tokens": 6, "capacity": 8, "lengths": [4, 6]},
    "a chunk": {"tokens": 5, "batch": 1},
    "window and soft cap": {"local_window_size": 4, "softcap": 2.0},
    "a window's chunk": {"tokens": 5, "batch": 1, "local_window_size": 3},
    "sinks": {"sink": True},
    "smooth": {"smooth_softmax": 1},
    "bias": {"bias": (1, 4)},
    "bias of rows, in a buffer": {"bias": (2, 1), "lengths": [13, 16]},
    "scale, not causal": {"scale": 0.3, "causal": 0},
    "rotary": {"rotary": True},
    "rotary, interleaved, packed, a prompt": {"rotary": True, "rotary_interleaved": 1, "packed": True, "tokens": 6,
                                              "capacity": 8, "lengths": [6, 6]},
}


@pytest.mark.parametrize("what", GROUPS)
@pytest.mark.parametrize("bits, per", [(0, None), (8, "PER_TENSOR"), (8, "PER_CHANNEL"), (4, "PER_TENSOR"), (4, "PER_CHANNEL")])
def test_group_query_attention_as_onnxruntime(what, bits, per):
    """Its CPU kernels': the same codes, and outputs within the rounding that kvant states of its kernels, which multiply
    integers where K and V are; on the oracle to f32's."""
    group = Group(bits, per, **{k: v for k, v in GROUPS[what].items() if k != "scale" or bits == 0})
    wanted = onnxruntime_of(group)
    for backends in (None, "oracle"):
        model = kvant.from_onnx(group.model, backends=backends, require_fused=backends is None)
        got = model(group.feeds)
        for name in ("present_key", "present_value"):
            assert (got[name].shape, got[name].dtype) == (wanted[name].shape, wanted[name].dtype)
            have, want = group.held(got[name]), group.held(wanted[name])
            if bits:
                np.testing.assert_array_equal(have, want)
            else:  # rotary embedding is rounded otherwise
                np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)
        error = relative_l2(group.real(got["out"]), group.real(wanted["out"]))
        assert error < 2e-6 + rounding(model), (backends, error)


@pytest.mark.parametrize("bits", [8, 4])
def test_group_query_attention_in_place(bits):
    """A buffer that is past and present at once: a padded prompt, then tokens one by one."""
    heads, size, capacity, lengths = 4, 32, 24, np.array([5, 9], np.int32)
    first = Group(bits, "PER_CHANNEL", tokens=9, capacity=capacity, size=size, heads=heads, lengths=lengths, total=9)
    theirs = onnxruntime_of(first)
    buffers = {name: first.inputs["past_" + name] for name in ("key", "value")}
    model = kvant.from_onnx(first.model)
    got = model(first.feeds, out={"present_" + name: buffer for name, buffer in buffers.items()})
    assert all(got["present_" + name] is buffer for name, buffer in buffers.items())
    assert relative_l2(first.real(got["out"]), first.real(theirs["out"])) < 1e-3
    for step in range(1, 16):
        token = Group(bits, "PER_CHANNEL", capacity=capacity, size=size, heads=heads, lengths=lengths + step, seed=step)
        for name in ("key", "value"):
            token.inputs["past_" + name] = theirs["present_" + name]
        for name in ("k_scale", "v_scale"):
            token.inputs[name] = first.inputs[name]
        theirs = onnxruntime_of(token)
        feeds = token.feeds | {"past_" + name: buffer for name, buffer in buffers.items()}
        if step == 1:
            model = kvant.from_onnx(token.model)
        got = model(feeds, out={"present_" + name: buffer for name, buffer in buffers.items()})
        assert relative_l2(got["out"], theirs["out"]) < 1e-3
        for name, buffer in buffers.items():
            np.testing.assert_array_equal(token.held(buffer), token.held(theirs["present_" + name]))
    assert len(model._ops[0]._kept._results) == 1  # one compiled graph for all lengths


def test_group_query_attention_of_16_bits():
    for rotary in (False, True):
        group = Group(0, dtype="f2", rotary=rotary, lengths=[13, 20])
        got, wanted = kvant.from_onnx(group.model)(group.feeds), onnxruntime_of(group)
        assert got["out"].dtype == np.float16
        assert relative_l2(got["out"], wanted["out"]) < 2**-9


def test_codes_saturate():
    """K and V beyond the codes, at both ends."""
    for bits in (8, 4):
        group = Group(bits, scale=0.001)
        got, wanted = kvant.from_onnx(group.model)(group.feeds), onnxruntime_of(group)
        for name in ("present_key", "present_value"):
            np.testing.assert_array_equal(group.held(got[name]), group.held(wanted[name]))


def test_the_block_of_the_docs_runs(source, tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", (source / "docs/onnx.md").read_text(), re.S)
    group = Group(8, "PER_CHANNEL", lengths=[9, 16], initializers=("k_scale", "v_scale"),
                  name="/model/layers.0/attn/GroupQueryAttention")
    q, k, v, *cache, _, total = [x for name, x in group.feeds.items() if not name.endswith("_scale")]
    for name in ("k_scale", "v_scale"):  # the model's own
        del group.inputs[name]
    wanted = onnxruntime_of(group)
    group.model.graph.node[0].input[6] = group.model.graph.input[6].name = "total_sequence_length"
    onnx.save(group.model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names = dict(q=q, k=k, v=v, cache=cache, lengths=group.lengths, total=total)
    exec(block, names)
    assert relative_l2(names["outputs"]["out"], wanted["out"]) < 1e-3
    for name, buffer in zip(("present_key", "present_value"), cache):
        assert names["outputs"][name] is buffer
        np.testing.assert_array_equal(group.held(buffer), group.held(wanted[name]))


def two_layers():
    """A model in which other ops are around two nodes of attention."""
    x = numbers(1, 4, 24)
    nodes = [helper.make_node("Relu", ["x"], ["q"], name="relu"),
             helper.make_node("Attention", ["q", "x", "x"], ["y"], name="first", q_num_heads=3, kv_num_heads=3),
             helper.make_node("Add", ["y", "x"], ["z"], name="add"),
             helper.make_node("Attention", ["z", "x", "x", "mask"], ["w"], name="second", q_num_heads=3, kv_num_heads=3)]
    info = [helper.make_tensor_value_info("x", F32, ["batch", "tokens", 24])]
    mask = onnx.numpy_helper.from_array(np.tri(4, dtype=bool), "mask")
    graph = helper.make_graph(nodes, "g", info, [helper.make_tensor_value_info("w", F32, None)], [mask])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), x


def test_nodes_are_chosen(tmp_path):
    proto, x = two_layers()
    onnx.save(proto, tmp_path / "m.onnx")
    model = kvant.from_onnx(tmp_path / "m.onnx", nodes="second")
    assert [str(port) for port in model.inputs] == ["z ?[?]", "x FLOAT[batch,tokens,24]"]
    z = numbers(1, 4, 24, seed=1)
    want, *_ = _compute_attention(*(a.astype("f8") for a in (z, x, x)), attn_mask=np.tri(4, dtype=bool), q_num_heads=3,
                                  kv_num_heads=3)
    assert relative_l2(model(z=z, x=x), want) < 2e-6
    both = kvant.from_onnx(proto.SerializeToString(), nodes=["first", "second"])
    got = both(q=z, x=x, z=z)
    assert set(got) == {"y", "w"} and set(both.graphs) == {"first", "second"}
    assert relative_l2(got["w"], want) < 2e-6
    assert "node 'first' (Attention)" in both.explain() and "fused" in both.explain()
    with pytest.raises(kvant.UnimplementedError, match=r"^node 'relu' \(Relu\) of domain 'ai.onnx' is not taken"):
        kvant.from_onnx(proto)
    with pytest.raises(kvant.Error, match="no node 'third'; its nodes of attention are 'first', 'second'"):
        kvant.from_onnx(proto, nodes=["third"])


def test_one_node_reads_another():
    x = numbers(2, 5, 24)
    first = helper.make_node("Attention", ["x", "x", "x"], ["y"], name="first", q_num_heads=3, kv_num_heads=3)
    graph = helper.make_graph(
        [first, helper.make_node("Attention", ["y", "x", "x"], ["z"], name="second", q_num_heads=3, kv_num_heads=3)], "g",
        [helper.make_tensor_value_info("x", F32, x.shape)], [helper.make_tensor_value_info("z", F32, None)])
    model = kvant.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]))
    y, *_ = _compute_attention(*[x.astype("f8")] * 3, q_num_heads=3, kv_num_heads=3)
    z, *_ = _compute_attention(y, *[x.astype("f8")] * 2, q_num_heads=3, kv_num_heads=3)
    assert relative_l2(model(x=x), z) < 2e-6


def test_what_the_model_holds(tmp_path):
    """Initializers, constants, and data in other files, some of them missing."""
    q, k, v = (numbers(1, 2, 4, 8, seed=at) for at in range(3))
    mask = np.tri(4, dtype=bool)
    inputs = {"Q": q, "K": k, "V": v, "mask": mask}
    want, *_ = _compute_attention(*(x.astype("f8") for x in (q, k, v)), attn_mask=mask)
    held = model_of("Attention", inputs, {"Y": F32}, initializers=("V", "mask"))
    assert relative_l2(kvant.from_onnx(held)(Q=q, K=k), want) < 2e-6
    constant = helper.make_node("Constant", [], ["mask"], value=onnx.numpy_helper.from_array(mask))
    proto = model_of("Attention", inputs, {"Y": F32}, nodes=[constant])
    proto.graph.input.pop()  # the mask
    assert relative_l2(kvant.from_onnx(proto)(Q=q, K=k, V=v), want) < 2e-6
    path = tmp_path / "m.onnx"
    onnx.save_model(held, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert relative_l2(kvant.from_onnx(str(path))(Q=q, K=k), want) < 2e-6
    stored = onnx.load(path, load_external_data=False)
    with pytest.raises(kvant.Error, match=r"^node 'attn' \(Attention\): its input 'V' is in the file 'weights.bin', and where"):
        kvant.from_onnx(stored)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(kvant.Error, match=r"^node 'attn' \(Attention\): its input 'V' is in the file 'weights.bin', which"):
        kvant.from_onnx(path)


Q = numbers(2, 4, 3, 8)
KV = numbers(2, 2, 5, 8, seed=1)
BASE = {"Q": Q, "K": KV, "V": KV}


@pytest.mark.parametrize("change, sentence", [
    (lambda x: setattr(x, "data_type", 999), "of data type 999 and dims .*, which cannot be read"),
    (lambda x: x.dims.__setitem__(3, -8), r"of data type 1 and dims \[2, 2, 5, -8\], which cannot be read"),
    (lambda x: setattr(x, "raw_data", bytes(100)), r"of data type 1 and dims \[2, 2, 5, 8\], which cannot be read"),
])
def test_broken_initializers(change, sentence):
    proto = model_of("Attention", BASE, {"Y": F32}, initializers=("V",))
    change(proto.graph.initializer[0])
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(Attention\): its input 'V',? {sentence}"):
        kvant.from_onnx(proto)


def test_no_tokens_under_a_mask_of_no_columns():
    none = numbers(2, 2, 0, 8)
    inputs = {"Q": Q, "K": none, "V": none, "mask": np.ones((3, 0), bool)}
    assert kvant.from_onnx(model_of("Attention", inputs, {"Y": F32}))(inputs).shape == Q.shape


@pytest.mark.parametrize("inputs, attributes, sentence", [
    ({}, {"opset": 22}, "is of opset 22; taken is"),
    ({}, {"opset": 999}, "is of opset 999"),
    ({}, {"opset": 24, "left_window_size": 2}, "has the attribute left_window_size, which is not taken"),
    ({}, {"temperature": 2.0}, "has the attribute temperature"),
    ({}, {"scale": 2}, "its attribute scale is INT, but must be one float"),
    ({}, {"scale": float("nan")}, "its attribute scale is nan"),
    ({}, {"softcap": float("inf")}, "its attribute softcap is inf"),
    ({}, {"is_causal": 2}, "is_causal is 2"),
    ({}, {"softcap": -1.0}, "softcap is -1"),
    ({}, {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode is 4"),
    ({}, {"softmax_precision": 7}, "softmax_precision is 7"),
    ({}, {"left_window_size": -2}, r"left_window_size and right_window_size are \(-2, -1\)"),
    ({"-a": None, "past": KV}, {}, "past_key and past_value go together"),
    ({"-a": None, "pk": KV, "pv": KV, "n": np.array([1, 2])}, {}, "past_key and nonpad_kv_seqlen exclude"),
    ({"-a": None, "-b": None, "-c": None, "n": np.array([1, 2])}, {"opset": 23}, "it has 7 inputs"),
])
def test_bad_nodes(inputs, attributes, sentence):
    opset = attributes.pop("opset", 25) if "opset" in attributes else 25
    proto = model_of("Attention", BASE | inputs, {"Y": F32}, opset=opset, **attributes)
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(Attention\):? {sentence}"):
        kvant.from_onnx(proto)


@pytest.mark.parametrize("inputs, attributes, sentence", [
    ({"Q": Q.astype("f8")}, {}, "has Q of DOUBLE; FLOAT, FLOAT16, BFLOAT16 are taken"),
    ({"K": numbers(2, 2, 5, 7)}, {}, r"Q \[2, 4, 3, 8\], K \[2, 2, 5, 7\], V .* are no queries, keys and values"),
    ({"K": numbers(2, 3, 5, 8), "V": numbers(2, 3, 5, 8)}, {}, "are no queries, keys and values"),
    ({"K": numbers(2, 5, 8)}, {}, "must have 3 dims or 4, all as many"),
    ({"Q": numbers(2, 3, 8), "K": numbers(2, 5, 8), "V": numbers(2, 5, 8)}, {}, "need q_num_heads and kv_num_heads"),
    ({}, {"q_num_heads": 4, "kv_num_heads": 2}, "are of inputs of 3 dims"),
    ({"mask": numbers(3, 9)}, {}, r"attn_mask \[3, 9\] does not broadcast to \[2, 4, 3, 5\]"),
    ({"mask": np.ones((3, 5), np.int32)}, {}, "has attn_mask of INT32"),
    ({"-a": None, "pk": numbers(2, 2, 4, 7), "pv": numbers(2, 2, 4, 8)}, {}, r"past_key is FLOAT\[2, 2, 4, 7\], but must be FLOAT"),
    ({"-a": None, "pk": numbers(2, 2, 3, 8), "pv": numbers(2, 2, 4, 8)}, {},
     r"past_key \[2, 2, 3, 8\] and past_value \[2, 2, 4, 8\] have not as many tokens"),
    ({"-a": None, "-b": None, "-c": None, "n": np.array([1, 6])}, {}, r"nonpad_kv_seqlen is INT64\[2\] = \[1, 6\], but K has 5"),
    ({"-a": None, "-b": None, "-c": None, "n": np.array([1])}, {}, r"nonpad_kv_seqlen .* must be INT64\[2\]"),
    ({"mask": numbers(3, 2), "-b": None, "-c": None, "n": np.array([1, 3])}, {}, "attn_mask has 2 columns, but nonpad"),
])
def test_bad_arrays(inputs, attributes, sentence):
    inputs = BASE | inputs
    model = kvant.from_onnx(model_of("Attention", inputs, {"Y": F32}, **attributes))
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(Attention\).* {sentence}"):
        model({name: x for name, x in inputs.items() if x is not None})


@pytest.mark.parametrize("group, change, sentence", [
    ({"sliding_window_cache": 1, "local_window_size": 4}, {}, "has sliding_window_cache = 1, which is not taken"),
    ({"qk_output": 1}, {}, "has qk_output = 1"),
    ({"local_window_size": 4, "causal": 0}, {}, "local_window_size is 4 and causal 0"),
    ({"heads": 3}, {}, "num_heads = 3 is no multiple of kv_num_heads = 2"),
    ({"smooth_softmax": 3}, {}, "smooth_softmax is 3"),
    ({"kv_cache_bit_width": 2}, {}, "kv_cache_bit_width is 2"),
    ({"k_quant_type": "PER_TOKEN"}, {}, "k_quant_type is 'PER_TOKEN'"),
    ({"v_quant_type": "NONE"}, {}, "k_quant_type is PER_TENSOR, but v_quant_type NONE"),
    ({}, {"past_key": np.zeros((2, 2, 20, 16), np.uint8)}, "past_key is UINT8"),
    ({}, {"past_key": np.zeros((2, 2, 20, 8), np.int8)}, r"past_key is INT8\[2, 2, 20, 8\], but must be INT8\[2, 2, capacity, 16\]"),
    ({}, {"past_value": np.zeros((2, 2, 19, 16), np.int8)},
     r"past_key \[2, 2, 20, 16\] and past_value \[2, 2, 19, 16\] have not as many tokens"),
    ({}, {"past_" + name: np.zeros((2, 2, 14, 16), np.int8) for name in ("key", "value")},
     r"seqlens_k is \[20, 20\]: with 1 new tokens that needs 20 before them, but there are past_key \[2, 2, 14, 16\] and"),
    ({}, {"k_scale": np.ones((1, 2, 1, 16), "f4")}, r"k_scale is FLOAT\[1, 2, 1, 16\], but must be FLOAT\[1\]"),
    ({}, {"key": np.zeros((2, 1, 30), "f4")}, r"key is \[2, 1, 30\], but 2 heads of 16 are 32"),
    ({}, {"seqlens_k": np.array([20, 25], np.int32)}, r"seqlens_k is \[20, 25\]: with 1 new tokens .* from 0 to 20"),
    ({}, {"seqlens_k": np.array([20, 20])}, r"seqlens_k is INT64\[2\], but must be INT32"),
    ({}, {"total": np.array(0, np.int32)}, "total_sequence_length is 0, fewer than the 1 new tokens"),
])
def test_bad_groups(group, change, sentence):
    own = {name: group[name] for name in group if name.endswith("_type") or name == "kv_cache_bit_width"}
    made = Group(8, **{name: x for name, x in group.items() if name not in own})
    (node,) = made.model.graph.node
    for name, value in own.items():
        (attribute,) = (a for a in node.attribute if a.name == name)
        attribute.CopyFrom(helper.make_attribute(name, value))
    for port in made.model.graph.input:  # what is declared is checked before the node is
        port.type.Clear()
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(GroupQueryAttention\):? {sentence}"):
        kvant.from_onnx(made.model)(made.feeds | change)


def test_bad_calls(tmp_path):
    proto = model_of("Attention", BASE, {"Y": F32})
    model = kvant.from_onnx(proto)
    (tmp_path / "text.json").write_bytes(b"\xff{}")
    for call, sentence in (
            (lambda: model(Q=Q, K=KV), "input 'V' is missing; inputs are 'Q', 'K', 'V'"),
            (lambda: model(BASE, W=Q), "the model has no input 'W'; inputs are 'Q', 'K', 'V'"),
            (lambda: model(BASE, Q=Q), "input 'Q' is given twice"),
            (lambda: model(BASE | {"Q": Q.astype("f2")}), "Q is FLOAT16, but must be FLOAT"),
            (lambda: model(BASE | {"Q": Q[:, :, :2]}), r"Q is \[2, 4, 2, 8\], but must be Q FLOAT\[2,4,3,8\]"),
            (lambda: model(BASE | {"Q": 1.0}), "input 'Q' is 1.0, not an array"),
            (lambda: model(BASE | {"Q": object()}), "input 'Q' is a object, not an array of numbers"),
            (lambda: model(BASE, out={"Z": Q}), "the model has no output 'Z'; outputs are 'Y'"),
            (lambda: model(BASE, out={"Y": Q[:1]}), r"out\['Y'\] is FLOAT\[1, 4, 3, 8\], but must be FLOAT\[2, 4, 3, 8\]"),
            (lambda: model([Q]), "inputs must be a dict of arrays by name, not list"),
            (lambda: kvant.from_onnx(7), "takes a path, bytes or an onnx.ModelProto, not int"),
            (lambda: kvant.from_onnx(b"\xff\xff"), "the bytes are no ONNX model"),
            (lambda: kvant.from_onnx(tmp_path / "text.json"), "text.json' is no ONNX model"),
            (lambda: kvant.from_onnx(proto, threads=0), "threads must be at least 1, not 0"),
            (lambda: kvant.from_onnx(proto, backends="gpu")(BASE), "gpu")):
        with pytest.raises(kvant.Error, match=sentence):
            call()
    sized = kvant.from_onnx(model_of("Attention", {"Q": Q, "K": KV, "V": KV}, {"Y": F32}))
    assert repr(sized) == "<kvant.onnx.Model of 1 node: Q FLOAT[2,4,3,8], K FLOAT[2,2,5,8], V FLOAT[2,2,5,8] -> Y FLOAT[?]>"
    with pytest.raises(FileNotFoundError):
        kvant.from_onnx(tmp_path / "none.onnx")
    dims = kvant.from_onnx(model_of("Attention", BASE, {"Y": F32}, open_dims=True))
    dims.inputs[1:] = [port._replace(dims=("Q_0", *port.dims[1:])) for port in dims.inputs[1:]]
    with pytest.raises(kvant.Error, match=r"K is \[1, 2, 5, 8\], but must be K FLOAT\[Q_0,K_1,K_2,K_3\] with Q_0 = 2"):
        dims(BASE | {"K": KV[:1]})
