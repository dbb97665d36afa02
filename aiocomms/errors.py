"""Every exception of aiocomms, and what each means for the communicator.

All derive from :class:`CommError`. They carry the communicator's name, the operation's name and sequence number, this
rank and the peer, as far as these are known. Each description says whether the communicator stays *usable* (nothing was
sent, and the program can go on), or is *poisoned* (every later call fails at once with the first reason).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AuthError",
    "BufferBusyError",
    "CapturedWorkError",
    "ClientLeftError",
    "CommAbortedError",
    "CommClosedError",
    "CommError",
    "CommTimeoutError",
    "ConcurrentCollectivesError",
    "DriverLostError",
    "LaneAbortedError",
    "LeaseError",
    "LeftBehindError",
    "MessageTruncatedError",
    "MismatchError",
    "MoveLostError",
    "MoveTimeoutError",
    "PeerDiedError",
    "PlanLostError",
    "PlanTimeoutError",
    "ProtocolError",
    "RegionError",
    "ServiceBusyError",
    "StoreLostError",
    "UnsupportedOperation",
    "WorkCancelledError",
    "WorkerError",
]


class CommError(Exception):
    """Raised when communication fails; the base of every error of aiocomms.

    :param message: what happened, and what to do about it.
    :param comm: the communicator's name.
    :param op: the operation's name, such as ``"all_reduce"``.
    :param seq: the operation's sequence number on its communicator.
    :param rank: the rank on which it happened.
    :param peer: the other rank it happened with.
    """

    def __init__(
        self,
        message: str,
        *,
        comm: str | None = None,
        op: str | None = None,
        seq: int | None = None,
        rank: int | None = None,
        peer: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.comm = comm
        self.op = op
        self.seq = seq
        self.rank = rank
        self.peer = peer

    def __str__(self) -> str:
        where = self._where()
        return f"{where}: {self.message}" if where else self.message

    def _where(self) -> str:
        """Return the op, its number, the communicator and the rank, as far as they are known."""
        where = self.op or ""
        if where and self.seq is not None:
            where += f" #{self.seq}"
        if self.comm is not None:
            where += f" on '{self.comm}'"
        if self.rank is not None:
            where += f" (rank {self.rank})"
        return where.strip()

    def about(
        self, *, comm: str | None = None, op: str | None = None, seq: int | None = None, rank: int | None = None
    ) -> Self:
        """Make a copy of this error for one operation, so that no two awaiters share a traceback.

        An attribute that this error has already is kept; the argument replaces only an attribute that is None.

        :returns: an error of the same class and with the same cause.
        """
        copy = type(self)(
            self.message,
            comm=self.comm if self.comm is not None else comm,
            op=self.op if self.op is not None else op,
            seq=self.seq if self.seq is not None else seq,
            rank=self.rank if self.rank is not None else rank,
            peer=self.peer,
        )
        copy.__cause__ = self.__cause__
        return copy

    def within(self, op: str, seq: int) -> Self:
        """Make a copy of this error for the operation that the failed one is a part of."""
        copy = self.about()
        copy.op, copy.seq = op, seq
        return copy


class ArgumentError(CommError, ValueError):
    """Raised when an argument is wrong. Nothing was sent; the communicator stays usable."""


class ArgumentTypeError(ArgumentError, TypeError):
    """Raised when an argument has the wrong type. Nothing was sent; the communicator stays usable."""


class UnsupportedOperation(CommError):  # noqa: N818 - the name io.UnsupportedOperation gave it
    """Raised when the transport, device or dtype cannot do this operation. The communicator stays usable."""


class MessageTruncatedError(CommError):
    """Raised when a message is not of the receive buffer's size. The communicator stays usable.

    The message is consumed. A larger message loses its tail; a shorter one does not change the rest of the buffer.
    """


class BufferBusyError(CommError):
    """Raised in debug mode when a buffer still belongs to an unfinished operation. The communicator stays usable."""


class ConcurrentCollectivesError(CommError):
    """Raised in debug mode when two tasks have collectives under way at once, whose order may differ from rank to rank.

    Nothing was sent; the communicator stays usable.
    """


class LaneAbortedError(CommError):
    """Raised when a rank has given up the operation's lane. The communicator stays usable, and so do its other lanes.

    The key stays given up for as long as the communicator lives. It cannot be told which of the lane's operations a
    rank has called before it heard of that.
    """


class CapturedWorkError(CommError):
    """Raised when a work that lives in a CUDA graph is awaited. The communicator stays usable."""


class WorkCancelledError(CommError):
    """Raised when the result of a withdrawn operation is asked for: it did not happen. The communicator stays usable.

    It is deliberately not an :class:`asyncio.CancelledError`, which a task group or a timeout would take for its own.
    """


class CommClosedError(CommError):
    """Raised when the communicator was closed on this rank, or an endpoint's connection on either side."""


class CommAbortedError(CommError):
    """Raised when the communicator was aborted on any rank; carries the first reason. The communicator is poisoned."""


