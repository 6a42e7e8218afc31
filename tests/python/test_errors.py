"""Wrong graphs and wrong arguments: kvant.Error, in words."""

import numpy as np
import pytest
from reference import numbers

import kvant


def builder():
    g = kvant.GraphBuilder()
    return g, *(g.input(name, "f32", [1, 2, 4, 8]) for name in "qkv")


def test_classes():
    assert issubclass(kvant.Error, RuntimeError)
    assert issubclass(kvant.InvalidError, ValueError)
    assert issubclass(kvant.InvalidError, kvant.Error)
    assert issubclass(kvant.UnimplementedError, NotImplementedError)
    assert issubclass(kvant.OutOfMemoryError, MemoryError)
    internal = kvant.errors.make_error("internal", "why")
    assert type(internal) is kvant.Error and internal.kind == "internal"
    with pytest.raises(ValueError) as error:
        kvant.Graph.from_json("{")
    assert error.value.kind == "invalid_json" and str(error.value)


def test_what_nothing_can_run():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [4])
    g.output("y", x + x)
    with pytest.raises(NotImplementedError) as error:
        kvant.compile(g.build(), backends="cpu")
    assert isinstance(error.value, kvant.Error) and error.value.kind == "unimplemented"


def test_require_fused_says_why():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [4])
    g.output("y", x + x)
    with pytest.raises(kvant.Error, match="Add"):
        kvant.compile(g.build(), backends="oracle", require_fused=True)


