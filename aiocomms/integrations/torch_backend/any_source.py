"""Receives of a group, with or without a named source. As in torch, receives match in the order of the calls.

If a receive from one source and a receive from any source both match a message, a communicator gives the message to the
receive from one source. torch gives the message to the receive that was called first. So while a receive from any
source is pending, a new receive from one source with the same tag also calls ``recv_any``, but lists only this source.
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
    """The receives on a communicator, from one source or from any source. Thread-safe."""

    def __init__(self, comm: blocking.Communicator) -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._waiting: dict[int, int] = {}
        """The number of pending ``recv_any`` calls for each tag."""
        self._lock = threading.RLock()  # The lock is reentrant: add_step calls _ended at once for an ended receive.

    def from_one(self, tensor: Tensor, source: int, tag: int) -> BlockingWork[Tensor] | BlockingWork[int]:
        """Start a receive from a rank into a one-dimensional, contiguous tensor."""
        with self._lock:  # The lock keeps receives in order while one is posted.
            if tag in self._waiting:
                return self._queued(tensor, [source], tag)
            return self._comm.recv(tensor, source, tag)

    def from_any(self, tensor: Tensor, tag: int) -> BlockingWork[int]:
        """Start a receive from any other rank into a one-dimensional, contiguous tensor."""
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
    """Return the source rank of the received message; -1 if no message was received."""
    try:
        return work.wait() if work.done() else -1
    except CommError:
        return -1
