"""Times kvant beside its peers on a GPU: bench.py OUT [--seconds N] [--shapes TEXT] [--rounds N]

In each round every contestant has its turn, and so have a copy and a plain read of device memory.
Writes OUT/results.json, results.md, decode.svg and prefill.svg after every shape, so that what was
measured is there whatever happens then. kvant is a process of its own, WORKER.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time

import cases
import report

HERE = pathlib.Path(__file__).resolve().parent
KVANT = HERE / "kvant"
REPLAYS = 6  # per round
SECONDS_OF_ONE = 2.5  # of one contestant's replays, all rounds together


class Failed(Exception):
    """Why something was not measured, in a sentence."""


class Worker:
    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do, limit=60, **request):
        if self.process.poll() is not None:
            raise Failed("kvant's process has ended")
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed("kvant's process has ended") from None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            words = "ended" if ready else f"did not answer within {limit} s"
            raise Failed(f"kvant's process {words} ({do})")
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer


class Kvant:
    """A contestant in the worker."""

    def __init__(self, worker, shape, name, kv_format):
        self.worker, self.name = worker, name
        made = worker.ask("prepare", name=name, case=shape.request(kv_format))
        self.kv_bytes, self.calls = made["kv_bytes"], made["calls"]
        self.detail, self.checked = made["kernel"], made["error"]

    def time(self, replays):
        return self.worker.ask("time", name=self.name, replays=replays)["us"]

    def error(self):
        return self.checked


def _sentence(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no words'}"[:300]


def _prepare(shape, worker, peers):
    """Contestants by name, and why others take no part."""
    made, not_run = {}, {}
    makers = {n: lambda n=n, f=f: Kvant(worker, shape, n, f) for n, f in shape.kvant.items()}
    for name in shape.peers:
        if peers:
            makers[name] = lambda name=name: peers.make(name, shape)
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as error:  # any peer's library has its own kinds
            not_run[name] = _sentence(error)
    return made, not_run


def _measure(shape, worker, peers, rounds):
    made, not_run = _prepare(shape, worker, peers)
    times = {name: [] for name in made}
    speeds = {"copy": [], "read": []}
    replays = {}
    for name, one in list(made.items()):
        try:
            us = one.time(2)[-1]  # warm; how many replays there is time for
            whole = us * 1e-6 * one.calls * rounds
            replays[name] = max(1, min(REPLAYS, int(SECONDS_OF_ONE / whole)))
        except Exception as error:
            not_run[name] = _sentence(error)
            made.pop(name)
    for _ in range(rounds):
        for kind, measured in speeds.items():
            measured += worker.ask(kind, replays=2)["gb_per_s"]
        for name, one in list(made.items()):
            try:
                times[name] += one.time(replays[name])
            except Exception as error:
                not_run[name] = _sentence(error)
                made.pop(name)
    speeds = {kind: statistics.median(measured) for kind, measured in speeds.items()}
    rows = [_row(shape, name, one, times[name], speeds) for name, one in made.items()]
    base = next((row["us"] for row in rows if row["name"] == cases.BASE), None)
    for row in rows:
        row["against_base"] = base / row["us"] if base else None
    return {
        "name": shape.name,
        "prefill": shape.prefill,
        "gb_per_s": speeds,
        "contestants": rows,
        "not_run": not_run,
    }


def _row(shape, name, one, times, speeds):
    us = statistics.median(times)
    gb_per_s = one.kv_bytes / us * 1e-3
    try:
        error = one.error()
    except Exception:
        error = None
    return {
        "name": name,
        "us": us,
        "us_best": min(times),
        "replays": len(times),
        "calls_per_replay": one.calls,
        "kv_bytes": one.kv_bytes,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / speeds["copy"],
        "floor_us": one.kv_bytes / speeds["copy"] * 1e-3,
        "tflop_per_s": shape.flops / us * 1e-6,
        "error": error,
        "detail": getattr(one, "detail", ""),
    }


def _host_costs(worker):
    """What Execute costs the host, and compiling."""
    shape = cases.SHAPES[0]
    case = shape.request(cases.INT4_GROUPS)
    costs = {"shape": shape.name, "format": cases.INT4_GROUPS}
    try:
        with tempfile.TemporaryDirectory() as folder:
            costs["compile"] = worker.ask("compile", case=case, folder=folder)
        worker.ask("prepare", name="host", case=case)
        costs["execute_us"] = worker.ask("host", name="host")["us"]
        worker.ask("clear")
    except Failed as error:
        costs["failed"] = str(error)
    return costs


def _precompile(shapes, arch):
    """All kernels, on all CPUs, so that no shape waits for its own. One that does not compile here
    says so later."""

    def compile_one(task):
        shape, kv_format = task
        graph = subprocess.run([KVANT, *shape.make(kv_format)], capture_output=True)
        command = [KVANT, "precompile", "-", "--arch", arch]
        subprocess.run(command, input=graph.stdout, capture_output=True)

    tasks = [(shape, kv_format) for shape in shapes for kv_format in shape.kvant.values()]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, tasks))


def _peers():
    try:
        import peers

        return peers, peers.versions()
    except Exception as error:  # no torch, or one without a GPU
        return None, {"peers": f"missing: {_sentence(error)}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=240, help="start no shape after that")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shapes", default="", help="only those whose name has this text in it")
    parser.add_argument("--worker", default=str(HERE / "kvant_gpu_worker"))
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    worker = Worker([options.worker])
    try:
        device = worker.ask("device")
    except Failed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    peers, versions = (None, {}) if options.no_peers else _peers()
    run = {"date": time.strftime("%Y-%m-%d"), "device": device, "versions": versions}
    run |= {"rounds": options.rounds, "host": _host_costs(worker), "shapes": [], "not_run": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = [shape for shape in cases.SHAPES if options.shapes in shape.name]
    _precompile(shapes, device["arch"])
    for shape in shapes:
        if time.monotonic() > deadline:
            run["not_run"][shape.name] = "no time was left"
            continue
        start = time.monotonic()
        try:
            run["shapes"].append(_measure(shape, worker, peers, options.rounds))
            worker.ask("clear")
        except Failed as error:
            run["not_run"][shape.name] = str(error)
            if worker.process.poll() is not None:
                worker = Worker([options.worker])
        if peers:
            peers.clear()
        print(f"bench: {shape.name}: {time.monotonic() - start:.1f} s", flush=True)
        report.write(run, options.out)
    report.write(run, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
