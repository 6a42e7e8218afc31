"""Every row of bench/static/kernels.py compiles for sm_90a, and every sixth for one of the other
architectures, without spilling, within the registers that its plan leaves, and for sm_90a issues no
more than 1.15 times what the committed report says. (scripts/static compiles all for all.)

Usage: cuda_specialisations_test.py SOURCE_DIR BUILD_DIR. Skipped where there is no NVRTC or no
nvdisasm; fails then where KVANT_REQUIRE_SHARED is set.
"""
import json
import os
import pathlib
import sys

SKIPPED = 77
SOURCE, BUILD = (pathlib.Path(arg).resolve() for arg in sys.argv[1:3])
sys.path.insert(0, str(SOURCE / "bench/static"))

import gate  # noqa: E402
import kernels  # noqa: E402
import report  # noqa: E402
import specialisations  # noqa: E402


def main():
    committed = json.loads((SOURCE / report.RESULTS / "report.json").read_text())
    try:
        nvdisasm = specialisations.find_nvdisasm(SOURCE)
        # A kernel takes three seconds to compile; architectures differ little in what they issue.
        others = [arch for arch in kernels.ARCHS if arch != "sm_90a"]
        def archs_of(row):
            return ("sm_90a", others[row // 6 % len(others)]) if row % 6 == 0 else ("sm_90a",)

        found = specialisations.compile_all(BUILD / "kvant", nvdisasm, BUILD / "static", archs_of=archs_of,
                                            counted=("sm_90a",))
    except specialisations.Unavailable as error:
        print(f"skipped: {error}")
        return 1 if os.environ.get("KVANT_REQUIRE_SHARED") else SKIPPED
    problems = list(gate.problems(found, committed))
    for problem in problems:
        print(problem)
    if problems:
        print("Where this is meant: scripts/static writes the report anew.")
    print(f"{len(found)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
