"""kvant.jax beside jax.nn.dot_product_attention, and numpy."""

import os
import re
import shutil
import subprocess
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import numpy as np
import pytest
from reference import attention, dequantize, distance, numbers, pack

jax = pytest.importorskip("jax")
import jax.ffi  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import kvant  # noqa: E402
import kvant.jax  # noqa: E402

KV_HEADS, RATIO, SIZE = 2, 3, 32


def attention_graph(dtype="f32", batch=2, queries=5, tokens=9, **options):
    g = kvant.GraphBuilder()
    q = g.input("q", dtype, [batch, KV_HEADS * RATIO, queries, SIZE])
    k, v = (g.input(name, dtype, [batch, KV_HEADS, tokens, SIZE]) for name in "kv")
    g.output("o", g.scaled_dot_product_attention(q, k, v, **options))
    return g.build()


def arrays(dtype=jnp.float32, batch=2, queries=5, tokens=9):
    shapes = (KV_HEADS * RATIO, queries), (KV_HEADS, tokens), (KV_HEADS, tokens)
    return [jnp.asarray(numbers(batch, heads, length, SIZE, seed=i)).astype(dtype)
            for i, (heads, length) in enumerate(shapes)]


def jax_attention(q, k, v, **options):
    heads_last = [x.swapaxes(1, 2) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*heads_last, **options).swapaxes(1, 2)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("type, bound", [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_equals_jax(type, bound, jit):
    q, k, v = arrays(type)
    for options, theirs in (({}, {}), ({"right_window": 0, "scale": 0.3}, {"is_causal": True, "scale": 0.3})):
        f = kvant.jax.compile(attention_graph(type, **options), require_fused=True)
        call = jax.jit(lambda q, k, v: f(q=q, k=k, v=v)) if jit else (lambda q, k, v: f({"q": q, "k": k, "v": v}))
        o = call(q, k, v)
        assert isinstance(o, jax.Array) and o.dtype == jnp.dtype(type) and o.shape == q.shape
        assert distance(np.asarray(o, np.float32), np.asarray(jax_attention(q, k, v, **theirs), np.float32)) < bound
    assert "fused" in f.explain()


def test_the_block_of_the_docs_runs(source):
    (block,) = re.findall(r"```python\n(.*?)```", (source / "docs/jax.md").read_text(), re.S)
    names = {}
    exec(block, names)
    want = jax_attention(*[names["x"].astype(jnp.float32)] * 3, is_causal=True)
    assert distance(np.asarray(names["o"], np.float32), want) < 2e-2


def test_traces():
    """Between other ops, in loops and conditions, with shapes and no values."""
    f = kvant.jax.compile(attention_graph())
    q, k, v = arrays()
    shape = jax.eval_shape(lambda *x: f(q=x[0], k=x[1], v=x[2]), q, k, v)
    assert shape.shape == q.shape and shape.dtype == q.dtype

    @jax.jit
    def loop(q, k, v):
        return jax.lax.fori_loop(0, 3, lambda _, x: x + f(q=2 * x, k=k, v=v), q)

    want = q
    for _ in range(3):
        want = want + jax_attention(2 * want, k, v)
    assert distance(loop(q, k, v), want) < 1e-5
    mapped = jax.lax.map(lambda x: f(q=x, k=k, v=v), jnp.stack([q, -q]))
    assert distance(mapped[1], jax_attention(-q, k, v)) < 1e-6


def test_shapes_that_the_graph_leaves_open():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(name, "f32", [None, 4, None, SIZE]) for name in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    f = kvant.jax.compile(g.build())
    call = jax.jit(lambda q, k, v: f(q=q, k=k, v=v))
    for batch, queries, tokens in ((1, 3, 8), (2, 1, 17), (1, 3, 8)):
        q, k, v = (jnp.asarray(numbers(batch, 4, length, SIZE, seed=length)) for length in (queries, tokens, tokens))
        assert distance(call(q, k, v), jax_attention(q, k, v)) < 1e-6


def test_open_shapes_keep_the_dims_that_the_graph_has():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [1, KV_HEADS, None, SIZE])
    g.output("codes", g.append(x, g.input("positions", "s32", [1]), 24, "u4", group_shape=[1, 1, 1, 16]).codes)
    f = kvant.jax.compile(g.build())
    at = np.zeros(1, np.int32)
    for dims in ((2, KV_HEADS, 3, SIZE), (1, 1, 3, SIZE), (1, KV_HEADS, 3, 16), (1, KV_HEADS, 3), (1, 1, KV_HEADS, 3, SIZE)):
        said = rf"input 'x' is float32\[{', '.join(map(str, dims))}\], but must be float32\[1, {KV_HEADS}, \?, {SIZE}\]"
        with pytest.raises(kvant.InvalidError, match=said):
            f(x=jnp.zeros(dims), positions=at)
    assert f(x=jnp.ones((1, KV_HEADS, 3, SIZE)), positions=at)["codes"].shape == (1, KV_HEADS, 24, SIZE)


def int_codes(bits, signed, shape, seed=3):
    low = -(2 ** (bits - 1)) if signed else 0
    return np.random.default_rng(seed).integers(low, low + 2**bits, shape)


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("tokens", [16, 7])
def test_codes_as_they_are(name, tokens):
    """Of 4 and 2 bits XLA has them packed as kvant does, though it says a byte for each."""
    bits = int(name.lstrip("uintfloat").partition("_")[0])
    type = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}.get(name, name)
    shape = [2, KV_HEADS, tokens, SIZE]
    if "float" in name:
        codes = numbers(*shape, seed=3)
        given = jnp.asarray(codes).astype(name)
        codes = np.asarray(given, np.float64)
    else:
        codes = int_codes(bits, not name.startswith("u"), shape)
        given = jnp.asarray(codes).astype(name)
    scales = np.random.default_rng(4).uniform(0.05, 0.2, (2, KV_HEADS, tokens, 2)).astype(np.float32)
    g = kvant.GraphBuilder("f16", apply_to_int=True)
    q = g.input("q", "f32", [2, KV_HEADS * RATIO, 5, SIZE])
    k = g.dynamic_dequantize(g.input("k", type, shape), g.input("s", "f32", scales.shape), group_shape=[1, 1, 1, 16])
    g.output("o", g.scaled_dot_product_attention(q, k, g.input("v", "f32", shape)))
    f = kvant.jax.compile(g.build(), require_fused=True)
    q, _, v = arrays(tokens=tokens)
    want = attention(q, dequantize(codes, scales), v)
    call = jax.jit(lambda k: f(q=q, k=k, s=scales, v=v))
    assert distance(call(given), want) < 4e-3
    if bits < 8:
        assert distance(call(jnp.asarray(pack(codes, bits))), want) < 4e-3