GRAPHS = [
    (lambda g, q, k, v: q @ g.input("w", "f32", [1, 2, 4, 8]), "4"),
    (lambda g, q, k, v: g.softmax(q, axis=7), "7"),
    (lambda g, q, k, v: g.softmax(q, axis="last"), "axis.*'last'"),
    (lambda g, q, k, v: g.softmax(q, axis=2**63), "axis.*64 bits"),
    (lambda g, q, k, v: g.softmax(q, axis=-(2**63) - 1), "axis.*64 bits"),
    (lambda g, q, k, v: g.softmax(q, mode="some"), "some"),
    (lambda g, q, k, v: g.softmax(q, first=k), "lengths"),
    (lambda g, q, k, v: g.softmax(q, lengths=k), "lengths|s32"),
    (lambda g, q, k, v: g.op("SoftMin", q), "SoftMin"),
    (lambda g, q, k, v: g.op("SoftMax", q, axles=1), "^SoftMax has no attribute 'axles'; it has axis, mode$"),
    (lambda g, q, k, v: g.op("ReLU", q, axles=1), "^ReLU has no attribute 'axles'; it has none$"),
    (lambda g, q, k, v: g.op("SoftMax", q, axes=[1]), "has no attribute 'axes'; it has axis, mode$"),
    (lambda g, q, k, v: g.op("SoftMax"), "SoftMax"),
    (lambda g, q, k, v: g.op("MatMul", q, k, v, v), "MatMul"),
    (lambda g, q, k, v: g.op("MatMul", q, "k"), "MatMul.*'k'"),
    (lambda g, q, k, v: g.op("Tanh", q, type=["f32", "f32"]), "Tanh"),
    (lambda g, q, k, v: g.op("Tanh", q, type=["f32"], dims=[[1], [2]]), "1 types and 2 dims"),
    (lambda g, q, k, v: g.op("Tanh", q, dims=[1, 2, 4, 9]), "9"),
    (lambda g, q, k, v: g.op("Tanh", q, type="f33"), "f33"),
    (lambda g, q, k, v: g.op(5, q), "kind.*5"),
    (lambda g, q, k, v: g.tanh(kvant.GraphBuilder().input("x", "f32", [2])), "another builder"),
    (lambda g, q, k, v: q + kvant.GraphBuilder().input("x", "f32", [2]), "another builder"),
    (lambda g, q, k, v: g.tanh("q"), "'q'"),
    (lambda g, q, k, v: g.tanh(None), "None"),
    (lambda g, q, k, v: g.reshape(q, [3, 5]), "15|3"),
    (lambda g, q, k, v: g.reshape(q, "64"), "shape.*'64'"),
    (lambda g, q, k, v: g.reshape(q, [1.5]), "shape.*1.5"),
    (lambda g, q, k, v: g.transpose(q, [0, 0, 1, 2]), "order|0"),
    (lambda g, q, k, v: g.hadamard(q, 3), "3"),
    (lambda g, q, k, v: g.concat([], 0), "Concat"),
    (lambda g, q, k, v: g.concat(5, 0), "^concat: values must be a list of values, not 5$"),
    (lambda g, q, k, v: g.load_ranges([], q), "segments"),
    (lambda g, q, k, v: g.load_ranges(5, q), "^load_ranges: segments must be a list of values, not 5$"),
    (lambda g, q, k, v: g.load_ranges([q], k, lengths=v), "^load_ranges: lengths must be True or False"),
    (lambda g, q, k, v: g.merge_attention([]), "needs a part"),
    (lambda g, q, k, v: g.merge_attention(5), "^merge_attention: parts must be a list of pairs of values, not 5$"),
    (lambda g, q, k, v: g.merge_attention([q]), "^merge_attention: parts must be a list of pairs of values, not <"),
    (lambda g, q, k, v: g.merge_attention([(q, k)], stats=1), "stats must be True or False, not 1"),
    (lambda g, q, k, v: g.softmax(q, stats=1), "stats must be True or False, not 1"),
    (lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, stats="no"), "stats must be True or False"),
    (lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, bottom_right="no"), "bottom_right must be True or False"),
    (lambda g, q, k, v: g.causal_mask(q, kv_length=k), "go together"),
    (lambda g, q, k, v: g.causal_mask(g.input("x", "f32", [4])), "rank of 2 or more"),
    (lambda g, q, k, v: q + True, "boolean"),
    (lambda g, q, k, v: g.select(q, k, v), "boolean"),
    (lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, scale="1"), "scale.*'1'"),
    (lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, bias=3), "bias|number|f32"),
    (lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, left_window=1.5), "left_window"),
    (lambda g, q, k, v: g.dynamic_dequantize(q, k), "f32"),
    (lambda g, q, k, v: g.dynamic_dequantize(q, k, group_shape=[1], axis=0), "exclude"),
    (lambda g, q, k, v: g.dynamic_dequantize(q, k, group_shape=8), "^group_shape must be a list of integers, not 8$"),
    (lambda g, q, k, v: g.append(q, k, 8, "u4", token_axis="x"), "token_axis must be an integer, not 'x'"),
    (lambda g, q, k, v: g.append_pages(q, k, 1, 8, "u4", token_axis=1.5), "token_axis must be an integer, not 1.5"),
    (lambda g, q, k, v: g.reshape(q, np.array(64)), r"shape' must be a list of integers, not array\(64\)"),
    (lambda g, q, k, v: g.dynamic_quantize(q, "s4", group_shape=[1, 1, 1, 3]), "3"),
    (lambda g, q, k, v: g.dynamic_quantize(q, "s4", zero_points=k), "scales"),
    (lambda g, q, k, v: g.dynamic_quantize(q, "f64"), "f64"),
    (lambda g, q, k, v: g.append(q, k, "8", "f16"), "capacity.*'8'"),
    (lambda g, q, k, v: g.append(q, k, 8, "f16"), "positions|s32"),
    (lambda g, q, k, v: g.append(q, k, 8, "f16", group_shape=[1, 1, 1, 8]), "Append: f16.*takes no group_shape"),
    (lambda g, q, k, v: g.append(q, k, 8, "bf16", zero_point_type="u8"), "bf16.*takes no zero_point_type"),
    (lambda g, q, k, v: g.append_pages(q, k, 1, 2, "f32", axis=1), "AppendPages: f32.*takes no axis"),
    (lambda g, q, k, v: g.append(q, k, 8, "f16", codebook=[1.0] * 16), "Append: f16.*takes no codebook"),
    (lambda g, q, k, v: g.dynamic_quantize(q, "u8", scales=k, zero_point_type="u8"), "are given, and it takes no zero_point_type$"),
    (lambda g, q, k, v: g.append(q, k, 8, "s8", scales=k, power_of_two_scales=True), "are given, and it takes no power_of_two_scales$"),
    (lambda g, q, k, v: g.append(q, k, 8, "s8", scales=k, formula="ggml"), "are given, and it takes no formula$"),
    (lambda g, q, k, v: g.append(q, k, 8, "f16", formula="ggml"), "Append: f16.*takes no formula"),
    (lambda g, q, k, v: g.append_pages(q, k, 1.5, 2, "f16"), "pages.*1.5"),
    (lambda g, q, k, v: g.scalar("1"), "'1'"),
    (lambda g, q, k, v: g.scalar(300, "s8"), "300"),
    (lambda g, q, k, v: g.scalar(2**70), "scalar|beyond|s64"),
    (lambda g, q, k, v: q + 10**400, "a number that a float holds"),
    (lambda g, q, k, v: q + 10**9999, "a number that a float holds, not a int"),
    (lambda g, q, k, v: g.input("\ud800", "f32", [1]), "UTF-8.*ud800"),
    (lambda g, q, k, v: g.input("a\0b", "f32", [1]), "name must be text without a NUL"),
    (lambda g, q, k, v: g.input("q", "f32", [1]), "'q'"),
    (lambda g, q, k, v: g.input("x", "f32", [1.5]), "'x'.*dims.*1.5"),
    (lambda g, q, k, v: g.input("x", "f32", 4), "'x'.*dims.*4"),
    (lambda g, q, k, v: g.input("x", "f32", [-2]), "-2"),
    (lambda g, q, k, v: g.input("x", "f32", [2**62, 8]), "x"),
    (lambda g, q, k, v: g.input("x", "f32", [1] * 99), "99"),
    (lambda g, q, k, v: g.input("x", "f32", [2, 2], strides=[2]), "1 strides for 2 dims"),
    (lambda g, q, k, v: g.input("x", "s3", [2]), "s3"),
    (lambda g, q, k, v: g.input(5, "f32", [2]), "name.*5"),
    (lambda g, q, k, v: g.input("x", "f32", [2], constant=1), "constant"),
    (lambda g, q, k, v: g.host_scalar("x", "f16"), "f16|host"),
    (lambda g, q, k, v: g.output("o", q), "'o'"),
    (lambda g, q, k, v: g.output("o", 3), "'o'.*3"),
    (lambda g, q, k, v: g.output("o", q + k, strides=[1]), "1 strides for 4 dims"),
    (lambda g, q, k, v: [g.output("o", q + k), g.output("o", q - k)], "'o'"),
    (lambda g, q, k, v: kvant.GraphBuilder(fpmath="f8"), "f8"),
    (lambda g, q, k, v: kvant.KvCache(head_size=32, capacity=9, fpmath="f8"), "there is no fpmath mode 'f8'"),
    (lambda g, q, k, v: kvant.GraphBuilder(apply_to_int=1), "apply_to_int"),
]


