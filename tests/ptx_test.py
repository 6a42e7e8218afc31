"""The CUDA kernels as what NVRTC makes of them, and the driver path, on the emulator of PTX (tests/ptxemu).

Usage: ptx_test.py SOURCE_DIR BUILD_DIR [--all] [TEST..]
--all (scripts/ptx): every architecture, problem and case, and other roundings; hours. Else a spread.
Skipped where there is no NVRTC, or no emulator was built; fails then where KVANT_REQUIRE_SHARED is set.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
SOURCE, BUILD = (pathlib.Path(arg).resolve() for arg in sys.argv[1:3])
ALL = "--all" in sys.argv
EMULATOR = BUILD / "ptxemu"
KVANT, GPU_TESTS = str(BUILD / "kvant"), str(BUILD / "gpu/kvant_gpu_tests")
sys.path.insert(0, str(SOURCE / "tests/ptxemu"))

import problems  # noqa: E402

ARCHS = ("sm_90a", "sm_80", "sm_100a", "sm_120")
# How an architecture may compute: as it is stated, up to what is stated for approximations, by contracting
# sums and products, and by the sums of tensor cores. Blocks and warps run in other orders.
MODELS = ({"PTXEMU_APPROX_ULPS": "0"}, {"PTXEMU_APPROX_ULPS": "2", "PTXEMU_SEED": "2"},
          {"PTXEMU_CONTRACT": "1", "PTXEMU_SEED": "3"}, {"PTXEMU_TRUNCATE_MMA": "1", "PTXEMU_SEED": "4"})
# Entries of the kernels; what the rows launch is compared with it.
ENTRIES = {"attention_codes", "attention_parts", "attention_tiles", "merge_attention",
           "quantize_elements", "quantize_rows", "quantize_tiles", "rotate_blocks", "rotate_runs"}

_cache = tempfile.TemporaryDirectory()
# Where kvant looks for NVRTC beside the loader's folders.
NVRTCS = [os.environ.get("KVANT_LIBNVRTC")] + [
    str(path) for folder in ("/usr/local/cuda/lib64", SOURCE / ".deps/cuda/lib")
    for path in sorted(pathlib.Path(folder).glob("libnvrtc.so.1[23]"), reverse=True)]
if real := next(filter(None, NVRTCS), None):
    os.environ.setdefault("PTXEMU_NVRTC", real)


def environment(arch="sm_90a", **more):
    return {**os.environ, "KVANT_LIBCUDA": str(EMULATOR / "libptxemu_cuda.so"),
            "KVANT_LIBNVRTC": str(EMULATOR / "libptxemu_nvrtc.so"), "KVANT_CACHE_DIR": _cache.name,
            "PTXEMU_ARCH": arch, **more}


def run(command, env, stdin=None):
    result = subprocess.run(command, input=stdin or "", capture_output=True, text=True, env=env,
                            timeout=None if ALL else 900)
    return result.returncode, (result.stdout + result.stderr).strip()


def run_tests(filter_, env):
    """What passes where no test was run has failed."""
    code, text = run([GPU_TESTS, "--gtest_brief=1", f"--gtest_filter={filter_}"], env)
    return (code, text) if re.search(r"PASSED  . [1-9]", text) else (code or 1, text)


def check(graph, env, data="real"):
    return run([KVANT, "check", "-", "--backend", "cuda", "--data", data], env, graph)


def on_all_cores(call, arguments):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: call(*one), arguments))


class PtxTest(unittest.TestCase):
    def expect_passed(self, results):
        """results: (name, (exit code, text))."""
        failed = [f"{name}\n{text[:1500]}" for name, (code, text) in results if code != 0]
        self.assertTrue(results)
        self.assertFalse(failed, f"{len(failed)} of {len(results)}\n" + "\n\n".join(failed))

    def test_the_emulator_finds_what_is_planted(self):
        self.expect_passed([("selftest", run(
            [sys.executable, str(SOURCE / "tests/ptxemu/selftest.py"), str(EMULATOR)], dict(os.environ)))])

    def test_operations_and_captured_graphs(self):
        self.expect_passed([(arch, run_tests("*OpParity*:*GraphCapture*", environment(arch)))
                            for arch in (ARCHS if ALL else ARCHS[:1])])

    def test_caches(self):
        """Races checked, each half on another architecture."""
        halves = [("KvCacheLivesTest.OnAGpu", 0), ("KvCache*OnGpu*", 1)]
        self.expect_passed([one for one in on_all_cores(
            lambda name, arch: (f"{name}, {arch}", run_tests(f"*{name}*", environment(arch, PTXEMU_RACES="1"))),
            [(name, arch) for name, i in halves for arch in (ARCHS if ALL else ARCHS[i:i + 1])])])

    def test_every_kernel(self):
        log = pathlib.Path(_cache.name) / "rows.jsonl"
        made = list(problems.rows(KVANT))
        if ALL:
            runs = [(f"{name}, {arch}, {model}", graph, environment(arch, **model, PTXEMU_RACES="1",
                                                                  PTXEMU_LOG=str(log)))
                    for name, graph in made for arch in ARCHS for model in MODELS]
        else:
            # Of attention and stores every third, since neighbours in the table are alike, on other architectures
            # and by other models.
            many = ("decode", "prefill", "append")
            some = [row for i, row in enumerate(made) if i % 3 == 0 or not row[0].startswith(many)]
            runs = []
            for i, (name, graph) in enumerate(some):
                arch, model = ARCHS[i % 4], MODELS[i // 4 % 4]
                runs.append((f"{name}, {arch}, {model}", graph,
                             environment(arch, **model, PTXEMU_RACES=str(i // 2 % 2), PTXEMU_LOG=str(log))))
        self.expect_passed(on_all_cores(lambda name, graph, env: (name, check(graph, env)), runs))
        launched = set()
        for line in log.read_text().splitlines():
            launched |= set(json.loads(line)["kernels"])
        self.assertEqual(launched, ENTRIES)

    def test_a_spread(self):
        made = problems.spread(KVANT, 7, 400 if ALL else 24)
        runs = [(f"{name}, {arch}, {model}", graph, environment(arch, **model))
                for i, (name, graph) in enumerate(made)
                for arch in (ARCHS if ALL else ARCHS[i % 4:][:1])
                for model in (MODELS if ALL else MODELS[i // 4 % 4:][:1])]
        self.expect_passed(on_all_cores(lambda name, graph, env: (name, check(graph, env)), runs))

    def test_conformance(self):
        # Each process takes every n-th case.
        shards, taken, archs = (16, 16, ARCHS) if ALL else (88, 2, ARCHS[1:2])
        log = pathlib.Path(_cache.name) / "conformance.jsonl"
        runs = [(f"shard {shard} of {shards}, {arch}, {model}",
                 environment(arch, **model, KVANT_CONFORMANCE_ENGINES="cuda", PTXEMU_LOG=str(log),
                             GTEST_TOTAL_SHARDS=str(shards), GTEST_SHARD_INDEX=str(shard)))
                for arch in archs for shard in range(taken)
                for model in (MODELS if ALL else MODELS[shard:][:1])]
        self.expect_passed(on_all_cores(lambda name, env: (name, run_tests("*ConformanceTest.*", env)), runs))
        self.assertTrue(all(json.loads(line)["launches"] for line in log.read_text().splitlines()))

    def test_bugs_in_kernels_are_found(self):
        graph = dict(problems.rows(KVANT))["decode u4 g32 zp"]
        self.assertEqual(check(graph, environment())[0], 0)
        for bug in ("cp.async.wait_group 0=>cp.async.wait_group 1", "0:cp.async.commit_group=>//",
                    "0:bar.sync=>//", "0:movmatrix.sync.aligned.m8n8.trans.b16=>mov.b32",
                    "ex2.approx.ftz.f32=>lg2.approx.ftz.f32", "bar.warp.sync=>//"):
            with self.subTest(bug):
                code, text = check(graph, environment(PTXEMU_EDIT=bug, PTXEMU_RACES="1"))
                self.assertNotEqual(code, 0, text)
                self.assertRegex(text, "FAILED|ptxemu: kernel")


def why_not():
    if not (EMULATOR / "libptxemu_cuda.so").exists() or not os.access(GPU_TESTS, os.X_OK):
        return "no emulator, or no tests for GPUs, was built"
    code, text = run([KVANT, "precompile", str(SOURCE / "examples/data/sdpa_int4_cache.json"), "--arch", "sm_90a",
                      "--cache", _cache.name], environment())
    return text if code != 0 and "NVRTC" in text else ""


if __name__ == "__main__":
    if reason := why_not():
        print(f"skipped: {reason}")
        sys.exit(1 if os.environ.get("KVANT_REQUIRE_SHARED") else SKIPPED)
    unittest.main(argv=[sys.argv[0], *(arg for arg in sys.argv[3:] if arg != "--all")])
