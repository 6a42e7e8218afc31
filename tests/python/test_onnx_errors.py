"""What kvant.from_onnx and its models refuse, and what is nearly refused."""


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
    ({}, {"right_window_size": -2}, r"left_window_size and right_window_size are \(-1, -2\)"),
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
    ({"K": KV.astype("f8")}, {}, "has K of DOUBLE"),
    ({"V": KV.astype("f8")}, {}, "has V of DOUBLE"),
    ({"K": KV[:1], "V": KV[:1]}, {}, "are no queries, keys and values of one batch"),
    ({"V": KV[:, :, :4]}, {}, "are no queries, keys and values"),
    ({"V": KV[:, :1]}, {}, "are no queries, keys and values"),
    ({"K": KV[:, :0], "V": KV[:, :0]}, {}, "are no queries, keys and values"),
    ({}, {"opset": 24, "q_num_heads": 4, "kv_num_heads": 4}, r"q_num_heads and kv_num_heads are \(4, 4\), but inputs are"),
    ({"Q": numbers(2, 3, 9), "K": numbers(2, 5, 8), "V": numbers(2, 5, 8)}, {"q_num_heads": 4, "kv_num_heads": 2},
     "are not divided by q_num_heads = 4 and kv_num_heads = 2"),
    ({"Q": numbers(2, 3, 8), "K": numbers(2, 5, 8), "V": numbers(2, 5, 8)}, {"q_num_heads": 4, "kv_num_heads": 0},
     "need q_num_heads and kv_num_heads"),
    ({"mask": numbers(1, 1, 1, 3, 5)}, {}, r"attn_mask \[1, 1, 1, 3, 5\] does not broadcast"),
    ({"mask": numbers(3, 0)}, {}, r"attn_mask \[3, 0\] does not broadcast"),
    ({"mask": np.float32(1)}, {}, r"attn_mask \[\] does not broadcast"),
    ({"-a": None, "-b": None, "-c": None, "n": np.array([-1, 3])}, {}, r"nonpad_kv_seqlen is INT64\[2\] = \[-1, 3\], but K"),
    ({"-a": None, "-b": None, "-c": None, "n": np.array([1, 3], np.int32)}, {}, r"nonpad_kv_seqlen is INT32\[2\] .* must be INT64"),
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
    ({"k_quant_type": b"\xff"}, {}, "k_quant_type is '\ufffd'"),
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


@pytest.mark.parametrize("tokens", [1, 6])
def test_bad_positions(tokens):
    """Of a token behind a past, and of a first prompt."""
    group = Group(8, rotary=True, tokens=tokens, capacity=8, lengths=[6, 6])
    (node,) = group.model.graph.node
    node.input[9] = "ids"
    group.model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.UNDEFINED, None))
    model, ids = kvant.from_onnx(group.model), np.tile(np.arange(6 - tokens, 6), (2, 1))
    want = kvant.from_onnx(Group(8, rotary=True, tokens=tokens, capacity=8, lengths=[6, 6]).model)(group.feeds)
    np.testing.assert_array_equal(model(group.feeds | {"ids": ids})["out"], want["out"])
    moved = np.concatenate([ids[:1] + 3, ids[1:] + 9])
    group.inputs["ids"] = moved
    group.model.graph.input[-1].type.tensor_type.elem_type = TensorProto.INT64
    theirs = onnxruntime_of(group)
    assert relative_l2(model(group.feeds | {"ids": moved})["out"], theirs["out"]) < 1e-3
    assert relative_l2(theirs["out"], want["out"]) > 1e-2
    for bad, sentence in (
            (ids.astype("f4"), rf"position_ids is FLOAT\[2, {tokens}\], but must be INT64\[2, {tokens}\]"),
            (ids > 2, "position_ids is BOOL"),
            (ids[0], rf"position_ids is INT64\[{tokens}\]"),
            (np.concatenate([ids, ids], 1), rf"position_ids is INT64\[2, {2 * tokens}\]"),
            (ids - 7, f"positions are {-1 - tokens} to -"), (ids + 64, "positions are 6.* but cos_cache has 64")):
        with pytest.raises(kvant.Error, match=rf"^node 'attn' \(GroupQueryAttention\): {sentence}"):
            model(group.feeds | {"ids": bad})


def test_what_is_not_read_may_be_of_a_newer_onnx():
    proto = model_of("Attention", BASE, {"Y": F32})
    port = proto.graph.value_info.add()
    port.name, port.type.tensor_type.elem_type = "elsewhere", 99
    proto.graph.node.append(helper.make_node("Constant", [], []))
    assert kvant.from_onnx(proto, nodes="attn")(BASE).shape == Q.shape
    proto.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(kvant.Error, match="Q is FLOAT, but must be 99"):
        kvant.from_onnx(proto, nodes="attn")(BASE)


def changed(group, drop=(), opset=1, third="present_value", **attributes):
    """The group's model with other attributes (None: without it), without some inputs."""
    (node,) = group.model.graph.node
    for at, name in enumerate(group.inputs):
        if name in drop:
            node.input[at] = ""
    kept = [each for each in node.attribute if each.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(n, x) for n, x in attributes.items() if x is not None)])
    node.output.append(third) if third != "present_value" else None
    group.model.opset_import[1].version = opset
    return group.model


