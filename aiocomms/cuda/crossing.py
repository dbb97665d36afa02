"""The conversion of bytes and numbers of the host into tensors on a device, and back.

The conversion does not wait for the current stream. torch's copy between the host and a GPU blocks the calling
thread until the current stream is idle. On the loop's thread, the current stream belongs to the program. The kernels of
this stream may run long, or wait for ops of this rank. So these functions make an idle stream current for the copy.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from aiocomms.cuda import ipc
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.ops.writing import copies_under_way


@unaffected
def to_tensor(data: bytes | bytearray, device: torch.device) -> Tensor:
    """Return bytes as a flat uint8 tensor on ``device``.

    A tensor on the CPU shares the memory of ``data`` if ``data`` is a bytearray.
    """
    if not data:
        return buffers.empty(0, dtype=torch.uint8, device=device)
    writable = data if isinstance(data, bytearray) else bytearray(data)
    return to_device(torch.frombuffer(writable, dtype=torch.uint8), device)


def to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a tensor's elements as bytes; the inverse of :func:`to_tensor`. See :func:`to_host`."""
    host = to_host(tensor)
    return ctypes.string_at(host.data_ptr(), host.nbytes)


@unaffected
def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return ``host`` itself if ``device`` is the CPU, or else a complete copy of ``host`` on ``device``."""
    if device.type != "cuda":
        return host.to(device)
    caller = torch.cuda.current_stream(device)
    with ipc.aside(caller.device_index):
        tensor = host.to(device)
    tensor.record_stream(caller)  # The memory is the idle stream's, which would use it again before the caller's reads.
    return tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself if it is on the CPU, or else a copy of ``tensor`` on the CPU.

    The tensor must come from :func:`to_device`, or must have been written by an op that has ended. No kernel may write
    the tensor. Ops between ranks of one process start copies on the GPU, and end before these copies. So this call
    waits for the copies, and for the kernels that precede the copies.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    with ipc.aside(tensor.device.index):
        for copy in copies_under_way(tensor.device.index):
            copy.wait()
        return tensor.cpu()
