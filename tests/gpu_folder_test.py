"""The folder for GPU machines (scripts/gpu), where there is no GPU: it needs no library but the C
library, says what is missing, and its benchmark runs on a driver that does nothing.

Usage: gpu_folder_test.py SOURCE_DIR BUILD_DIR; skipped where BUILD_DIR has no gpu/.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SKIPPED = 77
C_LIBRARY = re.compile(r"^\s*(linux-vdso|libm|libc|libdl|libpthread|librt|/lib\S*/ld-linux)")
PROGRAMS = ("kvant", "kvant_gpu_tests", "kvant_gpu_worker")


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def check_libraries(folder):
    for program in PROGRAMS:
        for line in run("ldd", folder / program).stdout.splitlines():
            assert C_LIBRARY.match(line), f"{program} needs {line.strip()}"


def check_without_gpu(folder, out):
    """All that starts where no driver is ends with 2 and a sentence."""
    none = {"KVANT_LIBCUDA": "libno-such-driver.so"}
    graph = out / "graph.json"
    graph.write_text(run(folder / "kvant", "make", "--kv-len", "64").stdout)
    tensors = ["--inputs", out / "in", "--outputs", out / "out"]
    commands = [[folder / "kvant", c, graph, "--backend", "cuda"] for c in ("check", "bench")]
    commands.append([folder / "kvant", "run", graph, "--backend", "cuda", *tensors])
    commands += [[folder / "kvant_gpu_tests"], [folder / "kvant_gpu_worker"]]
    commands += [[folder / "run.sh", out / "none"], [sys.executable, folder / "bench.py", out]]
    for command in commands:
        result = run(*command, **none)
        assert result.returncode == 2, (command, result)
        assert "no NVIDIA driver" in result.stderr, (command, result.stderr)
    assert not (out / "none").exists()
    check = run(folder / "kvant", "check", graph)
    assert check.returncode == 0, check


def check_benchmark(folder, build, out):
    """On a driver whose kernels do nothing and take a millisecond: what is written, not what it
    says."""
    fakes = {name: build / "tests" / f"libkvant_fake_{name}.so" for name in ("libcuda", "libnvrtc")}
    environment = {f"KVANT_{name.upper()}": str(path) for name, path in fakes.items()}
    environment |= {"KVANT_FAKE_NVRTC": "13.0", "KVANT_FAKE_DEVICES": "1"}
    environment["KVANT_CACHE_DIR"] = str(out / "cache")
    for shape in ("B=1 32/8 S=8k", "prefill 512"):
        command = [sys.executable, folder / "bench.py", out, "--rounds", "1", "--shapes", shape]
        result = run(*command, "--no-peers", **environment)
        assert result.returncode == 0, result
        results = json.loads((out / "results.json").read_text())
        measured = results["shapes"][0]
        assert measured["name"] == shape and len(measured["contestants"]) == 3, measured
        assert measured["not_run"] == {}, measured
        for row in measured["contestants"]:
            assert row["us"] == 1000 / row["calls_per_replay"], row
        assert "execute_us" in results["host"], results["host"]
        table = (out / "results.md").read_text()
        assert f"## {shape}" in table and "| kvant int4 g32 zp |" in table, table
        for plot in ("decode.svg", "prefill.svg"):
            xml.etree.ElementTree.parse(out / plot)
    check_tests(folder, out, environment)


def check_tests(folder, out, environment):
    """Where kernels do nothing, every test of an operation fails."""
    report = out / "tests.json"
    filters = ["--gtest_filter=*OpParity*", f"--gtest_output=json:{report}"]
    result = run(folder / "kvant_gpu_tests", *filters, **environment)
    assert result.returncode == 1, result
    tests = [t for s in json.loads(report.read_text())["testsuites"] for t in s["testsuite"]]
    passed = [test["name"] for test in tests if "failures" not in test]
    assert len(tests) > 50 and not passed, passed


def main():
    build = pathlib.Path(sys.argv[2]).resolve()
    folder = build / "gpu"
    missing = [name for name in (*PROGRAMS, "bench.py") if not (folder / name).exists()]
    if missing:
        print(f"no {missing[0]} in {folder}")
        return SKIPPED
    check_libraries(folder)
    with tempfile.TemporaryDirectory() as out:
        check_without_gpu(folder, pathlib.Path(out))
        check_benchmark(folder, build, pathlib.Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
