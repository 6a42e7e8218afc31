"""ggml's flash attention, from the libraries that scripts/bench builds: those of llama.cpp, and of
ik_llama.cpp, a fork whose functions are the same."""
import ctypes
import os

import attention
import numpy as np

BLOCK = 32
F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # enum ggml_type
TYPES = {"f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0}

# Of several libraries the first is what the others are linked with.
libraries = [
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in os.environ["KVANT_PEERS_GGML"].split(":")
]
base, cpu = libraries[0], libraries[-1]


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def _function(library, name, result, *arguments):
    function = getattr(library, name)
    function.restype = result
    function.argtypes = arguments
    return function


P, I64, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ggml_init = _function(base, "ggml_init", P, InitParams)
ggml_free = _function(base, "ggml_free", None, P)
new_tensor = _function(base, "ggml_new_tensor_4d", P, P, ctypes.c_int, I64, I64, I64, I64)
flash_attention = _function(base, "ggml_flash_attn_ext", P, P, P, P, P, P, F, F, F)
new_graph = _function(base, "ggml_new_graph", P, P)
build_forward = _function(base, "ggml_build_forward_expand", None, P, P)
allocate = _function(base, "ggml_backend_alloc_ctx_tensors", P, P, P)
free_buffer = _function(base, "ggml_backend_buffer_free", None, P)
compute = _function(base, "ggml_backend_graph_compute", ctypes.c_int, P, P)
data_of = _function(base, "ggml_get_data", P, P)
bytes_of = _function(base, "ggml_nbytes", ctypes.c_size_t, P)
cpu_init = _function(cpu, "ggml_backend_cpu_init", P)
set_threads = _function(cpu, "ggml_backend_cpu_set_n_threads", None, P, ctypes.c_int)


def version():
    ggml_version = _function(base, "ggml_version", ctypes.c_char_p)
    return f"ggml {ggml_version().decode()} of llama-cpp-python"


def _encode(x, kind):
    """The bytes of x [heads, tokens, size] in a ggml type, and what they stand for, per head."""
    if kind == "f16":
        halves = x.astype(np.float16)
        return halves, lambda h: halves[h]
    if kind == "bf16":
        words = attention.to_bf16(x)
        return words, lambda h: attention.from_bf16(words[h])
    bits = int(kind[1])
    stored = attention.Quantized(x, bits, zero_points=False)
    codes = stored.codes.reshape(*stored.scales.shape, BLOCK)
    if bits == 4:  # element i and element i + 16 share a byte
        nibbles = (codes + 8).astype(np.uint8)
        codes = nibbles[..., : BLOCK // 2] | (nibbles[..., BLOCK // 2 :] << 4)
    blocks = np.empty(stored.scales.shape, [("d", np.float16), ("qs", codes.dtype, codes.shape[-1])])
    blocks["d"] = stored.scales
    blocks["qs"] = codes
    return blocks, stored.head


class Graph:
    """The graph on one copy of the tensors, which have no memory yet."""

    def __init__(self, context, case, kind, mask):
        d, s = case.head_size, case.kv_len
        q = new_tensor(context, F32, d, case.q_len, case.heads, 1)
        k = new_tensor(context, TYPES[kind], d, s, case.kv_heads, 1)
        v = new_tensor(context, TYPES[kind], d, s, case.kv_heads, 1)
        m = None if mask is None else new_tensor(context, F16, *mask.shape[::-1], 1, 1)
        self.inputs = [tensor for tensor in (q, k, v, m) if tensor is not None]
        self.out = flash_attention(context, q, k, v, m, d**-0.5, 0.0, 0.0)
        self.graph = new_graph(context)
        build_forward(self.graph, self.out)

    def fill(self, contents):
        for tensor, content in zip(self.inputs, contents):
            assert bytes_of(tensor) == content.nbytes, (bytes_of(tensor), content.nbytes)
            ctypes.memmove(data_of(tensor), content.ctypes.data, content.nbytes)


class FlashAttention:
    """mask [at least q_len, kv_len], f16, is added to scores; None: nothing is."""

    def __init__(self, data, kind, threads, mask):
        case = self.case = data.case
        self.backend = cpu_init()
        set_threads(self.backend, threads)
        (k, self.k_head), (v, self.v_head) = (_encode(x, kind) for x in (data.k, data.v))
        self.bytes = 2 * data.q.nbytes + k.nbytes + v.nbytes
        count = attention.copies(self.bytes)
        # One for all copies: ik_llama.cpp has 64 contexts.
        self.context = ggml_init(InitParams(count << 20, None, True))
        self.rotation = [Graph(self.context, case, kind, mask) for _ in range(count)]
        self.buffer = allocate(self.context, self.backend)
        for copy in self.rotation:
            copy.fill([x for x in (data.q, k, v, mask) if x is not None])
        self.runs = 0
        self.detail = "ggml_flash_attn_ext"

    def __del__(self):
        free_buffer(self.buffer)
        ggml_free(self.context)

    def run(self):
        self.last = self.rotation[self.runs % len(self.rotation)]
        if compute(self.backend, self.last.graph) != 0:
            raise RuntimeError("ggml_backend_graph_compute failed")
        self.runs += 1

    def output(self):
        case = self.case
        count = case.q_len * case.heads * case.head_size
        floats = (ctypes.c_float * count).from_address(data_of(self.last.out))
        out = np.frombuffer(floats, np.float32).astype(np.float64)
        return out.reshape(case.q_len, case.heads, case.head_size).transpose(1, 0, 2)

    def kv(self, head):
        return self.k_head(head), self.v_head(head)


def mask_of(case):
    """What is added to scores [q_len, kv_len], in f16."""
    return np.where(attention.causal_mask(case), np.float16(-np.inf), np.float16(0))


def make(data, kind, threads):
    mask = mask_of(data.case) if data.case.causal else None
    return FlashAttention(data, kind, threads, mask)
