"""The makespan of a schedule on so many workers and memory domains, from times recorded on one thread.

What is assumed (docs/benchmarks.md has it in words):

- A loop's threads start one by the other: worker k begins once ceil(log2(k + 1)) wake-ups are over.
- "runs": each worker has a run of units, takes them from its front, and without any left takes the back half of the
  run of the next worker that has some. "counter": all take the next unit of one counter.
- A unit that does not follow what its worker did last takes as long as it was recorded to take apart from its
  neighbours.
- A unit that joins two chunks' results does so within its time, as recorded; another may do it, in the same time.
- A unit whose memory is in another domain than its worker takes `remote` times as long.
- No loop ends before each domain's memory has been read, at its bandwidth.
"""
import dataclasses
import heapq


@dataclasses.dataclass(frozen=True)
class Threads:
    """Microseconds."""
    wake: float
    join: float


@dataclasses.dataclass(frozen=True)
class Domains:
    count: int = 1
    placement: str = "near"  # a unit's memory: "near" in its share's domain, "spread" over all, or in "one"
    remote: float = 1.5
    bytes_per_us: float = float("inf")  # of each domain


def start(worker, wake):
    """When worker 0, 1, 2, .. begins: the caller, then one woken by it, then two, four, .."""
    return wake * worker.bit_length()


def _factor(unit, units, worker, workers, domains):
    """What being remote makes of a unit's time."""
    if domains.placement == "spread":
        return 1 + (domains.remote - 1) * (domains.count - 1) / domains.count
    home = 0 if domains.placement == "one" else unit * domains.count // units
    return 1 if worker * domains.count // workers == home else domains.remote


class _Runs:
    def __init__(self, units, workers):
        self.runs = [[units * w // workers, units * (w + 1) // workers] for w in range(workers)]

    def next(self, worker):
        for distance in range(len(self.runs)):
            victim = (worker + distance) % len(self.runs)
            begin, end = self.runs[victim]
            if begin == end:
                continue
            if distance == 0:
                self.runs[worker][0] += 1
                return begin
            middle = (begin + end) // 2
            self.runs[victim][1] = middle
            self.runs[worker] = [middle + 1, end]
            return middle
        return None


class _Counter:
    def __init__(self, units, workers):
        self.units, self.at = units, 0

    def next(self, worker):
        if self.at == self.units:
            return None
        self.at += 1
        return self.at - 1


HAND_OUT = {"runs": _Runs, "counter": _Counter}


def loop(in_order, apart, workers, threads, hand_out="runs", domains=Domains(), n_bytes=0):
    """How long a ParallelFor takes."""
    units = len(in_order)
    if workers == 1 or units == 1:
        here = sum(t * _factor(u, units, 0, 1, domains) for u, t in enumerate(in_order))
        return max(here, _memory(n_bytes, domains))
    source = HAND_OUT[hand_out](units, workers)
    free = [(start(worker, threads.wake), worker) for worker in range(workers)]
    heapq.heapify(free)
    last = [None] * workers
    end = 0
    while free:
        now, worker = heapq.heappop(free)
        unit = source.next(worker)
        if unit is None:
            continue
        follows = last[worker] is not None and last[worker] + 1 == unit
        took = (in_order if follows else apart)[unit] * _factor(unit, units, worker, workers, domains)
        last[worker] = unit
        end = max(end, now + took)
        heapq.heappush(free, (now + took, worker))
    return max(end, _memory(n_bytes, domains)) + threads.join


def _memory(n_bytes, domains):
    """The time in which the domain that has most to read reads it."""
    share = 1 if domains.placement == "one" else 1 / domains.count
    return n_bytes * share / domains.bytes_per_us


def makespan(case, workers, threads, hand_out="runs", domains=Domains()):
    serial = case["serial"]["before"] + case["serial"]["after"]
    return serial + loop(case["in_order"], case["apart"], workers, threads, hand_out, domains, case["bytes"])


def best_serial(case):
    """One worker, and nothing cut that need not be."""
    return case["serial"]["before"] + sum(case["least"]) + case["serial"]["after"]


def efficiency(case, workers, threads, hand_out="runs", domains=Domains()):
    """The share of the workers' time that one worker without a schedule would have needed."""
    return best_serial(case) / (workers * makespan(case, workers, threads, hand_out, domains))
