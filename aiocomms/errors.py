"""The exceptions of aiocomms, and the state in which each exception leaves the communicator.

All these exceptions except :class:`SimulationError` derive from :class:`CommError`. The attributes of a ``CommError``
name the communicator, the operation, the operation's number, this rank and the peer, if they are known. The
docstring of each class says whether the communicator stays *usable* or is *lost*. On a lost communicator every
later call fails at once with the reason of the loss.
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
    "SimulationError",
    "StoreLostError",
    "UnsupportedOperation",
    "WorkCancelledError",
    "WorkerError",
]


class CommError(Exception):
    """Raised when communication fails; the base class of all errors of aiocomms except :class:`SimulationError`.

    :param message: what happened, and what to do about it.
    :param comm: the communicator's name.
    :param op: the operation's name, such as ``"all_reduce"``.
    :param seq: the operation's sequence number on its communicator.
    :param rank: the rank on which the failure happened.
    :param peer: the other rank that the failure concerns.
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
        """Return the op, its number, the communicator and the rank as text, as far as they are known."""
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
        """Make a copy of this error for one operation. With separate copies, no two awaiters share a traceback.

        Each argument replaces an attribute of the copy, but only if that attribute is None in this error. All other
        attributes of the copy equal those of this error.

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
        """Make a copy of this error that names a larger operation, of which the failed operation is a part."""
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
    """Raised when the size of a message differs from that of the receive buffer. The communicator stays usable.

    No later receive gets the message. If the message is too large, the bytes that do not fit into the buffer are lost.
    If the message is too short, the rest of the buffer does not change.
    """


class BufferBusyError(CommError):
    """Raised in debug mode when a buffer of an operation is in use by another, unfinished operation.

    The communicator stays usable.
    """


class ConcurrentCollectivesError(CommError):
    """Raised in debug mode when two tasks have pending collectives, whose order may differ between ranks.

    Nothing was sent; the communicator stays usable.
    """


class LaneAbortedError(CommError):
    """Raised when a rank has aborted the operation's lane. The communicator and its other lanes stay usable.

    The lane's key stays unusable as long as the communicator lives. Other ranks may have called any number of the
    lane's operations before they learned of the abort.
    """


class CapturedWorkError(CommError):
    """Raised when a program awaits a work that a CUDA graph has captured. The communicator stays usable."""


class WorkCancelledError(CommError):
    """Raised when a program asks for the result of a withdrawn operation, which was cancelled before it matched.

    The communicator stays usable.

    The operation did not happen. The class does not derive from :class:`asyncio.CancelledError`, because a task group
    or a timeout would treat such an error as its own cancellation.
    """


class CommClosedError(CommError):
    """Raised when the communicator was closed on this rank, or an endpoint's connection was closed on either side."""


class CommAbortedError(CommError):
    """Raised when the communicator was aborted on any rank; the error gives the reason of the first abort.

    The communicator is lost.
    """


class CommTimeoutError(CommError, TimeoutError):
    """Raised when an operation's deadline passed; the error names the missing ranks, if the transport knows them.

    The communicator is lost on every rank, except in one case. The communicator stays usable if the operation was a
    receive, a ``probe`` or a ``wait_signal`` whose message or signal had not arrived.

    :param late: the missing ranks, the same on every rank; empty if they are unknown. If one rank is missing, ``peer``
        is that rank.
    :param teller: the rank on which the deadline has passed; None if the deadline has passed on this rank.
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
    """Raised when the other ranks of a live group have completed this call, and later calls, without this rank.

    The collectives of a live group (:class:`~aiocomms.LiveGroup`) complete even if a rank is late or dead. The lane
    stays usable: the next call of this rank takes part in the call that the other ranks are making at that time.
    """


class PeerDiedError(CommError):
    """Raised when a rank has died or is unreachable. The communicator is lost."""


class MismatchError(CommError):
    """Raised when calls of the ranks do not match, such as two different collectives. The communicator is lost.

    If ``new_window`` raises this error, the communicator stays usable.
    """


class StoreLostError(CommError):
    """Raised when the store, through which ranks find each other, is lost.

    Communicators that are already formed stay usable.
    """


class DriverLostError(CommAbortedError):
    """Raised on every worker when a service's driver is lost and no other process has replaced the driver.

    The communicator is lost.
    """


class WorkerError(CommError):
    """Raised on rank 0 when a plan has failed on rank ``peer``; ``__cause__`` has that rank's traceback.

    A plan is a unit of work that a driver of :mod:`aiocomms.serving` sends to all ranks. The communicator stays usable,
    except in one case. The communicator is lost if ``Driver.run_in_order`` started the plan, and the plan had called an
    operation.
    """


class PlanLostError(CommError):
    """Raised when a rank is lost during a driver's plan, or when a lost rank has not been replaced yet.

    ``__cause__`` is the reason. The communicator is lost. The program can run the plan again if a second run does no
    harm.
    """


class PlanTimeoutError(CommTimeoutError):
    """Raised on rank 0 when a driver's plan misses its deadline; the error names the ``late`` ranks and their ops.

    All ranks have stopped the plan. The communicator stays usable.
    """


class ServiceBusyError(CommError):
    """Raised when a driver's queue of waiting plans is full. Nothing was sent; the communicator stays usable."""


