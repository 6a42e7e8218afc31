"""kvant's KV cache, by the C ABI of build/libkvant.so (integrations/c/kvant_c.h)."""

import contextlib
import ctypes
import os
import pathlib

import numpy as np

from .packages import ROOT

_I64, _P, _TEXT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p


def library_path():
    """KVANT_LIBRARY, else the one of the release build."""
    return pathlib.Path(os.environ.get("KVANT_LIBRARY", ROOT / "build" / "libkvant.so"))


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor of f32 on the CPU, over an array that must stay alive."""

    _fields_ = [("data", _P), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int),
                ("ndim", ctypes.c_int), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(_I64)),
                ("strides", ctypes.POINTER(_I64)), ("byte_offset", ctypes.c_uint64)]

    def __init__(self, array, shape=None):
        assert array.dtype == np.float32, array.dtype
        cpu, floats = 1, 2
        shape = array.shape if shape is None else shape
        super().__init__(array.ctypes.data, cpu, 0, len(shape), floats, 32, 1, (_I64 * len(shape))(*shape),
                         (_I64 * len(shape))(*(stride // 4 for stride in array.strides[-len(shape):])))
        self.array = array


def _struct(name, *fields):
    """A struct of the ABI; what is not given is zero."""

    def __init__(self, **values):
        ctypes.Structure.__init__(self, size=ctypes.sizeof(self), **values)

    return type(name, (ctypes.Structure,), {"_fields_": [("size", ctypes.c_size_t), *fields], "__init__": __init__})


_EngineOptions = _struct("_EngineOptions", ("device", _TEXT), ("device_index", ctypes.c_int32),
                         ("backends", _TEXT), ("threads", ctypes.c_int32))
_CacheOptions = _struct(
    "_CacheOptions", ("scheme", _TEXT), ("layer_schemes", _P), ("layers", _I64), ("batch", _I64), ("heads", _I64),
    ("head_size", _I64), ("v_head_size", _I64), ("capacity", _I64), ("rollback", _I64),
    ("allow_non_finite", ctypes.c_bool), ("k_scales", _P), ("v_scales", _P))
_CacheBytes = _struct("_CacheBytes", ("codes", _I64), ("parameters", _I64), ("window", _I64),
                      ("bookkeeping", _I64), ("total", _I64))
_AttentionOptions = _struct("_AttentionOptions", ("query_heads", _I64), ("query_tokens", _I64),
                            ("type", ctypes.c_int), ("scale", ctypes.c_float), ("soft_cap", ctypes.c_float),
                            ("window", _I64), ("sinks", ctypes.c_bool))
_Described = _struct("_Described", ("id", ctypes.c_uint64), ("name", _TEXT), ("type", ctypes.c_int),
                     ("property", ctypes.c_int), ("rank", ctypes.c_int32), ("dims", ctypes.POINTER(_I64)),
                     ("strides", ctypes.POINTER(_I64)), ("bytes", _I64))

CODES, SCALES = 1, 2  # kvant_part


class Library:
    """The functions without their prefix; what fails raises RuntimeError with kvant's sentence."""

    def __init__(self, path=None):
        self.path = path or library_path()
        self._loaded = ctypes.CDLL(str(self.path))
        for name, result in (("error", _TEXT), ("type_name", _TEXT), ("cache_used_bytes", _I64)):
            self.function(name).restype = result

    def function(self, name):
        return getattr(self._loaded, "kvant_" + name)

    def call(self, name, *arguments):
        if self.function(name)(*arguments):
            raise RuntimeError(self.function("error")().decode())

    @contextlib.contextmanager
    def cache(self, scheme, batch, heads, head_size, capacity, layers=1, threads=2):
        cache = Cache(self, scheme, layers, batch, heads, head_size, capacity, threads)
        try:
            yield cache
        finally:
            cache.close()


