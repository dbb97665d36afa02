"""UCX on the fake GPU: the real transport for CUDA, with tensors that UCX treats as host memory.

The engine treats them as GPU memory, which it never touches itself. All ranks may be tasks of one process.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import msgspec
import torch
from aiocomms_ucx._engine import HOST
from aiocomms_ucx.cuda_transport import CudaUcxTransport, CudaWindows
from fake_cuda import FakeCuda
from torch import Tensor, UntypedStorage

from aiocomms.cuda import Cuda


class FakeWindows(CudaWindows):
    """Windows that are mapped between processes by the means of torch's CPU tensors."""

    def _gpu(self, tensor: Tensor) -> str:
        return "the fake one"

    def _export(self, storage: UntypedStorage) -> tuple[Any, ...] | None:
        fd, size = storage._share_fd_cpu_()
        return os.getpid(), fd, size

    def _import(self, rank: int, gpu: str, exported: tuple[Any, ...]) -> UntypedStorage | None:
        assert gpu == "the fake one"
        pid, fd, size = exported
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(mine, size), dtype=torch.uint8).untyped_storage()
        finally:
            os.close(mine)


class FakeUcxTransport(CudaUcxTransport):
    """The real transport above the fake GPU."""

    capabilities = msgspec.structs.replace(CudaUcxTransport.capabilities, devices=frozenset({"cpu"}), in_process=True)
    windows = FakeWindows
    cuda_layer = FakeCuda()

    @classmethod
    def layer(cls, device: torch.device) -> tuple[Cuda, int]:
        return cls.cuda_layer, HOST

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        return None

    @classmethod
    def preference(cls, device: torch.device, size: int, family: Any) -> int:
        return 0