@pytest.mark.parametrize("at", range(len(GRAPHS)))
def test_graphs_are_checked(at):
    make, words = GRAPHS[at]
    with pytest.raises(kvant.InvalidError, match=words):
        make(*builder())


def test_a_builder_that_failed_gives_no_graph():
    g, q, k, v = builder()
    with pytest.raises(kvant.Error) as first:
        g.hadamard(q, 3)
    with pytest.raises(kvant.Error) as second:
        g.build()
    assert str(second.value) == str(first.value)
    with pytest.raises(kvant.Error) as third:
        g.input("w", "f32", [1])
    assert str(third.value) == f"the builder refused an earlier call: {first.value}"


def test_a_builder_builds_once():
    g, q, k, v = builder()
    g.output("o", q + k)
    g.build()
    for again in (g.build, lambda: g.op("ReLU", q), lambda: q + k, lambda: q * 2, lambda: g.output("p", q),
                  lambda: g.input("w", "f32", [1]), lambda: q.dims):
        with pytest.raises(kvant.InvalidError, match="a builder builds one graph, and this one has"):
            again()
    assert repr(q) == "<kvant.Value of a builder that has built its graph>"


def test_other_operands_are_not_taken():
    g, q, k, v = builder()
    for wrong in (lambda: q + "1", lambda: [1] * q, lambda: q @ 2, lambda: q / None):
        with pytest.raises(TypeError):
            wrong()


