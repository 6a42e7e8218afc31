"""Graphs that are built, described, read and written."""

import json

import numpy as np
import pytest
from reference import attention, distance, numbers

import kvant

# What is not attention needs an engine that runs any op.
ANY = "cpu,oracle"


def run(g, **inputs):
    return kvant.compile(g.build(), backends=ANY)(**inputs)


def test_values_know_types_and_dims():
    g = kvant.GraphBuilder()
    q = g.input("q", "f16", [1, 2, 3, 4])
    k = g.input("k", "f32", [1, 2, 5, 4])
    s = g.matmul(q, k, transpose_b=True)
    assert s.type == "f32" and s.dims == (1, 2, 3, 5)
    s = g.type_cast(s, "f16")
    assert (s * 0.5).type == "f16" and (0.5 - s).type == "f16"
    assert (s + g.input("w", "f32", [5])).type == "f32"
    assert g.causal_mask(s).type == "f16"
    assert g.softmax(s, type="f32").type == "f32"
    assert g.gen_index(s, 3).type == "s32"
    assert (g.gen_index(s, 3) + 1).type == "s32"
    assert (g.gen_index(s, 3) + 0.5).type == (0.5 + g.gen_index(s, 3)).type == "f32"
    assert [g.scalar(n).type for n in (2**31 - 1, 2**31, -(2**31), -(2**31) - 1)] == ["s32", "s64", "s32", "s64"]
    assert g.host_scalar("n", "s64").type == "s64"
    assert g.greater_equal(s, 0).type == "boolean"
    probabilities, stats = g.softmax(s, stats=True)
    assert probabilities.type == "f16" and stats.type == "f32" and stats.dims == (1, 2, 3, 1)
    assert g.reshape(s, [2, 15]).dims == (2, 15)
    assert g.transpose(s, [0, 2, 1, 3]).dims == (1, 3, 2, 5)
    assert g.concat([k, k], axis=2).dims == (1, 2, 10, 4)
    ranges = g.input("ranges", "s32", [1, 1, 2])
    assert g.op("LoadRanges", ranges, s).type == g.load_ranges([s], ranges).type == "f16"
    assert [x.type for x in g.op("SoftMax", k, type=("f16", "f32"))] == ["f16", "f32"]
    assert "f16" in repr(s)
    assert repr(g.op("Tanh", k, name="mine")) == "<kvant.Value mine f32[1,2,5,4]>"


def test_types_by_any_name():
    torch = pytest.importorskip("torch")
    g = kvant.GraphBuilder()
    for at, (type, name) in enumerate(
        [
            ("f32", "f32"),
            ("float16", "f16"),
            (np.float32, "f32"),
            (np.dtype("int8"), "s8"),
            (bool, "boolean"),
            (np.bool_, "boolean"),
            (torch.bfloat16, "bf16"),
            (torch.float8_e4m3fn, "f8_e4m3"),
            (torch.float8_e5m2, "f8_e5m2"),
            ("uint4", "u4"),
        ]
    ):
        assert g.input(f"x{at}", type, [2]).type == name


def test_operators_against_numpy():
    g = kvant.GraphBuilder()
    a, b = g.input("a", "f32", [2, 3]), g.input("b", "f32", [3])
    g.output("o", (2 * a - b) / 3 + (1 - a) * b - 1 / (10 + b))
    x, y = numbers(2, 3), numbers(3)
    want = (2 * x - y) / 3 + (1 - x) * y - 1 / (10 + y.astype(float))
    np.testing.assert_allclose(run(g, a=x, b=y), want, rtol=1e-6, atol=1e-6)


