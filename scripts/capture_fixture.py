#!/usr/bin/env python3
"""Captures queries, keys and values of SmolLM2-135M on the King James Bible.

Writes tests/data/smollm2_kjv.safetensors (see tests/data/README.md). Tests need
only that file; this script is for remaking it or for reading how it was made.

    scripts/setup --dev
    python3 scripts/capture_fixture.py [--output FILE]

The model is tools/kv_report/model.py. It is trusted for two reasons, both checked
before and after the file is written: its perplexity on the window that is captured
is the one that an independent implementation has, and causal attention over the
tensors read back from the file gives the forward pass's own attention output.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import kv_report.packages as packages  # makes the packages below importable

import numpy as np
from kv_report import model as models

OUTPUT = ROOT / "tests" / "data" / "smollm2_kjv.safetensors"
CAPTURED_TOKENS = 512  # a prefix of the window: causal, so later tokens do not matter
CAPTURED_LAYERS = (0, 10, 20, 29)
MAX_BYTES = 4_000_000

PERPLEXITY_TOLERANCE = 1e-2
ATTENTION_TOLERANCE = 2e-3  # relative RMS: a few f16 roundings (2^-11 = 5e-4)


def causal_attention(q, k, v):
    """softmax(q k^T / sqrt(D), causal) v, in q's dtype; query head h reads KV head h // group."""
    group = q.shape[0] // k.shape[0]
    hidden = np.triu(np.ones((q.shape[1], k.shape[1]), dtype=bool), 1)
    output = np.empty_like(q)
    for h in range(q.shape[0]):
        scores = q[h] @ k[h // group].T / np.sqrt(q.dtype.type(q.shape[2]))
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        output[h] = weights @ v[h // group] / weights.sum(axis=-1, keepdims=True)
    return output


# --- The file ----------------------------------------------------------------


def write_safetensors(path, tensors, metadata):
    """Writes f16 tensors in the order given.

    By hand because the package's writer orders the metadata differently in each
    run, and the same inputs ought to give the same bytes.
    """
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        assert tensor.dtype == np.dtype("<f2")
        header[name] = {
            "dtype": "F16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def check_file(path, captured):
    """Compares attention over the file's tensors with the forward pass's own output."""
    from safetensors.numpy import load_file  # an independent reader

    tensors = load_file(path)
    print("layer  attention error  largest |k| (channel)  attention on token 0")
    for layer in CAPTURED_LAYERS:
        q, k, v = (tensors[f"layer{layer}.{name}"].astype(np.float64) for name in "qkv")
        assert all(np.isfinite(x).all() for x in (q, k, v)), "out of f16's range"
        expected = captured[layer][3][:, :CAPTURED_TOKENS]
        difference = causal_attention(q, k, v) - expected
        error = np.sqrt((difference**2).sum() / (expected.astype(np.float64) ** 2).sum())

        # Attending to values that are 1 at token 0 and 0 elsewhere reads that token's weight.
        first = np.zeros_like(v)
        first[:, 0] = 1
        share = causal_attention(q, k, first)[..., 0].mean()
        largest = np.unravel_index(np.abs(k).argmax(), k.shape)
        print(f"{layer:5}  {error:15.2e}  {abs(k[largest]):11.1f} ({largest[2]:2})  {share:25.0%}")
        assert error <= ATTENTION_TOLERANCE, f"layer {layer}: the file is not what was computed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output

    model, tokens = models.load([0])
    captured = {}

    def attend(layer, q, k, v):
        output = causal_attention(q[0], k[0], v[0])
        if layer in CAPTURED_LAYERS:
            captured[layer] = (q[0], k[0], v[0], output)
        return output[None]

    hidden = model.forward(tokens, attend)[0]
    perplexity = model.perplexity(hidden, tokens[0])
    expected = models.EXPECTED_PERPLEXITY[0]
    print(f"perplexity {perplexity:.4f} (expected {expected}, off by {perplexity - expected:+.5f})")
    assert abs(perplexity - expected) <= PERPLEXITY_TOLERANCE, "not a working model, or another text"

    tensors = {
        f"layer{layer}.{name}": np.ascontiguousarray(value[:, :CAPTURED_TOKENS], dtype="<f2")
        for layer in CAPTURED_LAYERS
        for name, value in zip("qkv", captured[layer])
    }
    captured_tokens = np.asarray(tokens[0, :CAPTURED_TOKENS], dtype="<u4")
    metadata = {
        "model": f"SmolLM2-135M-Instruct, Q4_1 GGUF of {packages.MODEL_PACKAGE}",
        "model_sha256": hashlib.sha256(packages.MODEL_FILE.read_bytes()).hexdigest(),
        "text": f"King James Bible, Debian bible-kjv-text, {models.VERSES}",
        "window": f"0: tokens [0, {models.WINDOW_TOKENS}), perplexity {perplexity:.4f}",
        "tokens": f"[0, {CAPTURED_TOKENS})",
        "tokens_sha256": hashlib.sha256(captured_tokens.tobytes()).hexdigest(),
        "layout": "[heads, tokens, head_size], after rope on interleaved pairs",
        "attention": "causal, scale 0.125, query head h reads kv head h // 3",
        "made_by": "scripts/capture_fixture.py",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(output, tensors, metadata)
    check_file(output, captured)
    size = output.stat().st_size
    print(f"{output.name}: {size} bytes")
    assert size <= MAX_BYTES


if __name__ == "__main__":
    main()
