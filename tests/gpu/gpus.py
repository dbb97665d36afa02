"""The common parts of the tests on a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of a distribution

from benchmarks.gpu import onegpu  # noqa: E402

CUDA = "cuda:0"

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU: torch.cuda.is_available() is False"
)
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")


def share(rank: int) -> None:
    """Let this process share the GPU with the other ranks. Call this before NCCL reads its environment."""
    os.environ.update(onegpu.environment(onegpu.nccl_version(), rank))


def busy(seconds: float) -> None:
    """Keep the current stream busy with a spinning kernel, for at least about this long."""
    fastest = 2.0e9  # cycles per second that no GPU of today exceeds by much
    torch.cuda._sleep(int(seconds * fastest))