def test_ops_against_numpy():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [3, 4])
    g.output("tanh", g.tanh(x))
    g.output("exp", g.exp(x))
    g.output("high", g.maximum(x, 0.25))
    g.output("low", g.minimum(x, x * 2))
    g.output("chosen", g.select(g.greater_equal(x, 0.0), x, -7.0))
    g.output("mask", g.causal_mask(x, -5.0))
    g.output("half", g.type_cast(x, "f16"))
    g.output("moved", g.concat([g.transpose(x, [1, 0]), g.reshape(x, [4, 3])], axis=0))
    g.output("part", g.slice(x, 1, 1, 2))
    g.output("rotated", g.hadamard(x, 4))
    g.output("relu", g.op("ReLU", x))
    a = numbers(3, 4)
    h = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    want = dict(
        tanh=np.tanh(a),
        exp=np.exp(a),
        high=np.maximum(a, 0.25),
        low=np.minimum(a, 2 * a),
        chosen=np.where(a >= 0, a, -7),
        mask=np.where(np.tri(3, 4, dtype=bool), a, -5),
        half=a.astype(np.float16),
        moved=np.concatenate([a.T, a.reshape(4, 3)]),
        part=a[:, 1:3],
        rotated=a @ h,
        relu=np.maximum(a, 0),
    )
    got = run(g, x=a)
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def attributes_of(g, kind):
    """Those of its first op of this kind, by name."""
    op = next(op for op in json.loads(g.build().to_json())["graph"] if op["kind"] == kind)
    return {name: each["value"] for name, each in op["attrs"].items()}


def test_what_attention_is_given_is_in_the_graph():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 4, 3, 8]) for n in "qkv")
    inputs = dict(bias=g.input("b", "f32", [1, 4, 3, 3]), select=g.input("s", "boolean", [1, 4, 3, 3]),
                  kv_lengths=g.input("l", "s32", [1]), kv_first=g.input("f", "s32", [1]),
                  sinks=g.input("i", "f32", [4]), alibi_slopes=g.input("a", "f32", [4]))
    attributes = dict(scale=0.5, soft_cap=5, left_window=3, right_window=0, mode="none")
    g.scaled_dot_product_attention(q, k, v, **inputs, **attributes, bottom_right=True)
    assert attributes_of(g, "ScaledDotProductAttention") == {
        **attributes, "mask_alignment": "bottom_right", "optional_inputs": ",".join(inputs)}
    g = kvant.GraphBuilder()
    q = g.input("q", "f32", [5, 4, 8])
    k, v = (g.input(n, "f32", [2, 4, 3, 8]) for n in "kv")
    g.scaled_dot_product_attention(q, k, v, query_offsets=g.input("at", "s32", [3]))
    assert attributes_of(g, "ScaledDotProductAttention")["optional_inputs"] == "query_offsets"


def test_softmax_of_rows_that_begin_and_end():
    x, first, lengths = numbers(3, 6), np.array([0, 2, 4], np.int32), np.array([6, 5, 4], np.int32)
    for mode, none in (("inf_as_zero", 0), ("none", np.nan)):
        g = kvant.GraphBuilder()
        limits = {name: g.input(name, "s32", [3]) for name in ("lengths", "first")}
        g.output("y", g.softmax(g.input("x", "f32", [3, 6]), **limits, mode=mode))
        at = np.arange(6)
        seen = (at >= first[:, None]) & (at < lengths[:, None])
        weights = np.where(seen, np.exp(x), 0)
        want = np.full((3, 6), none, np.float64)
        want[:2] = weights[:2] / weights[:2].sum(-1, keepdims=True)
        got = run(g, x=x, lengths=lengths, first=first)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7, err_msg=mode)


def test_products_of_what_is_transposed():
    a, b = numbers(2, 4, 3), numbers(2, 5, 4, seed=1)
    g = kvant.GraphBuilder()
    g.output("y", g.matmul(g.input("a", "f32", a.shape), g.input("b", "f32", b.shape), transpose_a=True, transpose_b=True))
    np.testing.assert_allclose(run(g, a=a, b=b), a.swapaxes(1, 2) @ b.swapaxes(1, 2), rtol=1e-5, atol=1e-6)


