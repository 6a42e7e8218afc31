"""Runs the kvant command with the CUDA kernels: on the executor, and where there is no GPU.

cuda_cli_test.py [SOURCE_DIR BUILD_DIR], as cli_test.py.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
ARGS = sys.argv[1:] if len(sys.argv) > 2 else None
SOURCE = pathlib.Path(ARGS[0] if ARGS else pathlib.Path(__file__).resolve().parents[1])
BINARY = os.environ.get("KVANT_BINARY") or (str(pathlib.Path(ARGS[1]) / "kvant") if ARGS else "")
SHARED = pathlib.Path(os.environ.get("KVANT_SHARED_DIR") or SOURCE / ".." / "shared")
sys.path.insert(0, str(SOURCE / "bench/static"))
EXAMPLE = str(SOURCE / "examples" / "data" / "sdpa_int4_cache.json")

import stores  # noqa: E402

# Shapes small enough for the executor, with tails; what does not fit them any more is reshaped.
GRAPHS = {
    "GQA-f32": (
        "0:2x8x65x64+2:2x2x65x64+11:2x1x1x65+18:2x2x65x64",
        "5:shape:2x2x4x65x64+6:shape:2x2x1x65x64+13:shape:2x1x1x1x65+21:shape:2x2x1x65x64"
        "+24:shape:2x8x65x64"),
    "GQA-f32-v2": ("1:2x2x4x65x64+3:2x2x1x65x64+11:2x1x1x1x65+19:2x2x1x65x64", None),
    "JAX-MHA-inf-fp32": ("1:2x2x65x64+2:2x2x64x65+0:2x1x1x65+7:2x2x64x65", "6:shape:2x65x2x64"),
    "MHA-GPT-inf-fp32-bs1": ("4:1x2x32x256+5:1x2x256x33+0:1x2x33x256", None),
    "MHA-bert_large-inf-fp32-bs1": ("3:1x2x65x64+4:1x2x64x65+1:1x1x1x65+0:1x2x65x64", None),
    "gemma2-bf16-f32": (None, None),
    "gqa-plain-training-fwd-w-dropout-f32":
        ("200:2x2x4x65x64+201:2x2x1x65x64+203:2x2x4x65x65+204:2x2x1x65x64", None),
    "hf-sdpa-fwd-w-mask-bf16-f32":
        ("0:2x2x128x32+1:2x2x128x32+4:2x1x128x128+5:2x2x128x32", None),
    "sdpa-compressed-k-int8-gs32": (None, None),
    "sdpa-compressed-kv-int4-gs32": (None, None),
    "sdpa-plain-implicit-causal-mask-fp32-bs1": ("1:1x2x130x64+2:1x2x130x64+3:1x2x130x64", None),
    "sdpa-plain-simplified-f16-f32":
        ("1:1x2x130x64+2:1x2x130x64+5:1x1x130x130+3:1x2x130x64", None),
    "sdpa-plain-simplified-f32":
        ("0:1x2x130x64+1:1x2x130x64+5:1x1x130x130+8:1x2x130x64", None),
    "sdpa-plain-training-forward-bf16-f32":
        ("0:1x2x130x64+1:1x2x130x64+7:1x2x130x130+13:1x2x130x64", None),
    "sdpa-plain-wo-scale-int8-bs1":
        ("4:1x2x130x64+3:1x2x64x130+1:1x1x1x130+0:1x2x130x64", None),
}


def kvant(*args, stdin=None, **environment):
    return subprocess.run([BINARY, *args], input=stdin, capture_output=True, text=True, timeout=600,
                          env={**os.environ, **environment})


class CudaCommandTest(unittest.TestCase):
    def assert_fails(self, result, *words):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_shared_graphs(self):
        graphs = SHARED / "graphs"
        if not graphs.is_dir():
            if os.environ.get("KVANT_REQUIRE_SHARED"):
                self.fail(f"{graphs} is not there")
            self.skipTest(f"{graphs} is not there")
        forward = {path.stem for path in graphs.glob("*.json") if "backward" not in path.stem}
        self.assertEqual(forward, set(GRAPHS))
        for name, (shapes, attributes) in GRAPHS.items():
            with self.subTest(name):
                arguments = ["--in-shapes", shapes] if shapes else []
                arguments += ["--op-attrs", attributes] if attributes else []
                result = kvant("check", str(graphs / f"{name}.json"), "--backend", "cuda_simt",
                               *arguments)
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                self.assertIn("on cuda_simt", result.stdout)

    def test_show_says_what_would_run(self):
        result = kvant("show", EXAMPLE, "--backend", "cuda_simt")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("runs    on cuda_simt", result.stdout)

    def test_no_driver(self):
        for command in ("check", "bench", "show"):
            with self.subTest(command):
                self.assert_fails(kvant(command, EXAMPLE, "--backend", "cuda",
                                        KVANT_LIBCUDA="/nonexistent/libcuda.so.1"),
                                  "/nonexistent/libcuda.so.1")
        # The CPU does not mind.
        self.assertEqual(kvant("check", EXAMPLE, "--backend", "cpu",
                               KVANT_LIBCUDA="/nonexistent/libcuda.so.1").returncode, 0)

    def test_latents_are_read_once(self):
        arguments = ("make", "--heads", "4", "--kv-heads", "1", "--q-len", "1", "--kv-len", "70",
                     "--head-size", "576", "--v-head-size", "512", "--dtype", "bf16", "--k", "s8:token")
        latent = kvant(*arguments, "--latent").stdout
        shown = kvant("show", "-", "--backend", "cuda_simt", stdin=latent).stdout
        self.assertIn("V in K", shown)
        self.assertEqual(kvant("check", "-", "--backend", "cuda_simt", "--data", "real", stdin=latent).returncode, 0)
        two = kvant(*arguments, "--v", "s8:token").stdout
        self.assertNotIn("V in K", kvant("show", "-", "--backend", "cuda_simt", stdin=two).stdout)

    def test_precompile_without_nvrtc(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assert_fails(kvant("precompile", EXAMPLE, "--arch", "sm_90a", "--cache", folder,
                                    KVANT_LIBNVRTC="/nonexistent/libnvrtc.so"),
                              "/nonexistent/libnvrtc.so")

    def test_precompile_refuses_unknown_architectures(self):
        self.assert_fails(kvant("precompile", EXAMPLE, "--arch", "sm_70"), "sm_70", "sm_90a")

    def test_precompile(self):
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder) / "kernels"
            arguments = ["precompile", EXAMPLE, "--arch", "sm_80", "--arch", "sm_90a", "--cache",
                         str(cache)]
            result = kvant(*arguments)
            if result.returncode == 2 and "libnvrtc" in result.stderr:
                if os.environ.get("KVANT_REQUIRE_SHARED"):
                    self.fail(result.stderr)
                self.skipTest(result.stderr)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("sm_80", result.stdout)
            self.assertIn("sm_90a", result.stdout)
            files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
            self.assertTrue(files)
            # Again: from disk.
            self.assertEqual(kvant(*arguments).returncode, 0)
            self.assertEqual(files, {path: path.stat().st_mtime_ns for path in cache.iterdir()})

    def test_precompile_with_the_oldest_nvrtc(self):
        nvrtc = SOURCE / ".deps/cuda12.0/lib/libnvrtc.so.12"
        if not nvrtc.exists():
            if os.environ.get("KVANT_REQUIRE_SHARED"):
                self.fail(f"{nvrtc} is not there: scripts/setup --dev")
            self.skipTest(f"{nvrtc} is not there")
        # Both kernels, by all arithmetics of theirs, and those that store.
        graphs = {f"{dtype} {k}": kvant("make", "--head-size", "128", "--q-len", "1", "--dtype", dtype,
                                        "--k", k, "--v", k).stdout
                  for dtype, k in (("f16", "u4:g32:zp:sf16"), ("bf16", "s8:token"), ("f32", "u8"),
                                   ("f16", "u4:channel:g32:zp"), ("bf16", "bf16"), ("f32", "f32"))}
        graphs |= {store.name: store.graph() for store in stores.STORES[::8]}
        for name, graph in graphs.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                result = kvant("precompile", "-", "--arch", "sm_80", "--arch", "sm_90a", "--cache",
                               folder, stdin=graph, KVANT_LIBNVRTC=str(nvrtc))
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(result.stdout.count(" 0 bytes spilled"), 2, result.stdout)


if __name__ == "__main__":
    if not BINARY or not os.access(BINARY, os.X_OK):
        print("no kvant command to run")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
