"""Runs the kvant command: exit codes, JSON keys, files in and out.

cli_test.py [SOURCE_DIR BUILD_DIR]; the binary is BUILD_DIR/kvant or $KVANT_BINARY. Graphs that are
not in this repository are read from $KVANT_SHARED_DIR or SOURCE_DIR/../shared; without them those
tests are skipped, or fail when $KVANT_REQUIRE_SHARED is set.
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

from graph_files import floats, one_op, read_safetensors, tensor, write_safetensors

SKIPPED = 77
ARGS = sys.argv[1:] if len(sys.argv) > 2 else None
SOURCE = pathlib.Path(ARGS[0] if ARGS else pathlib.Path(__file__).resolve().parents[1])
BINARY = os.environ.get("KVANT_BINARY") or (str(pathlib.Path(ARGS[1]) / "kvant") if ARGS else "")
SHARED = pathlib.Path(os.environ.get("KVANT_SHARED_DIR") or SOURCE / ".." / "shared")

FORMATS = ["f32", "bf16", "f16", "f8_e4m3", "f8_e5m2:zp", "s8:g16", "u8:g32:zp", "s4:token:sf16",
           "u4:g16:zp:sbf16", "s2:head", "u2:channel:zp", "s8:tensor:zp", "u4:channel:g16"]

# With a sanitizer in it a process takes ten times as long, and kvant_tests runs the same kernels.
SANITIZED = bool(os.environ.get("KVANT_SANITIZE"))

# Under the address sanitizer too, memory that cannot be had is an error of the command's own.
ENVIRONMENT = dict(os.environ)
ENVIRONMENT["ASAN_OPTIONS"] = ":".join(
    filter(None, [os.environ.get("ASAN_OPTIONS"), "allocator_may_return_null=1"]))


def kvant(*args, stdin=None, **environment):
    return subprocess.run([BINARY, *args], input=stdin, capture_output=True, text=True, timeout=600,
                          env={**ENVIRONMENT, **environment})


def make(*args):
    result = kvant("make", *args)
    assert result.returncode == 0, result.stderr
    return result.stdout


def batch_of_two(path):
    """Options that cut a graph's large batch to 2; None where a reshape's attribute holds it."""
    ops = json.loads(pathlib.Path(path).read_text())["graph"]
    made = {t["id"] for op in ops for t in op["outputs"]}
    inputs = {t["id"]: t["shape"] for op in ops for t in op["inputs"] if t["id"] not in made}
    batch = max((shape[0] for shape in inputs.values() if shape), default=1)
    if batch < 32:
        return []
    if any(op["kind"] == "StaticReshape" for op in ops):
        return None
    return ["--in-shapes", "+".join(f"{tid}:" + "x".join(map(str, [2] + shape[1:]))
                                    for tid, shape in inputs.items() if shape and shape[0] == batch)]


class CommandTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name, text=None):
        path = os.path.join(self.folder.name, name)
        if text is not None:
            pathlib.Path(path).write_text(text)
        return path

    def fails(self, message, *args, stdin=None):
        result = kvant(*args, stdin=stdin)
        self.assertEqual(result.returncode, 2, (args, result.stdout, result.stderr))
        self.assertIn(message, result.stderr)
        self.assertEqual(result.stdout, "")

    def test_help_everywhere(self):
        for command in ([], ["make"], ["show"], ["run"], ["check"], ["bench"]):
            result = kvant(*command, "--help")
            self.assertEqual((result.returncode, "--help" in result.stdout), (0, True))
        self.assertRegex(kvant("--version").stdout, r"^kvant \d+\.\d+\.\d+\n$")
        for option in ["--help", "--version"]:
            with open("/dev/full", "w") as full:
                result = subprocess.run([BINARY, option], stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual((result.returncode, result.stderr), (2, "kvant: cannot write to standard output\n"))

    def test_bad_command_lines(self):
        for word in ["nonsense", "--nonsense"]:
            self.fails(f"'{word}' is not a command", word)
        self.fails("", "show")
        self.fails("", "check", "g.json", "--backend", "fpga")
        for wrong in ["heads many", "heads 010", "heads " + "9" * 19, "kv-heads 0", "page-size 0", "hadamard 0"]:
            self.fails("--" + wrong.split()[0], "make", *("--" + wrong).split())
        self.fails("number format 's9'", "make", "--k", "s9")
        self.fails("no multiple", "make", "--heads", "8", "--kv-heads", "3")
        self.fails("--causal", "make", "--causal=sideways")
        self.fails("--mask: 'abc' does not have four dims", "make", "--mask", "abc")
        self.fails("--mask: '2' is not 1, dim 0 of", "make", "--mask", "2x1xQxS")
        self.fails("--mask: '3' is not 1 or 8, dim 1 of", "make", "--heads", "8", "--mask", "1x3xQxS")

    def test_bad_graphs(self):
        self.fails("/nowhere.json", "show", "/nowhere.json")
        for text in ["", "{", "[]", "{}", "[" * 100000, '{"graph": [{"kind": "Nonsense"}]}']:
            self.fails("kvant:", "show", "-", stdin=text)
            self.fails("kvant:", "check", "-", stdin=text)
        self.fails("--in-shapes", "show", "-", "--in-shapes", "77:1x2", stdin=make())
        self.fails("has no ':VALUE'", "show", "-", "--op-attrs", "0:transpose_a", stdin=make())
        self.fails("names no attribute of MatMul", "show", "-", "--op-attrs", "0:transpose", stdin=make())
        self.fails("--seed: '-1' is below 0", "check", "-", "--seed", "-1", stdin=make())
        for command in ["check", "bench"]:
            self.fails("the graph has no ops", command, "-", stdin='{"graph": []}')
        # More memory than any machine has, for an input that is not the first.
        self.fails("not enough memory for tensor 1", "check", "-", "--in-shapes", "1:1x8x99999999999999x64+4:1x8x99999999999999x64",
                   "--backend", "oracle", stdin=make("--scale", "none"))
        self.fails("kvant:", "check", "-", stdin=json.dumps(one_op(
            "Tanh", {}, [tensor(0, "f32", [1 << 20, 1 << 20, 1 << 10])],
            [tensor(1, "f32", [1 << 20, 1 << 20, 1 << 10])])))

    def test_files_without_an_end(self):
        self.fails("/dev/zero has more than", "show", "/dev/zero")
        self.fails("/dev/zero: safetensors: the header is not", "run",
                   self.path("g.json", make()), "--inputs", "/dev/zero", "--outputs",
                   self.path("o"))

    def test_names_stay_in_their_line(self):
        graph = one_op("Tanh", {}, [tensor(0, "f32", [2])], [tensor(1, "f32", [2])])
        graph["graph"][0]["name"] = "a\0b\n\x1b[31mc"
        shown = kvant("show", "-", stdin=json.dumps(graph))
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertIn("  op      Tanh 'a\\x00b\\n\\x1b[31mc' (id 0)\n", shown.stdout)

    def test_more_threads_than_cores(self):
        checked = kvant("check", "-", "--threads", "4096", stdin=make("--kv-len", "64"))
        self.assertEqual((checked.returncode, checked.stderr), (0, ""))

    def test_outputs_in_the_place_of_inputs(self):
        graph = self.path("g.json", json.dumps(one_op(
            "Tanh", {}, [tensor(0, "f32", [40000])], [tensor(1, "f32", [40000])]) | {"kvant_names": [{"id": 0, "name": "x"}]}))
        path = self.path("a.safetensors")
        write_safetensors(path, {"x": ("F32", [40000], floats([0] * 40000))})  # by its name
        before = pathlib.Path(path).read_bytes()
        arguments = [BINARY, "run", graph, "--inputs", path, "--outputs", path]
        # No file may grow beyond 64 KiB: writing fails half way.
        full = subprocess.run(["bash", "-c", 'trap "" XFSZ; ulimit -f 64; exec "$@"', "_", *arguments],
                              capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
        self.assertEqual(full.returncode, 2, full.stderr)
        self.assertIn("cannot write " + path + ": File too large", full.stderr)
        self.assertEqual(pathlib.Path(path).read_bytes(), before)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["a.safetensors", "g.json"])
        self.assertEqual(subprocess.run(arguments, timeout=600).returncode, 0)
        self.assertEqual(set(read_safetensors(path)), {"1"})

    def test_show_json(self):
        graph = make("--heads", "4", "--kv-heads", "2", "--k", "u4:g32:zp", "--v", "s8", "--causal")
        shown = json.loads(kvant("show", "-", "--json", stdin=graph).stdout)
        self.assertEqual(set(shown), {"partitions"})
        self.assertEqual(len(shown["partitions"]), 1)
        partition = shown["partitions"][0]
        self.assertLessEqual({"id", "kind", "pattern", "ops", "inputs", "outputs", "backend",
                              "kernel", "notes", "misses"}, set(partition))
        self.assertEqual(partition["kind"], "attention")
        self.assertEqual(partition["backend"], "cpu")

    def test_rotated(self):
        graph = make("--k", "s4:g32", "--v", "s4:g32", "--head-size", "96", "--hadamard", "32")
        shown = json.loads(kvant("show", "-", "--json", stdin=graph).stdout)
        self.assertEqual([p["backend"] for p in shown["partitions"]], ["cpu"])
        self.assertEqual(shown["partitions"][0]["pattern"],
                         "attention: compressed K and V, rotated, scale, output chain")
        self.assertIn("rotated in blocks of 32", kvant("show", "-", stdin=graph).stdout)
        self.assertEqual(kvant("check", "-", stdin=graph).returncode, 0)
        self.fails("blocks of 64 do not divide", "make", "--head-size", "96", "--hadamard", "64")
        self.fails("--op", "make", "--op", "--hadamard", "64")

    def test_values_in_keys(self):
        graph = make("--k", "s8", "--head-size", "96", "--v-head-size", "64", "--kv-heads", "1", "--latent")
        shown = json.loads(kvant("show", "-", "--json", stdin=graph).stdout)
        self.assertEqual([p["backend"] for p in shown["partitions"]], ["cpu"])
        self.assertEqual(kvant("check", "-", stdin=graph).returncode, 0)
        self.fails("first 128 of K's 96 channels", "make", "--latent", "--head-size", "96", "--v-head-size", "128")
        self.fails("k-layout", "make", "--latent", "--k-layout", "channels")

    def test_heads_of_a_token_side_by_side(self):
        for pages in [[], ["--page-size", "16"]]:
            for k, v in [("u4:g32:zp", "s8"), ("f16", "bf16")]:
                graph = make("--token-major", "--q-len", "1", "--k", k, "--v", v, *pages)
                self.assertEqual(kvant("check", "-", stdin=graph).returncode, 0)
        self.fails("token-major does not go with k-layout", "make", "--token-major", "--k-layout", "channels")

    def test_show_dot_and_text(self):
        graph = make()
        dot = kvant("show", "-", "--dot", stdin=graph).stdout
        self.assertIn("digraph", dot)
        self.assertIn("cluster_", dot)
        self.assertIn("partition 0", kvant("show", "-", stdin=graph).stdout)

    def test_svg(self):
        svg = self.path("g.svg")
        result = kvant("show", "-", "--svg", svg, stdin=make())
        if result.returncode == 0:
            self.assertIn("<svg", pathlib.Path(svg).read_text())
        else:
            self.assertIn("dot", result.stderr)

    def test_svg_of_what_dot_does_not_read(self):
        # It ends amid the drawing.
        folder = self.path("bin")
        os.mkdir(folder)
        dot = pathlib.Path(folder, "dot")
        dot.write_text("#!/bin/sh\nexit 3\n")
        dot.chmod(0o755)
        graph = json.loads(make())
        for op in graph["graph"]:
            op["name"] = "x" * 100000
        result = kvant("show", "-", "--svg", self.path("g.svg"), stdin=json.dumps(graph),
                       PATH=folder + ":" + os.environ["PATH"])
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("'dot' could not write", result.stderr)

    def test_check_json(self):
        graph = make("--mask", "--stats", "--q-len", "7", "--kv-len", "33", "--dtype", "f16")
        for data in ["integer", "real"]:
            result = kvant("check", "-", "--json", "--data", data, "--seed", "3", stdin=graph)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            checked = json.loads(result.stdout)
            self.assertEqual(set(checked), {"partitions", "backend", "kernel", "outputs", "passed"})
            self.assertTrue(checked["passed"])
            self.assertEqual(len(checked["outputs"]), 2)
            for output in checked["outputs"]:
                self.assertEqual(set(output), {"id", "max_abs", "rel_l2", "failing", "not_finite", "passed"})

    def test_cpu_takes_attention_only(self):
        graph = one_op("ReduceSum", {"axes": {"type": "s64[]", "value": [1]}},
                       [tensor(0, "f32", [2, 3])], [tensor(1, "f32", [2])])
        self.fails("partition 0", "check", "-", "--backend", "cpu", stdin=json.dumps(graph))

    def test_pairs_of_formats(self):
        for i, k in enumerate(FORMATS):
            # All pairs where a process is cheap; else each format once as K and once as V.
            for v in [FORMATS[(i + 5) % len(FORMATS)]] if SANITIZED else FORMATS:
                graph = make("--heads", "4", "--kv-heads", "2", "--kv-len", "48", "--head-size",
                             "32", "--q-len", "3", "--k", k, "--v", v)
                data = "real" if i % 2 else "integer"
                result = kvant("check", "-", "--data", data, stdin=graph)
                self.assertEqual(result.returncode, 0, (k, v, data, result.stdout, result.stderr))

    def test_options_without_a_value_count(self):
        for option, kinds in [("--causal", ["GenIndex", "GenIndex", "GreaterEqual", "Select"]),
                              ("--mask", ["Add"]), ("--select", ["Select"]),
                              ("--soft-cap", ["Multiply", "Tanh", "Multiply"])]:
            for args in [[option], [option, "--batch", "2"], ["--q-len", "3", option]]:
                graph = json.loads(make("--scale", "none", *args))
                self.assertEqual([op["kind"] for op in graph["graph"]],
                                 ["MatMul", *kinds, "SoftMax", "MatMul"], args)

    def test_options_of_make(self):
        base = ["--q-len", "5", "--kv-len", "40", "--head-size", "16", "--heads", "6", "--kv-heads", "2"]
        for extra in [["--causal"], ["--causal=bottom-right"], ["--mask=NxHxQxS"],
                      ["--mask=Nx1x1xS"], ["--select"], ["--soft-cap"], ["--scale", "mul"],
                      ["--scale", "none"], ["--stats"], ["--dropout"], ["--transpose-output"], ["--static-int8"], ["--v-head-size", "24"],
                      ["--hadamard", "8", "--k", "s4:g8"], ["--dtype", "bf16", "--k", "u4:g8:zp"],
                      ["--k-layout", "transposed", "--k", "s8:g8"],
                      ["--k-layout", "channels", "--k", "s4:channel:g8"],
                      ["--token-major", "--k", "u4:g8:zp", "--v", "s8:token"],
                      ["--token-major", "--page-size", "8", "--k", "s8:g16", "--v", "u2:g16:zp"],
                      ["--mask", "--causal", "--soft-cap", "20", "--batch", "2"],
                      ["--op", "--causal=bottom-right", "--left-window", "9", "--soft-cap", "5"],
                      ["--op", "--kv-lengths", "--batch", "3", "--k", "u4:g8:zp", "--v", "s8"],
                      ["--op", "--sinks", "--alibi", "--stats", "--mask", "--select"]]:
            graph = make(*base, *extra)
            for data in ["integer", "real"]:
                result = kvant("check", "-", "--data", data, stdin=graph)
                self.assertEqual(result.returncode, 0, (extra, data, result.stdout, result.stderr))

    def test_static_int8_goes_alone(self):
        for more in (["--k", "s8:g32"], ["--v", "f16"], ["--op"], ["--dtype", "bf16"]):
            why = "static-int8 takes dtype f32, not bf16" if "bf16" in more else "does not go with k, v"
            self.fails(why, "make", "--static-int8", *more)

    def test_overrides(self):
        graph = self.path("g.json", make("--head-size", "32", "--kv-len", "64"))
        ops = {op["name"]: op for op in json.loads(pathlib.Path(graph).read_text())["graph"]}
        q, k = next(op for op in ops.values() if op["kind"] == "MatMul")["inputs"]
        v = [op for op in ops.values() if op["kind"] == "MatMul"][-1]["inputs"][1]
        shapes = f"{q['id']}:2x8x3x32*acbd+{k['id']}:2x8x50x32+{v['id']}:2x8x50x32"
        result = kvant("check", graph, "--in-shapes", shapes, "--dt=f16", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(json.loads(result.stdout)["passed"])

    def test_run_applies_strides(self):
        # Stored transposed and padded; the files hold dense data.
        graph = self.path("g.json", json.dumps(one_op(
            "Add", {}, [tensor(0, "f32", [2, 3], [1, 4]), tensor(1, "f32", [3], [1])],
            [tensor(2, "f32", [2, 3], [1, 2])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        write_safetensors(inputs, {"0": ("F32", [2, 3], floats([1, 2, 3, 4, 5, 6])),
                                   "1": ("F32", [3], floats([10, 20, 30]))})
        result = kvant("run", graph, "--inputs", inputs, "--outputs", outputs)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_safetensors(outputs),
                         {"2": ("F32", [2, 3], floats([11, 22, 33, 14, 25, 36]))})

    def test_run_refuses_values_for_one_place_that_differ(self):
        graph = self.path("g.json", json.dumps(one_op(
            "Add", {}, [tensor(0, "f32", [2, 3], [0, 1]), tensor(1, "f32", [3], [1])],
            [tensor(2, "f32", [2, 3])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        args = ["run", graph, "--inputs", inputs, "--outputs", outputs]
        second = ("F32", [3], floats([10, 20, 30]))
        write_safetensors(inputs, {"0": ("F32", [2, 3], floats([1, 2, 3, 1, 5, 3])), "1": second})
        self.fails("graph input tensor 0 (f32[2,3]) has strides 0,1, by which element [0,1] lies "
                   "where another does, and the file has different bytes for them", *args)
        write_safetensors(inputs, {"0": ("F32", [2, 3], floats([1, 2, 3, 1, 2, 3])), "1": second})
        self.assertEqual(kvant(*args).returncode, 0)

    def test_run_takes_an_id_for_no_name(self):
        graph = one_op("Subtract", {}, [tensor(0, "f32", [1]), tensor(1, "f32", [1])],
                       [tensor(2, "f32", [1])])
        graph["kvant_names"] = [{"id": 0, "name": "1"}, {"id": 1, "name": "b"}]
        path = self.path("g.json", json.dumps(graph))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        write_safetensors(inputs, {"1": ("F32", [1], floats([3]))})
        self.fails("no tensor '0'", "run", path, "--inputs", inputs, "--outputs", outputs)

    def test_run_packs_sub_byte_types(self):
        # Stored with the two dims swapped, so that nibbles change place.
        graph = self.path("g.json", json.dumps(one_op(
            "DynamicDequantize", {"qtype": {"type": "string", "value": "per_tensor"}},
            [tensor(0, "u4", [2, 3], [1, 2]), tensor(1, "f32", [1])],
            [tensor(2, "f32", [2, 3])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        write_safetensors(inputs, {"0": ("U8", [3], bytes([0x21, 0x43, 0xf5])),
                                   "1": ("F32", [1], floats([0.5]))})
        result = kvant("run", graph, "--inputs", inputs, "--outputs", outputs)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_safetensors(outputs)["2"][2], floats([.5, 1, 1.5, 2, 2.5, 7.5]))

    def test_append(self):
        group = {"qtype": {"type": "string", "value": "per_group"},
                 "group_shape": {"type": "s64[]", "value": [1, 1, 4, 1]}}
        graph = self.path("g.json", json.dumps(one_op(
            "Append", group, [tensor(0, "f32", [3, 2, 8, 16]), tensor(1, "s32", [3])],
            [tensor(2, "s8", [3, 2, 24, 16], [4096, 1024, 20, 1]),
             tensor(3, "f16", [3, 2, 6, 16]), tensor(4, "s8", [3, 2, 6, 16])])))
        for seed in "1", "2":
            result = kvant("check", graph, "--backend", "cpu", "--seed", seed, "--json")
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertTrue(json.loads(result.stdout)["passed"])
        result = kvant("show", graph)
        self.assertIn("append, quantize, ranges and codes in one kernel", result.stdout)
        self.fails("writes into a part of its outputs", "check", graph, "--backend", "reference")

        graph = self.path("g.json", json.dumps(one_op(
            "Append", {}, [tensor(0, "f32", [2, 2, 1]), tensor(1, "s32", [2])],
            [tensor(2, "f32", [2, 3, 1])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        write_safetensors(inputs, {"0": ("F32", [2, 2, 1], floats([1, 2, 3, 4])),
                                   "1": ("I32", [2], struct.pack("<2i", 1, 0))})
        result = kvant("run", graph, "--inputs", inputs, "--outputs", outputs)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_safetensors(outputs)["2"][2], floats([0, 1, 2, 3, 4, 0]))
        write_safetensors(inputs, {"0": ("F32", [2, 2, 1], floats([1, 2, 3, 4])),
                                   "1": ("I32", [2], struct.pack("<2i", 1, 2))})
        self.fails("position 2 of row 1 and 2 tokens are beyond the capacity of 3", "run", graph,
                   "--inputs", inputs, "--outputs", outputs)

    def test_append_pages(self):
        group = {"qtype": {"type": "string", "value": "per_group"},
                 "group_shape": {"type": "s64[]", "value": [1, 1, 1, 8]},
                 "token_axis": {"type": "s64", "value": 1}}
        graph = self.path("g.json", json.dumps(one_op(
            "AppendPages", group, [tensor(0, "f16", [21, 3, 16]), tensor(1, "s64", [21])],
            [tensor(2, "u4", [6, 8, 3, 16]), tensor(3, "f16", [6, 8, 3, 2]),
             tensor(4, "f16", [6, 8, 3, 2])])))
        for seed in "1", "2":
            result = kvant("check", graph, "--backend", "cpu", "--seed", seed, "--json")
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertTrue(json.loads(result.stdout)["passed"])
        self.fails("writes into a part of its outputs", "check", graph, "--backend", "reference")

        graph = self.path("g.json", json.dumps(one_op(
            "AppendPages", {}, [tensor(0, "f32", [3, 1, 2]), tensor(1, "s64", [3])],
            [tensor(2, "f32", [2, 1, 2, 2])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        for slots in (3, -1, 0), (3, -1, 4):
            write_safetensors(inputs, {"0": ("F32", [3, 1, 2], floats([1, 2, 3, 4, 5, 6])),
                                       "1": ("I64", [3], struct.pack("<3q", *slots))})
            if slots[2] == 4:
                self.fails("slot 4 of token 2 is beyond the 4 of the pool, in pages of 2", "run",
                           graph, "--inputs", inputs, "--outputs", outputs)
                continue
            result = kvant("run", graph, "--inputs", inputs, "--outputs", outputs)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(read_safetensors(outputs)["2"][2], floats([5, 6, 0, 0, 0, 0, 1, 2]))

    def test_run_refuses_bad_tensors(self):
        graph = self.path("g.json", json.dumps(one_op(
            "Tanh", {}, [tensor(0, "f32", [2, 3])], [tensor(1, "f32", [2, 3])])))
        inputs, outputs = self.path("a.safetensors"), self.path("b.safetensors")
        args = ["run", graph, "--inputs", inputs, "--outputs", outputs]
        self.fails("a.safetensors", *args)
        write_safetensors(inputs, {"1": ("F32", [2, 3], floats([0] * 6))})
        self.fails("no tensor '0' for graph input tensor 0, f32[2,3], but '1'", *args)
        write_safetensors(inputs, {"0": ("F32", [3, 2], floats([0] * 6))})
        self.fails("graph input tensor 0", *args)
        write_safetensors(inputs, {"0": ("F16", [2, 3], bytes(12))})
        self.fails("graph input tensor 0", *args)
        pathlib.Path(inputs).write_bytes(b"\xff" * 40)
        self.fails("header", *args)
        self.assertFalse(os.path.exists(outputs))

    def test_bench_json(self):
        result = kvant("bench", "-", "--json", "--threads", "2", stdin=make("--k", "s8:g32"))
        self.assertEqual(result.returncode, 0, result.stderr)
        measured = json.loads(result.stdout)
        keys = {"ms_best", "ms_median", "bytes", "gb_per_s", "read_gb_per_s", "fraction",
                "compile_us", "partition_us"}
        self.assertLessEqual(keys, set(measured))
        for key in keys:
            self.assertGreater(measured[key], 0, key)
        self.assertLessEqual(measured["ms_best"], measured["ms_median"])

    def test_unknown_instruction_set_is_said(self):
        graph = self.path("g.json", make("--kv-len", "48", "--head-size", "16"))
        result = kvant("check", graph, KVANT_CPU_ISA="AVX2")
        self.assertIn("KVANT_CPU_ISA: 'AVX2' is none of what this CPU has of: portable, avx2", result.stderr)
        self.assertEqual(result.stderr.count("KVANT_CPU_ISA"), 1)

    # A line for each thing that was done, in order, with a time; nothing unless it is asked for.
    def test_verbose(self):
        graph = self.path("g.json", make("--kv-len", "48", "--head-size", "16", "--k", "s8:token"))
        for off in ["", "0"]:
            self.assertEqual(kvant("check", graph, KVANT_VERBOSE=off).stderr, "")
        result = kvant("check", graph, KVANT_VERBOSE="1")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stderr.splitlines()
        self.assertEqual(len(kvant("check", graph, KVANT_VERBOSE="2").stderr.splitlines()), len(lines))
        for line in lines:
            self.assertRegex(line, r"^kvant,(partition|compile|execute),.*,[0-9.]+ us$")
        text = "\n".join(lines)
        self.assertRegex(text, r"kvant,partition,[0-9]+ ops in 1 partition,")
        self.assertRegex(text, r"kvant,compile,fused attention: compressed K.*; cpu, ")
        self.assertRegex(text, r"kvant,execute,cpu,attention: compressed K")
        self.assertRegex(text, r"kvant,execute,oracle,attention: compressed K")
        # Into a file, after what is there.
        log = self.path("log.txt", "before\n")
        again = kvant("check", graph, KVANT_VERBOSE=log)
        self.assertEqual((again.returncode, again.stderr), (0, ""))
        written = pathlib.Path(log).read_text().splitlines()
        self.assertEqual(written[0], "before")
        self.assertEqual(len(written), len(lines) + 1)
        nowhere = kvant("check", graph, KVANT_VERBOSE=self.path("no/such/folder"))
        self.assertEqual(nowhere.returncode, 0)
        self.assertIn("KVANT_VERBOSE: cannot write", nowhere.stderr)
        # Near misses, and what does not compile.
        near = kvant("check", graph, "--backend", "cuda_simt", KVANT_VERBOSE="1")
        self.assertIn("kvant,execute,cuda_simt,", near.stderr)

    # Constants are shown, and are no inputs.
    def test_constants(self):
        tensors = [{"id": i, "dtype": "f32", "shape": shape, "stride": stride,
                    "layout_type": "strided", "property_type": kind}
                   for i, shape, stride, kind in [(0, [4], [1], "variable"), (1, [], [], "constant"),
                                                  (2, [4], [1], "variable")]]
        graph = {"version": "3.13.0", "engine_kind": "cpu", "fpmath_mode": "strict",
                 "input_ports": [0], "output_ports": [2],
                 "graph": [{"id": 0, "name": "m", "kind": "Multiply", "attrs": {},
                            "inputs": tensors[:2], "outputs": tensors[2:]}],
                 "kvant_constants": [{"id": 1, "value": 2.5}]}
        path = self.path("c.json", json.dumps(graph))
        shown = kvant("show", path)
        self.assertIn("constant 1: f32 2.5", shown.stdout, shown.stderr)
        part = json.loads(kvant("show", path, "--json").stdout)["partitions"][0]
        self.assertEqual(part["constants"], [{"id": 1, "type": "f32", "value": "2.5"}])
        self.assertEqual(part["inputs"], [0])
        self.assertEqual(kvant("check", path, "--backend", "oracle").returncode, 0)

    def test_shared_graphs(self):
        graphs = sorted((SHARED / "graphs").glob("*.json"))
        if not graphs and not os.environ.get("KVANT_REQUIRE_SHARED"):
            self.skipTest("no shared graphs")
        self.assertTrue(graphs)
        for graph in map(str, graphs):
            shown = json.loads(kvant("show", graph, "--grammar", "onednn", "--json").stdout)
            self.assertEqual(len(shown["partitions"]), 1, graph)
            backends = ["reference"] if "backward" in graph else ["reference", "cpu"]
            smaller = batch_of_two(graph) if SANITIZED else []
            for backend in [] if smaller is None else backends:
                result = kvant("check", graph, "--backend", backend, *smaller)
                self.assertEqual(result.returncode, 0, (graph, backend, result.stdout,
                                                        result.stderr))


if __name__ == "__main__":
    if not BINARY or not os.access(BINARY, os.X_OK):
        print("no kvant binary")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
