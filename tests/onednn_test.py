"""libkvant_dnnl_graph.so before oneDNN: the project's own client of oneDNN Graph with kvant and without.

Usage: onednn_test.py SOURCE_DIR BUILD_DIR

The client (tests/integrations/onednn/client) is compiled against oneDNN 3.2 and against 3.13, whose CPU
engine is SYCL's, and writes down what it sees. Where one of them is not installed its tests are skipped, and
likewise without ../shared those of its graphs; with KVANT_REQUIRE_ONEDNN=1 and KVANT_REQUIRE_SHARED=1, as in
CI, they fail.
"""
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
SOURCE, BUILD = map(pathlib.Path, sys.argv[1:3])
LIBRARY = BUILD / "libkvant_dnnl_graph.so"
FOLDER = SOURCE / "integrations" / "onednn"
SHARED = pathlib.Path(os.environ.get("KVANT_SHARED_DIR") or SOURCE / ".." / "shared") / "graphs"
SANITIZED = bool(os.environ.get("KVANT_SANITIZE"))
MADE_BY_LINKERS = {"_init", "_fini", "__bss_start", "_edata", "_end"}
# Relative L2 distances that rounding makes, by how the names of cases begin.
TOLERANCES = {"half": 2e-2, "compressed half": 2e-2, "compressed": 3e-3, "": 1e-5}
# Under the address sanitizer, for what is not kvant's.
LEAKS_PASS = {"ASAN_OPTIONS": ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), "detect_leaks=0"]))}


class OneDnn:
    """An installed oneDNN, by its folder in .deps."""

    def __init__(self, name):
        self.name = name
        self.prefix = SOURCE / ".deps" / name
        self.environment = dict(os.environ)
        for variable in ("KVANT_DNNL_GRAPH", "KVANT_DNNL_GRAPH_VERBOSE", "LD_PRELOAD"):
            self.environment.pop(variable, None)
        # With AMX, 3.13's attention in bf16 is off by half and more: with every shape that was tried, though
        # not in f16, and not without AMX.
        self.environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        lib = self.prefix / "lib"
        self.environment["LD_LIBRARY_PATH"] = str(lib)
        leaks = SOURCE / "tests" / "integrations" / "onednn" / "lsan.supp"
        self.environment["LSAN_OPTIONS"] = f"suppressions={leaks}:print_suppressions=0"
        if (lib / "libintelocl.so").exists():
            self.environment["OCL_ICD_FILENAMES"] = str(lib / "libintelocl.so")
            self.environment.update(LEAKS_PASS)  # SYCL's runtime leaves much behind

    def why_not(self):
        if not (self.prefix / ".complete").exists():
            return f"{self.prefix} is not installed: scripts/setup --dev does it"
        if not self.client().exists():
            return f"{self.client()} is not built: configure again after scripts/setup --dev"
        return ""

    def client(self, with_kvant=False):
        return BUILD / "onednn" / f"client-{self.name}{'-kvant' if with_kvant else ''}"

    def run(self, *command, **environment):
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600,
                              env={**self.environment, **environment})


OLD, NEW = OneDnn("onednn"), OneDnn("onednn-sycl")


def needs(onednn):
    """Skips, or in CI fails, where it is not there."""
    why = onednn.why_not()
    if why and os.environ.get("KVANT_REQUIRE_ONEDNN") not in (None, "", "0"):
        raise AssertionError(why)
    if why:
        raise unittest.SkipTest(why)


def cases(text):
    """Lines by case, in order."""
    found = {}
    for line in text.splitlines():
        case, _, rest = line.partition(": ")
        found.setdefault(case, []).append(rest)
    return found


def distance(expected, got):
    """Relative L2 of two lists of numbers in text; infinite where they are not alike."""
    a, b = ([float(x) for x in text.split()] for text in (expected, got))
    if len(a) != len(b) or any(math.isfinite(x) != math.isfinite(y) for x, y in zip(a, b)):
        return math.inf
    pairs = [(x, y) for x, y in zip(a, b) if math.isfinite(x)]
    norm = math.sqrt(sum(x * x for x, _ in pairs))
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs)) / max(norm, 1e-6)


def tolerance(case):
    return next(limit for start, limit in TOLERANCES.items() if case.startswith(start))


def partitions(lines):
    return [line.split("ops ")[1].split(",")[0].split() for line in lines if line.startswith("partition = ")]


