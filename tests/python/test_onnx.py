"""kvant.from_onnx against onnx's node cases and reference, and onnxruntime."""

import os
import re

import numpy as np
import pytest

import kvant

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference.ops.op_attention import _compute_attention  # noqa: E402

from onnx_models import Group, model_of, onnxruntime_of, relative_l2  # noqa: E402
from reference import numbers  # noqa: E402

F32 = TensorProto.FLOAT


@pytest.fixture(scope="module")
def cases():
    """The node cases of Attention; those of its expansion into other ops are not about it."""
    from onnx.backend.test.case.node import collect_testcases

    with np.errstate(all="ignore"):
        found = collect_testcases("Attention")
    return [case for case in found if not case.name.endswith("_expanded")]


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
