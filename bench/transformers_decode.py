"""Attention and cache of a decoding step through transformers: KvantCache beside its caches with sdpa, in turns.

transformers_decode.py [ROUNDS]. SmolLM2-135M's shape, 30 layers of 9 query heads over 3 KV heads of 64: for each layer
the cache's update and the attention function, as a model calls them, with random queries, keys and values. Milliseconds
of a step. DynamicCache with 8 sequences of 32k tokens takes 12 GB.

DynamicCache, and kvant.KvCache alone, called the same way: medians; ratios are medians of those of a round.
QuantizedCache (of quanto, hqq, where they are installed) quantizes all its tokens again every 128 steps: means of 128.
"""
import importlib.util
import random
import statistics
import sys
import time

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvant
from kvant.transformers import KvantCache, _attention

LAYERS, HEADS, KV_HEADS, SIZE = 30, 9, 3, 64


class Module(torch.nn.Module):
    num_key_value_groups, is_causal = HEADS // KV_HEADS, True


MODULE = Module().eval()


def through(cache, attention, q, k, v):
    for layer in range(LAYERS):
        keys, values = cache.update(k, v, layer)
        attention(MODULE, q, keys, values, None, scaling=SIZE**-0.5, dropout=0.0)


def alone(cache, q, k, v):
    for layer in range(LAYERS):
        cache.append(layer, k, v)
        cache.attend(layer, q)


def milliseconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - start) * 1e3


CONFIG = transformers.LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                                  head_dim=SIZE, hidden_size=HEADS * SIZE)


def tokens_of(batch, heads, count=1):
    return torch.randn(batch, heads, count, SIZE)


def filled(scheme, batch, tokens, steps, *others):
    """A KvantCache, and others that have an update, with the same tokens."""
    ours = KvantCache(CONFIG, scheme, capacity=tokens + steps + 2)
    # The first token as a model has it, which makes the cache; the others past attention, which would take hours.
    through(ours, _attention, tokens_of(batch, HEADS), tokens_of(batch, KV_HEADS), tokens_of(batch, KV_HEADS))
    for layer in range(LAYERS):
        k, v = tokens_of(batch, KV_HEADS, tokens), tokens_of(batch, KV_HEADS, tokens)
        ours.cache.append(layer, k[:, :, 1:], v[:, :, 1:])
        ours.layers[layer].position.fill_(tokens)
        for update in others:
            update(layer, k, v)
    return ours


def in_turns(batch, steps, runs):
    """Milliseconds of each run in each step, the first left out."""
    times = []
    for _ in range(steps + 1):
        new = tokens_of(batch, HEADS), tokens_of(batch, KV_HEADS), tokens_of(batch, KV_HEADS)
        taken = [0.0] * len(runs)
        # Who comes after DynamicCache finds nothing in the processor's caches: each does, in turns.
        for at in random.sample(range(len(runs)), len(runs)):
            function, *arguments = runs[at]
            taken[at] = milliseconds(function, *arguments, *new)
        times.append(taken)
    return times[1:]


def beside_dynamic(rounds):
    print("| batch | tokens | scheme | kvant, ms | KvCache alone | DynamicCache, sdpa | kvant / alone | DynamicCache / kvant |")
    print("|---|---|---|---|---|---|---|---|")
    for batch, tokens, scheme in ((1, 4096, "int4_g64_R128_s4"), (8, 4096, "int4_g64_R128_s4"),
                                  (1, 32768, "int4_g64_R128_s4"), (8, 32768, "int4_g64_R128_s4"),
                                  (1, 4096, "int8_th"), (1, 32768, "int8_th")):
        direct = kvant.KvCache(scheme, layers=LAYERS, batch=batch, heads=KV_HEADS, head_size=SIZE,
                               capacity=tokens + rounds + 2)
        theirs = transformers.DynamicCache(config=CONFIG)
        ours = filled(scheme, batch, tokens, rounds, direct.append, lambda layer, k, v: theirs.update(k, v, layer))
        times = in_turns(batch, rounds, [(through, ours, _attention), (alone, direct),
                                         (through, theirs, sdpa_attention_forward)])
        a, b, c = (statistics.median(column) for column in zip(*times))
        over = statistics.median(x / y for x, y, _ in times)
        won = statistics.median(z / x for x, _, z in times)
        print(f"| {batch} | {tokens} | {scheme} | {a:.2f} | {b:.2f} | {c:.2f} | {over:.2f} | {won:.1f} |", flush=True)


def beside_quantized(steps=128):
    print("\n| batch | tokens | of | kvant, ms | QuantizedCache, 4 bits | QuantizedCache / kvant |")
    print("|---|---|---|---|---|---|")
    for backend, module in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        if not importlib.util.find_spec(module.split(".")[0]):
            continue
        for batch, tokens in ((1, 4096), (8, 4096), (1, 32768)):
            axis = 0 if backend == "quanto" else 1
            theirs = transformers.QuantizedCache(backend, CONFIG, nbits=4, axis_key=axis, axis_value=axis,
                                                 q_group_size=64, residual_length=steps)
            ours = filled("int4_g64_R128_s4", batch, tokens, steps, lambda layer, k, v: theirs.update(k, v, layer))
            times = in_turns(batch, steps, [(through, ours, _attention), (through, theirs, sdpa_attention_forward)])
            a, b = (statistics.mean(column) for column in zip(*times))
            print(f"| {batch} | {tokens} | {backend} | {a:.2f} | {b:.2f} | {b / a:.1f} |", flush=True)


@torch.no_grad()
def main(rounds=15):
    beside_dynamic(rounds)
    beside_quantized()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
