"""The static report as data (JSON) and as tables (Markdown)."""
import dataclasses
import json

import kernels
import sass
import specialisations
import stores

RESULTS = "bench/results/static"


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    multiprocessors: int
    copy_bytes_per_s: float


# Multiprocessors: of the SXM boards, by NVIDIA's H100 and H200 data sheets. Copy bandwidth: a
# device-to-device copy in PyTorch, bytes read and written, of 3.35 and 4.8 TB/s on paper.
GPUS = (Gpu("H100", 132, 3.0e12), Gpu("H200", 132, 4.3e12))
# 1.98 GHz is the highest clock that nvidia-smi reports of both; under power limits it falls, and
# 1.70 GHz is assumed to hold.
CLOCKS_HZ = (1.70e9, 1.98e9)
SCHEDULERS, LANES = 4, 32
ALU_LANES = 16  # of a scheduler: an instruction takes it for two cycles

KEPT = ("kernel", "threads", "registers", "register_limit", "shared_bytes",
        "blocks_per_multiprocessor", "blocks_that_fit", "elements_per_lane", "instructions",
        "issued", "stall_cycles", "issued_per_element", "alu_per_element")
KEPT_OF_STORES = ("kernel", "threads", "registers", "register_limit", "shared_bytes",
                  "blocks_per_multiprocessor", "blocks_that_fit", "all_instructions")


def budget(gpu, clock_hz, bytes_per_element, lanes=LANES):
    """Instructions per element of K and V and lane that can be issued while memory delivers it."""
    per_second = gpu.multiprocessors * SCHEDULERS * lanes * clock_hz
    return per_second / (gpu.copy_bytes_per_s / bytes_per_element)


def to_json(found):
    """found: of compile_all, without errors."""
    rows, store_rows = [], []
    for kernel, archs in found:
        if isinstance(kernel, stores.Store):
            kept = {arch: {k: facts[k] for k in KEPT_OF_STORES} for arch, facts in archs.items()}
            store_rows.append({"name": kernel.name, "archs": kept})
            continue
        row = {"name": kernel.name, "kind": kernel.kind,
               "bytes_per_element": round(specialisations.bytes_per_element(kernel), 4)}
        if kernel.design:
            alu, issued = kernel.design_of(archs["sm_90a"]["elements_per_lane"])
            row["design"] = {"alu": alu, "issued": issued}
        row["archs"] = {arch: {k: facts[k] for k in KEPT} for arch, facts in archs.items()}
        rows.append(row)
    nvrtc = sorted({facts["nvrtc"] for _, archs in found for facts in archs.values()})
    return {"nvrtc": ", ".join(nvrtc), "rows": rows, "stores": store_rows}


def _table(columns, rows):
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return lines + ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]


def _share(row, arch, gpu):
    """Of the budget at the lower clock: issue slots, and the ALU's."""
    facts, size = row["archs"][arch], row["bytes_per_element"]
    issue = facts["issued_per_element"] / budget(gpu, CLOCKS_HZ[0], size)
    alu = facts["alu_per_element"] / budget(gpu, CLOCKS_HZ[0], size, ALU_LANES)
    return f"{issue:.0%} / {alu:.0%}"


def _ratio(row, arch):
    if "design" not in row:
        return "-"
    facts, design = row["archs"][arch], row["design"]
    return (f"{facts['alu_per_element'] / design['alu']:.2f} / "
            f"{facts['issued_per_element'] / design['issued']:.2f}")


def _family(row, arch):
    """"tiles" of "attention_tiles_d128"."""
    return row["archs"][arch]["kernel"].split("_")[1]


def _decode_table(rows, arch):
    columns = ["K and V", "kernel", "bytes per element", "ALU / issued per element", "against the design",
               *(f"share of {gpu.name}" for gpu in GPUS)]
    return _table(columns, [
        [row["name"].removeprefix("decode "), _family(row, arch), f"{row['bytes_per_element']:.3f}",
         f"{row['archs'][arch]['alu_per_element']:.2f} / "
         f"{row['archs'][arch]['issued_per_element']:.2f}",
         _ratio(row, arch), *(_share(row, arch, gpu) for gpu in GPUS)] for row in rows])


def _pipe_table(rows, arch):
    columns = ["kernel", "elements per lane", *sass.PIPES, "all", "stalls"]
    return _table(columns, [
        [row["name"], f"{row['archs'][arch]['elements_per_lane']:g}",
         *row["archs"][arch]["instructions"].values(), row["archs"][arch]["issued"],
         row["archs"][arch]["stall_cycles"]] for row in rows])


