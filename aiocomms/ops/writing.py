"""Reads and writes of a program's tensors as bytes, also of those that were made in torch's inference mode.

Such a tensor may be written in that mode only, and the code that ends an operation runs on the loop, outside of it. Not
all of that code may run inside: tensors that it allocates, such as an object's, would be inference tensors in turn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected

_AS_IT_IS = nullcontext()


def writing(tensor: Tensor) -> AbstractContextManager[object]:
    """Within it the tensor may be written, whatever mode it was made in."""
    return torch.inference_mode() if tensor.is_inference() else _AS_IT_IS


def ordinary(tensor: Tensor) -> Tensor:
    """Return the tensor or, if it was made in inference mode, another one of the same memory that was not."""
    return _same_memory(tensor) if tensor.is_inference() else tensor


@unaffected
def _same_memory(tensor: Tensor) -> Tensor:
    other = buffers.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def write(out: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source`` into ``out``, whatever the shape of either."""
    with writing(out):
        out.copy_(source.detach().view(out.shape))


def octets(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as bytes: whatever strides it has, which are any where nothing follows them.

    ``view(torch.uint8)`` asks for those of more than one element, also of ``torch.ones(2)[::2]``.
    """
    plain, count = tensor.detach(), tensor.numel()
    if count == 1:
        line = plain.view(()).unsqueeze(0)
    elif count:
        line = plain.view(-1)
    else:
        # With elements, as_strided would look at the storage. The code that uses the bytes says if that is too small.
        line = plain.as_strided((0,), (1,))
    return line.view(torch.uint8)