def test_attribute_types_follow_names():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 2, 4, 8]) for n in "qkv")
    # An integer for a float, and a float of numpy.
    o = g.op("ScaledDotProductAttention", q, k, v, scale=1, soft_cap=np.float32(3), left_window=2)
    g.output("o", o)
    graph = g.build()
    text = graph.to_json()
    assert '"f32"' in text and '"s64"' in text
    x, y, z = (numbers(1, 2, 4, 8, seed=s) for s in range(3))
    scores = 3 * np.tanh(x.astype(float) @ np.swapaxes(y, -1, -2) / 3)
    seen = np.tri(4, 4, 4, dtype=bool) & ~np.tri(4, 4, -3, dtype=bool)
    weights = np.where(seen, np.exp(scores), 0)
    want = weights / weights.sum(-1, keepdims=True) @ z
    assert distance(kvant.compile(graph)(q=x, k=y, v=z), want) < 1e-5


def test_open_dims_are_given_when_compiling():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 2, None, 8]) for n in "qkv")
    assert q.dims == (1, 2, None, 8)
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    graph = g.build()
    assert graph.inputs[0].dims == (1, 2, None, 8) and graph.inputs[0].bytes == 0
    x, y, z = numbers(1, 2, 3, 8), numbers(1, 2, 7, 8, seed=1), numbers(1, 2, 7, 8, seed=2)
    shapes = {"q": x.shape, "k": list(y.shape), graph.inputs[2].id: z.shape}
    compiled = kvant.compile(graph, shapes=shapes)
    assert compiled.outputs[0].dims == (1, 2, 3, 8)
    assert distance(compiled(q=x, k=y, v=z), attention(x, y, z)) < 1e-5
    with pytest.raises(kvant.Error):
        kvant.compile(graph)
    shapes["q"] = (x.shape, [6 * 8, 8, 2 * 8, 1])
    assert kvant.compile(graph, shapes=shapes).inputs[0].strides == (48, 8, 16, 1)


def test_strides_of_inputs_and_outputs():
    g = kvant.GraphBuilder()
    # [N,S,H,D] in memory, [N,H,S,D] for the graph.
    q, k, v = (g.input(n, "f32", [2, 3, 5, 8], strides=[120, 8, 24, 1]) for n in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v), strides=[120, 8, 24, 1])
    compiled = kvant.compile(g.build(), require_fused=True)
    memory = [numbers(2, 5, 3, 8, seed=s) for s in range(3)]
    views = [x.transpose(0, 2, 1, 3) for x in memory]
    o = compiled(dict(zip("qkv", views)))
    assert o.strides == views[0].strides
    assert distance(o, attention(*views)) < 1e-5
    with pytest.raises(kvant.Error, match="input 'q'.*strides"):
        compiled(dict(zip("qkv", [np.ascontiguousarray(x) for x in views])))


def test_masks_of_attention():
    x, y, z = numbers(1, 4, 3, 8), numbers(1, 2, 6, 8, seed=1), numbers(1, 2, 6, 8, seed=2)
    g = kvant.GraphBuilder()
    q = g.input("q", "f32", x.shape)
    k, v = (g.input(n, "f32", y.shape) for n in "kv")
    bias = g.input("bias", "f32", [1, 4, 3, 6])
    lengths = g.input("lengths", "s32", [1])
    sinks = g.input("sinks", "f32", [4])
    o, stats = g.scaled_dot_product_attention(
        q, k, v, bias=bias, kv_lengths=lengths, sinks=sinks, scale=0.3, right_window=0,
        bottom_right=True, stats=True,
    )
    g.output("o", o)
    g.output("stats", stats)
    b, s = numbers(1, 4, 3, 6, seed=3), numbers(4, seed=4)
    got = kvant.compile(g.build(), require_fused=True)(
        q=x, k=y, v=z, bias=b, lengths=np.array([5], np.int32), sinks=s
    )
    mask = np.tri(3, 6, 2, dtype=bool) & (np.arange(6) < 5)
    assert distance(got["o"], attention(x, y, z, 0.3, mask, b, s)) < 1e-5
    assert got["stats"].shape == (1, 4, 3, 1)


