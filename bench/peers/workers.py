"""Worker processes: one per family and thread count, of which one runs at a time."""
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile

import attention
import kvant_graph

HERE = pathlib.Path(__file__).parent
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """Why a worker could not do something, in a sentence."""


def cpus(count):
    """CPUs to run `count` threads on: of different cores while there are any."""

    def is_second_of_core(cpu):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            return not re.match(rf"{cpu}\b", pathlib.Path(path).read_text())
        except OSError:
            return False

    allowed = sorted(os.sched_getaffinity(0), key=lambda cpu: (is_second_of_core(cpu), cpu))
    return allowed[:count]


class Process:
    """Requests and answers, a line of JSON each. Between them the process is stopped, so that no
    thread of it that still spins for more work takes time from the others. It has as many CPUs as
    threads, because not every library keeps to the number of threads that it is told."""

    def __init__(self, command, threads, environment, log):
        self.log = log
        chosen = cpus(threads)

        def in_child():
            os.sched_setaffinity(0, chosen)
            # A stopped process would outlive a killed parent.
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "wb"),
            preexec_fn=in_child,
        )

    def ask(self, request, timeout=600):
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        ready, _, _ = select.select([process.stdout], [], [], timeout)
        if not ready:
            self.close()
            raise Failed(f"no answer within {timeout} s")
        line = process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _last_words(self):
        code = self.process.wait()
        lines = pathlib.Path(self.log).read_text(errors="replace").strip().splitlines()
        how = f"ended with {code}"
        if code == -signal.SIGKILL:
            how = "was killed, as Linux does where memory runs out"
        return f"its process {how}: {lines[-1] if lines else 'no message'}"

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Worker:
    """What both kinds answer. Raises Failed."""

    def __init__(self, process):
        self.process = process

    def time(self, contestant, iterations):
        request = {"do": "time", "contestant": contestant.name, "iterations": iterations}
        return self.process.ask(request)["ms"]

    def clear(self):
        self.process.ask({"do": "clear"})

    def close(self):
        self.process.close()


class PeerWorker(Worker):
    """worker.py in a process."""

    def __init__(self, family, threads, environment, log):
        count = str(threads)
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "DPCPP_CPU_NUM_CUS")
        command = [sys.executable, str(HERE / "worker.py"), family, count]
        environment = {**environment, **{name: count for name in limits}}
        # Nobody's buffers are in huge pages, so numpy's are not either.
        environment["NUMPY_MADVISE_HUGEPAGE"] = "0"
        super().__init__(Process(command, threads, environment, log))

    def version(self):
        return self.process.ask({"do": "version"})["version"]

    def prepare(self, data, contestant, check):
        return self.process.ask(
            {
                "do": "prepare",
                "case": dataclasses.asdict(data.case),
                "contestant": dataclasses.asdict(contestant),
                "check": check,
            }
        )


class KvantWorker(Worker):
    """kvant_worker in a process; graphs and data go there, and results come back, by files."""

    def __init__(self, build, threads, isa, log):
        self.binary = str(build / "kvant")
        command = [str(build / "kvant_worker"), str(threads)]
        environment = {"KVANT_CPU_ISA": isa} if isa else {}
        super().__init__(Process(command, threads, environment, log))

    def prepare(self, data, contestant, check):
        graph = kvant_graph.make_graph(self.binary, data.case, contestant)
        stored = kvant_graph.Stored(data, contestant.kind)
        with tempfile.TemporaryDirectory() as folder:
            files = {n: os.path.join(folder, n) for n in ("graph", "inputs", "output")}
            pathlib.Path(files["graph"]).write_text(json.dumps(graph))
            kvant_graph.write_inputs(files["inputs"], graph, data, stored)
            request = {
                "do": "prepare",
                "contestant": contestant.name,
                "beyond": attention.beyond_caches(),
                **files,
            }
            answer = self.process.ask(request)
            got = kvant_graph.read_output(files["output"], data.case)
        answer["error"] = None
        if check:
            want = attention.attention(data.case, data.q, stored.kv)
            answer["error"] = attention.relative_error(got, want)
        return answer

    def read_gb_per_s(self):
        return self.process.ask({"do": "read"})["gb_per_s"]


class Pool:
    """Workers by family, thread count and instruction set, started when first needed."""

    def __init__(self, build, logs):
        self.build = build
        self.logs = logs
        self.running = {}
        logs.mkdir(parents=True, exist_ok=True)

    def get(self, family, threads, isa=""):
        key = (family, threads, isa)
        if key not in self.running:
            log = self.logs / ("-".join(filter(None, (family, isa, str(threads)))) + ".log")
            if family == "kvant":
                self.running[key] = KvantWorker(self.build, threads, isa, log)
            else:
                self.running[key] = PeerWorker(family, threads, _environment(family), log)
        return self.running[key]

    def of(self, contestant, threads):
        return self.get(contestant.family, threads, contestant.isa)

    def clear(self):
        """Frees all data. Workers that have died are started again when next needed."""
        for key, worker in list(self.running.items()):
            try:
                worker.clear()
            except Failed:
                self.running.pop(key).close()

    def close(self):
        for worker in self.running.values():
            worker.close()


def _environment(family):
    """Where scripts/bench put what is no Python package."""
    prefix = pathlib.Path(sys.prefix)
    if family == "ggml":
        folder = prefix.parent / "ggml" / "bin"
        return {"KVANT_PEERS_GGML": f"{folder}/libggml-base.so:{folder}/libggml-cpu.so"}
    if family == "ik_llama":
        folder = prefix.parent / "ik_llama"
        return {
            "KVANT_PEERS_GGML": str(folder / "ggml" / "src" / "libggml.so"),
            "KVANT_PEERS_IK_LLAMA_VERSION": str(folder / "version"),
        }
    if family == "onednn":
        return {
            "KVANT_PEERS_ONEDNN": str(prefix.parent / "libonednn_sdpa.so"),
            "LD_LIBRARY_PATH": str(prefix / "lib"),
            "OCL_ICD_FILENAMES": str(prefix / "lib" / "libintelocl.so"),
        }
    return {}
