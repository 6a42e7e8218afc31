"""bench/peers runs kvant alone on small sizes, and its table holds; so does the sweep's. Usage: bench_peers_test.py
SOURCE_DIR BUILD_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77


def python_with_numpy(source):
    """The benchmark's own environment, or this one."""
    for python in (source / ".peers/venv/bin/python", sys.executable):
        try:
            if subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0:
                return python
        except OSError:
            pass
    return None


def check(run):
    names = [case["name"] for case in run["cases"]]
    assert names == ["decode-r4", "prefill"], names
    for case in run["cases"]:
        rows = {row["name"]: row for row in case["contestants"]}
        assert {"kvant int4", "kvant int8"} <= set(rows), rows
        assert case["read_gb_per_s"]["1"] > 0, case
        for name, row in rows.items():
            # bf16 math rounds to 8 bits; the others keep the queries' precision.
            assert 0 < row["error"] < (0.01 if "bf16" in name else 2e-4), row
            result = row["threads"]["1"]
            assert 0 < result["ms_best"] <= result["ms_median"], row
        for name, why in case["not_run"].items():
            assert name not in rows and "AVX2" in name and why, (name, why)
    # Eight KV heads of 512 tokens, K and V, beside queries and output of one token.
    decode = {row["name"]: row for row in run["cases"][0]["contestants"]}
    elements = 2 * 8 * 512 * 128
    extra = decode["kvant int4"]["threads"]["1"]["bytes"] - elements * 4.75 / 8
    assert 2 * 32 * 128 * 4 <= extra <= 2 * 32 * 128 * 4 + 16, extra


def check_sweep(source, build):
    """Every line of the sweep is a graph, and its table finds the one that is four times as slow."""
    sys.path.insert(0, str(source / "bench/sweep"))
    import lines
    import run
    import tables

    found = {}
    for line in lines.all_lines():
        subprocess.run([build / "kvant", "make", *line.make(1)], check=True, capture_output=True)
        for queries in lines.QUERIES:
            planted = line.name == "s8:g32" and queries == 4
            found[line, queries] = {"ns": (4.0 if planted else 1.0) * queries, "kernel": "a kernel"}
    machine = {"cpu": "a CPU", "cores": 1, "flags": "", "commit": ""}
    ratios = run.ratios(found)
    text = tables.markdown(machine, found, ratios, run.best_of_bits(found), {})
    assert f"## Cliffs: 1 of {len(found)}" in text, text
    assert "- formats, s8:g32, 4 queries: 4.0 times. a kernel" in text, text


def main():
    source, build = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
    check_sweep(source, build)
    python = python_with_numpy(source)
    if python is None or not (build / "kvant_worker").exists():
        print("no numpy, or kvant_worker is not built")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quick", "--only", "kvant", "--cases", "decode-r4,prefill", "--threads", "1"]
        options += ["--rounds", "1", "--build", build, "--output", folder, "--logs", folder]
        command = [python, source / "bench/peers/run.py", *options]
        table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "| kvant int4 | int4, groups of 32" in table, table
        check(json.loads((pathlib.Path(folder) / "peers.json").read_text()))
        bad = subprocess.run(
            [*command[:2], "--cases", "nonsense"], capture_output=True, text=True
        )
        assert bad.returncode == 2 and "nonsense" in bad.stderr, bad
    return 0


if __name__ == "__main__":
    sys.exit(main())
