"""A run of bench.py as a table (Markdown), as data (JSON) and as plots (SVG)."""
import html
import json

NOTES = """\
- us: of one call, the median over all replays of a CUDA graph of at least 20 calls; each takes the
  next of as many copies of K and V as exceed four times the second-level cache. Data are random.
- GB/s: bytes of K, V, scales and zero points over that time; of copy: its share of what a copy in
  device memory moved (read and written) in the same rounds. floor: the time of those bytes at that
  speed. Formats differ in bytes.
- against flash: torch's flash attention on bf16 of the same shape takes so many times as long.
- error: relative L2 against f64 on the very values that the contestant's own codes stand for, one
  sequence's one group of heads; - where that takes too long. Beyond 2% a result is WRONG."""

WRONG = 0.02


def _number(x):
    return "-" if x is None else f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"


def _error(error):
    if error is None:
        return "-"
    return f"{error:.1e}" if error < WRONG else f"{error:.1e} WRONG"


def _shape_table(shape):
    speeds = shape["gb_per_s"]
    lines = [f"## {shape['name']}", ""]
    lines += [f"Copy {speeds['copy']:.0f} GB/s, read {speeds['read']:.0f} GB/s.", ""]
    rate = "TFLOP/s" if shape["prefill"] else "GB/s"
    columns = ["contestant", "us", rate, "of copy", "floor us", "against flash", "error"]
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in shape["contestants"]:
        ratio = row["against_base"]
        cells = [row["name"], _number(row["us"])]
        if shape["prefill"]:
            cells += [_number(row["tflop_per_s"]), "-", "-"]
        else:
            cells += [_number(row["gb_per_s"]), f"{row['share_of_copy']:.0%}"]
            cells += [_number(row["floor_us"])]
        cells += [f"{_number(ratio)}x" if ratio else "-"]
        cells += [_error(row["error"])]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nNot run: {name}: {why}" for name, why in shape["not_run"].items()]
    lines += ["", *(f"- {r['name']}: {r['detail']}" for r in shape["contestants"] if r["detail"])]
    return lines


def _host(host):
    lines = [f"## Costs on the host ({host['shape']}, {host['format']})", ""]
    if "failed" in host:
        return lines + [f"Not measured: {host['failed']}"]
    compiled = host["compile"]
    return lines + [
        f"Execute takes {host['execute_us']:.1f} us. Compiling takes {compiled['cold_ms']:.0f} ms, "
        f"{compiled['disk_ms']:.1f} ms where the kernel is on disk, {compiled['memory_ms']:.2f} ms "
        "where it is in memory."
    ]


def markdown(run):
    device = run["device"]
    lines = [f"# Attention on {device['name']}", ""]
    lines += [f"{run['date']}, {run['rounds']} rounds.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in {**device, **run["versions"]}.items()]
    lines += ["", NOTES]
    for shape in run["shapes"]:
        lines += ["", *_shape_table(shape)]
    lines += ["", *_host(run["host"])]
    if run["not_run"]:
        lines += ["", "Not run:", *(f"- {name}: {why}" for name, why in run["not_run"].items())]
    return "\n".join(lines) + "\n"


COLORS = {"kvant": "#d62728", "torch": "#ff7f0e", "triton": "#1f77b4"}
ROW, LABEL, WIDTH = 14, 230, 460


def _bar(y, row, most):
    color = COLORS[row["name"].split()[0]]
    length = max(1, WIDTH * row["us"] / most)
    name = html.escape(row["name"])
    return (
        f'<text x="{LABEL - 6}" y="{y + 10}" text-anchor="end">{name}</text>'
        f'<rect x="{LABEL}" y="{y + 1}" width="{length:.1f}" height="{ROW - 3}" fill="{color}"/>'
        f'<text x="{LABEL + length + 4:.1f}" y="{y + 10}">{_number(row["us"])}</text>'
    )


def svg(shapes):
    """Bars of microseconds, a panel per shape, each to its own scale."""
    y, parts = 8, []
    for shape in shapes:
        title = html.escape(f"{shape['name']}: us")
        parts.append(f'<text x="{LABEL}" y="{y + 10}" font-weight="bold">{title}</text>')
        y += ROW + 2
        most = max((row["us"] for row in shape["contestants"]), default=1)
        for row in sorted(shape["contestants"], key=lambda row: row["us"]):
            parts.append(_bar(y, row, most))
            y += ROW
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 70}" height="{y}" '
    style = 'font-family="sans-serif" font-size="10">'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    return head + style + back + "\n".join(parts) + "</svg>\n"


def write(run, folder):
    (folder / "results.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(run))
    for name, prefill in (("decode", False), ("prefill", True)):
        shapes = [shape for shape in run["shapes"] if shape["prefill"] == prefill]
        (folder / f"{name}.svg").write_text(svg(shapes))
