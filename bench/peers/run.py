"""Times kvant and other implementations of attention in turns, and reports it.

Run by scripts/bench, which installs the others. In each round every contestant of a case runs a
few times, one after the other, and so does a plain read of memory; so whatever else the machine
does meets all of them alike.
"""
import argparse
import datetime
import pathlib
import sys

import cases
from counts import count, counts

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ("kvant", "onnxruntime", "ggml", "ik_llama", "torch", "onednn")


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="kvant beside other implementations, in one table.", allow_abbrev=False
    )
    names = [c.name for c in cases.CASES]
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds; not written")
    parser.add_argument(
        "--cases", default=",".join(names), help=f"some of {','.join(names)} (default: all)"
    )
    parser.add_argument("--threads", type=counts, default=[1, 2], help="thread counts (default: 1,2)")
    parser.add_argument("--rounds", type=count, help="how often each takes its turn (default: 9)")
    parser.add_argument(
        "--only",
        default=",".join(FAMILIES),
        help=f"some of {','.join(FAMILIES)} (default: all that are installed)",
    )
    parser.add_argument("--output", type=pathlib.Path, help="folder (bench/results/MACHINE)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="kvant's build")
    parser.add_argument(
        "--logs", type=pathlib.Path, default=ROOT / ".peers" / "logs", help="of the workers"
    )
    arguments = parser.parse_args()
    arguments.cases = arguments.cases.split(",")
    arguments.only = arguments.only.split(",")
    for given, known in ((arguments.cases, names), (arguments.only, FAMILIES)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    return arguments


def main():
    arguments = parse_arguments()
    # What needs more than Python, after --help.
    import machine
    import report
    import rounds
    import workers

    rounds_of_each = arguments.rounds or (3 if arguments.quick else 9)
    description = machine.describe(ROOT)
    pool = workers.Pool(arguments.build, arguments.logs)
    try:
        versions, missing = rounds.find_versions(pool, arguments.only)
        results = []
        for case in cases.CASES:
            if case.name not in arguments.cases:
                continue
            case = cases.quick(case) if arguments.quick else case
            families = {"kvant", *versions}
            results.append(
                rounds.run_case(pool, case, arguments.threads, rounds_of_each, families)
            )
    finally:
        pool.close()
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": description,
        "versions": versions,
        "missing": missing,
        "threads": arguments.threads,
        "rounds": rounds_of_each,
        "quick": arguments.quick,
        "cases": results,
    }
    print(report.markdown(run))
    folder = arguments.output
    if folder is None and not arguments.quick:
        folder = ROOT / "bench" / "results" / machine.slug(description)
    if folder is not None:
        report.write(run, folder)
        print(f"written to {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
