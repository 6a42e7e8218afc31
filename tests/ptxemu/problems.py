"""Small problems for kernels as PTX: name -> a graph's JSON, made by `kvant make`.

rows: every row of bench/static, which has each kernel, arithmetic, format and kind of segment, made
small. spread: random company of what rows do not combine, in which each value of an axis comes as
often as any other.
"""
import json
import pathlib
import random
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/static"))

import kernels  # noqa: E402
import stores  # noqa: E402

FORMATS = ("plain", "u4:g32:zp", "s4:g64", "u8", "s8:token", "s8:g32", "f8_e4m3", "u2:g32:zp", "f16", "bf16",
           "u4:channel:g32:zp", "u4:g32:rzp", "f8_e5m2:token", "s2:g32", "u4:token:rzp:sf16", "u8:g32:zp:sf16",
           "s8:channel", "s8:head", "u4:all_heads:zp", "u4:g32:nf4", "s8:token:sf16", "u2:token:zp")
AXES = {
    "--dtype": ("f16", "bf16", "f32"),
    "--head-size": (64, 80, 96, 128, 256),
    "ratio": (1, 3, 4, 8),
    "--q-len": (1, 1, 2, 5, 64),
    "--kv-len": (1, 32, 68, 193, 1025),
    "--k": FORMATS,
    "--batch": (1, 2),
    "--kv-heads": (1, 2),
    "feature": ((), ("--causal",), ("--causal=bottom-right",), ("--mask",), ("--mask=NxHxQxS",), ("--select",),
                ("--soft-cap",), ("--stats",), ("--transpose-output",), ("--hadamard", "16"),
                ("--k-layout", "channels"), ("--k-layout", "transposed"), ("--op", "--kv-lengths"),
                ("--op", "--kv-lengths", "--sinks", "--alibi"), ("--op", "--left-window", "40"), ("--dropout",),
                ("--ring",), ("--sink-tokens", "4", "--window-tokens", "66"), ("--page-size", "32"), ("--op", "--ragged")),
}


def _make(kvant, arguments):
    """None: kvant makes no such graph, as it says why."""
    made = subprocess.run([kvant, "make", *map(str, arguments)], capture_output=True, text=True)
    return made.stdout if made.returncode == 0 else None


def _small(kernel):
    """Two sequences of a few tiles, with a tail where neither groups of tokens nor pages forbid it."""
    whole = any("channel" in word or word == "--page-size" for word in kernel.make)
    sizes = {"--batch": "2", "--kv-len": "1152" if whole else "1044", "--left-window": "500"}
    if kernel.kind == "prefill":
        sizes |= {"--batch": "1", "--q-len": "70", "--kv-len": "256" if whole else "165"}
    words = list(kernel.make)
    for i, word in enumerate(words[:-1]):
        words[i + 1] = sizes.get(word, words[i + 1])
    return words


def _small_store(store):
    """2 sequences and heads, 64 slots instead of 4096, 4 tokens instead of 256."""
    graph = json.loads(store.graph())
    for op in graph["graph"]:
        for tensor in op["inputs"] + op["outputs"]:
            dims = tensor["shape"]
            if len(dims) == 4:
                dims[:3] = min(dims[0], 2), min(dims[1], 2), {4096: 64, 256: 4}.get(dims[2], dims[2])
            elif len(dims) == 1:
                dims[0] = min(dims[0], 2)
            stride = 1
            for d in reversed(range(len(dims))):
                tensor["stride"][d] = stride
                stride *= dims[d]
        group = op["attrs"].get("group_shape")
        if group:
            group["value"] = [min(size, 64) if size == 4096 else size for size in group["value"]]
    return json.dumps(graph)


def rows(kvant):
    for kernel in kernels.KERNELS:
        graph = _make(kvant, _small(kernel))
        assert graph is not None, kernel.name
        yield kernel.name, graph
    for store in stores.STORES:
        yield store.name, _small_store(store)


def spread(kvant, seed, count):
    """So many problems; a combination that kvant makes no graph of is passed over."""
    dice, decks = random.Random(seed), {}

    def deal(axis):
        deck = decks.setdefault(axis, [])
        if not deck:
            deck.extend(dice.sample(AXES[axis], len(AXES[axis])))
        return deck.pop()

    for _ in range(20 * count):
        if count == 0:
            return
        words = {axis: deal(axis) for axis in AXES}
        feature, ratio = words.pop("feature"), words.pop("ratio")
        words["--heads"] = words["--kv-heads"] * ratio
        words["--v"] = words["--k"] if dice.random() < 0.7 else deal("--k")
        for side in ("--k", "--v"):
            if words[side] == "plain":
                del words[side]
        arguments = [word for item in words.items() for word in item] + list(feature)
        graph = _make(kvant, arguments)
        if graph is None:
            continue
        count -= 1
        yield " ".join(map(str, arguments)), graph
    raise RuntimeError("kvant makes hardly any of these graphs")
