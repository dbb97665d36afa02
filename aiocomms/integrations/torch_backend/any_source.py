"""Receives of a group, which match in the order of the calls as torch has it, whether they name a source or not.

A communicator has a receive that names its source come before one that names none. So for as long as one that names
none waits, those behind it with its tag stand in the same queue, and name one source there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from torch import Tensor

from aiocomms import blocking
from aiocomms.communicator.portal.works import BlockingWork
from aiocomms.errors import ArgumentError, CommError


class Receives:
    """The receives on a communicator, from one source or from any; any thread."""

    def __init__(self, comm: blocking.Communicator) -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._waiting: dict[int, int] = {}
        """The number of receives in the queue of each tag."""
        self._lock = threading.RLock()  # A receive that has ended by then is counted within the call.

    def from_one(self, tensor: Tensor, source: int, tag: int) -> BlockingWork[Tensor] | BlockingWork[int]:
        """Start a receive from a rank; its tensor is one-dimensional and contiguous."""
        with self._lock:  # The lock holds while a receive is posted: a later one might be first.
            if tag in self._waiting:
                return self._queued(tensor, [source], tag)
            return self._comm.recv(tensor, source, tag)

    def from_any(self, tensor: Tensor, tag: int) -> BlockingWork[int]:
        """Start a receive from any other rank; its tensor is one-dimensional and contiguous."""
        if not self._others:
            raise ArgumentError("no source was given, and there is no other rank")
        with self._lock:
            return self._queued(tensor, self._others, tag)

    def _queued(self, tensor: Tensor, sources: Sequence[int], tag: int) -> BlockingWork[int]:
        work = self._comm.recv_any(tensor, sources, tag)
        self._waiting[tag] = self._waiting.get(tag, 0) + 1
        work.add_step(functools.partial(self._ended, tag))
        return work

    def _ended(self, tag: int) -> None:
        with self._lock:
            self._waiting[tag] -= 1
            if not self._waiting[tag]:
                del self._waiting[tag]


def source_of(work: BlockingWork[int]) -> int:
    """Return the rank that a message came from; -1: none has come."""
    try:
        return work.wait() if work.done() else -1
    except CommError:
        return -1
