"""The layers of docs/design.md hold, and no file is too long.

Usage: layering_test.py SOURCE_DIR [BUILD_DIR]

A layer compiles with the headers of those that it links, and finds no others
(cmake/KvantLibrary.cmake): of the build, what each is compiled with is compared with the table
below. What is finer than layers is read from the sources.
"""
import json
import pathlib
import re
import sys

MAX_LINES = 500

TOP = ("tools", "integrations", "python", "tests", "bench", "examples")
FOLDERS = ("graph", "patterns", "kernels", "backends", "cache")
# By the longest folder that a file is in, the layers whose headers it sees. backends is what lies in
# that folder itself; values are data types, the table of score steps and layouts of caches.
LAYERS = {
    "graph": {"graph"},
    "patterns": {"patterns", "graph"},
    "kernels": {"kernels", "values"},
    "backends": {"backends", "patterns", "graph"},
    "cache": {"cache", "backends", "patterns", "graph"},
}
for _backend in ("oracle", "reference", "cpu", "cuda"):
    LAYERS[f"backends/{_backend}"] = {_backend, "kernels", "values"} | LAYERS["backends"]
# The executor sees everything: it is a library beside kvant, not a layer of it.
ON_TOP_OF_KVANT = re.compile(r"kernels/device/|backends/cuda/simt/")

# Third-party headers, and the only files that may include them (below the top layers).
EXTERNAL = [
    (re.compile(r"nlohmann/"), re.compile(r"graph/.*\.cc$")),
    (re.compile(r"(oneapi/)?tbb/"), re.compile(r"backends/[^/]*\.cc$")),
    (re.compile(r"(oneapi/dnnl/)?dnnl"), re.compile(r"backends/reference/")),
    (re.compile(r"xxh"), re.compile(r"backends/cuda/runtime/disk_cache\.cc$")),
    (re.compile(r"cuda|nvrtc"), re.compile(r"backends/cuda/|kernels/cuda/|kernels/device/")),
    (re.compile(r"absl/"), re.compile(r"(?!kernels/)")),
    (re.compile(r"CLI/"), re.compile(r"$^")),
    (re.compile(r"omp\.h"), re.compile(r"$^")),
]

# Folders that lower specs: they see no graph. What they may include of patterns, and what says that
# they look at ops all the same.
LOWERING = re.compile(r"(kernels|backends/cpu|backends/cuda)/")
SPECS = re.compile(r"kvant/patterns/[a-z]+_spec\.h$")
READS_OPS = re.compile(r"\battrs\b|\bAttr::|\bOpKind\b|\bSubgraph\b|\bPartitionGraph")

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
SUFFIXES = {".cc", ".h", ".inc", ".cu", ".cuh", ".py", ".cmake"}


def source_files(root):
    """Our sources: the layers' folders, docs and scripts aside. Build folders hold none."""
    folders = [d for d in (*FOLDERS, *TOP, "cmake", "scripts")]
    found = [f for f in root.iterdir() if f.suffix in SUFFIXES or f.name == "CMakeLists.txt"]
    for folder in folders:
        for f in (root / folder).rglob("*"):
            is_source = f.suffix in SUFFIXES or f.name == "CMakeLists.txt"
            if f.is_file() and (is_source or folder == "scripts") and "__pycache__" not in f.parts:
                found.append(f)
    return sorted(found)


def include_error(path, quote, include):
    """Why the file at `path` may not have this include, or None."""
    layer = path.split("/")[0] if "/" in path else ""
    if include.startswith("kvant/"):
        if layer in TOP:
            return None
        lowers = LOWERING.match(path) and include.startswith("kvant/patterns/")
        if lowers and not SPECS.match(include):
            return "of patterns, only the specs may be included here"
        if path == "graph/data_type.h" and include != "kvant/graph/data_type.inc":
            return "kernels include data_type.h, so it may include nothing of graph but its table"
        return None
    if layer in TOP:
        return None
    for header, allowed in EXTERNAL:
        if header.match(include):
            return None if allowed.match(path) else "this library may not be used here"
    if quote == '"' and not re.search(r"\.(pb\.h)$", include):
        return 'our own headers are included as "kvant/folder/file.h"'
    return None


