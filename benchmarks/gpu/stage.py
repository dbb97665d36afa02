"""The GPU as the measures see it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiocomms.progress.work import Work


class Stage:
    """One GPU. The tests give the measures one that is none."""

    backend = "nccl"
    """The backend of torch.distributed that runs beside us."""
    transport = "nccl"
    p2p = "ucx"

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._cycles = self._calibrate()

    def sleep(self, seconds: float) -> None:
        """Have the current stream wait, by a kernel that spins."""
        torch.cuda._sleep(int(seconds * self._cycles))

    def synchronize(self) -> None:
        """Hold up this thread until the current stream is done."""
        torch.cuda.current_stream().synchronize()

    def order(self, work: Work[Any]) -> None:
        """Have the current stream wait for one of ours."""
        work.wait_stream()

    def seconds_of_copy(self, nbytes: int, times: int) -> float:
        """Return the GPU's best time of some copies of so many bytes within its memory."""
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        took = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(took)

    def init(self, store: dist.Store, rank: int, size: int) -> None:
        """Start the peer."""
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, device_id=self.device)

    def tensor(self, nbytes: int) -> Tensor:
        """Zeros, float32."""
        return torch.zeros(nbytes // 4, device=self.device)

    def _calibrate(self) -> float:
        """Cycles per second of the spinning kernel's clock, which is the GPU's, not that of the host."""
        torch.cuda._sleep(10_000_000)  # the GPU runs at full speed then
        torch.cuda.synchronize()
        cycles = 50_000_000
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return cycles / (time.perf_counter() - begin)
