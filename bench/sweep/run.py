"""Times kvant's CPU kernels over formats, layouts, head sizes, masks and numbers of queries, and shows cliffs.

Run by `scripts/bench --sweep`. All are timed once per round, in one thread, and the best of a case's rounds counts.
A case is compared with the best of its bits and queries, per element of K and V; what takes more than three times
as long is a cliff, and is listed with what ran.
"""
import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench/peers"))

import machine  # noqa: E402
import tables  # noqa: E402
from counts import count  # noqa: E402
from lines import QUERIES, all_lines  # noqa: E402


def _run(kvant, *words, text=None):
    done = subprocess.run([kvant, *words], input=text, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None, done.stderr.strip()


def time_all(kvant, lines, rounds):
    """{(line, queries): {"ns": per element of K and V, "kernel"}}, and what kvant refuses: {line: why}."""
    graphs, refused = {}, {}
    for line in lines:
        for queries in QUERIES:
            made, why = _run(kvant, "make", *line.make(queries))
            if made is None:
                refused[line] = why
            else:
                graphs[line, queries] = made
    found = {}
    for n in range(rounds):
        for i, ((line, queries), graph) in enumerate(graphs.items()):
            print(f"\r{n + 1}/{rounds}: {i + 1}/{len(graphs)}", end="", file=sys.stderr, flush=True)
            timed, why = _run(kvant, "bench", "-", "--backend", "cpu", "--threads", "1", "--json", text=graph)
            if timed is None:
                refused[line] = why
                continue
            got = json.loads(timed)
            ns = got["ms_best"] * 1e6 / line.elements()
            before = found.get((line, queries))
            if before is None or ns < before["ns"]:
                found[line, queries] = {"ns": ns, "kernel": got["kernel"]}
    print(file=sys.stderr)
    return found, refused


def best_of_bits(found):
    """{(bits, queries): ns} of lines whose K and V have the same bits."""
    best = {}
    for (line, queries), got in found.items():
        k, v = line.bits()
        if k == v and line.may_be_best():
            best[k, queries] = min(best.get((k, queries), got["ns"]), got["ns"])
    return best


def ratios(found):
    """{line: {queries: times the best of its bits}}; of a mixture, of the mean of both sides' bests."""
    best, result = best_of_bits(found), {}
    for (line, queries), got in found.items():
        k, v = line.bits()
        result.setdefault(line, {})[queries] = got["ns"] / ((best[k, queries] + best[v, queries]) / 2)
    return result


def parse_arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench --sweep", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--rounds", type=count, default=2, help="how often each is timed (default: 2)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    found, refused = time_all(ROOT / "build/kvant", list(all_lines()), arguments.rounds)
    description = machine.describe(ROOT)
    folder = ROOT / "bench/results" / machine.slug(description)
    tables.write(folder, description, found, ratios(found), best_of_bits(found), refused)
    print(folder / "sweep.md")


if __name__ == "__main__":
    main()
