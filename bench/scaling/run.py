"""Computes how the CPU's schedules would scale to 256 workers and 8 memory domains, from times recorded here.

Run by `scripts/bench --scaling`. All units of a step are timed one after another on one thread,
through the engine; model.py says what is computed from that.
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
from cases import BY_TOKENS, BY_TOKENS_WORKERS, CASES  # noqa: E402
from model import Threads  # noqa: E402


def record(program, request):
    done = subprocess.run([program], input=json.dumps(request), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"scripts/bench: {done.stderr.strip()}")
    return json.loads(done.stdout)


def least_disturbed(measured):
    """The best of what was measured at several times: other programs may have had the processors."""
    best = measured[0]
    for other in measured[1:]:
        for key in ("read_gb_per_s_of_one", "read_gb_per_s_of_all"):
            best[key] = max(best[key], other[key])
        for pool, states in other["hand_over"].items():
            for state, times in states.items():
                for key, us in times.items():
                    best["hand_over"][pool][state][key] = min(best["hand_over"][pool][state][key], us)
    return best


def parse_arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench --scaling", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--rounds", type=count, default=31, help="how often each case is recorded (default: 31)")
    parser.add_argument("--remote", type=float, default=1.5,
                        help="how many times as long a unit takes whose memory is another domain's (default: 1.5)")
    parser.add_argument("--domain-gb-per-s", type=float,
                        help="what a domain's memory delivers (default: what the cores here read, for each core)")
    parser.add_argument("--output", type=pathlib.Path, help="the folder to write to (default: the machine's)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    program = ROOT / "build/kvant_unit_times"
    recorded, measured = {}, []
    for i, (name, case) in enumerate(CASES.items()):
        print(f"\r{i + 1}/{len(CASES)}", end="", file=sys.stderr, flush=True)
        measured.append(record(program, {}))
        recorded[name] = record(program, {**case, "rounds": arguments.rounds})
    print(file=sys.stderr)
    by_tokens = {name: {w: record(program, {**case, "workers": w, "rounds": arguments.rounds}) for w in BY_TOKENS_WORKERS}
                 for name, case in BY_TOKENS.items()}
    here = least_disturbed(measured)
    states = here["hand_over"]["oneTBB"]
    threads = {state: Threads(**times) for state, times in states.items()}
    description = machine.describe(ROOT)
    folder = arguments.output or ROOT / "bench/results" / machine.slug(description)
    tables.write(folder, description, here, recorded, by_tokens, threads, arguments.remote, arguments.domain_gb_per_s)
    print(folder / "scaling.md")


if __name__ == "__main__":
    main()