class CommTimeoutError(CommError, TimeoutError):
    """Raised when an operation's deadline passed; names the ranks that were missing, if the transport knows them.

    The communicator is poisoned on every rank, unless the operation was a receive or wait that nothing had matched yet.

    :param late: the ranks that were missing, the same on every rank; empty: it is not known which. One alone is also
        the ``peer``.
    :param teller: the rank whose deadline has passed, where that is another one.
    """

    def __init__(
        self,
        message: str,
        *,
        comm: str | None = None,
        op: str | None = None,
        seq: int | None = None,
        rank: int | None = None,
        peer: int | None = None,
        late: Sequence[int] = (),
        teller: int | None = None,
    ) -> None:
        peer = late[0] if len(late) == 1 else peer
        super().__init__(message, comm=comm, op=op, seq=seq, rank=rank, peer=peer)
        self.late: tuple[int, ...] = tuple(sorted(late))
        self.teller = teller

    def about(
        self, *, comm: str | None = None, op: str | None = None, seq: int | None = None, rank: int | None = None
    ) -> Self:
        """See :meth:`CommError.about`."""
        copy = super().about(comm=comm, op=op, seq=seq, rank=rank)
        copy.late, copy.teller = self.late, self.teller
        return copy


class LeftBehindError(CommError):
    """Raised when the others of a live group have ended the call, and later ones, without this rank.

    The lane stays usable: this rank's next call is the one that is open then.
    """


class PeerDiedError(CommError):
    """Raised when a rank is gone. The communicator is poisoned."""


class MismatchError(CommError):
    """Raised when ranks disagree on what they are doing. The communicator is poisoned."""


class StoreLostError(CommError):
    """Raised when the rendezvous store is gone. Established communicators stay usable."""


class DriverLostError(CommAbortedError):
    """Raised on every worker when the driver is lost and no process that drives has taken its place.

    The communicator is poisoned.
    """


class WorkerError(CommError):
    """Raised on rank 0 when a rank failed to carry out a plan: ``peer`` did, and the cause has its traceback.

    The communicator stays usable, unless the plan was run in order and had begun to communicate.
    """


class PlanLostError(CommError):
    """Raised when a rank was lost while a plan was under way, or has not been replaced yet; the cause says why.

    The communicator is poisoned. The plan may be given out again, if carrying it out twice does no harm.
    """


class PlanTimeoutError(CommTimeoutError):
    """Raised on rank 0 when a plan is not done in time; says on which ranks, the ``late`` ones, in which operations.

    The plan was given up on all ranks. The communicator stays usable.
    """


class ServiceBusyError(CommError):
    """Raised when as many plans wait for their turn as may wait: nothing was sent. The communicator stays usable."""


class ClientLeftError(CommError):
    """Raised in a web server's handler when the client has gone: what it waited for was cancelled, on all ranks.

    The communicator stays usable.
    """


class ProtocolError(CommError):
    """Raised when bytes from a stranger or a broken peer make no sense. That connection is dropped."""


class AuthError(ProtocolError):
    """Raised when a peer does not prove that it belongs to the job. That connection is dropped."""


class RegionError(CommError):
    """Raised when a region of another endpoint gives no access: forged, foreign, expired, revoked, or not that right.

    Nothing was read or written. The connection with that endpoint stays usable.
    """


class LeaseError(CommError):
    """Raised when blocks that are lent may not be used: their owner has taken them back, or the borrower dropped them.

    The message says why. The connection with the other endpoint stays usable.
    """


class MoveLostError(CommError):
    """Raised on every source rank when a version has not been moved: something was lost, closed or given up; says who.

    The target's old version stays current. The communicators stay usable, unless one of them is what was lost.
    """


class MoveTimeoutError(CommTimeoutError):
    """Raised on every source rank when a version has not been moved in time; says what was waited for.

    The target's old version stays current. The communicators stay usable.
    """


class SimulationError(RuntimeError):
    """Raised when a simulated program does what cannot be simulated, or its history breaks a promise."""


def wrong_thread(what: str) -> RuntimeError:
    """Make the error of a call on another thread than its communicator's.

    :param what: the call, and the object on which it was made.
    """
    advice = "call it on the communicator's portal(), or hand it to its loop with call_soon_threadsafe"
    return RuntimeError(f"{what} was called on another thread than the communicator's; {advice}")


def closed_by(rank: int) -> CommAbortedError:
    """Return the error of an op that needs a rank which has closed the communicator."""
    return CommAbortedError(f"closed by rank {rank}, which this op needs", peer=rank)


def gone(rank: int | None, why: str = "its connection broke without a goodbye") -> PeerDiedError:
    """Return the error of a communicator when a rank has died; None: it cannot be told which one."""
    return PeerDiedError(f"{'a rank' if rank is None else f'rank {rank}'} is gone: {why}", peer=rank)


def as_reason(reason: str | BaseException) -> str:
    """Return why something was given up, in words."""
    if not isinstance(reason, BaseException):
        return reason
    return f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
