"""Copies between tensors of this process: copies of messages, and background copies of low priority."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from aiocomms.errors import CommError, MessageTruncatedError
from aiocomms.lowlevel.failures import misfit
from aiocomms.lowlevel.libraries import native
from aiocomms.ops.writing import note_copy, write, writing


def copy_message(given: Tensor, wanted: Tensor, src: int) -> CommError | None:
    """Copy the sender's tensor into the buffer of the matching receive. Both operations are in this process.

    :param given: the sender's tensor.
    :param wanted: the receiver's tensor, which may have another shape.
    :param src: the sender's rank.
    :returns: the error of the receive, as :func:`misfit` returns it; None if the receive succeeded.
    """
    if given.requires_grad:  # An autograd graph does not reach from one rank to another.
        given = given.detach()
    error = misfit(src, given.dtype, given.nbytes, wanted, given.shape)
    if error is None:
        with writing(wanted):
            wanted.copy_(given.view(wanted.shape))
    elif isinstance(error, MessageTruncatedError):
        n = min(given.numel(), wanted.numel())
        write(wanted.view(-1)[:n], given.view(-1)[:n])
    note_copy(wanted)
    return error


class YieldingCopy:
    """A copier of tensors that gives precedence to all other threads and processes. Any thread can stop the copier.

    A native thread with the lowest priority makes the copies. During a copy, the caller's thread waits, and does not
    hold the interpreter's lock. The caller's thread itself copies tensors that need a conversion. Without native code,
    the caller's thread copies all tensors.
    """

    def __init__(self) -> None:
        module = native()
        self._native: Any = None if module is None else module.YieldingCopy()
        self._stopped = False

    def stop(self) -> None:
        """Stop copying. A running copy ends soon. Any thread may call this method."""
        self._stopped = True
        if self._native is not None:
            self._native.stop()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair into the first, which has the same shape. Blocks."""
        parts = []
        kept = []  # These tensors hold the memory that the native thread reads.
        for there, part in pairs:
            if self._stopped:
                return
            if self._native is None or not _same_bytes(there, part):
                there.copy_(part)
                continue
            size = part.element_size()
            strides = zip(part.shape, there.stride(), part.stride(), strict=True)
            dims = [(count, to * size, of * size) for count, to, of in strides]
            parts.append((there.data_ptr(), part.data_ptr(), size, dims))
            kept.append(part)
        if parts:
            self._native.copy(parts)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are on the CPU, and both tensors represent equal values by equal bytes."""
    on_cpu = one.device.type == other.device.type == "cpu"
    return on_cpu and one.dtype == other.dtype and not (other.is_conj() or other.is_neg())
