"""Functions that write a program's tensors, or return views of them. The tensors may be inference tensors of torch.

An inference tensor can be written only in inference mode. The code that completes an operation runs on the loop,
outside inference mode. This code enters inference mode only to write. Otherwise, new tensors, such as those of a
received object, would become inference tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected

_AS_IT_IS = nullcontext()
_copies: dict[tuple[int, int], torch.cuda.Event] = {}  # the last copy on each stream


def writing(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which code can write the tensor, even if the tensor was created in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _AS_IT_IS


def ordinary(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor unchanged. For an inference tensor, return an ordinary tensor with the same memory."""
    return _same_memory(tensor) if tensor.is_inference() else tensor


@unaffected
def _same_memory(tensor: Tensor) -> Tensor:
    other = buffers.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def write(out: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source`` into ``out``.

    The two tensors may differ in shape, and their memory may overlap.
    """
    data = source.detach()
    if 0 < abs(out.data_ptr() - data.data_ptr()) < out.nbytes:
        data = data.clone()
    with writing(out):
        out.copy_(data.view(out.shape))


def note_copy(out: Tensor) -> None:
    """Record that the caller has just enqueued a copy into ``out`` on the current stream.

    :func:`copies_under_way` returns the CUDA events that mark the ends of these copies.
    """
    if out.is_cuda and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(out.device)
        key = out.device.index, stream.cuda_stream
        _copies.setdefault(key, torch.cuda.Event()).record(stream)  # type: ignore[no-untyped-call]


def copies_under_way(gpu: int) -> list[torch.cuda.Event]:
    """Return one CUDA event per stream with recorded copies.

    Each event completes when the GPU has done the copies of the event's stream.
    """
    return [event for (index, _), event in _copies.items() if index == gpu]


def octets(tensor: Tensor) -> Tensor:
    """Return a flat uint8 tensor over a contiguous tensor's memory, whatever the tensor's strides are.

    A contiguous tensor of at most one element may have any strides, for example ``torch.ones(2)[::2]``.
    ``view(torch.uint8)`` raises an error for such strides.
    """
    plain, count = tensor.detach(), tensor.numel()
    if count == 1:
        line = plain.view(()).unsqueeze(0)
    elif count:
        line = plain.view(-1)
    else:
        # With elements, as_strided would check the size of the storage. The code that uses the bytes checks it instead.
        line = plain.as_strided((0,), (1,))
    return line.view(torch.uint8)