def test_compile_is_checked():
    g, q, k, v = builder()
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    graph = g.build()
    for arguments, words in [
        ({"device": "tpu"}, "tpu"),
        ({"device": 5}, "device.*5"),
        ({"device": "cuda:x"}, "cuda:x"),
        ({"device": "cuda"}, "."),
        ({"threads": 0}, "threads.*0"),
        ({"threads": 1.5}, "threads.*1.5"),
        ({"threads": 2**31}, "threads must be at most 2147483647, not 2147483648"),
        ({"device": "cpu:1"}, "'cpu:1' must be"),
        ({"device": "cuda:"}, "'cuda:' must be"),
        ({"device": "cuda:99999999999"}, "'cuda:99999999999' must be"),
        ({"backends": "\ud800"}, "backends.*UTF-8"),
        ({"backends": "fast"}, "fast"),
        ({"backends": 5}, "backends.*5"),
        ({"require_fused": 1}, "require_fused"),
        ({"shapes": {"w": [1]}}, "'w'.*'q', 'k', 'v', 'o'"),
        ({"shapes": {"q": 4}}, "'q'.*4"),
        ({"shapes": {"q": []}}, "rank|dims"),
        ({"shapes": {"q": ([1, 2, 4, 8], [64, 32, 8, 1], [1])}}, "dims and as many strides"),
        ({"shapes": {"q": [1, 2, 4, 9]}}, "9"),
        ({"shapes": {"q": ([1, 2, 4, 8], [1])}}, "strides"),
        ({"shapes": {"q": ([1, 2, 4, 8], None)}}, r"^shapes\['q'\] must be a list of integers and None, not None$"),
        ({"shapes": {"q": ([1, 2], [2, 1], [3, 3])}}, "dims and as many strides"),
        ({"shapes": [4]}, r"^shapes must be a dict of dims by name, not \[4\]$"),
    ]:
        with pytest.raises(kvant.Error, match=words):
            kvant.compile(graph, **arguments)
    with pytest.raises(kvant.Error, match="takes a kvant.Graph"):
        kvant.compile(graph.to_json())
    with pytest.raises(kvant.Error, match="explain takes"):
        kvant.explain("graph")
    with pytest.raises(kvant.Error, match="not a str$"):
        kvant.explain("x" * 300)
    # A value whose text has lines is said by its type.
    for call in (kvant.explain, kvant.compile):
        with pytest.raises(kvant.Error, match="not a ndarray$"):
            call(np.zeros((3, 3)))


def test_json_is_checked():
    for text in ("", "{}", "[]", "null", '{"version": 1}', "x" * 1000):
        with pytest.raises(kvant.Error):
            kvant.Graph.from_json(text)
    with pytest.raises(kvant.Error, match="text.*b'"):
        kvant.Graph.from_json(b"{}")
    with pytest.raises(FileNotFoundError):
        kvant.Graph.from_json_file("/no/such/file")


def test_open_dims_are_named():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [1, 2, None, 8]) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    with pytest.raises(kvant.Error, match=r"^graph input 'k' \(f32\[1,2,\?,8\]\) has no known shape$"):
        kvant.compile(g.build(), shapes={"q": [1, 2, 3, 8]})


def test_an_error_leaves_the_output():
    g, q, k, v = builder()
    lengths = g.input("lengths", "s32", [1])
    g.output("o", g.scaled_dot_product_attention(q, k, v, kv_lengths=lengths))
    compiled = kvant.compile(g.build())
    o = np.full([1, 2, 4, 8], 7, np.float32)
    x = numbers(1, 2, 4, 8)
    for bad in (5, -1):
        with pytest.raises(kvant.Error, match=str(bad)):
            compiled(q=x, k=x, v=x, lengths=np.array([bad], np.int32), out=o)
    assert (o == 7).all()
