"""Times kvant and other implementations of attention in turns, and reports it.

Run by scripts/bench, which installs the others. In each round every contestant of a case runs a
few times, one after the other, and so does a plain read of memory; so whatever else the machine
does meets all of them alike.
"""
import argparse
import datetime
import os
import pathlib
import sys

import attention
import cases
import machine
import report
import workers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ("kvant", "onnxruntime", "ggml", "torch", "onednn")
# Contestants run this long per round (but at least once), and are timed only once in all if a
# single call takes longer than the second.
MS_PER_ROUND = 150
MS_ONCE = 8000


def say(text):
    print(text, file=sys.stderr, flush=True)


class Workers:
    """Started when first needed, and again after one has died."""

    def __init__(self, build, logs):
        self.build = build
        self.logs = logs
        self.running = {}
        logs.mkdir(parents=True, exist_ok=True)

    def get(self, family, threads, isa=""):
        key = (family, threads, isa)
        if key not in self.running:
            log = self.logs / ("-".join(filter(None, (family, isa, str(threads)))) + ".log")
            self.running[key] = (
                workers.KvantWorker(self.build, threads, isa, log)
                if family == "kvant"
                else workers.PeerWorker(family, threads, self._environment(family), log)
            )
        return self.running[key]

    def of(self, contestant, threads):
        return self.get(contestant.family, threads, contestant.isa)

    def _environment(self, family):
        prefix = pathlib.Path(sys.prefix)
        if family == "ggml":
            return {"KVANT_PEERS_GGML": str(prefix.parent / "ggml" / "bin")}
        if family == "onednn":
            return {
                "KVANT_PEERS_ONEDNN": str(prefix.parent / "libonednn_sdpa.so"),
                "LD_LIBRARY_PATH": str(prefix / "lib"),
                "OCL_ICD_FILENAMES": str(prefix / "lib" / "libintelocl.so"),
            }
        return {}

    def clear(self):
        for key, worker in list(self.running.items()):
            try:
                worker.clear()
            except workers.Failed:
                del self.running[key]

    def forget(self, contestant, threads):
        """After a failure, the process may be gone."""
        key = (contestant.family, threads, contestant.isa)
        if key in self.running and self.running[key].process.process.poll() is not None:
            del self.running[key]

    def close(self):
        for worker in self.running.values():
            worker.close()


