"""What the numbers were measured on."""
import os
import pathlib
import platform
import re
import subprocess

# Those that attention kernels may use.
FLAGS = re.compile(r"^(avx.*|fma|f16c|amx.*)$")


def _cpuinfo(name):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _first_line(*command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def describe(repository):
    kib = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1])
    model = _cpuinfo("model name") or platform.processor() or platform.machine()
    family, number = _cpuinfo("cpu family"), _cpuinfo("model")
    return {
        "cpu": f"{model} (family {family}, model {number})" if family else model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(kib / 2**20, 1),
        "flags": " ".join(sorted(f for f in _cpuinfo("flags").split() if FLAGS.match(f))),
        "system": f"{platform.system()} {platform.release()}",
        "compiler": _first_line("c++", "--version"),
        "commit": _first_line("git", "-C", str(repository), "describe", "--always", "--dirty"),
    }


def slug(description):
    """A folder name: the CPU and its cores."""
    text = f"{description['cpu']} {description['cores']} cores".lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")
