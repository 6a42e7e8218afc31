"""Compiles and counts every specialisation of kernels.py and stores.py, and writes the report.

run.py KVANT BUILD_DIR [--only TEXT]   TEXT: rows whose names have it; printed, nothing is written
"""
import argparse
import os
import pathlib
import sys

import gate
import kernels
import report
import specialisations
import stores

SOURCE = pathlib.Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvant")
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = [kernel for kernel in kernels.KERNELS + stores.STORES if arguments.only in kernel.name]
    try:
        found = specialisations.compile_all(arguments.kvant, specialisations.find_nvdisasm(SOURCE),
                                            arguments.build / "static", rows, jobs=os.cpu_count())
    except specialisations.Unavailable as error:
        sys.exit(f"static: {error}")
    broken = list(gate.problems(found, None))
    for problem in broken:
        print(problem, file=sys.stderr)
    whole = [(kernel, archs) for kernel, archs in found if not isinstance(archs, str)]
    data = report.to_json(whole)
    if arguments.only:
        print(report.to_markdown(data))
    else:
        report.write(SOURCE / report.RESULTS, data)
        print(f"{len(whole)} kernels: {report.RESULTS}/report.md")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