def _resource_table(rows):
    columns = ["kernel", "threads"]
    for arch in kernels.ARCHS:
        columns += [f"{arch}: registers of", "shared KiB", "blocks planned / fit", "issued per element"]
    lines = []
    for row in rows:
        cells = [row["name"], row["archs"][kernels.ARCHS[0]]["threads"]]
        for arch in kernels.ARCHS:
            facts = row["archs"][arch]
            cells += [f"{facts['registers']} of {facts['register_limit']}",
                      f"{facts['shared_bytes'] / 1024:.1f}",
                      f"{facts['blocks_per_multiprocessor']} / {facts['blocks_that_fit']}",
                      f"{facts['issued_per_element']:.2f}"]
        lines.append(cells)
    return _table(columns, lines)


def _store_table(rows):
    columns = ["kernel", "threads"]
    for arch in kernels.ARCHS:
        columns += [f"{arch}: registers", "shared KiB", "blocks that fit", "instructions"]
    lines = []
    for row in rows:
        cells = [f"{row['name']} ({row['archs'][kernels.ARCHS[0]]['kernel']})",
                 row["archs"][kernels.ARCHS[0]]["threads"]]
        for arch in kernels.ARCHS:
            facts = row["archs"][arch]
            cells += [facts["registers"], f"{facts['shared_bytes'] / 1024:.1f}",
                      facts["blocks_that_fit"], facts["all_instructions"]]
        lines.append(cells)
    return _table(columns, lines)


def _budget_table():
    rows = []
    for gpu in GPUS:
        for bits, size in (("4-bit, row-wise scales and zero points", 136 / 256), ("16-bit", 2)):
            issue = [f"{budget(gpu, clock, size):.1f}" for clock in CLOCKS_HZ]
            alu = [f"{budget(gpu, clock, size, ALU_LANES):.1f}" for clock in CLOCKS_HZ]
            rows.append([f"{gpu.name}, {bits}", f"{gpu.copy_bytes_per_s / 1e12:g}",
                         " to ".join(issue), " to ".join(alu)])
    return _table(["", "copy TB/s", "issue slots per element and lane", "of the ALU"], rows)


HEAD = """\
# What the compiler makes of the CUDA kernels

Written by `scripts/static`; docs/cuda_kernels.md says what it means. Compiled by NVRTC {nvrtc}; nothing
here has run. Every kernel: 0 bytes spilled, and registers within the limit that the planned blocks
per multiprocessor leave (a CI test).

## Budgets

Instructions per element of K and V and lane that can be issued in the time in which memory delivers
the element:

    multiprocessors x 4 schedulers x lanes x clock / (copy bandwidth / bytes per element)

lanes: 32 for issue slots, 16 for the ALU, whose instructions take a scheduler's ALU two cycles.
132 multiprocessors (data sheets of both SXM boards); copy bandwidth 3.0 and 4.3 TB/s (device-to-device
copies in PyTorch, bytes read and written); clocks 1.70 GHz (assumed under power limits) to 1.98 GHz
(the highest that nvidia-smi reports of both).
"""

DECODE = """
## Decode, sm_90a

Of an element of K or V, per lane. "against the design": ALU and issued, divided by what the design's
table has for warp tiles of the same size, or the nearest, of the kernel on packed codes; kernels
named tiles dequantize to shared memory instead. "share": issue slots / ALU, of the budget at 1.70 GHz; above 100 % memory
waits for instructions.
"""

PIPES = """
## One round of the steady loop, sm_90a

Instructions of a warp by pipe; "stalls" is the sum of their stall counts, a warp's cycles where
nothing else holds it up.
"""

RESOURCES = """
## Registers, shared memory and blocks per multiprocessor
"""


STORES = """
## What stores into caches, and what merges attention over parts

Every instruction of a kernel once, those of branches that are rarely taken as well.
"""


def to_markdown(data):
    rows = data["rows"]
    decode = [row for row in rows if row["kind"] == "decode"]
    lines = [HEAD.format(nvrtc=data["nvrtc"]), *_budget_table(), DECODE,
             *_decode_table(decode, "sm_90a"), PIPES, *_pipe_table(rows, "sm_90a"), RESOURCES,
             *_resource_table(rows), STORES, *_store_table(data["stores"])]
    return "\n".join(lines) + "\n"


def write(folder, data):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "report.md").write_text(to_markdown(data))
