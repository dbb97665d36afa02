"""The memory in use: the tensors of pending ops and open windows of all communicators of this process.

Code that moves a tensor's memory calls :func:`in_use` first, because another communicator, on another thread, may have
given the address to the network. The start of an op records nothing: only the rare call of :func:`in_use` asks all
holders.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, UntypedStorage

from aiocomms.lowlevel.threads import copied


class Holder(Protocol):
    """An object that uses tensors, and may have stored the addresses of their memory."""

    def held(self) -> Iterable[Tensor]:
        """Return the tensors whose memory is in use now. Any thread may call this."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register(holder: Holder) -> None:
    """Make :func:`in_use` ask a holder, as long as the holder exists."""
    _holders.add(holder)


def has_room(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor still fits its storage.

    A program may have resized the storage since the call.
    """
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return not tensor.numel() or tensor.untyped_storage().nbytes() >= end


def in_use(storage: UntypedStorage) -> bool:
    """Return whether a pending op, or an open window, of any communicator of this process uses this memory."""
    place = storage.data_ptr()
    return any(tensor.untyped_storage().data_ptr() == place for one in copied(_holders) for tensor in one.held())