def append_graph(tokens, capacity=24, type="u4"):
    """What quantizes tokens into a cache: codes and scales of groups of 16."""
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [2, KV_HEADS, tokens, SIZE])
    cache = g.append(x, g.input("positions", "s32", [2]), capacity, type, group_shape=[1, 1, 1, 16], scale_type="f16")
    g.output("codes", cache.codes)
    g.output("scales", cache.scales)
    return g.build()


def test_append_is_in_place():
    """Under jit with donation a cache is written where it is; without it, it is another's."""
    f = kvant.jax.compile(append_graph(3, type="s4"))
    x = jnp.asarray(numbers(2, KV_HEADS, 3, SIZE))
    first = f(x=x, positions=np.array([0, 5], np.int32))
    assert first["codes"].dtype == jnp.int4 and first["codes"].shape == (2, KV_HEADS, 24, SIZE)
    codes = np.asarray(first["codes"].astype(jnp.int8))
    written = np.zeros((2, 24), bool)
    written[0, :3] = written[1, 5:8] = True
    assert not codes.swapaxes(1, 2)[~written].any() and codes.swapaxes(1, 2)[written].any(-1).all()
    got = dequantize(codes, np.asarray(first["scales"], np.float64))
    assert distance(got.swapaxes(1, 2)[written], np.asarray(x).swapaxes(1, 2).reshape(6, KV_HEADS, SIZE)) < 0.1

    def step(cache, x, positions):
        return f(x=x, positions=positions, **cache)

    where = {name: cache.unsafe_buffer_pointer() for name, cache in first.items()}
    kept = {name: np.asarray(cache.astype(jnp.float32)) for name, cache in first.items()}
    positions = np.array([3, -1], np.int32)
    other = jax.jit(step)(first, 2 * x, positions)
    for name, cache in first.items():
        np.testing.assert_array_equal(cache.astype(jnp.float32), kept[name])
    again = jax.jit(step, donate_argnums=0)(first, 2 * x, positions)
    assert {name: cache.unsafe_buffer_pointer() for name, cache in again.items()} == where
    assert all(cache.is_deleted() for cache in first.values())
    for name in again:
        np.testing.assert_array_equal(again[name].astype(jnp.float32), other[name].astype(jnp.float32))
        rest = np.ones(24, bool)
        rest[3:6] = False
        np.testing.assert_array_equal(again[name].astype(jnp.float32)[1], kept[name][1])
        np.testing.assert_array_equal(again[name].astype(jnp.float32)[0][:, rest], kept[name][0][:, rest])


