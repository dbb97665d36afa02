"""UCX on the fake GPU: the real transport for CUDA, with tensors that UCX treats as host memory.

The engine treats them as GPU memory, which it never touches itself. All ranks may be tasks of one process.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch
from aiocomms_ucx._engine import HOST
from aiocomms_ucx.cuda_transport import CudaUcxTransport
from aiocomms_ucx.cuda_windows import CudaWindows
from fake_cuda import FakeCuda
from torch import UntypedStorage

from aiocomms.cuda import Cuda


class FakeWindows(CudaWindows):
    """Windows that ranks of one process map, too."""

    def _export(self, rank: int, storage: UntypedStorage) -> tuple[Any, ...] | None:
        transport = self._transport
        cuda = cast("FakeCuda", transport.cuda)
        here = transport.pids[rank] == transport.pids[transport.rank]
        return cuda.share(storage) if here else cuda.share_moved(storage)


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


class UnmappedUcxTransport(FakeUcxTransport):
    """The same where CUDA maps no memory of another rank, so that UCX reads and writes it."""

    cuda_layer = FakeCuda(shares=False)
