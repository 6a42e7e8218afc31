"""SmolLM2-135M on the King James Bible: text, tokens, and a forward pass in numpy and f32.

The forward pass goes layer by layer over whole windows, with attention left to a
function. So attention can be one that quantizes its cache token by token, while
all else stays one matrix product per weight: within a layer, a token's K and V do
not depend on other tokens' attention in that layer.

It is trusted because its perplexities are those of an independent implementation
(EXPECTED_PERPLEXITY, torch in f32 on the same weights, text and windows).
"""

import os
import subprocess

import numpy as np

from .packages import MODEL_FILE, bible_command

VERSES = "gen1:1-rev22:21"
WINDOW_TOKENS = 2048  # window w: tokens [2048 w, 2048 w + 2048), positions from 0
EXPECTED_PERPLEXITY = (4.7104, 6.7532, 8.0540, 8.8641, 8.5740, 13.9212, 13.3600, 16.6260)


def read_text(verses=VERSES):
    """The Bible (or some verses of it), one verse a line, without the verses' references."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}  # it would wrap lines
    printed = subprocess.run(
        bible_command() + ["-f", verses],
        check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment,
    ).stdout.decode("ascii")
    # "Ge1:1 In the beginning ..." -> "In the beginning ..."
    return "\n".join(line.split(" ", 1)[1] for line in printed.splitlines() if " " in line)


def tokenizer_of(reader):
    """Byte-level BPE from the GGUF's own vocabulary and merges."""
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
    return tokenizer


def tokenize(reader, text):
    """Tokens of the text; no BOS."""
    tokenizer = tokenizer_of(reader)
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == text, "the tokenizer loses text"
    return tokens


def load(windows, window_tokens=WINDOW_TOKENS):
    """(model, tokens [len(windows), window_tokens]) of windows by number, each cut to its start."""
    from gguf import GGUFReader

    reader = GGUFReader(MODEL_FILE)
    text = read_text()
    # Words are tokenized on their own, so a beginning that ends with a verse is as good as all.
    text = text[: text.index("\n", (max(windows) + 1) * WINDOW_TOKENS * 6)]
    tokens = np.asarray(tokenize(reader, text))
    starts = np.asarray(windows)[:, None] * WINDOW_TOKENS
    return Model(reader), tokens[starts + np.arange(window_tokens)]


class Model:
    """Llama's architecture in f32.

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

    def forward(self, tokens, attention, first=0):
        """Final hidden states [W, T, hidden] of tokens [W, T], a window a row, from position
        `first` on.

        attention(layer, q, k, v) gets arrays [W, heads, T, head_size], q and k
        after rope and q not scaled, and returns one like q.
        """
        windows, positions = tokens.shape
        cos, sin = self._rope_tables(first + np.arange(positions))
        x = self.weights["token_embd.weight"][tokens.reshape(-1)]
        for layer in range(self.layers):
            w = lambda name: self.weights[f"blk.{layer}.{name}.weight"]

            def heads(y):
                split = y.reshape(windows, positions, -1, self.head_size)
                return np.ascontiguousarray(split.transpose(0, 2, 1, 3))

            n = self._rms_norm(x, w("attn_norm"))
            q = rope(heads(n @ w("attn_q").T), cos, sin)
            k = rope(heads(n @ w("attn_k").T), cos, sin)
            output = attention(layer, q, k, heads(n @ w("attn_v").T))
            x += output.transpose(0, 2, 1, 3).reshape(len(x), -1) @ w("attn_output").T

            n = self._rms_norm(x, w("ffn_norm"))
            gate = n @ w("ffn_gate").T
            x += (gate / (1 + np.exp(-gate)) * (n @ w("ffn_up").T)) @ w("ffn_down").T
        x = self._rms_norm(x, self.weights["output_norm.weight"])
        return x.reshape(windows, positions, -1)

    def logits(self, hidden):
        """Logits [..., vocabulary] of final hidden states; 400 MB for a window at once."""
        return hidden @ self.weights["token_embd.weight"].T

    def perplexity(self, hidden, tokens):
        """exp of the mean negative log-likelihood of tokens[1:], from final states [T, hidden]."""
        total, targets = 0.0, tokens[1:]
        for begin in range(0, len(targets), 256):
            part = slice(begin, min(begin + 256, len(targets)))
            logits = self.logits(hidden[part]).astype(np.float64)
            highest = logits.max(axis=-1)
            log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1))
            total += (log_sum - logits[np.arange(len(logits)), targets[part]]).sum()
        return float(np.exp(total / len(targets)))

    def _rms_norm(self, x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.epsilon) * weight

    def _rope_tables(self, positions):
        exponents = np.arange(0, self.head_size, 2) / self.head_size
        angles = positions[:, None] * self.rope_base ** -exponents
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
