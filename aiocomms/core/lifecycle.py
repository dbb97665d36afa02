"""The life of a communicator, as a state machine: what ends it, and the error that each pending op gets then.

::

    open --close--> closing --release--> closed
      |                |                   ^
      +------lose------+--> lost --release-+

While it is closing, what is under way may end and nothing new starts; a death, an abort and a deadline are still heard
and acted upon. The first :class:`Failure` wins. A transition is a pure function from a :class:`Life` and an event to
the next life and the actions that it asks for; :class:`aiocomms.core.core.Core` runs them.
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
    """The reason why a communicator is lost; it alone decides what error each work gets."""

    error: CommError
    """The event and the rank concerned: the op, its number and this rank where it happened to an op of this rank."""
    since: float
    """The time of the failure, by ``clock.now()``."""

    @property
    def timed_out(self) -> bool:
        """True if a deadline has passed, here or elsewhere: then every rank that waited gets a ``TimeoutError``."""
        return isinstance(self.error, CommTimeoutError)

    def error_of(self, work: StartedWork[Any]) -> CommError:
        """Return the error of a pending work: for the op at fault the error itself, for others one that quotes it."""
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
        """Return what the other ranks are told by this one; see :meth:`aiocomms.transport.Transport.abort`.

        A rank that is excluded tells them of its death, as those do that took it for dead.
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
        """Return the error with what has been learnt since of who was missing, and the recorder's file."""
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
    """The findings about a deadline that has passed; the rank that was late tells them to the others."""

    report: str
    """The text that says where the ranks were; empty: nothing was learnt."""
    late: tuple[int, ...]
    """The ranks that were missing."""


def failure_of(error: CommError, since: float, rank: int) -> Failure:
    """Return what has happened to this rank. One that was stopped or cut off hears of its death as an exclusion."""
    if isinstance(error, PeerDiedError) and error.peer == rank:
        excluded = CommAbortedError(
            f"this rank is excluded: the others took it for dead and go on without it: {error.message}"
        )
        excluded.__cause__ = error
        error = excluded
    return Failure(error, since)


class State(enum.Enum):
    """The state of a communicator in its life."""

    OPEN = "open"
    CLOSING = "closing"
    LOST = "lost"
    CLOSED = "closed"


class Life(msgspec.Struct, frozen=True):
    """The state of a communicator, with why it is in it."""

    state: State = State.OPEN
    failure: Failure | None = None
    closed: CommClosedError | None = None
    """The error of ops that are called after this rank has begun to close it."""

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
    """Note a failure. Later ones change nothing.

    :param here: works may end at once, as their tasks go on when all actions have run. Elsewhere they go on at any
        time, and may close what the other actions need.
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
    """Note why a deadline has passed."""
    assert life.failure is not None
    return Life(life.state, life.failure.explained(verdict, path), life.closed)


def close(life: Life) -> Step:
    """Begin to close it on this rank."""
    if life.state is not State.OPEN:
        return life, ()
    return Life(State.CLOSING, None, CommClosedError("it was closed on this rank")), (Action.WITHDRAW,)


def release(life: Life) -> Life:
    """Ops have had their time to end: nothing is heard any more, and everything is released."""
    return Life(State.CLOSED, life.failure, life.closed)


def disown(parent: int) -> Life:
    """Note that it is another process's, from which this one was forked."""
    why = f"it was created in process {parent} and cannot be used after a fork"
    return Life(State.CLOSED, None, CommClosedError(why))
