"""The sweep as a table (Markdown), data (JSON) and a heat map (SVG)."""
import datetime
import json

from lines import QUERIES

CLIFF = 3


def _bits(line):
    k, v = line.bits()
    return str(k) if k == v else f"{k} and {v}"


def _heat_map(path, ratios):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvant"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import colors, pyplot

    lines = list(ratios)
    figure, axes = pyplot.subplots(figsize=(7, 2 + 0.17 * len(lines)), layout="constrained")
    cells = [[ratios[line].get(q, float("nan")) for q in QUERIES] for line in lines]
    image = axes.imshow(cells, aspect="auto", cmap="RdYlGn_r", norm=colors.LogNorm(1, 10))
    axes.set_yticks(range(len(lines)), [f"{line.family}: {line.name}" for line in lines], fontsize=6)
    axes.set_xticks(range(len(QUERIES)), [str(q) for q in QUERIES])
    axes.set_xlabel("queries")
    for y, row in enumerate(cells):
        for x, ratio in enumerate(row):
            if ratio == ratio:
                axes.text(x, y, f"{ratio:.1f}", ha="center", va="center", fontsize=5,
                          weight="bold" if ratio > CLIFF else "normal")
    figure.colorbar(image, label="times the best of the same bits, per element of K and V", shrink=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _table(ratios, found, family):
    rows = [f"## {family}", "", "| K and V | bits | " + " | ".join(f"{q} queries" for q in QUERIES) + " |",
            "|---|---|" + "--:|" * len(QUERIES)]
    for line, of_line in ratios.items():
        if line.family != family:
            continue
        cells = []
        for q in QUERIES:
            if q not in of_line:
                cells.append("-")
                continue
            mark = "**" if of_line[q] > CLIFF else ""
            cells.append(f"{mark}{of_line[q]:.2f}{mark} ({found[line, q]['ns']:.3g} ns)")
        rows.append(f"| {line.name} | {_bits(line)} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def markdown(description, found, ratios, best, refused):
    made = datetime.date.today().isoformat()
    text = ["# The CPU's kernels over formats, layouts, heads, masks and queries", "",
            f"{made}, {description['cpu']}, {description['cores']} cores ({description['flags']}), commit "
            f"{description['commit']}. By `scripts/bench --sweep`: one thread, 8 query heads over 2 KV heads of 128 "
            "channels but for what a line says, 4096 tokens.", "",
            "A number is the time per element of K and V over that of the best line of its bits with as many queries "
            "(of a mixture: over the mean of both bests); behind it the time itself. What is **bold** takes more than "
            f"{CLIFF} times as long. Where lengths, ranges or pages say which tokens exist, some 3 of 4 do at least, and no "
            "such line counts as a best; nor does one of bf16 queries, whose products may be in bf16.", "",
            "![heat map](sweep.svg)", "", "Best of the bits, ns per element: " + "; ".join(
                f"{bits} bits " + ", ".join(f"{best[bits, q]:.3g}" for q in QUERIES)
                for bits in sorted({b for b, _ in best})) + f" (with {', '.join(map(str, QUERIES))} queries).", ""]
    for family in dict.fromkeys(line.family for line in ratios):
        text += _table(ratios, found, family)
    cliffs = [(line, q, r) for line, of_line in ratios.items() for q, r in of_line.items() if r > CLIFF]
    text += [f"## Cliffs: {len(cliffs)} of {len(found)}", ""]
    text += [f"- {line.family}, {line.name}, {q} queries: {r:.1f} times. {found[line, q]['kernel']}"
             for line, q, r in cliffs] or ["None."]
    if refused:
        text += ["", "## Not taken", "", *(f"- {line.family}, {line.name}: {why}" for line, why in refused.items())]
    return "\n".join(text) + "\n"


def write(folder, description, found, ratios, best, refused):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.md").write_text(markdown(description, found, ratios, best, refused))
    data = [{"family": line.family, "name": line.name, "bits": line.bits(), "queries": q,
             "ns_per_element": round(got["ns"], 5), "times_best": round(ratios[line][q], 3), "kernel": got["kernel"]}
            for (line, q), got in found.items()]
    rows = ",\n".join(json.dumps(row) for row in data)
    text = f"{{\"machine\": {json.dumps(description)},\n\"cases\": [\n{rows}\n]}}\n"
    (folder / "sweep.json").write_text(text)
    _heat_map(folder / "sweep.svg", ratios)
