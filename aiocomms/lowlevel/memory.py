"""The ledger of memory in use: what ops and windows of this process hold, whichever communicator has them.

Code that is about to move a tensor's memory asks :func:`in_use` first: another communicator, on another thread, may
have given its address to the network. Nothing is written down when an op starts; the few that ask look at all that is
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, UntypedStorage

from aiocomms.lowlevel.threads import copied


class Holder(Protocol):
    """An object that uses tensors' memory, and may have kept its address."""

    def held(self) -> Iterable[Tensor]:
        """Return the tensors whose memory it uses now; on any thread."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register(holder: Holder) -> None:
    """Have a holder asked, for as long as it lives."""
    _holders.add(holder)


def has_room(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor's storage still holds it: a program may have resized that since the call."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return not tensor.numel() or tensor.untyped_storage().nbytes() >= end


def in_use(storage: UntypedStorage) -> bool:
    """Return whether a pending op, or an open window, of any communicator of this process uses this memory."""
    place = storage.data_ptr()
    return any(tensor.untyped_storage().data_ptr() == place for one in copied(_holders) for tensor in one.held())
