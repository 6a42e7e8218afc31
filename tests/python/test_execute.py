"""Tensors in and out, without torch."""

import array
import ctypes
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from reference import attention, distance, numbers

import kvant
from kvant.tensors import allocate

SHAPE = [1, 2, 5, 8]


def compiled_attention(type="f32", **options):
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, type, SHAPE) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    return kvant.compile(g.build(), **options)


@pytest.fixture(scope="module")
def compiled():
    return compiled_attention()


@pytest.fixture
def qkv():
    return [numbers(*SHAPE, seed=s) for s in range(3)]


def test_by_keyword_by_dict_and_by_id(compiled, qkv):
    q, k, v = qkv
    want = attention(*qkv)
    ids = [port.id for port in compiled.inputs]
    for o in (
        compiled(q=q, k=k, v=v),
        compiled({"q": q, "k": k, "v": v}),
        compiled({"q": q}, k=k, v=v),
        compiled({ids[0]: q, ids[1]: k, "v": v}),
    ):
        assert isinstance(o, np.ndarray) and o.dtype == np.float32 and distance(o, want) < 1e-5


def test_given_outputs(compiled, qkv):
    want = attention(*qkv)
    inputs = dict(zip("qkv", qkv))
    for out in (np.empty(SHAPE, np.float32), {"o": np.empty(SHAPE, np.float32)}):
        o = compiled(inputs, out=out)
        assert o is (out["o"] if isinstance(out, dict) else out)
        assert distance(o, want) < 1e-5
    o = np.empty(SHAPE, np.float32)
    assert compiled.execute(qkv, [o]) is None
    assert distance(o, want) < 1e-5
    compiled.execute(tuple(qkv), (o,))


def test_descriptions(compiled):
    assert [port.name for port in compiled.inputs] == ["q", "k", "v"]
    (port,) = compiled.outputs
    assert (port.name, port.type, port.dims, port.bytes) == ("o", "f32", tuple(SHAPE), 320)
    assert compiled.graph.inputs == compiled.inputs
    assert "q f32[1,2,5,8]" in repr(compiled) and "fused" in repr(compiled)