class Comparison:
    """What differs between a client's log and that with kvant, a sentence each."""

    def __init__(self, plain, kvant, may_be_cut):
        self.plain, self.kvant, self.may_be_cut = cases(plain), cases(kvant), may_be_cut
        self.wrong, self.cut, self.compared = [], set(), 0
        if list(self.plain) != [case for case in self.kvant if case in self.plain]:
            self.wrong.append("there are other cases")
        for case, lines in self.plain.items():
            self.compare(case, lines, self.kvant.get(case, []))

    def compare(self, case, plain, kvant):
        if partitions(plain) != partitions(kvant) and self.may_be_cut(case):
            self.cut.add(case)
            return self.compare_cut(case, plain, kvant)
        if len(plain) != len(kvant):
            self.wrong.append(f"{case}: {len(plain)} lines, {len(kvant)} with kvant")
        for a, b in zip(plain, kvant):
            self.compare_line(case, a, b)

    def compare_line(self, case, a, b):
        self.compared += 1
        (what, expected), (also, got) = a.split(" = ", 1), b.split(" = ", 1)
        if what == also and what.startswith("~"):
            if (off := distance(expected, got)) > tolerance(case):
                self.wrong.append(f"{case}: {what}: off by {off:.2g}")
        elif a != b:
            self.wrong.append(f"{case}: {a[:200]}, with kvant {b[:200]}")

    def compare_cut(self, case, plain, kvant):
        """Where oneDNN cuts what kvant takes as one: what comes out is the same."""
        ours = partitions(kvant)
        if len(ours) >= len(partitions(plain)):
            self.wrong.append(f"{case}: {len(ours)} partitions with kvant, not fewer")
        for ops in partitions(plain):
            if not any(set(ops) <= set(whole) for whole in ours) and len(ops) == 1:
                self.wrong.append(f"{case}: op {ops} is in no partition")
        self.wrong += [f"{case}: {line}, with kvant" for line in kvant
                       if line.startswith("status of") and not line.endswith("= 0")]
        results = {line.split(" = ")[0]: line for line in kvant if line.startswith("~result")}
        for line in plain:
            if line.startswith("~result"):
                self.compare_line(case, line, results.get(line.split(" = ")[0], "none = "))


def reported(path):
    """Of KVANT_DNNL_GRAPH_VERBOSE's lines: (what, who) of each, or of what kvant compiled (what, hit or miss)."""
    fields = [line.split(",") for line in pathlib.Path(path).read_text().splitlines()]
    return [(line[2], line[5] if line[2:5:2] == ["compile", "kvant"] else line[4]) for line in fields]


class Exports(unittest.TestCase):
    def exported(self, library):
        out = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True,
                             text=True).stdout
        return {line.split()[-1].partition("@")[0] for line in out.splitlines()} - MADE_BY_LINKERS

    def test_exports_are_the_table(self):
        table = re.findall(r"^KVANT_DNNL_(?:FORWARD|OWN)\((\w+)", (FOLDER / "functions.inc").read_text(), re.M)
        self.assertEqual({f"dnnl_graph_{name}" for name in table}, self.exported(LIBRARY))

    def test_all_that_oneDNN_exports(self):
        for onednn in (OLD, NEW):
            with self.subTest(onednn.name):
                needs(onednn)
                theirs = {name for name in self.exported(onednn.prefix / "lib" / "libdnnl.so")
                          if name.startswith("dnnl_graph_")}
                self.assertGreater(len(theirs), 50)
                self.assertEqual(set(), theirs - self.exported(LIBRARY))

    def test_oneDNN_is_the_clients(self):
        dynamic = subprocess.run(["readelf", "-d", LIBRARY], check=True, capture_output=True, text=True).stdout
        self.assertNotIn("libdnnl", dynamic)
        self.assertNotIn("libgomp", dynamic)