@pytest.mark.parametrize("change, sentence", [
    ({"opset": 2}, "is of opset 2 of com.microsoft; that of 1 is taken"),
    ({"drop": ["query"]}, "its input query is missing"),
    ({"drop": ["seqlens_k"]}, "its input seqlens_k is missing"),
    ({"drop": ["total"]}, "its input total_sequence_length is missing"),
    ({"drop": ["key"]}, "key and value go together"),
    ({"drop": ["past_value"]}, "past_key and past_value go together"),
    ({"drop": ["sin"]}, "cos_cache and sin_cache go together"),
    ({"drop": ["sin", "cos"]}, "do_rotary is 1, but it has no cos_cache"),
    ({"drop": ["past_key", "past_value"]}, "its cache is quantized, which takes past_key"),
    ({"drop": ["k_scale"]}, "its cache is quantized, which takes past_key"),
    ({"drop": ["v_scale"]}, "its cache is quantized, which takes past_key"),
    ({"third": "scores"}, "has the output output_qk, which is not taken"),
    ({"num_heads": None}, "num_heads is not given, but must be 1 or more"),
    ({"kv_num_heads": 0}, "kv_num_heads is 0, but must be 1 or more"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"local_window_size": 0}, "local_window_size is 0 and causal 1"),
    *(({name: 2}, f"{name} is 2, but must be 0 or 1") for name in (
        "causal", "do_rotary", "rotary_interleaved", "smooth_softmax", "sliding_window_cache")),
])
def test_bad_group_nodes(change, sentence):
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(GroupQueryAttention\):? {sentence}"):
        kvant.from_onnx(changed(Group(8, rotary=True), **change))


@pytest.mark.parametrize("options, change, sentence", [
    ({}, {"query": np.zeros((2, 1, 64), "f8")}, "query is DOUBLE"),
    ({}, {"query": np.zeros((2, 64), "f4")}, r"query is FLOAT\[2, 64\], but must be \[batch, tokens, hidden size\]"),
    ({}, {"key": np.zeros((2, 1, 32), "f2")}, "key is FLOAT16"),
    ({}, {"value": np.zeros((2, 2, 32), "f4")}, r"value is FLOAT\[2, 2, 32\]"),
    ({}, {"query": np.zeros((2, 1, 63), "f4")}, r"query is \[2, 1, 63\], which 4 heads do not divide"),
    ({}, {"seqlens_k": np.zeros((1, 2), np.int32)}, r"seqlens_k is INT32\[1, 2\], but must be INT32\[2\]"),
    ({}, {"total": np.array([21, 21], np.int32)}, r"total_sequence_length is INT32\[2\]"),
    ({"sink": True}, {"sink": np.zeros(3, "f4")}, r"head_sink is FLOAT\[3\], but must be \[4\]"),
    ({"bias": (1, 4)}, {"bias": np.zeros((1, 4, 1, 20), "f4")}, r"attention_bias is FLOAT\[1, 4, 1, 20\], but must be"),
    ({"bias": (1, 4)}, {"bias": np.zeros((1, 3, 1, 21), "f4")}, r"attention_bias is FLOAT\[1, 3, 1, 21\]"),
    ({"bias": (1, 4)}, {"bias": np.zeros((1, 4, 1, 21), "f8")}, "attention_bias is DOUBLE"),
    ({"rotary": True}, {"cos": np.zeros((64, 7), "f4")}, r"cos_cache and sin_cache are \[64, 7\], \[64, 8\], but must be"),
    ({"rotary": True}, {"cos": np.zeros((64, 9), "f4"), "sin": np.zeros((64, 9), "f4")}, r"cos_cache and sin_cache are .* but must be \[positions, 8 or less\]"),
    ({"rotary": True}, {"cos": np.zeros((9, 8), "f4"), "sin": np.zeros((9, 8), "f4")}, "position.* 9"),
    ({"size": 15, "bits": 4}, {}, "heads of 15 elements of 4 bits are not whole bytes"),
])
def test_bad_group_arrays(options, change, sentence):
    group = Group(**{"bits": 8} | options)
    for port in group.model.graph.input:
        port.type.Clear()
    with pytest.raises(kvant.Error, match=rf"^node 'attn' \(GroupQueryAttention\):? {sentence}"):
        kvant.from_onnx(group.model)(group.feeds | change)


def test_lengths_of_two_dims():
    """As onnxruntime takes them."""
    group = Group(8)
    for port in group.model.graph.input:
        port.type.Clear()
    model = kvant.from_onnx(group.model)
    want, feeds = model(group.feeds)["out"], group.feeds
    got = model(feeds | {"seqlens_k": feeds["seqlens_k"][:, None], "total": feeds["total"][None]})["out"]
    np.testing.assert_array_equal(got, want)


