"""The life of a communicator, as a state machine: the events that end it, and the errors that pending ops then get.

::

    open --close--> closing --release--> closed
      |                |                   ^
      +------lose------+--> lost --release-+

While a communicator is closing, pending ops may end and no new op starts. A death, an abort or a missed deadline still
takes effect. The first :class:`Failure` wins. A transition is a pure function from a :class:`Life` and an event to the
next life and its actions, which :class:`aiocomms.core.core.Core` runs.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Final

import msgspec

from aiocomms.errors import CommAbortedError, CommClosedError, CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.progress.inflight import StartedWork

LOST: Final = "the communicator is lost: "
"""The words before the reason, in the error of an op that is not at fault."""


class Failure(msgspec.Struct, frozen=True):
    """The reason why a communicator is lost; it alone decides the error of each work."""

    error: CommError
    """The error. It names the rank concerned and, for an op of this rank, the op, its number and this rank."""
    since: float
    """The time of the failure, by ``clock.now()``."""

    @property
    def timed_out(self) -> bool:
        """True if a deadline has passed on any rank. Every rank that waited gets a ``TimeoutError`` in this case."""
        return isinstance(self.error, CommTimeoutError)

    def error_of(self, work: StartedWork[Any]) -> CommError:
        """Return a pending work's error: the op at fault gets the error itself, other ops get one that quotes it."""
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

        An excluded rank reports its own death, as the ranks that excluded it do.
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
        """Return the failure with the verdict and the path of the recorder's file added to its error."""
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
    """The findings about a missed deadline. The rank whose deadline passed sends them to the other ranks."""

    report: str
    """The text that says where the ranks were; empty: nothing was found."""
    late: tuple[int, ...]
    """The missing ranks."""


def failure_of(error: CommError, since: float, rank: int) -> Failure:
    """Return the failure for an error. If this rank is reported dead, the error says that it is excluded."""
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
    """The state of a communicator, and the reason for it."""

    state: State = State.OPEN
    failure: Failure | None = None
    closed: CommClosedError | None = None
    """The error of ops that are called after this rank has begun to close the communicator."""

    def refusal(self) -> CommError | None:
        """Return the error of an op that is called now; None: it may start."""
        if self.closed is not None:
            return CommClosedError(self.closed.message)
        if self.failure is None:
            return None
        error = CommAbortedError(f"{LOST}{self.failure.error}", peer=self.failure.error.peer)
        error.__cause__ = self.failure.error
        return error


class Action(enum.Enum):
    """An action that a transition asks for."""

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

    :param here: whether this is the loop's thread. On the loop's thread, works end first, because their tasks resume
        only after all actions. On another thread works end last, because resumed tasks may close what the other actions
        need.
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
    """Enter the state closed: ops have had their time to end, and later failures have no effect."""
    return Life(State.CLOSED, life.failure, life.closed)


def disown(parent: int) -> Life:
    """Record that the communicator belongs to the parent process, from which this process was forked."""
    why = f"the communicator was created in process {parent} and cannot be used after a fork: form a new one"
    return Life(State.CLOSED, None, CommClosedError(why))
