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
from lines import ELEMENTS_OF_CHANNEL, QUERIES, all_lines  # noqa: E402


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
            ns = got["ms_best"] * 1e6 / (ELEMENTS_OF_CHANNEL * line.head_size)
            before = found.get((line, queries))
            if before is None or ns < before["ns"]:
                found[line, queries] = {"ns": ns, "kernel": got["kernel"]}
    print(file=sys.stderr)
    return found, refused


def best_of_bits(found):
    """{(bits, queries): ns} of lines whose K and V have the same bits, and all tokens."""
    best = {}
    for (line, queries), got in found.items():
        k, v = line.bits()
        if k == v and line.family != "masks and loads":
            best[k, queries] = min(best.get((k, queries), got["ns"]), got["ns"])
    return best


def ratios(found):
    """{line: {queries: times the best of its bits}}; of a mixture, of the mean of both sides' bests."""
    best, result = best_of_bits(found), {}
    for (line, queries), got in found.items():
        k, v = line.bits()
        result.setdefault(line, {})[queries] = got["ns"] / ((best[k, queries] + best[v, queries]) / 2)
    return result


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench --sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--families", help="some of them, by comma: formats, mixtures, head sizes, ...")
    parser.add_argument("--output", type=pathlib.Path, help="folder (bench/results/MACHINE)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="kvant's build")
    arguments = parser.parse_args()
    lines = list(all_lines())
    if arguments.families:
        wanted = arguments.families.split(",")
        lines = [line for line in lines if line.family in wanted]
        if not lines:
            parser.error(f"{arguments.families}: among {', '.join(sorted({x.family for x in all_lines()}))}")
    found, refused = time_all(arguments.build / "kvant", lines, arguments.rounds)
    description = machine.describe(ROOT)
    import tables

    folder = arguments.output or ROOT / "bench/results" / machine.slug(description)
    tables.write(folder, description, found, ratios(found), best_of_bits(found), refused)
    print(folder / "sweep.md")


if __name__ == "__main__":
    main()