def test_decoding_in_a_scan():
    """A cache that is carried through a scan, and attention over the tokens that it has."""
    capacity, steps = 12, 6
    append = kvant.jax.compile(append_graph(1, capacity, "s8"), require_fused=True)
    g = kvant.GraphBuilder("f16", apply_to_int=True)
    q = g.input("q", "f32", [2, KV_HEADS * RATIO, 1, SIZE])
    lengths = g.input("lengths", "s32", [1])
    k, v = (g.load_tokens(g.dynamic_dequantize(
        g.input(name, "s8", [2, KV_HEADS, capacity, SIZE]),
        g.input(name + "_scales", "f16", [2, KV_HEADS, capacity, 2]), group_shape=[1, 1, 1, 16], type="f32"), lengths)
        for name in "kv")
    g.output("o", g.scaled_dot_product_attention(q, k, v, kv_lengths=lengths))
    attend = kvant.jax.compile(g.build(), require_fused=True)
    xs = [jnp.asarray(numbers(steps, 2, heads, 1, SIZE, seed=i))
          for i, heads in enumerate((KV_HEADS * RATIO, KV_HEADS, KV_HEADS))]

    def step(caches, x):
        q, k, v, length = x
        positions = jnp.full(2, length, jnp.int32)
        k_cache, v_cache = (append(x=new, positions=positions, **cache) for new, cache in zip((k, v), caches))
        o = attend(q=q, lengths=(length + 1)[None], k=k_cache["codes"], k_scales=k_cache["scales"],
                   v=v_cache["codes"], v_scales=v_cache["scales"])
        return (k_cache, v_cache), o

    empty = {"codes": jnp.zeros((2, KV_HEADS, capacity, SIZE), jnp.int8),
             "scales": jnp.zeros((2, KV_HEADS, capacity, 2), jnp.float16)}
    _, o = jax.jit(lambda caches, xs: jax.lax.scan(step, caches, xs))(
        (empty, empty), (*xs, jnp.arange(steps, dtype=jnp.int32)))
    for i in range(steps):
        k, v = (np.concatenate(x[: i + 1], 2) for x in map(np.asarray, xs[1:]))
        assert distance(o[i], attention(xs[0][i], k, v)) < 0.02