class Series:
    """The times of one contestant with one number of threads."""

    def __init__(self, contestant, threads, prepared):
        self.contestant = contestant
        self.threads = threads
        self.bytes = prepared["bytes"]
        self.detail = prepared["detail"]
        self.error = prepared["error"]
        first = prepared["ms"]
        self.once = first > MS_ONCE
        self.iterations = max(1, min(1000, int(MS_PER_ROUND / max(first, 1e-3))))
        self.ms = [first] if self.once else []

    def result(self, read_gb_per_s):
        times = sorted(self.ms)
        gb_per_s = self.bytes / times[0] * 1e-6
        return {
            "ms_best": times[0],
            "ms_median": times[len(times) // 2],
            "runs": len(times),
            "bytes": self.bytes,
            "gb_per_s": gb_per_s,
            "share_of_read": gb_per_s / read_gb_per_s,
            "detail": self.detail,
        }


def prepare(pool, data, contestants, threads, not_run):
    """The series of those that work; the others go to `not_run`, with why."""
    series, checked = [], set()
    for count in threads:
        for contestant in contestants:
            if contestant.name in not_run:
                continue
            say(f"  preparing {contestant.name}, {count} thread(s)")
            try:
                check = contestant.name not in checked
                prepared = pool.of(contestant, count).prepare(data, contestant, check)
                checked.add(contestant.name)
                series.append(Series(contestant, count, prepared))
            except workers.Failed as e:
                not_run[contestant.name] = str(e)
                pool.forget(contestant, count)
    return [s for s in series if s.contestant.name not in not_run]


def run_case(pool, case, threads, rounds, families):
    wanted = [c for c in cases.contestants(case) if c.family in families]
    not_run = {c.name: why for c in wanted if (why := cases.why_left_out(case, c))}
    series = prepare(pool, attention.Data(case), wanted, threads, not_run)
    reads = {count: [] for count in threads}
    for number in range(rounds):
        say(f"  round {number + 1} of {rounds}")
        for count in threads:
            reads[count].append(pool.get("kvant", count).read_gb_per_s())
            for s in series:
                if s.threads != count or s.once or s.contestant.name in not_run:
                    continue
                worker = pool.of(s.contestant, count)
                try:
                    if s.iterations > 1:
                        worker.time(s.contestant, 1)
                    s.ms += worker.time(s.contestant, s.iterations)
                except workers.Failed as e:
                    not_run[s.contestant.name] = str(e)
                    pool.forget(s.contestant, count)
    pool.clear()
    return summarize(case, series, {n: max(r) for n, r in reads.items()}, not_run)


def summarize(case, series, reads, not_run):
    rows = {}
    for s in series:
        c = s.contestant
        if c.name in not_run:
            continue
        row = rows.setdefault(
            c.name,
            {
                "name": c.name,
                "family": c.family,
                "format": c.format,
                "bits": c.bits,
                "against": list(c.against),
                "error": s.error,
                "threads": {},
            },
        )
        row["threads"][str(s.threads)] = s.result(reads[s.threads])
    for row in rows.values():
        for count, result in row["threads"].items():
            if case.prefill:
                result["gflop_per_s"] = case.gflop / result["ms_best"] * 1e3
            result["ratio"] = {
                name: result["ms_best"] / rows[name]["threads"][count]["ms_best"]
                for name in row["against"]
                if name in rows and count in rows[name]["threads"]
            }
    return {
        "name": case.name,
        "title": case.title,
        "prefill": case.prefill,
        "read_gb_per_s": {str(n): gb for n, gb in reads.items()},
        "contestants": list(rows.values()),
        "not_run": not_run,
    }


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="kvant beside other implementations, in one table."
    )
    names = [c.name for c in cases.CASES]
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds; not written")
    parser.add_argument(
        "--cases", default=",".join(names), help=f"some of {','.join(names)} (default: all)"
    )
    parser.add_argument("--threads", default="1,2", help="thread counts (default: 1,2)")
    parser.add_argument("--rounds", type=int, help="how often each takes its turn (default: 9)")
    parser.add_argument(
        "--only",
        default=",".join(FAMILIES),
        help=f"some of {','.join(FAMILIES)} (default: all that are installed)",
    )
    parser.add_argument("--output", type=pathlib.Path, help="folder (bench/results/MACHINE)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="kvant's build")
    arguments = parser.parse_args()
    arguments.cases = arguments.cases.split(",")
    arguments.only = arguments.only.split(",")
    arguments.threads = [int(n) for n in arguments.threads.split(",")]
    for given, known in ((arguments.cases, names), (arguments.only, FAMILIES)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    return arguments


def find_versions(pool, wanted):
    """What is there, by family, and what is not, with why."""
    versions, missing = {}, {}
    for family in FAMILIES[1:]:
        if family not in wanted:
            continue
        try:
            versions[family] = pool.get(family, 1).version()
        except workers.Failed as e:
            missing[family] = str(e)
            pool.get(family, 1).close()
            pool.running.pop((family, 1, ""))
    return versions, missing


def main():
    arguments = parse_arguments()
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    description = machine.describe(ROOT)
    logs = pathlib.Path(os.environ.get("KVANT_PEERS_LOGS", ROOT / ".peers" / "logs"))
    pool = Workers(arguments.build, logs)
    try:
        versions, missing = find_versions(pool, arguments.only)
        families = {"kvant", *versions}
        results = []
        for case in cases.CASES:
            if case.name not in arguments.cases:
                continue
            say(f"{case.name}: {case.title}")
            case = cases.quick(case) if arguments.quick else case
            results.append(run_case(pool, case, arguments.threads, rounds, families))
    finally:
        pool.close()
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": description,
        "versions": versions,
        "missing": missing,
        "threads": arguments.threads,
        "rounds": rounds,
        "quick": arguments.quick,
        "cases": results,
    }
    print(report.markdown(run))
    folder = arguments.output
    if folder is None and not arguments.quick:
        folder = ROOT / "bench" / "results" / machine.slug(description)
    if folder is not None:
        report.write(run, folder)
        say(f"written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