def test_json_and_dot_round_trip(tmp_path):
    g = kvant.GraphBuilder(fpmath="f16", apply_to_int=True)
    q, k, v = (g.input(n, "f32", [1, 2, 4, 8]) for n in "qkv")
    g.output("o", g.softmax(g.matmul(q, k, transpose_b=True) * 0.25) @ v)
    graph = g.build()
    file = tmp_path / "graph.json"
    file.write_text(graph.to_json(), encoding="utf-8")
    again = kvant.Graph.from_json_file(file)
    assert again.to_json() == graph.to_json() == kvant.Graph.from_json(graph.to_json()).to_json()
    # The format has ids, not names.
    x, y, z = (numbers(1, 2, 4, 8, seed=s) for s in range(3))
    o = kvant.compile(again)(dict(zip([i.id for i in again.inputs], [x, y, z])))
    assert distance(o, attention(x, y, z, 0.25)) < 2e-3
    port = again.inputs[0]
    assert (port.type, port.dims, port.strides) == ("f32", (1, 2, 4, 8), (64, 32, 8, 1))
    assert port.bytes == 256 and port.property == "variable"
    assert graph.to_dot().lstrip().startswith("digraph")


def test_ports_without_names_go_by_id():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [3])
    g.output("a", g.tanh(x))
    g.output("b", g.exp(x))
    text = json.loads(g.build().to_json())
    del text["kvant_names"]
    graph = kvant.Graph.from_json(json.dumps(text))
    ids = [port.id for port in graph.outputs]
    got = kvant.compile(graph, backends=ANY)({graph.inputs[0].id: numbers(3)})
    assert list(got) == ids
    np.testing.assert_allclose(got[ids[1]], np.exp(numbers(3)), rtol=1e-6)


def test_an_input_and_an_output_of_one_name():
    g = kvant.GraphBuilder()
    g.output("x", g.tanh(g.input("x", "f32", [None])))
    graph = g.build()
    with pytest.raises(kvant.Error, match="2 input or outputs are named 'x': use their ids, 0, 1"):
        kvant.compile(graph, shapes={"x": [3]})
    compiled = kvant.compile(graph, backends=ANY, shapes={graph.inputs[0].id: [3]})
    np.testing.assert_allclose(compiled(x=numbers(3)), np.tanh(numbers(3)), rtol=1e-6)


def test_partitions_and_explain():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 2, 4, 8]) for n in "qkv")
    g.output("o", g.softmax(g.matmul(q, k, transpose_b=True) * 0.25) @ v)
    graph = g.build()
    (partition,) = graph.partitions()
    assert partition.kind == "attention" and "attention" in partition.pattern
    assert len(partition.ops) == 4
    assert [i.name for i in partition.graph().inputs] == ["q", "k", "v"]
    assert partition.pattern in kvant.explain(graph)
    compiled = kvant.compile(graph)
    assert compiled.fused and compiled.scratch_bytes > 0 and compiled.rounding >= 0
    assert "fused" in kvant.explain(compiled)


def test_svg():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [2])
    g.output("y", x + x)
    graph = g.build()
    svg = graph._repr_svg_()
    assert svg is None or "<svg" in svg


def test_notes_are_explained():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 2, 4, 8]) for n in "qkv")
    g.output("o", g.softmax(g.exp(g.matmul(q, k, transpose_b=True))) @ v)
    graph = g.build()
    notes = [note for partition in graph.partitions() for note in partition.notes]
    assert notes and all(f"   {note}" in graph.explain().splitlines() for note in notes)


@pytest.mark.parametrize("status", [0, 1])
def test_what_graphviz_gives(status, monkeypatch, tmp_path):
    dot = tmp_path / "dot"
    dot.write_text(f"#!/bin/sh\necho '<svg/>'\nexit {status}\n")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    g = kvant.GraphBuilder()
    g.output("y", g.tanh(g.input("x", "f32", [2])))
    assert g.build()._repr_svg_() == (None if status else "<svg/>\n")


def test_no_svg_without_graphviz(monkeypatch):
    monkeypatch.setenv("PATH", "")
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [2])
    g.output("y", x + x)
    assert g.build()._repr_svg_() is None


