"""SmolLM2-135M continues a text, with its KV cache in kvant.

All but attention is numpy in f32. Each step appends one token's keys and values to the cache of
every layer, which quantizes them, and attends to what the cache holds.

    scripts/demo [--scheme NAME] [--prompt TEXT | --verses gen1:1-gen4:26] [--tokens N]
"""

import argparse
import pathlib
import sys
import time

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    __package__ = "kv_report"
    import kv_report  # noqa: F401

import numpy as np

from .kvant_kv import Library
from .model import Model, read_text, tokenizer_of
from .packages import MODEL_FILE, missing

SCHEME = "int4_g64_R128_s4"


def prompt_of(arguments):
    if arguments.prompt:
        return arguments.prompt
    return "\n".join(read_text(arguments.verses).splitlines())


class Generator:
    """A model with a cache of `capacity` tokens."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.length = 0
        self.attention_seconds = 0.0

    def feed(self, tokens):
        """Logits after the last of these tokens, which follow those fed before."""
        hidden = self.model.forward(np.asarray([tokens]), self._attention, first=self.length)
        self.length += len(tokens)
        return self.model.logits(hidden[0, -1])

    def _attention(self, layer, q, k, v):
        begin = time.perf_counter()
        self.cache.append(layer, k, v)
        output = self.cache.attend(layer, q)
        self.attention_seconds += time.perf_counter() - begin
        return output


def pick(logits, temperature, random):
    if temperature == 0:
        return int(logits.argmax())
    best = np.argpartition(logits, -40)[-40:]
    weights = np.exp((logits[best] - logits[best].max()) / temperature)
    return int(random.choice(best, p=weights / weights.sum()))


def run(arguments):
    from gguf import GGUFReader

    reader = GGUFReader(MODEL_FILE)
    model, tokenizer = Model(reader), tokenizer_of(reader)
    prompt = prompt_of(arguments)
    tokens = tokenizer.encode(prompt).ids
    if not tokens:
        raise ValueError("an empty prompt")
    library = Library()
    capacity = len(tokens) + arguments.tokens
    shape = dict(batch=1, heads=model.kv_heads, head_size=model.head_size, capacity=capacity,
                 layers=model.layers, threads=arguments.threads)
    with library.cache(arguments.scheme, **shape) as cache:
        generator = Generator(model, cache)
        begin = time.perf_counter()
        # In pieces, so that scores of long prompts take little memory.
        for first in range(0, len(tokens), 256):
            logits = generator.feed(tokens[first : first + 256])
        prompt_seconds = time.perf_counter() - begin
        print(f"... {prompt[-400:]}\n\n>>> ", end="", flush=True)
        random = np.random.default_rng(arguments.seed)
        generator.attention_seconds = 0.0
        new = []
        begin = time.perf_counter()
        for _ in range(arguments.tokens):
            new.append(pick(logits, arguments.temperature, random))
            print(tokenizer.decode(new[-1:]), end="", flush=True)
            logits = generator.feed(new[-1:])
        seconds = time.perf_counter() - begin
        print("\n")
        elements = 2 * model.layers * model.kv_heads * model.head_size * generator.length
        used = cache.used_bytes
        print(f"prompt      {len(tokens)} tokens in {prompt_seconds:.1f} s")
        print(f"generated   {len(new)} tokens, {len(new) / seconds:.1f} tokens/s; append and "
              f"attention {1e3 * generator.attention_seconds / len(new):.1f} of "
              f"{1e3 * seconds / len(new):.1f} ms per token")
        print(f"cache       {arguments.scheme}: {used:,} bytes for {generator.length} tokens, "
              f"{8 * used / elements:.2f} bits per element; f16 would take {2 * elements:,}, "
              f"{2 * elements / used:.2f} times as much")
        print(f"kernel      {cache.kernel}")


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scheme", default=SCHEME, help=f"how K and V are stored ({SCHEME}); "
                        "docs/kv_cache.md lists the names")
    parser.add_argument("--prompt", help="the text to continue")
    parser.add_argument("--verses", default="gen1:1-gen4:26",
                        help="or verses of the King James Bible (gen1:1-gen4:26)")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate (64)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of kvant; 0: all")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: at least 1")
    if missing():
        sys.exit("demo: missing " + "; ".join(missing()) + ": run scripts/demo")
    try:
        run(arguments)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
