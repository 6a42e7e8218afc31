"""kvant.torch.context_parallel: 2 and 4 processes by torchrun equal one; a rank that is lost."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import kvant  # noqa: E402
from kvant.torch.context_parallel import ContextParallelCache  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("context_parallel_worker.py")


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", WORKER]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


@pytest.mark.parametrize("how", ["leaves", "hangs"])
@pytest.mark.parametrize("method", ["prefill", "attend"])
def test_a_lost_rank_is_told(how, method):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    workers = [subprocess.Popen([sys.executable, WORKER, how, method], env=environment(RANK=str(rank), **rendezvous),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(3)]
    try:
        for rank in (0, 2):
            text, _ = workers[rank].communicate(timeout=120)
            assert workers[rank].returncode == 0 and text.rstrip().endswith("told"), text[-4000:]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_needs_a_group():
    with pytest.raises(kvant.Error, match="torch.distributed is not initialised"):
        ContextParallelCache(heads=1, head_size=8, capacity=4)
