"""oneDNN's own Graph API on the CPU, through onednn_sdpa.cc (which scripts/bench compiles)."""
import ctypes
import math
import os

import attention
import numpy as np

CAPACITY = 512

library = ctypes.CDLL(os.environ["KVANT_PEERS_ONEDNN"])
library.kvant_onednn_create.restype = ctypes.c_void_p
library.kvant_onednn_create.argtypes = (
    [ctypes.c_int64] * 5 + [ctypes.c_char_p] * 2 + [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
)
library.kvant_onednn_bind.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
library.kvant_onednn_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
library.kvant_onednn_destroy.argtypes = [ctypes.c_void_p]
library.kvant_onednn_version.argtypes = [ctypes.c_char_p, ctypes.c_int]

# Types of the queries and of K and V.
KINDS = {"f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "int8": ("f32", "s8"), "int4": ("f32", "u4")}


def version():
    text = ctypes.create_string_buffer(CAPACITY)
    library.kvant_onednn_version(text, CAPACITY)
    return f"oneDNN {text.value.decode()}"


def aligned_copy(x):
    """x in memory that starts a cache line, as oneDNN likes it."""
    raw = np.empty(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


class Attention:
    def __init__(self, data, kind):
        case = self.case = data.case
        self.type, codes = KINDS[kind]
        message = ctypes.create_string_buffer(CAPACITY)
        shape = (case.kv_heads, case.ratio, case.q_len, case.kv_len, case.head_size)
        self.handle = library.kvant_onednn_create(
            *shape, self.type.encode(), codes.encode(), case.causal, message, CAPACITY
        )
        if not self.handle:
            raise RuntimeError(message.value.decode())
        convert = attention.to_bf16 if self.type == "bf16" else np.ascontiguousarray
        q = convert(data.q)
        if self.type == codes:
            k, v = (convert(x) for x in (data.k, data.v))
            extra = [None] * 4
            self.kv = lambda h: [self._real(x[h]) for x in (k, v)]
        else:
            bits = int(codes[1])
            stored = [attention.Quantized(x, bits, codes == "u4") for x in (data.k, data.v)]
            for s in stored:  # this oneDNN wants the scales in the queries' type
                s.scales = s.scales.astype(np.float32)
            k, v = (s.codes if bits == 8 else attention.pack4(s.codes) for s in stored)
            extra = [s.scales for s in stored] + [s.zero_points for s in stored]
            self.kv = lambda h: [s.head(h) for s in stored]
        mask = np.where(attention.causal_mask(case), np.float32(-np.inf), np.float32(0))
        divisor = np.array([math.sqrt(case.head_size)], np.float32)
        slots = [q, k, v, *extra, divisor, mask if case.causal else None, np.zeros_like(q)]
        self.bytes = sum(x.nbytes for x in slots if x is not None)
        self.rotation = [self._bind(slots) for _ in range(attention.copies(self.bytes))]
        self.runs = 0
        self.detail = "one partition"

    def __del__(self):
        if getattr(self, "handle", None):
            library.kvant_onednn_destroy(self.handle)

    def _real(self, x):
        return attention.from_bf16(x) if self.type == "bf16" else x

    def _bind(self, slots):
        buffers = [None if x is None else aligned_copy(x) for x in slots]
        pointers = [None if b is None else b.ctypes.data for b in buffers]
        library.kvant_onednn_bind(self.handle, (ctypes.c_void_p * len(slots))(*pointers))
        return buffers

    def run(self):
        self.last = self.runs % len(self.rotation)
        message = ctypes.create_string_buffer(CAPACITY)
        if library.kvant_onednn_run(self.handle, self.last, message, CAPACITY) != 0:
            raise RuntimeError(message.value.decode())
        self.runs += 1

    def output(self):
        out = self._real(self.rotation[self.last][-1]).astype(np.float64)
        return out.reshape(self.case.heads, self.case.q_len, self.case.head_size)


def make(data, kind, threads):
    del threads  # DPCPP_CPU_NUM_CUS has them: they are the process's
    return Attention(data, kind)