def check_file(path, text):
    """Yields one message for each thing that is wrong with a file."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{path}: {len(lines)} lines, more than {MAX_LINES}"
    if path.endswith((".cc", ".h", ".inc", ".cu", ".cuh")):
        for number, line in enumerate(lines, 1):
            if match := INCLUDE.match(line):
                if reason := include_error(path, *match.groups()):
                    yield f"{path}:{number}: includes {match.group(2)}: {reason}"
            if LOWERING.match(path) and READS_OPS.search(line.split("//")[0]):
                yield f"{path}:{number}: reads ops: what lowers specs sees no graph"


def self_test():
    """The checker itself: what must be refused, and what must not."""
    bad = [
        ("kernels/cpu/decode.h", '#include "absl/status/status.h"'),
        ("graph/data_type.h", '#include "kvant/graph/status.h"'),
        ("graph/json.h", "#include <nlohmann/json.hpp>"),
        ("backends/cpu/attention_plan.cc", "#include <oneapi/dnnl/dnnl.hpp>"),
        ("graph/op.cc", '#include "op.h"'),
        ("backends/cpu/attention_plan.cc", '#include "kvant/patterns/partition.h"'),
        ("backends/cuda/plan.cc", "if (op.attrs.Has(kBlock)) return;"),
        ("backends/cpu/store.cc", "auto rest = PartitionGraph(graph);"),
        ("tests/long.cc", "\n" * (MAX_LINES + 1)),
    ]
    good = [
        ("kernels/cpu/decode.h", '#include "kvant/graph/data_type.h"\n#include <cstdint>'),
        ("graph/data_type.h", '#include "kvant/graph/data_type.inc"'),
        ("backends/cpu/attention_plan.cc", '#include "kvant/kernels/cpu/attention_args.h"'),
        ("backends/reference/matmul.cc", '#include "oneapi/dnnl/dnnl.hpp"'),
        ("graph/json.cc", '#include "nlohmann/json.hpp"'),
        ("backends/cpu/cpu_backend.h", '#include "kvant/patterns/store_spec.h"\n// no attrs here'),
        ("backends/oracle/ops.cc", "op.attrs.Has(kBlock)"),
        ("tests/x_test.cc", '#include "kvant/tools/make.h"\n#include "gtest/gtest.h"'),
        ("kvant.h", '#include "kvant/backends/engine.h"'),
        ("cache/import_export.h", '#include "kvant/backends/tensor.h"\n#include "absl/types/span.h"'),
    ]
    for path, text in bad:
        assert list(check_file(path, text)), f"accepted in {path}: {text}"
    for path, text in good:
        assert not list(check_file(path, text)), f"refused in {path}: {text}"


def check_build(root, build):
    """Yields a message for each source of a layer that is compiled with headers of another."""
    for unit in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(unit["file"])
        if not path.is_relative_to(root):
            continue
        path = path.relative_to(root).as_posix()
        inside = [layer for layer in LAYERS if path.startswith(layer + "/")]
        if not inside or ON_TOP_OF_KVANT.match(path):
            continue
        sees = set()
        for folder in re.findall(r"(?:-I|-isystem )(\S+)", unit["command"]):
            folder = pathlib.Path(folder)
            if folder.is_relative_to(build) or folder == root:
                in_layers = folder.parent == build / "layers"
                sees.add(folder.name if in_layers else folder.as_posix())
        if sees != LAYERS[max(inside, key=len)]:
            yield f"{path}: is compiled with the headers of {', '.join(sorted(sees))}"


def main():
    self_test()
    root = pathlib.Path(sys.argv[1]).resolve()
    files = source_files(root)
    problems = list(check_build(root, pathlib.Path(sys.argv[2]).resolve())) if sys.argv[2:] else []
    problems += [
        problem
        for f in files
        for problem in check_file(f.relative_to(root).as_posix(), f.read_text(errors="replace"))
    ]
    print("\n".join(problems) or f"{len(files)} files: fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
