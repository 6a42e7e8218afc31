"""Attention and cache of a decoding step through transformers: KvantCache beside DynamicCache with sdpa, in turns.

transformers_decode.py [ROUNDS]. SmolLM2-135M's shape, 30 layers of 9 query heads over 3 KV heads of 64: for each layer
the cache's update and the attention function, as a model calls them, with random queries, keys and values. Beside
them kvant.KvCache alone, called the same way. Milliseconds of a step, medians; ratios are medians of those of a round.
"""
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


@torch.no_grad()
def main(rounds=15):
    print("| batch | tokens | scheme | kvant, ms | KvCache alone | DynamicCache, sdpa | kvant / alone | DynamicCache / kvant |")
    print("|---|---|---|---|---|---|---|---|")
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                                      head_dim=SIZE, hidden_size=HEADS * SIZE)
    for batch, tokens, scheme in ((1, 4096, "int4_g64_R128_s4"), (8, 4096, "int4_g64_R128_s4"),
                                  (1, 32768, "int4_g64_R128_s4"), (1, 4096, "int8_th"), (1, 32768, "int8_th")):
        ours = KvantCache(config, scheme, capacity=tokens + rounds + 2)
        direct = kvant.KvCache(scheme, layers=LAYERS, batch=batch, heads=KV_HEADS, head_size=SIZE,
                               capacity=tokens + rounds + 2)
        theirs = transformers.DynamicCache(config=config)
        # The first token as a model has it, which makes the cache; the others past attention, which would take hours.
        through(ours, _attention, torch.randn(batch, HEADS, 1, SIZE), *torch.randn(2, batch, KV_HEADS, 1, SIZE))
        for layer in range(LAYERS):
            k, v = torch.randn(2, batch, KV_HEADS, tokens, SIZE)
            ours.cache.append(layer, k[:, :, 1:], v[:, :, 1:])
            ours.layers[layer].position.fill_(tokens)
            direct.append(layer, k, v)
            theirs.update(k, v, layer)
        times = []
        for _ in range(rounds + 1):
            q = torch.randn(batch, HEADS, 1, SIZE)
            k, v = torch.randn(2, batch, KV_HEADS, 1, SIZE)
            # Who comes after DynamicCache finds nothing in the processor's caches: each does, in turns.
            runs = [(0, through, ours, _attention), (1, alone, direct), (2, through, theirs, sdpa_attention_forward)]
            taken = [0.0, 0.0, 0.0]
            for at, function, *arguments in random.sample(runs, 3):
                taken[at] = milliseconds(function, *arguments, q, k, v)
            times.append(taken)
        times = times[1:]
        a, b, c = (statistics.median(column) for column in zip(*times))
        over = statistics.median(x / y for x, y, _ in times)
        won = statistics.median(z / x for x, _, z in times)
        print(f"| {batch} | {tokens} | {scheme} | {a:.2f} | {b:.2f} | {c:.2f} | {over:.2f} | {won:.1f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