class Cache:
    """One cache. Arrays are [batch, heads, tokens, head size] and f32."""

    def __init__(self, library, scheme, layers, batch, heads, head_size, capacity, threads):
        self.library, self.scheme, self.heads = library, scheme, heads
        self.batch, self.head_size = batch, head_size
        self.handle, self._attentions, self._last = _P(), {}, None
        engine = _P()
        library.call("engine_create", ctypes.byref(_EngineOptions(threads=threads)), ctypes.byref(engine))
        try:
            options = _CacheOptions(scheme=scheme.encode(), layers=layers, batch=batch, heads=heads,
                                    head_size=head_size, capacity=capacity)
            library.call("cache_create", engine, ctypes.byref(options), ctypes.byref(self.handle))
        finally:
            library.function("engine_destroy")(engine)

    def close(self):
        for attention in self._attentions.values():
            self.library.function("attention_destroy")(attention)
        self.library.function("cache_destroy")(self.handle)
        self._attentions, self.handle = {}, _P()

    def append(self, layer, k, v):
        tokens = k.shape[2]
        assert k.shape == v.shape == (self.batch, self.heads, tokens, self.head_size), (k.shape, v.shape)
        self.library.call("cache_append", self.handle, None, _I64(layer), ctypes.byref(_Tensor(k)),
                          ctypes.byref(_Tensor(v)), None, None)

    def attend(self, layer, q):
        """Causal over what is held; the last query is the last token's."""
        output = np.empty_like(q)
        self.library.call("attention_execute", self._attention(q.shape[1], q.shape[2]), None, _I64(layer),
                          ctypes.byref(_Tensor(q)), ctypes.byref(_Tensor(output)), None)
        return output

    def teacher_force(self, layer, q, k, v):
        """For each token: append it, then attend with its query."""
        tokens, step = q.shape[2], (q.shape[0], q.shape[1], 1, q.shape[3])
        attention = self._attention(q.shape[1], 1)
        # Queries and output by token; K and V are read where they are.
        queries = np.ascontiguousarray(q.transpose(2, 0, 1, 3))
        outputs = np.empty_like(queries)
        whole = [_Tensor(x, (*x.shape[:2], 1, x.shape[3])) for x in (k, v)]
        turned = [_Tensor(x[0][:, :, None], step) for x in (queries, outputs)]
        call, layer = self.library.call, _I64(layer)
        for token in range(tokens):
            for tensor, array, axis in (*zip(whole, (k, v), (2, 2)), *zip(turned, (queries, outputs), (0, 0))):
                tensor.byte_offset = token * array.strides[axis]
            call("cache_append", self.handle, None, layer, ctypes.byref(whole[0]), ctypes.byref(whole[1]), None, None)
            call("attention_execute", attention, None, layer, ctypes.byref(turned[0]), ctypes.byref(turned[1]),
                 None)
        return np.ascontiguousarray(outputs.transpose(1, 2, 0, 3))

    def reset(self):
        """Forgets all tokens of all layers."""
        self.library.call("cache_reset", self.handle)

    @property
    def bytes(self):
        """Of all storage, whatever is held."""
        result = _CacheBytes()
        self.library.call("cache_memory", self.handle, ctypes.byref(result))
        return result.total

    @property
    def used_bytes(self):
        """Of the tokens held."""
        return self.library.function("cache_used_bytes")(self.handle)

    @property
    def bits_per_element(self):
        result = ctypes.c_double()
        self.library.call("scheme_bits", self.scheme.encode(), _I64(self.head_size), _I64(self.heads),
                          ctypes.byref(result))
        return result.value

    @property
    def kernel(self):
        """What ran attention last, in kvant's words."""
        text = _TEXT()
        self.library.call("attention_kernel", self._last, _I64(0), ctypes.byref(text))
        return text.value.decode()

    def part(self, layer, values, part):
        """What is stored of K (of V, if `values`): numbers [batch, heads, slots, n]; f8 as its bits."""
        tensor, data = _Described(), _P()
        self.library.call("cache_part", self.handle, _I64(layer), ctypes.c_bool(values), part,
                          ctypes.byref(tensor), ctypes.byref(data))
        kind, dims = self.library.function("type_name")(tensor.type).decode(), tensor.dims[:tensor.rank]
        raw = np.frombuffer(ctypes.string_at(data, tensor.bytes), np.uint8)
        if kind in ("f16", "f32"):
            return raw.view({"f16": np.float16, "f32": np.float32}[kind]).reshape(dims)
        bits = int(kind.partition("_")[0][1:])
        codes = raw[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
        codes = codes.reshape(dims).astype(np.int64)
        return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if kind[0] == "s" else codes

    def _attention(self, query_heads, tokens):
        if (query_heads, tokens) not in self._attentions:
            made, options = _P(), _AttentionOptions(query_heads=query_heads, query_tokens=tokens)
            self.library.call("cache_attention", self.handle, ctypes.byref(options), ctypes.byref(made))
            self._attentions[query_heads, tokens] = made
        self._last = self._attentions[query_heads, tokens]
        return self._last
