#!/usr/bin/env python3
"""Times kvant through oneDNN Graph's functions beside kvant itself and oneDNN, and writes the table.

    bench/onednn/run.py [--build BUILD] [--calls N] [--output FOLDER]

Needs scripts/setup --dev, for oneDNN 3.13. Calls of kvant by its own API (as `kvant bench` times it) and
through libkvant_dnnl_graph.so take turns, over the same buffers; oneDNN's own follow, once where a call takes
seconds. The rows go to bench/results/<machine>/onednn_graph.md.
"""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import machine  # noqa: E402

ONEDNN = ROOT / ".deps" / "onednn-sycl" / "lib"
HEADS = ["--heads", "32", "--kv-heads", "8", "--head-size", "128"]
DECODE = [*HEADS, "--q-len", "1", "--kv-len", "32768"]
PROMPT = [*HEADS, "--q-len", "512", "--kv-len", "4096"]
ENCODER = ["--heads", "16", "--head-size", "64", "--q-len", "384", "--kv-len", "384", "--mask=Nx1x1xS"]
INT8 = ["--k", "s8:g32", "--v", "s8:g32"]
INT4 = ["--k", "u4:g32", "--v", "u4:g32"]
STATIC = ["--static-int8"]
# Name, shape, storage of K and V, calls of oneDNN.
CASES = [("decode, 32,768 tokens, int8", DECODE, INT8, 2),
         ("decode, 32,768 tokens, int4", DECODE, INT4, 2),
         ("decode, 32,768 tokens, static int8", DECODE, STATIC, 40),
         ("decode, 32,768 tokens, f32", DECODE, [], 40),
         ("prompt, 512 x 4,096, int8", PROMPT, INT8, 1),
         ("prompt, 512 x 4,096, int4", PROMPT, INT4, 1),
         ("prompt, 512 x 4,096, static int8", PROMPT, STATIC, 8),
         ("prompt, 512 x 4,096, f32", PROMPT, [], 8),
         ("encoder, 16 heads of 64, 384 tokens, static int8", ENCODER, STATIC, 60),
         ("encoder, 16 heads of 64, 384 tokens, f32", ENCODER, [], 60)]


def measure(build, shape, storage, calls, onednn_calls):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(ONEDNN),
                   "OCL_ICD_FILENAMES": str(ONEDNN / "libintelocl.so")}
    with tempfile.NamedTemporaryFile(suffix=".json") as graph:
        made = subprocess.run([build / "kvant", "make", *shape, *storage], check=True,
                              capture_output=True)
        pathlib.Path(graph.name).write_bytes(made.stdout)
        done = subprocess.run(
            [build / "onednn" / "onednn_graph_bench", graph.name, build / "libkvant_dnnl_graph.so",
             "libdnnl.so.3", str(calls), str(onednn_calls)],
            check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def milliseconds(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def markdown(description, rows, calls):
    lines = [
        "# kvant through oneDNN Graph's functions",
        "",
        f"{description['cpu']}, {description['cores']} cores, {description['memory_gib']} GiB; "
        f"oneDNN 3.13 on SYCL's CPU device; {description['commit']}, "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}. 32 query heads on 8 of K and V, head size 128, "
        "f32 queries, groups of 32, unless said; in static int8 queries, K, V, probabilities and output are codes "
        "with constant scales. All threads.",
        "",
        f"Medians of {calls} calls each (prompts: {calls // 4}), kvant's own and through the ABI in turns over rotating "
        "buffers; the ratio is the median of those of neighbours. oneDNN's calls of compressed attention, in reference "
        "code, are one or two. `bench/onednn/run.py` makes this table.",
        "",
        "| | kvant, ms | through the ABI, ms | ratio | oneDNN, ms | oneDNN / ABI | read from memory, GB/s | share of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        share = row["bytes"] / row["through_ms"] * 1e-6 / row["read_gb_per_s"]
        lines.append(
            f"| {name} | {milliseconds(row['kvant_ms'])} | {milliseconds(row['through_ms'])} | {row['median_ratio']:.3f} "
            f"| {milliseconds(row['onednn_ms'])} | {row['onednn_ms'] / row['through_ms']:,.1f} "
            f"| {row['read_gb_per_s']:.1f} | {share:.0%} |")
    lines += [
        "",
        "Compiling again what was compiled for the same shapes takes "
        f"{rows[0][1]['compile_us']:.0f} us through the ABI.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--output", type=pathlib.Path, help="folder (bench/results/MACHINE)")
    parser.add_argument("--only", default="", help="cases with this in their name; printed, not written")
    arguments = parser.parse_args()
    description = machine.describe(ROOT)
    rows = []
    for name, shape, storage, onednn_calls in CASES:
        if arguments.only not in name:
            continue
        calls = arguments.calls // 4 if shape is PROMPT else arguments.calls
        rows.append((name, measure(arguments.build, shape, storage, calls, onednn_calls)))
        print(name, json.dumps(rows[-1][1]), file=sys.stderr, flush=True)
    table = markdown(description, rows, arguments.calls)
    print(table)
    if arguments.only:
        return
    folder = arguments.output or ROOT / "bench" / "results" / machine.slug(description)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "onednn_graph.md").write_text(table)


if __name__ == "__main__":
    main()
