"""Runs one peer: JSON requests on standard input, one per line, and a JSON answer to each.

  {"do": "prepare", "case": {..}, "contestant": {..}, "check": bool}
      -> {"bytes", "ms" (first run), "detail", "error" (relative, against f64; null unchecked)}
  {"do": "time", "contestant": NAME, "iterations": N} -> {"ms": [N times]}
  {"do": "clear"} -> {}
  {"do": "version"} -> {"version"}

An answer {"failed": sentence} says that it could not be done.

A peer is a module peer_FAMILY with version() and make(data, kind, threads), which returns an object
with run(), bytes (K, V, Q and output of one run), detail, output() (of the last run, as
attention.attention() returns it) and kv(head), the K and V it computed with.

Usage: worker.py FAMILY THREADS
"""
import importlib
import json
import os
import sys
import time
import traceback

import attention
import cases


class Worker:
    def __init__(self, family, threads):
        self.peer = importlib.import_module(f"peer_{family}")
        self.threads = threads
        self.data = None
        self.contestants = {}

    def version(self, _):
        return {"version": self.peer.version()}

    def prepare(self, request):
        case = cases.Case(**request["case"])
        contestant = cases.Contestant(**request["contestant"])
        if self.data is None or self.data.case != case:
            self.data = attention.Data(case)
        made = self.peer.make(self.data, contestant.kind, self.threads)
        start = time.perf_counter()
        made.run()
        answer = {
            "bytes": made.bytes,
            "ms": (time.perf_counter() - start) * 1e3,
            "detail": made.detail,
            "error": None,
        }
        if request["check"]:
            want = attention.attention(case, self.data.q, made.kv)
            answer["error"] = attention.relative_error(made.output(), want)
        self.contestants[contestant.name] = made
        return answer

    def time(self, request):
        run = self.contestants[request["contestant"]].run
        times = []
        for _ in range(request["iterations"]):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return {"ms": times}

    def clear(self, _):
        self.contestants.clear()
        self.data = None
        return {}


def main():
    # Libraries print to standard output as they like; the answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    family, threads = sys.argv[1], int(sys.argv[2])
    worker = Worker(family, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request["do"])(request)
        except Exception as e:
            traceback.print_exc()
            answer = {"failed": f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
