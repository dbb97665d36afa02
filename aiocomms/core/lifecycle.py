"""The state machine of a communicator: the events that change its state, and the errors that pending ops then get.

::

    open --close--> closing --release--> closed
      |                |                   ^
      +------lose------+--> lost --release-+

While a communicator is closing, pending ops may end and no new op starts. A death, an abort or a missed deadline still
takes effect. Only the first :class:`Failure` has an effect. A transition is a pure function, which takes a
:class:`Life` and an event. The function returns the next life and a list of actions, which
:class:`aiocomms.core.core.Core` runs.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Final

import msgspec

from aiocomms.errors import CommAbortedError, CommClosedError, CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.progress.inflight import StartedWork

LOST: Final = "the communicator is lost: "
"""The text before the reason, in the error of an op that has not caused the loss."""


class Failure(msgspec.Struct, frozen=True):
    """The reason why a communicator is lost. The error of each work depends only on this reason."""

    error: CommError
    """The error that describes the failure.

    The error names the rank that the error is about. If an op of this rank has failed, the error also names the op and
    this rank.
    """
    since: float
    """The time of the failure, by ``clock.now()``."""

    @property
    def timed_out(self) -> bool:
        """True if a deadline has passed on any rank. Every rank that waited gets a ``TimeoutError`` in this case."""
        return isinstance(self.error, CommTimeoutError)

    def error_of(self, work: StartedWork[Any]) -> CommError:
        """Return a pending work's error.

        The op that failed gets the failure's error. Every other op gets a new error with the same reason.
        """
        error = self.error
        if work.seq == error.seq:
            return error
        if error.op is None and isinstance(error, (CommAbortedError, CommTimeoutError, PeerDiedError)):
            return error.about()
        lost = f"{LOST}{error}"
        if isinstance(error, CommTimeoutError):
            return CommTimeoutError(lost, late=error.late)
        return CommAbortedError(lost, peer=error.peer)

    def for_peers(self, rank: int) -> CommError:
        """Return the error that this rank sends to the other ranks; see :meth:`aiocomms.transport.Transport.abort`.

        If the other ranks have excluded this rank, the error reports the death of this rank.
        """
        error = self.error
        if isinstance(error.__cause__, PeerDiedError) and error.__cause__.peer == rank:
            error = error.__cause__
        if isinstance(error, (CommAbortedError, MismatchError, PeerDiedError)):
            return type(error)(error.message, peer=rank if error.peer is None else error.peer)
        if isinstance(error, CommTimeoutError):
            told = error.message if error.op is None else f"rank {rank} timed out: {error}"
            return CommTimeoutError(told, late=error.late, teller=rank if error.teller is None else error.teller)
        return CommAbortedError(f"aborted by rank {rank}: {error}", peer=rank)

    def explained(self, verdict: Verdict, path: Path | None) -> Failure:
        """Return the failure with an error that also contains the verdict and the path of the recorder's file."""
        old, report = self.error, verdict.report
        assert isinstance(old, CommTimeoutError)
        message = old.message + (f": {report}" if report and report not in old.message else "")
        if path is not None:
            message += f" [flight recorder: {path}]"
        new = CommTimeoutError(
            message, comm=old.comm, op=old.op, seq=old.seq, rank=old.rank, late=verdict.late, teller=old.teller
        )
        new.__cause__ = old.__cause__
        return msgspec.structs.replace(self, error=new)


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The explanation of a missed deadline.

    The rank whose deadline has passed sends the explanation to the other ranks.
    """

    report: str
    """The text about what the ranks were doing; empty: nothing is known."""
    late: tuple[int, ...]
    """The missing ranks."""


def failure_of(error: CommError, since: float, rank: int) -> Failure:
    """Return the failure for an error. If other ranks report this rank as dead, the error says so."""
    if isinstance(error, PeerDiedError) and error.peer == rank:
        excluded = CommAbortedError(
            f"this rank is excluded: the other ranks count it as dead and go on without it: {error.message}"
        )
        excluded.__cause__ = error
        error = excluded
    return Failure(error, since)


class State(enum.Enum):
    """The state of a communicator in its life cycle."""

    OPEN = "open"
    CLOSING = "closing"
    LOST = "lost"
    CLOSED = "closed"


class Life(msgspec.Struct, frozen=True):
    """The state of a communicator, and the reason for this state."""

    state: State = State.OPEN
    failure: Failure | None = None
    closed: CommClosedError | None = None
    """The error of ops that are called after this rank has begun to close the communicator."""

    def refusal(self) -> CommError | None:
        """Return the error with which a new op fails; None if a new op may start."""
        if self.closed is not None:
            return CommClosedError(self.closed.message)
        if self.failure is None:
            return None
        error = CommAbortedError(f"{LOST}{self.failure.error}", peer=self.failure.error.peer)
        error.__cause__ = self.failure.error
        return error


class Action(enum.Enum):
    """An action that the core must run after a transition."""

    END_WORKS = "every pending work ends with the error that the failure gives it"
    END_WORKS_SOON = "they end on the loop's next turn"
    TELL_PEERS = "the transports give up and tell the peers"
    NOTE = "what every op was doing is noted: before the peers hear of it, who do the same"
    RECORD = "what was noted is written down"
    EXPLAIN = "who was missing is found out, and then the pending works end"
    WITHDRAW = "receives that nothing has matched are withdrawn"


Step = tuple[Life, tuple[Action, ...]]


def lose(life: Life, failure: Failure, *, here: bool) -> Step:
    """Record a failure. Later failures change nothing.

    :param here: whether the caller runs on the loop's thread, and not in a signal handler. If so, the works end first:
        the tasks that await the works resume only after all actions. Otherwise the works end last, because resumed
        tasks may close objects that the other actions need. After a missed deadline, the works always end last.
    """
    if life.state in (State.LOST, State.CLOSED):
        return life, ()
    lost = Life(State.LOST, failure, life.closed)
    if failure.timed_out:
        return lost, (Action.NOTE, Action.TELL_PEERS, Action.EXPLAIN)
    if here:
        return lost, (Action.END_WORKS, Action.NOTE, Action.TELL_PEERS, Action.RECORD)
    return lost, (Action.NOTE, Action.TELL_PEERS, Action.RECORD, Action.END_WORKS_SOON)


def explain(life: Life, verdict: Verdict, path: Path | None) -> Life:
    """Record why a deadline has passed."""
    assert life.failure is not None
    return Life(life.state, life.failure.explained(verdict, path), life.closed)


def close(life: Life) -> Step:
    """Begin to close the communicator on this rank."""
    if life.state is not State.OPEN:
        return life, ()
    return Life(State.CLOSING, None, CommClosedError("the communicator was closed on this rank")), (Action.WITHDRAW,)


def release(life: Life) -> Life:
    """Change the state to ``CLOSED``, after pending ops have had time to end. Later failures have no effect."""
    return Life(State.CLOSED, life.failure, life.closed)


def disown(parent: int) -> Life:
    """Record that the communicator belongs to the parent process, from which this process was forked."""
    why = f"the communicator was created in process {parent} and cannot be used after a fork: form a new one"
    return Life(State.CLOSED, None, CommClosedError(why))
