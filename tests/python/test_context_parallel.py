"""kvant.torch.context_parallel: 2 and 4 processes by torchrun equal one; a rank that is lost."""

import os
import pathlib
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


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", WORKER]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def test_a_lost_rank_is_told():
    result = subprocess.run([sys.executable, WORKER, "lost"], env=environment(), capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def test_needs_a_group():
    with pytest.raises(kvant.Error, match="torch.distributed is not initialised"):
        ContextParallelCache(heads=1, head_size=8, capacity=4)
