"""Writes index.md, report.json and the charts of a run."""

import json

import numpy as np

from . import expected, plots, speed
from .definitions import NO_TAIL, SCHEMES
from .quality import ERROR_LAYERS

KIB = {512: "512", 1024: "1k", 2048: "2k", 4096: "4k", 8192: "8k", 32768: "32k"}
GRID_BITS = {bits: str(bits) for bits in range(3, 11)}
EXACT = ("f32", "f16")  # would take half of a chart for themselves
# Of the lines against length, those that do not lie on others.
SHOWN = ("q8_0", "int8_th", "k8th_v4g32", "int4_g32", "int4_g64", "int4zp_g64", "int2_g32",
         "kivi4", "kivi2", "int4_g64_R128_s4")
NO_TAIL_COLOUR, TAIL_COLOUR = plots.COLOURS[0], plots.COLOURS[1]


class Report:
    """What one run found, by scheme.

    quality: {scheme: summary()}; windows: {scheme: [Window]}; errors: {scheme:
    attention's error per layer}; speeds: {(scheme, tokens): measure()}, empty for an
    engine that is not measured.
    """

    def __init__(self, model, engine, window_numbers, quality, windows, errors, speeds):
        self.model, self.engine, self.window_numbers = model, engine, window_numbers
        self.quality, self.windows, self.errors, self.speeds = quality, windows, errors, speeds

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.rows(), indent=1) + "\n")
        charts = {"kld.svg": self._kld_chart(), "perplexity.svg": self._perplexity_chart(),
                  "bytes.svg": self._bytes_chart()}
        if self.speeds:
            charts["time.svg"] = self._time_chart()
        for name, chart in charts.items():
            (folder / name).write_text(chart.svg())
        (folder / "index.md").write_text(self.markdown())

    def rows(self):
        """A scheme at a cache length each; predictions are the same at every length."""
        rows = []
        for scheme, quality in self.quality.items():
            for tokens in speed.LENGTHS:
                measured = self.speeds.get((scheme, tokens), {})
                rows.append({
                    "scheme": scheme, "tokens": tokens, **quality,
                    "bits_per_element": SCHEMES[scheme].bits_per_element(self.model.head_size),
                    "bytes": measured.get("bytes", self._bytes(scheme, tokens)),
                    "bytes_by_formula": self._bytes(scheme, tokens),
                    "ms_per_token": measured.get("ms_per_token"),
                    "ms_per_token_over_f16": measured.get("ratio"),
                    "peak_rss": measured.get("peak_rss"),
                    "kernel": measured.get("kernel"),
                    "engine": self.engine, "windows": len(self.window_numbers),
                })
        return rows

    def _bytes(self, scheme, tokens):
        per_head = SCHEMES[scheme].bytes(tokens, self.model.head_size)
        return round(per_head * self.model.layers * self.model.kv_heads)

    # --- Charts ------------------------------------------------------------------

    def _kld_chart(self):
        points = {s: q["kld_mean"] for s, q in self.quality.items() if s not in EXACT}
        return self._against_bits(points, "KL divergence to full precision against bits",
                                  "mean KL divergence (nats)")

    def _perplexity_chart(self):
        exact = self.quality["f32"]["ppl"]
        points = {s: 100 * (q["ppl"] / exact - 1) for s, q in self.quality.items() if s not in EXACT}
        return self._against_bits(points, f"Perplexity above full precision's {exact:.3f}, against bits",
                                  "more perplexity (%)")

    def _against_bits(self, values, title, y_title):
        values = {s: v for s, v in values.items() if v > 0}  # the rest is noise around none
        exponents = np.log10([*values.values(), 1])
        decades = range(int(np.floor(exponents.min())), max(1, int(np.ceil(exponents.max()))) + 1)
        chart = plots.Chart(title, "bits per element, scales and zero points included", y_title,
                            (2.2, 11), (10.0 ** decades[0], 10.0 ** decades[-1]))
        chart.grid(GRID_BITS, {10.0**d: f"{10.0**d:g}" for d in decades})
        points = []
        for scheme, value in values.items():
            rule = SCHEMES[scheme]
            tail = rule.k.tail != NO_TAIL
            bits = rule.bits_per_element(self.model.head_size)
            points.append((bits, value, scheme, TAIL_COLOUR if tail else NO_TAIL_COLOUR, tail,
                           bits <= 4.5))
        chart.points(points)
        chart.legend([(NO_TAIL_COLOUR, False, "all tokens quantized"),
                      (TAIL_COLOUR, True, "the last tokens exact")])
        return chart

    def _bytes_chart(self):
        shown = [s for s in SHOWN if s in self.quality]
        series = [(s, [(n, self._bytes("f16", n) / self._row_bytes(s, n)) for n in speed.LENGTHS])
                  for s in shown]
        chart = plots.Chart("How much smaller than f16 a cache is", "tokens in the cache",
                            "times smaller than f16", (speed.LENGTHS[0], speed.LENGTHS[-1]), (0, 6.5),
                            linear_y=True, right=170)
        chart.grid(KIB, {i: str(i) for i in range(7)})
        chart.level(1, "f16")
        chart.lines(series)
        return chart

    def _row_bytes(self, scheme, tokens):
        return self.speeds.get((scheme, tokens), {}).get("bytes", self._bytes(scheme, tokens))

    def _time_chart(self):
        series = [(s, self._ratios(s)) for s in SHOWN if s in self.quality]
        values = [ratio for _, points in series for _, ratio in points]
        low, high = min(values + [.25]) * .9, max(values + [2.]) * 1.1
        ticks = [t for t in (.1, .2, .3, .5, .7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low <= t <= high]
        chart = plots.Chart("Time of a decoded token, against f16's in the same run",
                            "tokens in the cache", "time over f16's",
                            (speed.LENGTHS[0], speed.LENGTHS[-1]), (low, high), right=170)
        chart.grid(KIB, {t: f"{t:g}" for t in ticks})
        chart.level(1, "f16")
        chart.lines(series)
        return chart

    def _ratios(self, scheme):
        return [(n, self.speeds[scheme, n]["ratio"]) for n in speed.LENGTHS if (scheme, n) in self.speeds]

    # --- The page ----------------------------------------------------------------

    def markdown(self):
        parts = [self._head(), self._quality_table(), CHART.format("KL divergence", "kld.svg"),
                 CHART.format("Perplexity", "perplexity.svg"), self._agreement(), self._error_table(),
                 self._bytes_table(), CHART.format("Bytes", "bytes.svg")]
        if self.speeds:
            parts += [self._time_table(), CHART.format("Time", "time.svg")]
        return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)

    def _head(self):
        count = sum(len(w.nll) for w in self.windows["f32"])
        return HEAD.format(
            engine={"kvant": "kvant's cache and attention", "definitions": "numpy, by the definitions "
                    "of the schemes (tools/kv_report/definitions.py); kvant was not run"}[self.engine],
            windows=", ".join(map(str, self.window_numbers)), predictions=count,
            ppl=self.quality["f32"]["ppl"])

    def _quality_table(self):
        lines = []
        for scheme, q in self.quality.items():
            bits = SCHEMES[scheme].bits_per_element(self.model.head_size)
            lines.append([f"`{scheme}`", SCHEMES[scheme].what, f"{bits:g}", f"{q['ppl']:.4f}",
                          f"{q['dnll']:+.5f} ± {q['dnll_se']:.5f}", f"{q['kld_mean']:.2g}"
                          if q["kld_mean"] < 1e-3 else f"{q['kld_mean']:.4f}",
                          f"{q['kld_p99']:.2g}", f"{q['top1']:.4f}"])
        return "## Predictions\n\n" + _table(
            ["scheme", "", "bits", "perplexity", "change of the loss", "KL, mean", "KL, 99 %",
             "same token first"], lines)

    def _agreement(self):
        text = ORDERINGS
        klds = {s: [w.kld.mean() for w in ws] for s, ws in self.windows.items()}
        text += _table(["lower KL", "than", "on windows"], [
            [f"`{a}`", f"`{b}`", f"{holds} of {all_}"] for a, b, holds, all_ in expected.orderings(klds)])
        if len(self.window_numbers) == len(expected.INDEPENDENT_WINDOWS):
            text += "\n" + INDEPENDENT + _table(["scheme", "KL here", "KL there", ""], [
                [f"`{s}`", f"{got:.3g}", f"{want:.3g}", "agrees" if near else "**differs**"]
                for s, got, want, near in expected.deviations(self.quality)])
        return text

    def _error_table(self):
        return ERRORS + _table(["scheme", *(f"layer {n}" for n in ERROR_LAYERS)], [
            [f"`{s}`", *(f"{100 * e:.2f} %" for e in errors)] for s, errors in self.errors.items()])

    def _bytes_table(self):
        lengths = (1024, 4096, 32768)
        head = ["scheme", *(f"{KIB[n]} tokens" for n in lengths), *(f"f16's over it, {KIB[n]}" for n in lengths)]
        lines = []
        for scheme in self.quality:
            used = [self._row_bytes(scheme, n) for n in lengths]
            head_ratio = [self._bytes("f16", n) / b for n, b in zip(lengths, used)]
            lines.append([f"`{scheme}`", *map(_mebibytes, used), *(f"{r:.2f}" for r in head_ratio)])
        if self.speeds:
            head.append("peak memory of the process, 32k")
            for line, scheme in zip(lines, self.quality):
                measured = self.speeds.get((scheme, lengths[-1]))
                line.append(_mebibytes(measured["peak_rss"]) if measured else "")
        return (BYTES if self.speeds else BYTES_BY_FORMULA) + _table(head, lines)

    def _time_table(self):
        lengths = (512, 2048, 8192, 32768)
        lines = []
        for scheme in self.quality:
            if not self._ratios(scheme):
                continue
            ratios = dict(self._ratios(scheme))
            crossing = speed.crossover(self._ratios(scheme))
            lines.append([f"`{scheme}`",
                          *(f"{self.speeds[scheme, n]['ms_per_token']:.2f} ({ratios[n]:.2f})"
                            for n in lengths),
                          "" if scheme == "f16" else str(crossing or "no"),
                          self.speeds[scheme, lengths[-1]]["kernel"]])
        return TIME + _table(["scheme", *(f"{KIB[n]}, ms (over f16's)" for n in lengths),
                              "faster than f16 from", "kernel"], lines)


