"""A run as a table (Markdown), as data (JSON) and as a plot (SVG)."""
import json

NOTES = """\
- Times are of one call, best / median over all rounds; within a round each contestant has its turn,
  and all others are stopped meanwhile. Buffers are taken in turns so that no cache still holds
  them. Peers are called from Python, which adds some microseconds.
- GB/s: bytes of K, V, queries and output over the best time; its share is of the plain read
  bandwidth that the same number of threads reached in the same rounds.
- bits: per element of K and V, with scales and zero points. Formats differ: where a peer has no zero
  points or one static scale, it does less work per element.
- against kvant: this row's best time over that of the kvant row named.
- error: relative RMS against attention in f64 on the very values that the contestant's own codes
  stand for (f32 queries), so it leaves out what the format itself loses. Values are normal with
  means that differ per head and channel; the softmax is flat, which is hard on f16 sums."""


def _pair(row, threads, text):
    cells = [text(row["threads"][n]) if n in row["threads"] else "-" for n in threads]
    return " / ".join(cells)


def _number(x):
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _ratio(result, name):
    return f"{_number(result['ratio'][name])}x" if name in result["ratio"] else "-"


def _ms(result):
    once = " (one call)" if result["runs"] == 1 else ""
    return f"{_number(result['ms_best'])} / {_number(result['ms_median'])}{once}"


def _case_table(case):
    threads = sorted(case["read_gb_per_s"], key=int)
    reads = ", ".join(f"{n}: {case['read_gb_per_s'][n]:.1f} GB/s" for n in threads)
    each = " / ".join(threads)
    rate = "GFLOP/s" if case["prefill"] else "GB/s"
    columns = ["contestant", "K and V", "bits"]
    columns += [f"ms, {n} thread{'s' if n != '1' else ''}" for n in threads]
    columns.append(f"{rate}, {each}")
    if not case["prefill"]:
        columns.append(f"share of read, {each}")
    columns += [f"against kvant, {each}", "error"]
    lines = [f"## {case['name']}: {case['title']}", ""]
    lines += [f"Read bandwidth by threads: {reads}."]
    if case["prefill"]:
        lines += ["GFLOP/s count the full rectangle of scores, masked ones too."]
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in case["contestants"]:
        ratios = [
            _pair(row, threads, lambda r, name=name: _ratio(r, name)) + f" {name.removeprefix('kvant ')}"
            for name in row["against"]
        ]
        cells = [row["name"], row["format"], f"{row['bits']:g}"]
        cells += [_ms(row["threads"][n]) if n in row["threads"] else "-" for n in threads]
        key = "gflop_per_s" if case["prefill"] else "gb_per_s"
        cells.append(_pair(row, threads, lambda r: _number(r[key])))
        if not case["prefill"]:
            cells.append(_pair(row, threads, lambda r: f"{r['share_of_read']:.0%}"))
        cells.append(", ".join(ratios))
        cells.append("-" if row["error"] is None else f"{row['error']:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    if case["not_run"]:
        lines += ["", "Not run:"]
        lines += [f"- {name}: {why}" for name, why in case["not_run"].items()]
    lines += ["", "kvant's kernels:"]
    for row in case["contestants"]:
        if row["family"] == "kvant":
            lines.append(f"- {row['name']}: {next(iter(row['threads'].values()))['detail']}")
    return lines


def markdown(run):
    machine = run["machine"]
    lines = ["# kvant beside other implementations", ""]
    lines += [f"{run['date']}, {run['rounds']} rounds.", ""]
    if run["quick"]:
        lines += ["**Small sizes: this says that it runs, not how fast.**", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    lines += [f"| {name} | {value} |" for name, value in run["versions"].items()]
    lines += [f"| {name} | missing: {why} |" for name, why in run["missing"].items()]
    lines += ["", NOTES]
    for case in run["cases"]:
        lines += ["", *_case_table(case)]
    return "\n".join(lines)


COLORS = {
    "kvant": "#d62728",
    "onnxruntime": "#1f77b4",
    "ggml": "#2ca02c",
    "ik_llama": "#9467bd",
    "torch": "#ff7f0e",
    "onednn": "#7f7f7f",
}


def _plot(run, path):
    """Bars of the best times with the most threads, a panel per case."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "kvant", "svg.fonttype": "none", "font.size": 8})
    threads = str(max(run["threads"]))
    cases = run["cases"]
    heights = [len(case["contestants"]) + 3 for case in cases]
    figure, panels = pyplot.subplots(
        len(cases),
        figsize=(8, 0.19 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for case, panel in zip(cases, panels[:, 0]):
        rows = [r for r in case["contestants"] if threads in r["threads"]]
        rows.sort(key=lambda r: r["threads"][threads]["ms_best"])
        times = [r["threads"][threads]["ms_best"] for r in rows]
        labels = [f"{r['name']} ({r['bits']:g} bits)" for r in rows]
        bars = panel.barh(labels, times, color=[COLORS[r["family"]] for r in rows])
        panel.bar_label(bars, [_number(t) for t in times], padding=2)
        panel.set(xscale="log", title=f"{case['title']}: ms, {threads} thread(s)")
        panel.set_xlim(left=min(times, default=1) / 2)
        panel.invert_yaxis()
        panel.margins(x=0.1)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(run, folder):
    """peers.md, peers.json and, where matplotlib is there, peers.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    plot = folder / "peers.svg"
    text = markdown(run)
    try:
        _plot(run, plot)
        text = text.replace("\n\n", f"\n\n![Times]({plot.name})\n\n", 1)
    except ImportError:
        pass
    (folder / "peers.md").write_text(text + "\n")
    (folder / "peers.json").write_text(json.dumps(run, indent=1) + "\n")