class Clients(unittest.TestCase):
    def check(self, onednn, may_be_cut, expected_differences=()):
        needs(onednn)
        with tempfile.TemporaryDirectory() as folder:
            report = f"{folder}/report"
            plain = onednn.run(onednn.client(), **LEAKS_PASS)
            kvant = onednn.run(onednn.client(True), KVANT_DNNL_GRAPH_VERBOSE=report)
            self.assertEqual((0, ""), (plain.returncode, plain.stderr))
            self.assertEqual((0, ""), (kvant.returncode, kvant.stderr))
            comparison = Comparison(plain.stdout, kvant.stdout, may_be_cut)
            wrong = [text for text in comparison.wrong if not text.startswith(tuple(expected_differences))]
            self.assertEqual([], wrong)
            self.assertGreater(comparison.compared, 1000)
            told = reported(report)
        off = onednn.run(onednn.client(True), KVANT_DNNL_GRAPH="0")
        self.assertEqual((0, ""), (off.returncode, off.stderr))
        self.assertEqual(plain.stdout, off.stdout, "turned off, it is oneDNN bit for bit")
        if not SANITIZED:
            preloaded = onednn.run(onednn.client(), LD_PRELOAD=str(LIBRARY))
            self.assertEqual(kvant.stdout, preloaded.stdout, "preloaded as linked")
        return comparison, told

    def test_new(self):
        comparison, told = self.check(
            NEW, lambda case: "half" in case,
            # kvant takes parameters by channel of heads, which oneDNN does not compile.
            ("compressed per channel: 20 lines", "compressed per channel: status of compile = 3"))
        self.assertGreater(told.count(("partition", "kvant")), 70)
        self.assertGreater(told.count(("compile", "cache_miss")), 70)
        # Of graphs that are built anew.
        self.assertEqual(21, told.count(("compile", "cache_hit")))
        self.assertGreater(told.count(("partition", "oneDNN")), 100)
        # Of forms that the old one lacks.
        self.assertEqual(["1"], self.values(comparison.kvant["compressed u4 with zero points"], "partitions"))
        self.assertEqual(["3"], self.values(comparison.kvant["compressed not permitted"], "status of compile"))

    def test_old(self):
        """Where 3.2 cuts attention, which is nearly always, kvant's is cut out of the graph."""
        comparison, told = self.check(OLD, lambda case: True, ("places: partitions",))
        self.assertGreater(told.count(("compile", "cache_miss")), 40)
        for case, count in (("plain", "1"), ("select, fill first", "1"), ("grouped heads", "1"), ("residual", "2"),
                            ("around", "3")):
            self.assertEqual([count], self.values(comparison.kvant[case], "partitions"), case)
        for case, what, value in (("threads", "different results", "0"), ("threads", "failures", "0"),
                                  ("engines", "same result", "1"), ("allocators", "all went back", "1")):
            self.assertEqual([value], self.values(comparison.kvant[case], what))
        [before] = [line for line in comparison.kvant["after main"]]
        self.assertIn(before, comparison.kvant["engines"])

    @staticmethod
    def values(lines, what):
        return [line.split(" = ")[1] for line in lines if line.startswith(f"{what} = ")]

    def test_misuse_that_oneDNN_does_not_survive(self):
        for onednn in (OLD, NEW):
            with self.subTest(onednn.name):
                needs(onednn)
                done = onednn.run(onednn.client(True), "misuse")
                self.assertEqual((0, ""), (done.returncode, done.stderr))
                self.assertTrue(done.stdout)
                for line in done.stdout.splitlines():
                    self.assertRegex(line, " = 2$")


class Loading(unittest.TestCase):
    SCRIPT = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
graph, op = ctypes.c_void_p(), ctypes.c_void_p()
print(library.dnnl_graph_graph_create(ctypes.byref(graph), 1))
if graph:
    print(library.dnnl_graph_op_create(ctypes.byref(op), ctypes.c_size_t(1), 26, b"exp"))
    print(library.dnnl_graph_add_op(graph, op), library.dnnl_graph_graph_finalize(graph))
    print(library.dnnl_graph_op_destroy(op), library.dnnl_graph_graph_destroy(graph))
"""

    def load(self, onednn):
        return onednn.run(sys.executable, "-c", self.SCRIPT, LIBRARY).stdout.split()

    @unittest.skipIf(SANITIZED, "Python is not sanitized")
    def test_opened_by_itself(self):
        needs(OLD)
        self.assertEqual(["0", "0", "8", "0", "0", "0"], self.load(OLD))

    @unittest.skipIf(SANITIZED, "Python is not sanitized")
    def test_without_oneDNN(self):
        nowhere = OneDnn("nowhere")
        self.assertEqual(["5"], self.load(nowhere))


@unittest.skipIf(SANITIZED, "the program and the library would both have kvant's sanitized code")
class SharedGraphs(unittest.TestCase):
    # What kvant leaves to oneDNN.
    LEFT = {"sdpa-plain-training-backward-f32", "gqa-plain-training-fwd-w-dropout-f32"}

    def test_as_kvant_check(self):
        needs(NEW)
        graphs = sorted(SHARED.glob("*.json"))
        if not graphs and os.environ.get("KVANT_REQUIRE_SHARED") in (None, "", "0"):
            self.skipTest(f"no graphs in {SHARED}")
        self.assertGreater(len(graphs), 10)
        for graph in graphs:
            with self.subTest(graph.stem):
                done = NEW.run(BUILD / "onednn" / "check_dnnl", graph, LD_PRELOAD=str(LIBRARY))
                result = json.loads(done.stdout)
                self.assertNotIn("error", result)
                self.assertEqual(1, len(result["partitions"]))
                self.assertTrue(result["partitions"][0]["supported"])
                # The bits that Dropout draws are oneDNN's, not the oracle's.
                if "dropout" not in graph.stem:
                    self.assertTrue(all(output["passed"] for output in result["outputs"]), result["outputs"])
                if graph.stem not in self.LEFT:
                    self.assertTrue(all(output["as_kvant"] for output in result["outputs"]), result["outputs"])


if __name__ == "__main__":
    if not LIBRARY.exists():
        print(f"{LIBRARY} is not built")
        sys.exit(SKIPPED)
    result = unittest.main(argv=sys.argv[:1] + sys.argv[3:], exit=False).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(SKIPPED if result.testsRun == len(result.skipped) else 0)