class ClientLeftError(CommError):
    """Raised in a web server's handler when the client has disconnected. The request was cancelled on all ranks.

    The communicator stays usable.
    """


class ProtocolError(CommError):
    """Raised when received bytes violate the protocol, because an unknown process or a broken peer has sent them.

    The transport drops the connection. If the bytes belong to an object, only the receive of the object fails, and the
    communicator stays usable.
    """


class AuthError(ProtocolError):
    """Raised when a peer does not prove that it belongs to the job. The connection is dropped."""


class RegionError(CommError):
    """Raised when a region's descriptor is forged or expired, or belongs to another endpoint.

    The same error is raised when the region is revoked or closed, or forbids the operation. Nothing was read or
    written. The connection with the region's endpoint stays usable.
    """


class LeaseError(CommError):
    """Raised when leased blocks are no longer usable, because the owner or the borrower has ended the lease.

    The error's message gives the reason. The connection with the other endpoint stays usable.
    """


class MoveLostError(CommError):
    """Raised on every source rank when ``Source.move`` of :mod:`aiocomms.resharding` fails because a rank is lost.

    The same error is raised if a rank closes, aborts or cancels its part in the move, or if the source's function
    ``convert`` raises an error. The error's message names the rank that was lost or has failed. The ``open`` of a
    source or target raises this error if another rank's ``open`` has failed. ``Target.step`` and ``Target.pin`` raise
    this error if the target has no current version.

    The target keeps its old version. A communicator of the move stays usable, unless that communicator itself is lost.
    """


class MoveTimeoutError(CommTimeoutError):
    """Raised on every source rank when ``Source.move`` of :mod:`aiocomms.resharding` misses its deadline.

    The error's message says what the move waited for.

    The target keeps its old version. The communicators stay usable.
    """


class SimulationError(RuntimeError):
    """Raised when a program cannot be simulated, hangs in the simulation, or leaves a communicator open."""


def wrong_thread(what: str) -> RuntimeError:
    """Return the error for a call that was made outside the communicator's thread.

    :param what: a text that names the call, and the object on which the call was made.
    """
    advice = "call it on the communicator's portal(), or hand it to its loop with call_soon_threadsafe"
    return RuntimeError(f"{what} was called on another thread than the communicator's; {advice}")


def closed_by(rank: int) -> CommAbortedError:
    """Return the error for an op that needs a rank which has closed the communicator."""
    return CommAbortedError(f"closed by rank {rank}, which this op needs", peer=rank)


def gone(rank: int | None, why: str = "its connection broke unexpectedly") -> PeerDiedError:
    """Return the error that ends a communicator when a rank has died or is unreachable.

    :param rank: the lost rank; None if the lost rank is unknown.
    """
    return PeerDiedError(f"{'a rank' if rank is None else f'rank {rank}'} has died or was cut off: {why}", peer=rank)


def as_reason(reason: str | BaseException) -> str:
    """Return the reason for an abort as text in valid UTF-8.

    The text of an exception may contain the name of a file, and this name may be invalid UTF-8. The exception's
    ``__str__`` may also raise an error. The function handles both cases.
    """
    try:
        text = str(reason)
    except Exception:
        text = ""
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}" if text else type(reason).__name__
    return text.encode(errors="backslashreplace").decode()
