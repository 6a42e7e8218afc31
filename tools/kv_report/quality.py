"""How far a scheme moves the model's predictions from full precision.

Teacher forcing: every token of a window is predicted from the true ones before it,
with the cache as decoding token by token would have filled it. Results are kept per
scheme and window, so that a run that was stopped goes on where it was.
"""

import dataclasses
import hashlib
import pathlib
import sys
import time

import numpy as np

from . import definitions, kvant_kv, model as models

HERE = pathlib.Path(__file__).parent
ERROR_LAYERS, ERROR_TOKENS = (0, 1, 10, 20, 29), 512  # where attention's own error is taken
BATCH = 4  # windows at a time; a layer's arrays are 50 MB then


class Definitions:
    """Attention by definitions.py."""

    name = "definitions"
    sources = (HERE / "definitions.py",)

    def attention(self, scheme):
        rule = definitions.SCHEMES[scheme]

        def attend(layer, q, k, v):
            return np.stack([definitions.attention(rule, *x) for x in zip(q, k, v)])

        return attend


class Kvant:
    """Attention by kvant's cache, one of a single layer that is emptied for each."""

    name = "kvant"

    def __init__(self):
        self.library = kvant_kv.Library()
        self.sources = (self.library.path,)

    def attention(self, scheme):
        def attend(layer, q, k, v):
            windows, heads, tokens, size = k.shape
            with self.library.cache(scheme, windows, heads, size, tokens) as cache:
                return cache.teacher_force(0, q, k, v)

        return attend


ENGINES = {"definitions": Definitions, "kvant": Kvant}


@dataclasses.dataclass
class Window:
    """Per prediction of a window: what a scheme does to it."""

    nll: np.ndarray  # of the true next token
    kld: np.ndarray  # KL(full precision || scheme), over the vocabulary
    same: np.ndarray  # whether the likeliest token is the same


def compare(model, tokens, exact, hidden, rows=128):
    """The Window of final states `hidden` [T, hidden size], against those of full precision."""
    targets = tokens[1:]
    result = Window(*(np.empty(len(targets)) for _ in range(2)), np.empty(len(targets), bool))
    for begin in range(0, len(targets), rows):  # all logits at once would be 400 MB, twice
        part = slice(begin, min(begin + rows, len(targets)))
        p, q = model.logits(exact[part]), model.logits(hidden[part])
        result.same[part] = p.argmax(axis=-1) == q.argmax(axis=-1)
        for logits in (p, q):
            logits -= logits.max(axis=-1, keepdims=True)
        picked = q[np.arange(len(q)), targets[part]].astype(np.float64)
        difference = p - q
        # f32 is enough below: differences are small wherever p is not.
        weights = np.exp(p, out=p)
        total_p = weights.sum(axis=-1, dtype=np.float64)
        total_q = np.exp(q, out=q).sum(axis=-1, dtype=np.float64)
        mean = np.einsum("rv,rv->r", weights, difference).astype(np.float64) / total_p
        result.nll[part] = np.log(total_q) - picked
        result.kld[part] = mean - np.log(total_p) + np.log(total_q)
    return result


class Runs:
    """Runs schemes on windows, once each.

    `folder` keeps what was run, under names that change when the code does that it
    depends on.
    """

    def __init__(self, engine, windows, folder, window_tokens=models.WINDOW_TOKENS):
        self.engine, self.windows = engine, windows
        self.model, self.tokens = models.load(windows, window_tokens)
        self.shape = f"{window_tokens}"
        reference = _fingerprint((HERE / "model.py",))
        self.exact_folder = folder / f"full-{reference}"
        self.folder = folder / f"{engine.name}-{_fingerprint((HERE / 'model.py', *engine.sources))}"
        for path in (self.exact_folder, self.folder):
            path.mkdir(parents=True, exist_ok=True)
        self.exact = self._full_precision()

    def _full_precision(self):
        """Final states of each window in f32, by numpy whatever the engine."""
        path = lambda w: self.exact_folder / f"{w}-{self.shape}.npy"
        attend = Definitions().attention("f32")
        for rows in _batches([i for i, w in enumerate(self.windows) if not path(w).exists()]):
            hidden = self._forward("full precision", rows, attend)
            for row, states in zip(rows, hidden):
                np.save(path(self.windows[row]), states)
        return [np.load(path(w)) for w in self.windows]

    def scheme(self, name):
        """[Window] of a scheme, in the order of the windows."""
        path = lambda w: self.folder / f"{name}-{w}-{self.shape}.npz"
        for rows in _batches([i for i, w in enumerate(self.windows) if not path(w).exists()]):
            hidden = self._forward(name, rows, self.engine.attention(name))
            for row, states in zip(rows, hidden):
                window = compare(self.model, self.tokens[row], self.exact[row], states)
                np.savez(path(self.windows[row]), **dataclasses.asdict(window))
                log(f"{name}: window {self.windows[row]}: KL {window.kld.mean():.5f}")
        return [Window(**np.load(path(w))) for w in self.windows]

    def attention_inputs(self):
        """{layer: (q, k, v)} of the start of the first window, in full precision."""
        path = self.exact_folder / f"attention-{self.windows[0]}.npz"
        if not path.exists():
            kept, attend = {}, Definitions().attention("f32")

            def keep(layer, q, k, v):
                if layer in ERROR_LAYERS:
                    kept.update({f"{layer}{name}": x for name, x in zip("qkv", (q, k, v))})
                return attend(layer, q, k, v)

            self.model.forward(self.tokens[:1, :ERROR_TOKENS], keep)
            np.savez(path, **kept)
        kept = np.load(path)
        return {layer: tuple(kept[f"{layer}{name}"] for name in "qkv") for layer in ERROR_LAYERS}

    def attention_errors(self, name):
        """Relative RMS error of attention's output per layer of ERROR_LAYERS, inputs exact."""
        return [attention_error(self.engine, name, layer, *inputs)
                for layer, inputs in self.attention_inputs().items()]

    def _forward(self, what, rows, attend):
        start = time.monotonic()
        hidden = self.model.forward(self.tokens[rows], attend)
        log(f"{what}: windows {[self.windows[r] for r in rows]}: {time.monotonic() - start:.0f} s")
        return hidden


def attention_error(engine, scheme, layer, q, k, v):
    """Relative RMS error of attention's output over all heads and tokens."""
    exact = Definitions().attention("f32")(layer, q, k, v)
    got = engine.attention(scheme)(layer, q, k, v)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def summary(windows, exact):
    """One scheme's numbers over all predictions; `exact` are the windows of full precision."""
    nll, base = (np.concatenate([w.nll for w in ws]) for ws in (windows, exact))
    kld = np.concatenate([w.kld for w in windows])
    difference = nll - base
    return {
        "ppl": float(np.exp(nll.mean())),
        "dnll": float(difference.mean()),
        "dnll_se": float(difference.std(ddof=1) / np.sqrt(len(difference))),
        "kld_mean": float(kld.mean()),
        "kld_p99": float(np.percentile(kld, 99)),
        "top1": float(np.concatenate([w.same for w in windows]).mean()),
    }


def log(line):
    print(f"kv_report: {line}", file=sys.stderr, flush=True)


def _batches(rows):
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def _fingerprint(paths):
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
