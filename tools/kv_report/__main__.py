"""What quantizing the KV cache costs SmolLM2-135M, and what it saves.

    scripts/kv_report                                     all of docs/kv_report (an hour)
    scripts/kv_report --windows 1 --schemes q8_0,kivi4 --no-speed --out /tmp/look
    scripts/kv_report --engine definitions                without kvant, to compare it with

Runs the model on the King James Bible with each scheme's cache and writes a page,
charts and report.json. Results are kept per scheme and window under build/, so a
run that was stopped goes on where it was.
"""

import argparse
import json
import pathlib

from . import expected, kvant_kv, packages, quality, speed
from .definitions import SCHEMES
from .report import Report

ROOT = packages.ROOT


def measured_speeds(runs, schemes, threads):
    """{(scheme, tokens): measure()}, each in its own process, or as kept from before."""
    speeds = {}
    for tokens in speed.LENGTHS:
        for scheme in schemes:
            path = runs.folder / f"speed-{scheme}-{tokens}-{threads}.json"
            if not path.exists():
                found = speed.run(scheme, tokens, threads)
                path.write_text(json.dumps(found))
                quality.log(f"{scheme} at {tokens}: {found['ms_per_token']:.2f} ms, "
                            f"{found['ratio']:.2f} of f16's")
            speeds[scheme, tokens] = json.loads(path.read_text())
    return speeds


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/kv_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, metavar="N", help="the first N of 8")
    parser.add_argument("--schemes", default=",".join(SCHEMES), metavar="A,B,...",
                        help="of: " + " ".join(SCHEMES))
    parser.add_argument("--engine", choices=quality.ENGINES, default="kvant")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "kv_report", metavar="DIR")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "kv_report",
                        metavar="DIR", help="where results are kept between runs")
    parser.add_argument("--threads", type=int, default=2, help="for times per token")
    parser.add_argument("--no-speed", action="store_true", help="measure no times")
    arguments = parser.parse_args()

    asked = arguments.schemes.split(",")
    if unknown := [s for s in asked if s not in SCHEMES]:
        parser.error(f"no scheme is called {', '.join(unknown)}; there are: {' '.join(SCHEMES)}")
    most = len(expected.INDEPENDENT_WINDOWS)
    if not 1 <= arguments.windows <= most:
        parser.error(f"--windows {arguments.windows}: there are 1 to {most}")
    if missing := packages.missing():
        parser.error(f"missing: {'; '.join(missing)}. scripts/setup --dev installs it")
    if arguments.engine == "kvant" and not kvant_kv.library_path().exists():
        parser.error(f"{kvant_kv.library_path()} is not built; or give --engine definitions")
    # What all else is compared with comes first, whether asked for or not.
    schemes = [s for s in SCHEMES if s in asked or s == "f32"]

    runs = quality.Runs(quality.ENGINES[arguments.engine](), list(range(arguments.windows)),
                        arguments.work)
    windows = {s: runs.scheme(s) for s in schemes}
    summaries = {s: quality.summary(ws, windows["f32"]) for s, ws in windows.items()}
    errors = {s: runs.attention_errors(s) for s in schemes if s != "f32"}
    timed = arguments.engine == "kvant" and not arguments.no_speed
    speeds = measured_speeds(runs, schemes, arguments.threads) if timed else {}
    Report(runs.model, arguments.engine, runs.windows, summaries, windows, errors, speeds).write(
        arguments.out)
    quality.log(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
