"""A direction from one rank to another: a NCCL communicator of the two ranks, with its own stream.

The receiver makes the communicator's id, and sends the id to the sender. Both ranks join the communicator, each in a
thread. NCCL has no timeout: if the other rank does not join or does not pass a message to NCCL, this rank waits
forever. So a rank that closes its transport sends its progress in both directions to the other rank. The progress
includes the number of messages that the closed rank has passed to NCCL. The other rank then ends the messages that the
closed rank has not passed to NCCL.
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
"""The rank of the sender in the communicator of a direction. The rank of the receiver is 1."""
AT_ONCE: Final = 16
"""The maximum number of unfinished messages of a direction, or unfinished collectives of a channel, in NCCL.

CUDA blocks a thread that enqueues too many calls. Without this limit, two ranks could block their loops with receives.
Then neither rank could post the sends for which the other rank's receives wait."""


class Forming(Protocol):
    """The interface through which a direction uses its transport."""

    cuda: Cuda
    library: Nccl
    launcher: Launcher
    aborted: bool

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run ``call`` in a thread, and then call ``then`` with the result on the loop's thread.

        If ``call`` raises an error, the transport's communicator is lost.
        """

    def comm_stream(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return the communicator ``comm`` together with its own CUDA stream."""

    def end(self, comm_stream: CommStream) -> None:
        """Start a thread that aborts the communicator of a direction."""


class Posted:
    """A send or a receive, and a position in the caller's stream.

    The op starts when the stream has reached this position.
    """

    __slots__ = ("after", "op", "work")

    def __init__(self, op: ops.Send | ops.Recv, work: Completion, after: Any) -> None:
        self.op = op
        self.work = work
        self.after = after


class Direction:
    """The queue of the messages from one rank to another rank.

    Methods run on the loop's thread, unless their docstrings say otherwise.
    """

    def __init__(self, owner: Forming, sends: bool) -> None:
        """Create a direction without a communicator. Messages wait until the communicator is formed.

        :param sends: whether this rank is the sender.
        """
        self.comm_stream: CommStream | None = None
        """The communicator. None means that the communicator is not formed yet, or is already aborted."""
        self.begun = False
        """True if this rank has begun to form the communicator."""
        self.carried = 0
        """The number of messages that this rank has passed to NCCL."""
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
        """Join the communicator in a thread. The thread first calls ``unique_id`` to get the communicator's id."""
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
        """Enqueue a message behind all earlier messages of the direction.

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
        """End the messages that the other rank did not pass to NCCL before it closed its transport.

        :param carried: the number of messages that the other rank has passed to NCCL.
        :param begun: whether the other rank has begun to form the direction.
        :param error: the error for the messages that the other rank has not passed to NCCL.
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
        """Abort the communicator if the closed rank has passed none of the unfinished messages to NCCL."""
        comm_stream = self.comm_stream
        if self._most is not None and comm_stream is not None and self.carried > self._finished >= self._most:
            self.comm_stream = None
            self._owner.end(comm_stream)

    def release(self, error: CommError) -> bool:
        """Unblock the thread that joins the communicator, if the other rank does not join.

        A second thread joins in place of the missing rank, because NCCL has no other way to end a join. If NCCL accepts
        two ranks on one GPU, both joins succeed, and both threads abort the communicator. If NCCL does not accept two
        ranks on one GPU, both joins fail. Any thread may call this method.

        :returns: whether a thread was waiting in a join.
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
