"""kvant's KV cache, by its C functions in build/libkvant_kv.so."""

import contextlib
import ctypes
import os
import pathlib

import numpy as np

from .packages import ROOT

_F32, _I64 = ctypes.POINTER(ctypes.c_float), ctypes.c_int64
_SIGNATURES = {  # name: (result, arguments)
    "error": (ctypes.c_char_p, ()),
    "create": (ctypes.c_void_p, (ctypes.c_char_p,) + (_I64,) * 5 + (ctypes.c_int,)),
    "destroy": (None, (ctypes.c_void_p,)),
    "reset": (ctypes.c_int, (ctypes.c_void_p,)),
    "append": (ctypes.c_int, (ctypes.c_void_p, _I64, _F32, _F32, _I64)),
    "attend": (ctypes.c_int, (ctypes.c_void_p, _I64, _F32, _F32, _I64, _I64)),
    "teacher_force": (ctypes.c_int, (ctypes.c_void_p, _I64, _F32, _F32, _F32, _F32, _I64, _I64)),
    "bytes": (_I64, (ctypes.c_void_p,)),
    "used_bytes": (_I64, (ctypes.c_void_p,)),
    "bits_per_element": (ctypes.c_double, (ctypes.c_void_p,)),
    "kernel": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "part": (ctypes.c_void_p, (ctypes.c_void_p, _I64, ctypes.c_int, ctypes.c_int,
                               ctypes.POINTER(_I64), ctypes.POINTER(_I64))),
    "part_type": (ctypes.c_char_p, (ctypes.c_void_p, _I64, ctypes.c_int, ctypes.c_int)),
}


def library_path():
    """KVANT_KV_LIBRARY, else the one of the release build."""
    return pathlib.Path(os.environ.get("KVANT_KV_LIBRARY", ROOT / "build" / "libkvant_kv.so"))


class Library:
    """The functions without their prefix; what fails raises RuntimeError with kvant's sentence."""

    def __init__(self, path=None):
        self.path = path or library_path()
        loaded = ctypes.CDLL(str(self.path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, "kvant_kv_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def check(self, failed):
        if failed:
            raise RuntimeError(self.error().decode())

    @contextlib.contextmanager
    def cache(self, scheme, batch, heads, head_size, capacity, layers=1, threads=2):
        cache = Cache(self, scheme, layers, batch, heads, head_size, capacity, threads)
        try:
            yield cache
        finally:
            self.destroy(cache.handle)


CODES, SCALES = 1, 2  # parts of kvant_kv_part


class Cache:
    """One cache. Arrays are [batch, heads, tokens, head size] and f32."""

    def __init__(self, library, scheme, layers, batch, heads, head_size, capacity, threads):
        self.library, self.scheme, self.heads = library, scheme, heads
        self.batch, self.head_size = batch, head_size
        self.handle = library.create(
            scheme.encode(), layers, batch, heads, head_size, capacity, threads)
        library.check(not self.handle)

    def append(self, layer, k, v):
        tokens = k.shape[2]
        self._check(self.library.append, layer, self._kv(k, tokens), self._kv(v, tokens), tokens)

    def attend(self, layer, q):
        """Causal over what is held; the last query is the last token's."""
        output = np.empty_like(q)
        self._check(self.library.attend, layer, self._pointer(q, q.shape), self._pointer(output, q.shape),
                    q.shape[1], q.shape[2])
        return output

    def teacher_force(self, layer, q, k, v):
        """For each token: append it, then attend with its query."""
        output, tokens = np.empty_like(q), q.shape[2]
        self._check(self.library.teacher_force, layer, self._pointer(q, q.shape),
                    self._kv(k, tokens), self._kv(v, tokens), self._pointer(output, q.shape),
                    q.shape[1], tokens)
        return output

    def reset(self):
        """Forgets all tokens of all layers."""
        self._check(self.library.reset)

    @property
    def bytes(self):
        """Of all storage, whatever is held."""
        return self.library.bytes(self.handle)

    @property
    def used_bytes(self):
        """Of the tokens held."""
        return self.library.used_bytes(self.handle)

    @property
    def bits_per_element(self):
        return self.library.bits_per_element(self.handle)

    @property
    def kernel(self):
        """What runs attention, in kvant's words."""
        return self.library.kernel(self.handle).decode()

    def part(self, layer, values, part):
        """What is stored of K (of V, if `values`): numbers [batch, heads, slots, n]; f8 as its bits."""
        kind = self.library.part_type(self.handle, layer, values, part).decode()
        size, dims = _I64(), (_I64 * 4)()
        data = self.library.part(self.handle, layer, values, part, ctypes.byref(size), dims)
        raw = np.frombuffer(ctypes.string_at(data, size.value), np.uint8)
        if kind in ("f16", "f32"):
            return raw.view({"f16": np.float16, "f32": np.float32}[kind]).reshape(dims)
        bits = int(kind.partition("_")[0][1:])
        codes = raw[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
        codes = codes.reshape(dims).astype(np.int64)
        return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if kind[0] == "s" else codes

    def _check(self, function, *arguments):
        self.library.check(function(self.handle, *arguments))

    def _kv(self, x, tokens):
        return self._pointer(x, (self.batch, self.heads, tokens, self.head_size))

    def _pointer(self, x, shape):
        assert x.dtype == np.float32 and x.flags.c_contiguous and x.shape == shape, (x.shape, shape)
        return x.ctypes.data_as(_F32)