def test_outputs_of_any_strides():
    flat = model_of("Attention", {"Q": numbers(2, 3, 8), "K": numbers(2, 5, 4), "V": numbers(2, 5, 4)}, {"Y": F32},
                    q_num_heads=4, kv_num_heads=2)
    group = Group(8)
    for proto, feeds, name, shape in (
            (flat, {"Q": numbers(2, 3, 8), "K": numbers(2, 5, 4), "V": numbers(2, 5, 4)}, "Y", (2, 3, 8)),
            (group.model, group.feeds, "out", (2, 1, 64))):
        model, wide = kvant.from_onnx(proto), np.zeros((*shape[:2], 2 * shape[2]), "f4")
        want = model(feeds)
        want = want if len(model.outputs) == 1 else want["out"]
        model(feeds, out={name: wide[..., :shape[2]]})
        np.testing.assert_array_equal(wide[..., :shape[2]], want)
        apart = np.zeros((*shape[::-1], 3), "f4")[..., 0].transpose(2, 1, 0)
        model(feeds, out={name: apart})
        np.testing.assert_array_equal(apart, want)
        with pytest.raises(kvant.Error, match=r"out\['\w+'\] is FLOAT16"):
            model(feeds, out={name: apart.astype("f2")})
        wide.flags.writeable = False
        with pytest.raises(kvant.Error, match=r"out\['\w+'\] is read-only"):
            model(feeds, out={name: wide[..., :shape[2]]})
        with pytest.raises(kvant.Error, match="out must be a dict of arrays by name, not ndarray"):
            model(feeds, out=wide)


def test_heads_of_four_dims_may_be_named():
    """Before opset 25."""
    proto = model_of("Attention", BASE, {"Y": F32}, opset=24, q_num_heads=4, kv_num_heads=2)
    np.testing.assert_array_equal(kvant.from_onnx(proto)(BASE), kvant.from_onnx(model_of("Attention", BASE, {"Y": F32}))(BASE))


def test_arrays_of_odd_strides():
    packed = np.zeros(Q.shape, np.dtype([("a", "u1"), ("b", "f4")]))
    packed["b"] = Q
    model = kvant.from_onnx(model_of("Attention", BASE, {"Y": F32}))
    for x in (packed["b"], Q[:, ::-1], np.broadcast_to(Q[:1], Q.shape)):
        np.testing.assert_array_equal(model(BASE | {"Q": x}), model(BASE | {"Q": np.ascontiguousarray(x)}))


def test_bad_models():
    def model(change, **options):
        proto = model_of("Attention", BASE, {"Y": F32}, **options)
        change(proto.graph)
        return proto

    def no_opset(graph):
        graph.node[0].domain = "com.microsoft"
        graph.node[0].op_type = "GroupQueryAttention"

    def sparse(graph):
        graph.sparse_initializer.add().values.name = "V"
        del graph.input[2]

    no_import = model(no_opset)
    del no_import.opset_import[1]
    for proto, nodes, sentence in (
            (model(lambda graph: graph.node.pop()), None, "^the model has no nodes$"),
            (model(lambda graph: graph.node.append(graph.node[0])), "attn", "^the model has 2 nodes 'attn'$"),
            (model(lambda graph: graph.input.pop()), None, r"^node 'attn' \(Attention\): it reads 'V', which nothing before"),
            (model(lambda graph: setattr(graph.output[0], "name", "Q")), None, "^the model's output 'Q' is made by no node"),
            (model(sparse), "attn", r"^node 'attn' \(Attention\) reads the sparse initializer 'V', which is not taken"),
            (no_import, None, "imports no opset of domain 'com.microsoft'")):
        with pytest.raises(kvant.Error, match=sentence):
            kvant.from_onnx(proto, nodes=nodes)


def test_constants_by_value():
    """Of a node Constant, in each of its forms."""
    x = numbers(1, 1, 3, 4)
    for attribute, value in (("value_floats", [0.0, -1.0, 2.0]), ("value", onnx.numpy_helper.from_array(np.float32([0, -1, 2])))):
        node = helper.make_node("Constant", [], ["mask"], **{attribute: value})
        proto = model_of("Attention", {"Q": x, "K": x, "V": x, "mask": np.zeros(3, "f4")}, {"Y": F32}, nodes=[node])
        proto.graph.input.pop()
        want, *_ = _compute_attention(*[x.astype("f8")] * 3, attn_mask=np.float64([[0, -1, 2]] * 3))
        assert relative_l2(kvant.from_onnx(proto)(Q=x, K=x, V=x), want) < 2e-6
    lengths = helper.make_node("Constant", [], ["n"], value_ints=[2])
    inputs = {"Q": x, "K": x, "V": x, "-a": None, "-b": None, "-c": None, "n": np.array([2])}
    proto = model_of("Attention", inputs, {"Y": F32}, nodes=[lengths])
    del proto.graph.input[3]
    want, *_ = _compute_attention(*[x.astype("f8")] * 3, nonpad_kv_seqlen=np.array([2]))
    assert relative_l2(kvant.from_onnx(proto)(Q=x, K=x, V=x), want) < 2e-6
    proto.graph.node[0].attribute[0].name = "value_strings"
    with pytest.raises(kvant.Error, match="has the attribute value_strings; value, value_float"):
        kvant.from_onnx(proto)


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