def _mebibytes(count):
    return f"{count / 2**20:.1f} MiB"


def _table(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


CHART = "![{}]({})\n"

HEAD = """# What quantizing the KV cache costs a real model

Written by `scripts/kv_report`; the numbers are also in [report.json](report.json), a scheme at a cache length each.

| | |
|---|---|
| model | SmolLM2-135M-Instruct, Q4_1 weights read back to f32; 30 layers, 9 query and 3 KV heads of 64 |
| text | King James Bible from Genesis 1:1, windows {windows} of 2048 tokens; {predictions} predictions |
| cache and attention | {engine} |
| full precision | f32 in numpy; perplexity {ppl:.4f} |

A model this small is more fragile than a large one: int4 per token is far from free on it. What carries over is the order.

Every token is predicted from the true ones before it, with the cache as decoding token by token would have filled it: a
query sees its own token quantized too, unless the scheme keeps a tail of exact tokens. *KL* is the divergence of the
predicted distribution from that of full precision, in nats; it ranks schemes reliably. The change of the loss does not
where it is small: its standard error is of the paired differences per token.
"""

ORDERINGS = """## Whether it is as it should be

Orderings that any right implementation shows on every window:

"""

INDEPENDENT = """The same measured by an independent implementation. Quantized runs are chaotic, since rounding anywhere flips codes: two
right ones differ by up to 8 % here.

"""

ERRORS = """## Error of attention's output

Relative RMS error over a layer's heads and the first 512 tokens, with queries, keys and values of full precision.

"""

BYTES = """## Memory

Bytes that kvant counts for K and V of all layers with that many tokens in the cache: codes, scales, zero points, and tails
in f16. Peak memory is of a process that fills and reads a cache in kvant, Python and numpy included.

"""

BYTES_BY_FORMULA = """## Memory

Bytes of K and V of all layers with that many tokens in the cache, by formula: codes, scales, zero points, and tails in f16.

"""

TIME = """## Time

Of one decoded token through all layers' caches (append and attention, nothing else of the model), in turns with f16 in
the same process. Ratios are medians of paired rounds and hold where the milliseconds drift. The rare step
that quantizes a whole block at once (KIVI, K per channel) is slower than these.

"""
