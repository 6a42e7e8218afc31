"""Sums up what the PTX emulator leaves behind.

Usage: report.py coverage FOLDER [KERNEL]   (of PTXEMU_COVERAGE)
       report.py log FILE..                 (of PTXEMU_LOG)

coverage: the share of each kernel's PTX instructions that was executed; of KERNEL also the opcodes
that never were. log: launches, opcodes executed, and what was found.
"""
import collections
import json
import pathlib
import sys


def coverage(folder, kernel=None):
    by_name = collections.defaultdict(list)
    missed = collections.Counter()
    for path in pathlib.Path(folder).glob("*.cov"):
        # HASH_NAME.cov, of lines "EXECUTED LINE TEXT".
        name = path.stem.split("_", 1)[1]
        rows = [line.split(" ", 2) for line in path.read_text().splitlines()]
        by_name[name].append((sum(row[0] == "1" for row in rows), len(rows)))
        if name == kernel:
            missed.update(row[2].split()[0] for row in rows if row[0] == "0")
    for name, found in sorted(by_name.items()):
        hit, total = map(sum, zip(*found))
        print(f"{name}: {len(found)} specialisations, {hit} of {total} instructions executed "
              f"({100 * hit / total:.1f} %), the best {100 * max(h / t for h, t in found):.1f} %")
    for opcode, count in missed.most_common(25):
        print(f"{count:9} {opcode}")


def log(paths):
    sums = collections.defaultdict(collections.Counter)
    occupancy = {}
    for line in "".join(pathlib.Path(path).read_text() for path in paths).splitlines():
        process = json.loads(line)
        sums["totals"]["processes"] += 1
        sums["launches"][process["arch"]] += process["launches"]
        for name in ("launches", "blocks", "instructions"):
            sums["totals"][name] += process[name]
        for name in ("kernels", "opcodes", "contracted", "notes"):
            sums[name].update(process[name])
        sums["faults"].update(fault.split("\n")[0] for fault in process["faults"])
        occupancy.update(process["occupancy"])
    for name in ("totals", "launches", "kernels", "opcodes", "contracted", "notes", "faults"):
        print(f"{name}:")
        for key, count in sums[name].most_common():
            print(f"{count:16,} {key}")
    print("occupancy below what was compiled for:")
    for launch, found in sorted(occupancy.items()):
        print(f"  {launch}: {found}")


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ("coverage", "log"):
        sys.exit(__doc__)
    if sys.argv[1] == "coverage":
        coverage(*sys.argv[2:4])
    else:
        log(sys.argv[2:])


if __name__ == "__main__":
    main()