def test_names_are_checked(compiled, qkv):
    q, k, v = qkv
    for call, words in [
        (lambda: compiled(q=q, k=k), "input 'v' is missing; inputs are 'q', 'k', 'v'"),
        (lambda: compiled(), "'q', 'k', 'v' is missing"),
        (lambda: compiled(q=q, k=k, v=v, w=v), "no input is named 'w'; inputs are 'q', 'k', 'v'"),
        (lambda: compiled({"q": q}, q=q, k=k, v=v), "'q' is given twice"),
        (lambda: compiled({"q": q, compiled.inputs[0].id: q}, k=k, v=v), "given twice"),
        (lambda: compiled({99: q}, k=k, v=v), "99"),
        (lambda: compiled(qkv), "inputs must be a dict"),
        (lambda: compiled(q=q, k=k, v=v, out={"p": q}), "no output is named 'p'; outputs are 'o'"),
        (lambda: compiled.execute([q, k], [q]), "takes 3 inputs.*'v'.*not 2"),
        (lambda: compiled.execute(qkv, []), "takes 1 outputs.*'o'.*not 0"),
        (lambda: compiled.execute(None, []), "list of inputs, not a NoneType"),
        (lambda: compiled.execute(q, [q]), "list of inputs, not a ndarray"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            call()
        assert isinstance(error.value, kvant.Error) and error.value.kind == "invalid_arguments"


def test_tensors_are_checked(compiled, qkv):
    q, k, v = qkv
    wide = numbers(1, 2, 5, 16)
    odd = np.zeros(SHAPE, np.dtype([("a", "u1"), ("b", "f4")]))["b"]
    for bad, words in [
        (v.astype(np.float16), r"input 'v' is f16\[1,2,5,8\], but must be f32\[1,2,5,8\]"),
        (v.astype(np.float64), "input 'v'.*f32"),
        (v.astype(np.int32), "input 'v' is s32"),
        (v.astype(">f4"), "input 'v'.*byte order"),
        (v.astype(complex), "input 'v'.*format 'Zd'"),
        (v[0], r"input 'v' is f32\[2,5,8\]"),
        (v[:, :, :4], r"input 'v' is f32\[1,2,4,8\]"),
        (wide[..., ::2], "input 'v'.*strides"),
        (v[:, :, ::-1], "input 'v'.*strides"),
        (odd, "input 'v' has a stride of 5 bytes.*4"),
        (v.tolist(), "input 'v' is a list, not a tensor"),
        (2.5, "input 'v' is a float, not a tensor"),
        (None, "input 'v' is a NoneType, not a tensor"),
        ("v", "input 'v' is a str, not a tensor"),
        (b"v", r"input 'v' is u8\[1\]"),
    ]:
        with pytest.raises(kvant.Error, match=words):
            compiled.execute([q, k, bad], [np.empty_like(q)])


def test_outputs_are_checked(compiled, qkv):
    o = np.empty(SHAPE, np.float32)
    o.flags.writeable = False
    for bad, words in [
        (o, "output 'o' is read-only"),
        (bytes(320), "output 'o' is read-only"),
        (np.empty(SHAPE, np.float16), "output 'o' is f16"),
        (np.empty([1, 2, 5, 16], np.float32)[..., ::2], "output 'o'.*strides"),
        (np.float32(1), "output 'o' is read-only"),
        ([], "output 'o' is a list"),
        (None, "output 'o' is a NoneType"),
    ]:
        with pytest.raises(kvant.Error, match=words):
            compiled.execute(qkv, [bad])


def test_several_outputs_need_a_dict():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [2])
    g.output("a", x + 1)
    g.output("b", x + 2)
    c = kvant.compile(g.build(), backends="cpu,oracle")
    a = np.empty(2, np.float32)
    with pytest.raises(kvant.Error, match="outputs are 'a', 'b'"):
        c(x=a, out=a)
    got = c(x=np.zeros(2, np.float32), out={"a": a})
    assert got["a"] is a and got["a"].tolist() == [1, 1] and got["b"].tolist() == [2, 2]


@pytest.mark.parametrize("type", ["f16", "s8", "u8", "s32", "boolean"])
def test_types_of_numpy(type):
    """What goes in comes out: the type of numpy's array is read and made as kvant's."""
    dtype = {"f16": "f2", "s8": "i1", "u8": "u1", "s32": "i4", "boolean": "?"}[type]
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    g = kvant.GraphBuilder()
    g.output("y", g.transpose(g.input("x", type, [2, 3]), [1, 0]))
    y = kvant.compile(g.build(), backends="oracle")(x=x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x.T)


def test_bf16_is_not_numpy():
    c = compiled_attention("bf16")
    q = np.zeros(SHAPE, np.float32)
    with pytest.raises(kvant.Error, match="output 'o' is bf16, which numpy lacks"):
        c(q=q, k=q, v=q)
    with pytest.raises(kvant.Error, match="input 'q' is f32.*bf16"):
        c(q=q, k=q, v=q, out=q)


def test_f8_is_bytes_in_numpy():
    for type in ("f8_e4m3", "f8_e5m2"):
        assert allocate("o", type, [2, 3], None, None).dtype == np.uint8


@pytest.mark.parametrize("type, name", [("bf16", "bfloat16"), ("f8_e4m3", "float8_e4m3fn"), ("f8_e5m2", "float8_e5m2")])
def test_types_of_ml_dtypes(type, name):
    """numpy's arrays of types that ml_dtypes adds; of another type they are refused."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([[0.5, -1, 3], [1.5, 0, -0.25]]).astype(getattr(ml_dtypes, name))
    g = kvant.GraphBuilder()
    g.output("y", g.transpose(g.input("x", type, [2, 3]), [1, 0]))
    c, y = kvant.compile(g.build(), backends="oracle"), np.zeros((3, 2), x.dtype)
    c(x=x, out=y)
    np.testing.assert_array_equal(y.astype("f4"), x.T.astype("f4"))
    x.flags.writeable = False
    c(x=x, out=y)
    with pytest.raises(kvant.Error, match="output 'y' is read-only"):
        c(x=y.reshape(2, 3), out=x.reshape(3, 2))
    wrong = np.zeros((2, 3), ml_dtypes.float8_e5m2 if type == "f8_e4m3" else ml_dtypes.float8_e4m3fn)
    with pytest.raises(kvant.Error, match=f"input 'x' is f8_.*{type}"):
        c(x=wrong, out=y)
    with pytest.raises(kvant.Error, match="input 'x', a ndarray, cannot be read"):
        c(x=np.zeros((2, 3), ml_dtypes.float8_e3m4), out=y)


def test_what_has_a_buffer():
    g = kvant.GraphBuilder()
    g.output("y", g.exp(g.input("x", "f32", [4])))
    c = kvant.compile(g.build(), backends="oracle")
    x, y = array.array("f", [0, 1, 2, 3]), array.array("f", [0] * 4)
    c.execute([memoryview(x)], [y])
    np.testing.assert_allclose(y, np.exp([0, 1, 2, 3]), rtol=1e-6)
    # ctypes' has no strides.
    c.execute([(ctypes.c_float * 4)(4, 3, 2, 1)], [y])
    np.testing.assert_allclose(y, np.exp([4, 3, 2, 1]), rtol=1e-6)


def test_packed_outputs_that_no_array_holds():
    for dims, strides, why in (
        ([2, 6], [1, 2], r"elements of a row are not side by side.*strides=\[6, 1\]"),
        ([3, 5], [5, 1], r"rows do not begin at bytes.*strides=\[6, 1\]"),
        ([], None, r"without dims.*reshape it to \[1\]"),
    ):
        with pytest.raises(kvant.Error, match=why):
            allocate("o", "u4", dims, strides, None)


@pytest.mark.parametrize("dims, strides, shape", [
    ([5], [1], (3,)), ([2, 5], [6, 1], (2, 3)), ([1, 3], [5, 1], (1, 2)), ([2, 1], [2, 7], (2, 1))])
def test_packed_outputs(dims, strides, shape):
    """Strides of axes of one element do not count."""
    assert allocate("o", "u4", dims, strides, None).shape == shape


class OnlyDlpack:
    """A producer without a buffer: of DLPack 1 or, with ``old``, of before."""

    def __init__(self, x, old=False):
        self.x, self.old = x, old

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **arguments):
        if self.old and "max_version" in arguments:
            raise TypeError("max_version")
        return self.x.__dlpack__(**arguments)


def test_dlpack(compiled, qkv):
    o = np.empty(SHAPE, np.float32)
    compiled.execute([OnlyDlpack(qkv[0]), OnlyDlpack(qkv[1], old=True), qkv[2]], [OnlyDlpack(o)])
    assert distance(o, attention(*qkv)) < 1e-5
    with pytest.raises(kvant.Error, match="output 'o' is read-only"):
        compiled.execute(qkv, [OnlyDlpack(o, old=True)])
    frozen = qkv[0].copy()
    frozen.flags.writeable = False
    with pytest.raises(kvant.Error, match="read-only"):
        compiled.execute(qkv, [OnlyDlpack(frozen)])
    compiled.execute([OnlyDlpack(frozen), *qkv[1:]], [o])


def test_dlpack_that_fails(compiled, qkv):
    class Broken:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **arguments):
            raise BufferError("the moon is full")

    class NoCapsule(Broken):
        def __dlpack__(self, **arguments):
            return 5

    for bad, words in [(Broken(), "the moon is full"), (NoCapsule(), "no DLPack capsule")]:
        with pytest.raises(kvant.Error, match=f"input 'v', a {type(bad).__name__}.*{words}"):
            compiled.execute([*qkv[:2], bad], [np.empty(SHAPE, np.float32)])


def test_nothing_is_kept(compiled, qkv):
    class Array(np.ndarray):
        pass

    counts = [sys.getrefcount(a) for a in qkv]
    x = qkv[0].view(Array)
    alive = weakref.ref(x)
    o = compiled(q=x, k=qkv[1], v=qkv[2])
    with pytest.raises(kvant.Error):
        compiled(q=x, k=qkv[1], v=5)
    del x
    gc.collect()
    assert alive() is None and o is not None
    assert [sys.getrefcount(a) for a in qkv] == counts


def test_temporary_inputs_live_as_long_as_the_call(compiled):
    for _ in range(50):
        o = compiled(q=numbers(*SHAPE), k=numbers(*SHAPE, seed=1), v=numbers(*SHAPE, seed=2))
    want = attention(*(numbers(*SHAPE, seed=s) for s in range(3)))
    assert distance(o, want) < 1e-5


def test_a_compiled_graph_outlives_what_made_it(qkv):
    c = compiled_attention(threads=1)
    gc.collect()
    execute = c.execute
    del c
    gc.collect()
    o = np.empty(SHAPE, np.float32)
    execute(qkv, [o])
    assert distance(o, attention(*qkv)) < 1e-5


def test_threads_share_a_compiled_graph(compiled, qkv):
    want, wrong = attention(*qkv), []

    def work():
        for _ in range(100):
            if distance(compiled(dict(zip("qkv", qkv))), want) > 1e-5:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_engines_are_shared():
    from kvant.compiled import engine_for

    assert engine_for("cpu", 1, None) is engine_for("cpu", 1, None)
    assert engine_for("cpu", 1, ["cpu", "oracle"]) is engine_for("cpu", 1, "cpu,oracle")
    assert engine_for("cpu", 1, None) is not engine_for("cpu", 2, None)


def test_empty_tensors():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [0, 2, 5, 8]) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    x = np.zeros([0, 2, 5, 8], np.float32)
    assert kvant.compile(g.build())(q=x, k=x, v=x).shape == (0, 2, 5, 8)
