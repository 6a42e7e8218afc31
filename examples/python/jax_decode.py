"""Decoding in JAX over an int4 cache that is written in place, beside attention over the exact tokens."""

import functools
import sys

import numpy as np

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("jax_decode.py needs jax")

import kvant
import kvant.jax

HEADS, QUERY_HEADS, SIZE, GROUP, CAPACITY, PROMPT, STEPS = 2, 8, 64, 32, 256, 200, 20
GROUPS = [1, 1, 1, GROUP]


def append(tokens):
    """K or V of so many tokens into a cache: codes, two in a byte, and a scale for each 32 channels."""
    g = kvant.GraphBuilder()
    x = g.input("x", "f32", [1, HEADS, tokens, SIZE])
    positions = g.input("positions", "s32", [1])
    cache = g.append(x, positions, CAPACITY, "s4", group_shape=GROUPS, scale_type="f16")
    g.output("codes", cache.codes)
    g.output("scales", cache.scales)
    return kvant.jax.compile(g.build(), require_fused=True)


def attention():
    """One query over the tokens that the cache has."""
    g = kvant.GraphBuilder("f16", apply_to_int=True)
    q = g.input("q", "f32", [1, QUERY_HEADS, 1, SIZE])
    lengths = g.input("lengths", "s32", [1])
    k, v = (
        g.load_tokens(
            g.dynamic_dequantize(
                g.input(name, "s4", [1, HEADS, CAPACITY, SIZE]),
                g.input(name + "_scales", "f16", [1, HEADS, CAPACITY, SIZE // GROUP]),
                group_shape=GROUPS,
                type="f32",
            ),
            lengths,
        )
        for name in "kv"
    )
    g.output("o", g.scaled_dot_product_attention(q, k, v, kv_lengths=lengths))
    return kvant.jax.compile(g.build(), require_fused=True)


prompt, one, attend = append(PROMPT), append(1), attention()


@functools.partial(jax.jit, donate_argnums=0)
def step(caches, q, k, v, length):
    """Appends a token, in the caches' own memory, and attends to all."""
    position = length[None]
    caches = [one(x=x, positions=position, **cache) for x, cache in zip((k, v), caches)]
    keys, values = caches
    o = attend(
        q=q,
        lengths=position + 1,
        k=keys["codes"],
        k_scales=keys["scales"],
        v=values["codes"],
        v_scales=values["scales"],
    )
    return caches, o


def main():
    print(attend.explain())
    key = iter(jax.random.split(jax.random.key(0), 100))
    k, v = (jax.random.normal(next(key), (1, HEADS, PROMPT, SIZE)) for _ in "kv")
    caches = [prompt(x=x, positions=jnp.zeros(1, jnp.int32)) for x in (k, v)]
    where = [cache["codes"].unsafe_buffer_pointer() for cache in caches]
    for i in range(STEPS):
        q = jax.random.normal(next(key), (1, QUERY_HEADS, 1, SIZE))
        new = [jax.random.normal(next(key), (1, HEADS, 1, SIZE)) for _ in "kv"]
        caches, o = step(caches, q, *new, jnp.int32(PROMPT + i))
        k, v = (jnp.concatenate(pair, 2) for pair in zip((k, v), new))
    want = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)
    distance = float(jnp.linalg.norm(o - want) / jnp.linalg.norm(want))
    print(f"{PROMPT + STEPS} tokens in {caches[0]['codes'].dtype}: differs by {distance:.3f} from the exact tokens")
    assert distance < 0.2
    assert [cache["codes"].unsafe_buffer_pointer() for cache in caches] == where, "copied"
    assert not np.isnan(o).any()


if __name__ == "__main__":
    main()
