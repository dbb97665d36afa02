"""The memory in use.

The memory of tensors is in use while a pending op or an open window of any communicator in this process uses the
tensors.

Code that moves the memory of a tensor must call :func:`in_use` first. Another communicator, perhaps on another thread,
may have given the old address to the network. To keep the start of an op fast, ops do not record their memory. A call
of :func:`in_use` asks all holders for their tensors.
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
        """Return the tensors whose memory the object uses now. Any thread may call this method."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register(holder: Holder) -> None:
    """Make :func:`in_use` ask a holder for its tensors, as long as the holder exists."""
    _holders.add(holder)


def has_room(tensor: Tensor) -> bool:
    """Return whether the storage of a contiguous tensor is still large enough for the tensor.

    A program may have resized the storage after the call that got the tensor.
    """
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return not tensor.numel() or tensor.untyped_storage().nbytes() >= end


def in_use(storage: UntypedStorage) -> bool:
    """Return whether a pending op or an open window uses this memory, for any communicator of this process."""
    place = storage.data_ptr()
    return any(tensor.untyped_storage().data_ptr() == place for one in copied(_holders) for tensor in one.held())
