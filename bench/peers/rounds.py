"""Rounds: every contestant of a case in turn, again and again."""
import sys

import attention
import cases
import workers

# Contestants run this long per round (but at least once), and are timed only once in all if a
# single call takes longer than the second.
MS_PER_ROUND = 150
MS_ONCE = 8000
# On a few tokens, beyond any arithmetic's rounding: something else than attention.
MAX_ERROR = 0.02


def say(text):
    print(text, file=sys.stderr, flush=True)


class Series:
    """The times of one contestant with one number of threads."""

    def __init__(self, contestant, threads, worker, prepared):
        self.contestant = contestant
        self.threads = threads
        self.worker = worker
        self.bytes = prepared["bytes"]
        self.detail = prepared["detail"]
        self.error = prepared["error"]
        first = prepared["ms"]
        self.once = first > MS_ONCE
        if not self.once:
            first = worker.time(contestant, 2)[1]
        self.iterations = max(1, min(1000, int(MS_PER_ROUND / max(first, 1e-3))))
        self.ms = [first] if self.once else []

    def run_round(self):
        if self.once:
            return
        if self.iterations > 1:
            self.worker.time(self.contestant, 1)  # what the others have driven out of caches
        self.ms += self.worker.time(self.contestant, self.iterations)

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


def check_small(pool, case, contestants, threads, not_run):
    """Whether each computes what it should, on few tokens; who does not goes to `not_run`."""
    data = attention.Data(cases.quick(case))
    for contestant in contestants:
        if contestant.name in not_run:
            continue
        try:
            error = pool.of(contestant, threads).prepare(data, contestant, check=True)["error"]
            if not error < MAX_ERROR:  # nor may it be NaN
                raise workers.Failed(f"its output is off by {error:.2g}")
        except workers.Failed as e:
            not_run[contestant.name] = str(e)
    pool.clear()


def prepare(pool, case, contestants, threads, not_run):
    """The series of those that work; who does not goes to `not_run`, with why."""
    data = attention.Data(case)
    series = []
    for count in threads:
        for contestant in contestants:
            if contestant.name in not_run:
                continue
            say(f"  preparing {contestant.name}, {count} thread(s)")
            try:
                worker = pool.of(contestant, count)
                prepared = worker.prepare(data, contestant, check=count == threads[0])
                series.append(Series(contestant, count, worker, prepared))
            except workers.Failed as e:
                not_run[contestant.name] = str(e)
    return [s for s in series if s.contestant.name not in not_run]


def run_case(pool, case, threads, rounds, families):
    say(f"{case.name}: {case.title}")
    wanted = [c for c in cases.contestants(case) if c.family in families]
    not_run = {c.name: why for c in wanted if (why := cases.why_left_out(case, c))}
    check_small(pool, case, wanted, threads[0], not_run)
    series = prepare(pool, case, wanted, threads, not_run)
    reads = {count: [] for count in threads}
    for number in range(rounds):
        say(f"  round {number + 1} of {rounds}")
        for count in threads:
            reads[count].append(pool.get("kvant", count).read_gb_per_s())
            for s in series:
                if s.threads != count or s.contestant.name in not_run:
                    continue
                try:
                    s.run_round()
                except workers.Failed as e:
                    not_run[s.contestant.name] = str(e)
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


def find_versions(pool, wanted):
    """What is there of the peers, by family, and what is not, with why."""
    versions, missing = {}, {}
    for family in wanted:
        if family == "kvant":
            continue
        try:
            versions[family] = pool.get(family, 1).version()
        except workers.Failed as e:
            missing[family] = str(e)
    return versions, missing
