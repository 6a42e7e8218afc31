#!/usr/bin/env python3
"""Makes tests/data/ggml_blocks.safetensors: random blocks, and what gguf reads in them.

    pip install numpy gguf safetensors
    python3 scripts/make_ggml_blocks.py

See tests/data/README.md. Tests need only the file.
"""

import importlib.metadata
import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
OUTPUT = DATA / "ggml_blocks.safetensors"
ROWS, BLOCKS = 5, 3  # blocks of a row
HALVES = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2, "IQ4_NL": 1}  # f16 numbers that a block begins with


def main():
    rng = np.random.default_rng(20)
    tensors = {}
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = rng.integers(0, 256, (ROWS * BLOCKS, size), dtype=np.uint8)
        numbers = blocks[:, : 2 * halves].view(np.uint16)
        # Infinity and NaN read back as NaN, which tells nothing.
        numbers[(numbers & 0x7C00) == 0x7C00] &= 0x83FF
        blocks = blocks.reshape(ROWS, BLOCKS * size)
        tensors[f"{name.lower()}.blocks"] = blocks
        tensors[f"{name.lower()}.values"] = dequantize(blocks, kind)
    made_by = f"gguf {importlib.metadata.version('gguf')}"
    save_file(tensors, OUTPUT, {"made by": made_by})
    OUTPUT.chmod(0o644)


if __name__ == "__main__":
    main()
