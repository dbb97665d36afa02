"""A direction from one rank to another: a NCCL communicator of the two ranks, with its own stream.

The receiver makes the communicator's id, and sends the id to the sender. Both ranks join the communicator, each in a
thread. If the other rank is missing, NCCL waits without end for a join or a message. So a rank that closes reports its
progress in each direction to the other rank. The other rank then ends the messages that the closed rank does not carry.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from aiocomms import ops
from aiocomms.cuda import Cuda
from aiocomms.errors import CommError
from aiocomms.transport import Completion, conclude
from aiocomms_nccl import nccl
from aiocomms_nccl.calls import NONE, RECV, SEND, CallPlan
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.launcher import Launcher
from aiocomms_nccl.nccl import Nccl, NcclComm

_SENDER: Final = 0
"""The sender's rank in a direction's communicator. The receiver's rank is 1."""
AT_ONCE: Final = 16
"""The most messages of a direction, or collectives of a channel, that are enqueued in NCCL at once.

CUDA blocks a thread that enqueues too many calls. If receives blocked the loops of two ranks, neither rank would post
the sends that the other rank's receives wait for."""


class Forming(Protocol):
    """The interface through which a direction uses its transport."""

    cuda: Cuda
    library: Nccl
    launcher: Launcher
    aborted: bool

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run a blocking call in a thread, then call ``then`` on the loop's thread. An error loses the communicator."""

    def comm_stream(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return a communicator with a stream."""

    def end(self, comm_stream: CommStream) -> None:
        """Abort a communicator of a direction, in a thread."""


class Posted:
    """A send or a receive, and the position in the caller's stream after which it starts."""

    __slots__ = ("after", "op", "work")

    def __init__(self, op: ops.Send | ops.Recv, work: Completion, after: Any) -> None:
        self.op = op
        self.work = work
        self.after = after


class Direction:
    """The messages from one rank to another.

    Methods run on the loop's thread, unless their docstrings say otherwise.
    """

    def __init__(self, owner: Forming, sends: bool) -> None:
        """Make a direction that is not formed yet. Messages wait until the direction is formed.

        :param sends: whether this rank is the sender.
        """
        self.comm_stream: CommStream | None = None
        """The communicator; None before it has formed and after it has ended."""
        self.begun = False
        """True once this rank has begun to form the communicator."""
        self.carried = 0
        """The number of messages that this rank has launched."""
        self._owner = owner
        self._sends = sends
        self._rank = _SENDER if sends else 1 - _SENDER
        self._waiting: deque[tuple[Posted, int, Any]] = deque()
        self._finished = 0
        self._most: int | None = None  # the number of messages that the other rank has carried, if it has closed
        self._error: CommError | None = None
        self._joining = b""  # the id of the communicator that a thread is joining
        self._lock = threading.Lock()  # orders the start of a join and the close of the other rank

    def form(self, unique_id: Callable[[], bytes]) -> None:
        """Join the communicator in a thread, which calls ``unique_id`` first."""
        self.begun = True
        self._owner.spawn(functools.partial(self._join, unique_id), self._formed)

    def _join(self, unique_id: Callable[[], bytes]) -> list[CommStream]:
        library, joining = self._owner.library, unique_id()
        with self._lock:
            if self._error is not None:
                return []
            self._joining = joining
        try:
            comm = library.communicator(2, joining, self._rank)
        except library.errors:
            if self._error is not None:
                return []
            raise
        with self._lock:
            self._joining = b""
            closed = self._error is not None
        if closed:
            comm.abort()
            return []
        comm_stream = self._owner.comm_stream(comm, self._rank, 2)
        comm_stream.warm(self._sends)
        return [comm_stream]

    def _formed(self, comm_streams: list[CommStream]) -> None:
        for comm_stream in comm_streams:
            self._owner.launcher.adopt(comm_stream)
            self.comm_stream = comm_stream
            self._flush()

    def add(self, posted: Posted, nbytes: int, outcome: Any) -> None:
        """Send or receive a message after all earlier messages of the direction.

        Both ranks add messages in the same order.
        """
        self._waiting.append((posted, nbytes, outcome))
        self._flush()

    def _flush(self) -> None:
        comm_stream = self.comm_stream
        while comm_stream is not None and self._waiting and self.carried - self._finished < AT_ONCE:
            posted, nbytes, outcome = self._waiting.popleft()
            pointer, other = posted.op.tensor.data_ptr(), 1 - self._rank
            source, target = (pointer, NONE) if self._sends else (NONE, pointer)
            call = (SEND if self._sends else RECV, source, target, nbytes, nccl.UINT8, NONE, other)
            finish = functools.partial(self._finish, posted, outcome)
            if self._owner.launcher.launch(comm_stream, posted.op.name, CallPlan([call]), posted.after, finish) is None:
                return
            self.carried += 1

    def _finish(self, posted: Posted, outcome: Any) -> None:
        self._finished += 1
        if self._owner.aborted:
            return  # the event may have fired because NCCL has stopped
        unmet = self._most is not None and self._finished > self._most
        conclude(posted.work, self._error if unmet else outcome)
        self._cut()
        self._flush()

    def close_peer(self, carried: int, begun: bool, error: CommError) -> None:
        """End the messages that the other rank does not carry, because that rank has closed.

        :param carried: the number of messages that the other rank has given to NCCL.
        :param begun: whether the other rank has begun to form the direction.
        :param error: the error of the messages that the other rank has not given to NCCL.
        """
        self._most = carried
        due = max(0, carried - self.carried)
        if not due:  # with due messages, a thread that joins goes on: the other rank has formed the communicator
            with self._lock:
                self._error = error
        unmet = [self._waiting.pop() for _ in range(len(self._waiting) - due)]
        for posted, _, _ in reversed(unmet):
            conclude(posted.work, error)
        if not begun:
            self.release(error)
        self._cut()

    def _cut(self) -> None:
        """End the communicator if only messages are left that the closed rank does not carry."""
        comm_stream = self.comm_stream
        if self._most is not None and comm_stream is not None and self.carried > self._finished >= self._most:
            self.comm_stream = None
            self._owner.end(comm_stream)

    def release(self, error: CommError) -> bool:
        """Release a thread that waits for a missing rank: another thread joins in the place of that rank.

        NCCL has no other way to end a join. If NCCL accepts two ranks on one GPU, the second thread then aborts the
        communicator. Otherwise both joins fail. Any thread may call this method.

        :returns: whether a thread waits.
        """
        with self._lock:
            self._error = self._error or error
            joining = self._joining
        if joining:
            self._owner.spawn(functools.partial(self._stand_in, joining), lambda _: None)
        return bool(joining)

    def _stand_in(self, joining: bytes) -> None:
        library = self._owner.library
        try:
            comm = library.communicator(2, joining, 1 - self._rank)
        except library.errors:
            return
        comm.abort()