def test_host_scalar():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [3])
    g.output("o", x * g.host_scalar("s", "f32"))
    compiled = kvant.compile(g.build(), backends=ANY)
    assert compiled.inputs[1].property == "host_scalar"
    x = numbers(3)
    for s in (2, 2.5, np.float32(2.5), np.array(2.5, np.float32)):
        np.testing.assert_allclose(compiled(x=x, s=s), x * float(s), rtol=1e-6)
    for bad in ("2", 1e300, None):
        with pytest.raises(kvant.Error, match="s"):
            compiled.execute([x, bad], [np.empty(3, np.float32)])


def test_a_boolean_is_a_scalar():
    g = kvant.GraphBuilder()
    g.output("o", g.select(g.scalar(True), g.input("x", "f32", [2]), 0.0))
    x = np.array([1.5, 2.5], "f4")
    assert run(g, x=x).tolist() == x.tolist()


def test_integer_host_scalars():
    g = kvant.GraphBuilder()
    s = g.input("s", "f32", [1, 1, 2, 6])
    rows = g.host_scalar("kv", "s32"), g.host_scalar("q", "s32")
    g.output("o", g.causal_mask(s, -1.0, kv_length=rows[0], query_length=rows[1]))
    compiled = kvant.compile(g.build(), backends=ANY)
    x = numbers(1, 1, 2, 6)
    want = np.where(np.tri(2, 6, 3, dtype=bool), x, -1)
    np.testing.assert_array_equal(compiled(s=x, kv=5, q=2), want)
    for bad in (2.5, 2**31, "5"):
        with pytest.raises(kvant.Error, match="input 'kv'"):
            compiled(s=x, kv=bad, q=2)


def test_causal_masks_of_scores_that_were_moved():
    """By a row's and a column's index, wherever the scores' axes are."""
    q, k, v = numbers(2, 2, 4, 3, 8), numbers(2, 2, 1, 16, 8), numbers(2, 2, 1, 16, 8, seed=1)
    seen = np.arange(16) <= np.arange(3)[:, None]
    want = attention(q.reshape(2, 8, 3, 8), k[:, :, 0], v[:, :, 0], scale=1, mask=seen).reshape(q.shape)

    def reshaped(g, q, k):
        return g.reshape(g.causal_mask(g.reshape(g.matmul(q, k, transpose_b=True), [2, 8, 3, 16])), [2, 2, 4, 3, 16])

    def transposed(g, q, k):
        return g.causal_mask(g.transpose(g.matmul(k, q, transpose_b=True), [0, 1, 2, 4, 3]))

    def both(g, q, k):
        x = g.transpose(g.matmul(q, k, transpose_b=True), [0, 3, 1, 2, 4])
        x = g.causal_mask(g.transpose(g.reshape(x, [2, 3, 8, 16]), [0, 2, 1, 3]))
        return g.reshape(x, [2, 2, 4, 3, 16])

    for moved in (lambda g, q, k: g.causal_mask(g.matmul(q, k, transpose_b=True)), reshaped, transposed, both):
        g = kvant.GraphBuilder()
        values = [g.input(name, "f32", list(x.shape)) for name, x in (("q", q), ("k", k), ("v", v))]
        g.output("o", g.softmax(moved(g, *values[:2])) @ values[2])
        c = kvant.compile(g.build(), backends="cpu", require_fused=True)
        assert "band mask" in c.explain()
        assert distance(c(q=q, k=k, v=v), want) < 1e-5
    # Without tokens as well.
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [1, 2, tokens, 8]) for name, tokens in (("q", 3), ("k", 0), ("v", 0)))
    g.output("o", g.softmax(g.causal_mask(g.matmul(q, k, transpose_b=True))) @ v)
    assert "band mask" in kvant.compile(g.build(), backends="cpu", require_fused=True).explain()
    # An index of heads and rows is none of rows.
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [1, 2, 5, 8]) for name in "qkv")
    x = g.causal_mask(g.reshape(g.matmul(q, k, transpose_b=True), [1, 10, 5]))
    g.output("o", g.softmax(g.reshape(x, [1, 2, 5, 5])) @ v)
    with pytest.raises(kvant.Error, match="does not count the rows of the scores"):
        kvant.compile(g.build(), backends="cpu", require_fused=True)
