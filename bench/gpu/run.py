"""All that a GPU is wanted for, within eight minutes: run.py OUT

Tests (operations, conformance, captured graphs, lives of KvCache, both sanitizers), then the
benchmark with what time is left. Every step has its limit; after one that fails the next begins.
OUT receives summary.md, tests.json, log.txt, and the benchmark's files (bench.py).
"""
import concurrent.futures
import glob
import json
import os
import pathlib
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE / "kvant_gpu_tests"
SECONDS = 470
# Small shapes of each kind: a sanitizer makes them a hundred times slower.
SANITIZED = "*ConformanceTest*/Segments2*:*ConformanceTest*/RealLengths_0:*GraphCapture*"
SANITIZED += ":*ConformanceTest*/Op_features_1*:*ConformanceTest*/Groups_u4*"
# Most of conformance is compiling. Processes share what they have compiled, also with later steps.
MANY = max(4, min(16, os.cpu_count()))
# Name, gtest filter, seconds, processes, tool of compute-sanitizer.
STEPS = [
    ("operations", "*OpParity*:*MmaModel*", 40, 4, ""),
    ("conformance", "*ConformanceTest.*:*ThreadsTest*", 120, MANY, ""),
    ("captured graphs", "*GraphCapture*", 30, 2, ""),
    ("caches", "*KvCache*OnGpu*:*KvCacheLives*", 45, 4, ""),
    ("memcheck", SANITIZED, 30, 4, "memcheck"),
    ("racecheck", SANITIZED, 30, 4, "racecheck"),
]


def find_nvrtc():
    """NVRTC in a wheel of NVIDIA's, such as torch brings; none: where the loader looks."""
    folders = {*site.getsitepackages(), site.getusersitepackages(), *sys.path}
    folders.add(sysconfig.get_paths()["purelib"])
    found = []
    for folder in filter(None, folders):
        found += glob.glob(f"{folder}/nvidia/**/libnvrtc.so.1[0-9]", recursive=True)
    return max(found, key=lambda path: path.rsplit(".", 1)[1], default=None)


def environment(cache):
    env = dict(os.environ, KVANT_CONFORMANCE_ENGINES="cuda", PYTHONUNBUFFERED="1")
    env.setdefault("KVANT_CACHE_DIR", cache)
    if "KVANT_LIBNVRTC" not in env and (nvrtc := find_nvrtc()):
        env["KVANT_LIBNVRTC"] = nvrtc
    return env


def _end(process, deadline, log):
    """Its exit code; None where it had to be stopped."""
    try:
        output, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    log.write(output)
    return code


def _failures(path):
    """Tests run, tests skipped, and the failed ones with their first words."""
    ran, skipped, failed = 0, 0, {}
    if not path.exists():
        return ran, skipped, failed, {}
    properties = {}
    for suite in json.loads(path.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            if test["status"] != "RUN":
                continue
            if test["result"] == "SKIPPED":
                skipped += 1
                continue
            ran += 1
            properties |= {k: v for k, v in test.items() if k.startswith("equal_to_")}
            if "failures" in test:
                words = test["failures"][0]["failure"][:1500]
                failed[f"{suite['name']}.{test['name']}"] = words
    return ran, skipped, failed, properties


def run_tests(step, env, deadline, log, folder):
    name, pattern, seconds, processes, tool = step
    command = [str(TESTS), f"--gtest_filter={pattern}", "--gtest_brief=1"]
    if tool:
        sanitizer = shutil.which("compute-sanitizer")
        if not sanitizer:
            return {"name": name, "result": "not run: compute-sanitizer is not on PATH"}
        command = [sanitizer, "--tool", tool, "--error-exitcode", "86", *command]
    deadline = min(deadline, time.monotonic() + seconds)
    start = time.monotonic()
    running = []
    for shard in range(processes):
        path = folder / f"{name.replace(' ', '_')}.{shard}.json"
        shards = {"GTEST_TOTAL_SHARDS": str(processes), "GTEST_SHARD_INDEX": str(shard)}
        process = subprocess.Popen(
            [*command, f"--gtest_output=json:{path}"],
            env={**env, **shards},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running.append((process, path))
    # All pipes are read at once, or a process with much to say would wait for its reader.
    with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:
        codes = list(pool.map(lambda one: _end(one[0], deadline, log), running))
    outcome = {"name": name, "ran": 0, "skipped": 0, "failed": {}, "seconds": 0}
    for _, path in running:
        ran, skipped, failed, properties = _failures(path)
        outcome["ran"] += ran
        outcome["skipped"] += skipped
        outcome["failed"] |= failed
        outcome |= properties
    outcome["seconds"] = round(time.monotonic() - start, 1)
    late, other = codes.count(None), [c for c in codes if c not in (0, 1, 86, None)]
    passed = codes == [0] * len(codes) and outcome["ran"] > 0
    words = ["passed" if passed else "FAILED", f"{outcome['ran']} tests"]
    words += [f"{len(outcome['failed'])} failed"] if outcome["failed"] else []
    words += [f"{outcome['skipped']} skipped"] if outcome["skipped"] else []
    words += [f"{late} of {processes} processes stopped at the limit"] if late else []
    words += [f"processes ended with {other}"] if other else []
    words += [f"{tool} reports errors (log.txt)"] if 86 in codes else []
    return {**outcome, "result": ", ".join(words)}


def run_bench(env, deadline, log, out):
    left = deadline - time.monotonic()
    if left < 20:
        return {"name": "benchmark", "result": "not run: no time was left"}
    # It starts no shape late, and has half a minute for the one that it is at.
    command = [sys.executable, str(HERE / "bench.py"), str(out), "--seconds", str(left - 30)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    code = _end(process, deadline, log)
    result = {0: "done", None: "stopped at the limit"}.get(code, f"FAILED with {code}")
    return {"name": "benchmark", "result": result}


def write_summary(outcomes, seconds, env, out):
    (out / "tests.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    lines = [f"# What was run, in {seconds:.0f} s", "", "| step | result |", "|---|---|"]
    lines += [f"| {o['name']} | {o['result']} |" for o in outcomes]
    lines += ["", f"NVRTC: {env.get('KVANT_LIBNVRTC', 'where the loader finds it')}", ""]
    for outcome in outcomes:
        for test, words in list(outcome.get("failed", {}).items())[:20]:
            lines += [f"## {test}", "", "```", words, "```", ""]
    (out / "summary.md").write_text("\n".join(lines))
    print("\n".join(lines[: len(outcomes) + 4]))


def main():
    if len(sys.argv) != 2:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    start = time.monotonic()
    deadline = start + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        env = environment(str(folder / "kernels"))
        probe = subprocess.run(
            [TESTS, "--gtest_filter=none"], env=env, capture_output=True, text=True
        )
        if probe.returncode == 2:
            print(probe.stderr.strip(), file=sys.stderr)
            return 2
        out = pathlib.Path(sys.argv[1])
        out.mkdir(parents=True, exist_ok=True)
        outcomes = []
        with open(out / "log.txt", "w") as log:
            for step in STEPS:
                print(f"run: {step[0]}", flush=True)
                outcomes.append(run_tests(step, env, deadline, log, folder))
                write_summary(outcomes, time.monotonic() - start, env, out)
            outcomes.append(run_bench(env, deadline, log, out))
            write_summary(outcomes, time.monotonic() - start, env, out)
    bad = any("FAILED" in o["result"] or "limit" in o["result"] for o in outcomes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