@pytest.mark.parametrize("type, bound", [("f32", 1e-6), ("f16", 1e-6), ("s4", 4e-3)])
def test_a_donated_cache_equals_jax(type, bound):
    """Under jit, step by step: caches stay where they are, and attention over them is that over what they hold."""
    capacity, steps = 12, 5
    g = kvant.GraphBuilder("f16", apply_to_int=True)
    q = g.input("q", "f32", [2, KV_HEADS * RATIO, 1, SIZE])
    positions, lengths = g.input("positions", "s32", [2]), g.input("lengths", "s32", [2])
    shapes, loaded = {}, []
    for name in "kv":
        x = g.input(name, "f32", [2, KV_HEADS, 1, SIZE])
        options = {"group_shape": [1, 1, 1, 16], "scale_type": "f16"} if type == "s4" else {}
        cache = g.append(x, positions, capacity, type, **options)
        g.output(f"{name}_codes", cache.codes)
        shapes[f"{name}_codes"] = (SIZE, {"s4": "int4", "f16": "float16", "f32": "float32"}[type])
        if type == "s4":
            g.output(f"{name}_scales", cache.scales)
            shapes[f"{name}_scales"] = (SIZE // 16, "float16")
            loaded.append(g.dynamic_dequantize(cache.codes, cache.scales, group_shape=[1, 1, 1, 16], type="f32"))
        else:
            loaded.append(g.type_cast(cache.codes, "f32") if type == "f16" else cache.codes)
    g.output("o", g.scaled_dot_product_attention(q, *loaded, kv_lengths=lengths))
    f = kvant.jax.compile(g.build(), require_fused=True)
    step = jax.jit(lambda caches, **more: f(caches, **more), donate_argnums=0)
    caches = {name: jnp.zeros((2, KV_HEADS, capacity, last), dtype) for name, (last, dtype) in shapes.items()}
    where = {name: cache.unsafe_buffer_pointer() for name, cache in caches.items()}
    for at in range(steps):
        q, k, v = (jnp.asarray(numbers(2, heads, 1, SIZE, seed=3 * at + i))
                   for i, heads in enumerate((KV_HEADS * RATIO, KV_HEADS, KV_HEADS)))
        counts = np.array([at + 1, at + 4], np.int32)
        caches = step(caches, q=q, k=k, v=v, positions=counts - 1, lengths=counts)
        o = caches.pop("o")
        assert {name: cache.unsafe_buffer_pointer() for name, cache in caches.items()} == where
        held = [caches[f"{name}_codes"].astype(jnp.float32) for name in "kv"]
        if type == "s4":
            held = [jnp.asarray(dequantize(np.asarray(x), np.asarray(caches[f"{name}_scales"], np.float32)), jnp.float32)
                    for name, x in zip("kv", held)]
        assert distance(o, jax_attention(q, *held, key_value_seq_lengths=jnp.asarray(counts))) < bound


def test_pages_and_ragged_queries():
    """Rows that are not written are those of the array that is given for the output, or zeros."""
    g = kvant.GraphBuilder()
    q = g.input("q", "f32", [7, KV_HEADS * RATIO, SIZE])
    k, v = (g.input(name, "f32", [2, KV_HEADS, 9, SIZE]) for name in "kv")
    offsets = g.input("offsets", "s32", [3])
    g.output("o", g.scaled_dot_product_attention(q, k, v, query_offsets=offsets))
    f = kvant.jax.compile(g.build())
    _, k, v = arrays()
    q = jnp.asarray(numbers(7, KV_HEADS * RATIO, SIZE))
    offsets = np.array([0, 2, 5], np.int32)
    o = jax.jit(lambda q: f(q=q, k=k, v=v, offsets=offsets))(q)
    for row, (begin, end) in enumerate(((0, 2), (2, 5))):
        want = attention(q[begin:end].swapaxes(0, 1)[None], k[row:row + 1], v[row:row + 1])[0].swapaxes(0, 1)
        assert distance(o[begin:end], want) < 1e-5
    assert (o[5:] == 0).all()
    assert (f(q=q, k=k, v=v, offsets=offsets, o=jnp.full_like(q, 7))[5:] == 7).all()


def test_on_several_devices():
    """Each device its heads, by shard_map."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device: XLA_FLAGS was set before")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("heads",))
    heads = jax.sharding.PartitionSpec(None, "heads")
    g = kvant.GraphBuilder()
    q = g.input("q", "f32", [2, RATIO, 5, SIZE])
    k, v = (g.input(name, "f32", [2, 1, 9, SIZE]) for name in "kv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    f = kvant.jax.compile(g.build())
    call = jax.jit(jax.shard_map(lambda q, k, v: f(q=q, k=k, v=v), mesh=mesh, in_specs=(heads,) * 3, out_specs=heads))
    q, k, v = arrays()
    assert distance(call(q, k, v), jax_attention(q, k, v)) < 1e-6


def test_several_outputs_and_a_host_scalar():
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [4, 8])
    scale = g.host_scalar("scale", "f32")
    g.output("y", g.op("ReLU", x * scale))
    g.output("z", g.softmax(x))
    f = kvant.jax.compile(g.build(), backends=["cpu", "oracle"])
    x = jnp.asarray(numbers(4, 8))
    out = jax.jit(lambda x, scale: f(x=x, scale=scale))(x, jnp.float32(3))
    assert sorted(out) == ["y", "z"]
    assert distance(out["y"], np.maximum(3 * np.asarray(x), 0)) < 1e-6
    assert distance(out["z"], jax.nn.softmax(x)) < 1e-6


def test_transformations_without_a_rule():
    f = kvant.jax.compile(attention_graph(), name="attention of layer 3")
    q, k, v = arrays()
    call = lambda q: f(q=q, k=k, v=v).sum()  # noqa: E731
    for transform in (jax.grad, jax.value_and_grad, lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(kvant.UnimplementedError, match="attention of layer 3: there is no gradient through it"):
            transform(call)(q)
    with pytest.raises(kvant.UnimplementedError, match="attention of layer 3: there is no gradient"):
        jax.jvp(call, (q,), (q,))
    with pytest.raises(kvant.UnimplementedError, match="attention of layer 3: jax.vmap has no rule for it"):
        jax.vmap(call)(jnp.stack([q, q]))
    # Where none is wanted, it is no matter.
    gradient = jax.grad(lambda q: (q * f(q=jax.lax.stop_gradient(q), k=k, v=v)).sum())(q)
    assert distance(gradient, jax_attention(q, k, v)) < 1e-6


def test_errors():
    f = kvant.jax.compile(attention_graph())
    q, k, v = arrays()
    for wrong, message in (
        (dict(q=q, k=k), "input 'v' is missing; inputs are 'q', 'k', 'v'"),
        (dict(q=q, k=k, v=v, w=v), "'w'"),
        (dict(q=q, k=k, v=v[:, :, :8]), r"input 'v' is float32\[2, 2, 8, 32\], but must be float32\[2, 2, 9, 32\]"),
        (dict(q=q.astype(jnp.float16), k=k, v=v), r"input 'q' is float16\[2, 6, 5, 32\], but must be float32"),
    ):
        for call in (lambda: f(**wrong), lambda: jax.jit(lambda x: f(**x))(wrong)):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="compile takes a kvant.Graph"):
        kvant.jax.compile(f)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        kvant.jax.compile(attention_graph(), threads=0)
    with pytest.raises(kvant.Error, match="GELU"):
        g = kvant.GraphBuilder()
        g.output("y", g.op("GELU", g.input("x", "f32", [4])))
        kvant.jax.compile(g.build(), require_fused=True)(x=np.zeros(4, np.float32))
    append = kvant.jax.compile(append_graph(3))
    x = np.zeros((2, KV_HEADS, 3, SIZE), np.float32)
    with pytest.raises(ValueError, match=r"output 'codes' is int8\[3\], but must be uint4"):
        append(x=x, positions=np.zeros(2, np.int32), codes=jnp.zeros(3, jnp.int8))
    # What only values show is an error of the execution.
    with pytest.raises(Exception, match="position 22 of row 1 and 3 tokens are beyond the capacity of 24"):
        jax.block_until_ready(append(x=x, positions=np.array([0, 22], np.int32)))
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [5, 1, 4])
    g.output("pool", g.append_pages(x, g.input("slots", "s64", [5]), 2, 8, "f16").codes)
    pages = kvant.jax.compile(g.build())
    with pytest.raises(ValueError, match="input 'slots' is int32.*must be int64.*jax_enable_x64 is off"):
        pages(x=np.zeros((5, 1, 4), np.float32), slots=jnp.zeros(5, jnp.int32))
    with jax.enable_x64(True):
        pool = pages(x=np.ones((5, 1, 4), np.float32), slots=jnp.array([0, 3, 9, -1, 15], jnp.int64))
        assert [int(n) for n in pool.sum((1, 3)).ravel()] == [4, 0, 0, 4, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 4]


def test_executables_that_jax_keeps_on_disk(tmp_path):
    """One that another process has compiled brings its graph with it."""
    code = """
import sys, jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[2])
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import kvant.jax
from test_jax import arrays, attention_graph, jax_attention
f = kvant.jax.compile(attention_graph())
q, k, v = arrays()
print(float(abs(jax.jit(lambda q, k, v: f(q=q, k=k, v=v))(q, k, v) - jax_attention(q, k, v)).max()) < 1e-5)
"""
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", code, tmp_path, os.path.dirname(__file__)], text=True,
                                capture_output=True, check=False, timeout=120)
        assert result.stdout.strip() == "True", result.stderr[-2000:]
    assert any(tmp_path.iterdir())


def test_structs_are_those_of_the_installed_jaxlib(source, tmp_path):
    """What python/core/xla_ffi.h declares, beside xla/ffi/api/c_api.h."""
    compiler = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    fields = {
        "ApiVersion": ("XLA_FFI_Api_Version", ("major_version", "minor_version")),
        "Extension": ("XLA_FFI_Extension_Base", ("type", "next")),
        "MetadataExtension": ("XLA_FFI_Metadata_Extension", ("metadata",)),
        "Metadata": ("XLA_FFI_Metadata", ("api_version", "traits")),
        "ErrorArgs": ("XLA_FFI_Error_Create_Args", ("message", "code errc")),
        "StreamArgs": ("XLA_FFI_Stream_Get_Args", ("context ctx", "stream")),
        "DeviceOrdinalArgs": ("XLA_FFI_DeviceOrdinal_Get_Args", ("context ctx", "device_ordinal")),
        "Api": ("XLA_FFI_Api", ("create_error XLA_FFI_Error_Create", "get_stream XLA_FFI_Stream_Get",
                                "get_device_ordinal XLA_FFI_DeviceOrdinal_Get")),
        "Buffer": ("XLA_FFI_Buffer", ("type dtype", "data", "rank", "dims")),
        "ByteSpan": ("XLA_FFI_ByteSpan", ("data ptr", "size len")),
        "Scalar": ("XLA_FFI_Scalar", ("type dtype", "value")),
        "Buffers": ("XLA_FFI_Args", ("size", "types", "buffers args")),
        "Attributes": ("XLA_FFI_Attrs", ("size", "types", "names", "values attrs")),
        "CallFrame": ("XLA_FFI_CallFrame", ("api", "context ctx", "stage", "arguments args", "results rets",
                                            "attributes attrs", "future")),
    }
    values = {"int(DataType::kS4)": "XLA_FFI_DataType_S4", "int(DataType::kU4)": "XLA_FFI_DataType_U4",
              "int(DataType::kS2)": "XLA_FFI_DataType_S2", "int(DataType::kU2)": "XLA_FFI_DataType_U2",
              "int(DataType::kF8E4M3)": "XLA_FFI_DataType_F8E4M3FN", "int(DataType::kF8E5M2)": "XLA_FFI_DataType_F8E5M2",
              "int(DataType::kPred)": "XLA_FFI_DataType_PRED", "int(DataType::kBF16)": "XLA_FFI_DataType_BF16",
              "int(DataType::kF16)": "XLA_FFI_DataType_F16", "int(DataType::kF32)": "XLA_FFI_DataType_F32",
              "int(DataType::kS8)": "XLA_FFI_DataType_S8", "int(DataType::kU8)": "XLA_FFI_DataType_U8",
              "int(DataType::kS32)": "XLA_FFI_DataType_S32", "int(DataType::kS64)": "XLA_FFI_DataType_S64",
              "kMetadataExtension": "XLA_FFI_Extension_Metadata", "kApiMajor": "XLA_FFI_API_MAJOR",
              "int(AttributeType::kScalar)": "XLA_FFI_AttrType_SCALAR", "int(Stage::kExecute)": "XLA_FFI_ExecutionStage_EXECUTE",
              "int(AttributeType::kString)": "XLA_FFI_AttrType_STRING", "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
              "kInternal": "XLA_FFI_Error_Code_INTERNAL", "kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
              "kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED"}
    lines = ['#include "xla_ffi.h"', '#include "xla/ffi/api/c_api.h"', "using namespace kvant_python::xla;"]
    for ours, (theirs, members) in fields.items():
        for member in members:
            mine, _, other = member.partition(" ")
            lines.append(f"static_assert(offsetof({ours}, {mine}) == offsetof({theirs}, {other or mine}));")
    lines += [f"static_assert({ours} == int({theirs}));" for ours, theirs in values.items()]
    lines.append("static_assert(kApiMinor <= XLA_FFI_API_MINOR);")
    (tmp_path / "check.cc").write_text("\n".join(lines))
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-I", source / "python/core",
                    "-I", jax.ffi.include_dir(), tmp_path / "check.cc"], check=True)
