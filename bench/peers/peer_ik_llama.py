"""ik_llama.cpp's flash attention: the functions and types are ggml's, but it always wants a mask."""
import os
import pathlib

import numpy as np
import peer_ggml

ROWS = 16  # GGML_KQ_MASK_PAD: a mask has a multiple of them


def version():
    number = pathlib.Path(os.environ["KVANT_PEERS_IK_LLAMA_VERSION"]).read_text().strip()
    return f"ik_llama.cpp of ik-llama-cpp-python {number}"


def make(data, kind, threads):
    case = data.case
    mask = np.zeros((-(-case.q_len // ROWS) * ROWS, case.kv_len), np.float16)
    if case.causal:
        mask[: case.q_len] = peer_ggml.mask_of(case)
    return peer_ggml.FlashAttention(data, kind, threads, mask)
