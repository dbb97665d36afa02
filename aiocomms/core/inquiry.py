"""The inquiry: after the deadline of a receive, this rank asks other ranks what they are doing.

The answers become part of the error's text. The communicator stays usable. This rank sends its question as a note (see
:meth:`aiocomms.transport.Transport.say`). The first question goes to the rank for which the receive has waited. The
next question goes to the rank for which that rank waits, or has waited until a deadline, and so on. The inquiry stops
at a rank that waits for no other rank, or when the chain of ranks closes a circle. Each rank answers on a background
thread, so that a busy loop does not prevent the answer. If a rank does not answer in time, the error's text can say so.
If a rank cannot be asked, the error's text says nothing about it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from aiocomms.bootstrap.notes import Answer, Late, Notes, Question, Waiting
from aiocomms.core.postmortem import PATIENCE, printable
from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.hang_report import NO_ANSWER, doing
from aiocomms.diagnosis.recorder import LONGEST, SHOWN
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.clock import Reply

if TYPE_CHECKING:
    from aiocomms.core.core import Core

PERIOD: Final = 0.5
"""The smallest number of seconds between two inquiries of a communicator.

This limit protects the other ranks from many questions when deadlines are short.
"""
_ROOM: Final = 1200
"""The largest size in bytes of the text in which a rank describes its activity. A longer text is cut off."""
_LOOKED_AT: Final = 64
"""The largest number of pending ops for which an answer names the awaited ranks. The oldest ops come first."""


class Wait(NamedTuple):
    """A wait for another rank. Times are those of this rank's monotonic clock."""

    peer: int
    since: float
    until: float
    """The end of the wait.

    For a late receive, this is the deadline. For an op that is pending on another rank, this is the time at which this
    rank sent the question.
    """
    what: str = ""
    """A description of the late receive. The text is empty for a pending op, because a pending op is not late."""


class Inquiry:
    """The object that asks other ranks of one communicator, and answers the questions of other ranks."""

    def __init__(self, comm: Core, notes: Notes) -> None:
        self._comm = comm
        self._notes = notes
        notes.on_word = self.hear
        self._not_before = float("-inf")
        self._late: Wait | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[int, Reply[Answer]]] = {}
        """The unanswered questions by number.

        Each value is the rank that was asked, and the object that receives the answer.
        """
        self._lock = threading.Lock()
        self._askers: dict[int, int] = {}
        """The ranks that wait for an answer, with the number of each rank's last question."""

    # ------------------------------------------------------------------------------------------------------- asking

    def begin(self, late: Wait, end: Callable[[str], object]) -> None:
        """Ask ranks, one after another, why a receive is late. The watchdog's thread calls this.

        :param end: a function that is called once, on any thread, with the text to add to the error.
        """
        self._late = late
        now = clock.now()
        if self._comm.size > 1 and now >= self._not_before:
            self._not_before = now + PERIOD
            if dumps.in_background(lambda: self._inquire(late, end)):
                return
        end("")

    def _inquire(self, late: Wait, end: Callable[[str], object]) -> None:
        report = ""
        try:
            report = self._follow(late)
        finally:
            end(report)

    def _follow(self, wait: Wait) -> str:
        """Ask the ranks of a chain of waits, one after another.

        Return a text about what these ranks do, and about a circle in which they wait.
        """
        ends = clock.now() + PATIENCE
        chain, words = [self._comm.rank], list[str]()
        while wait.peer not in chain:
            rank, asked = wait.peer, clock.now()
            answer = self._ask(rank, ends)
            if isinstance(answer, str):
                # A rank that was asked late has had no time to answer.
                words += [f"rank {rank} {answer}"] if answer and ends - asked > PATIENCE / 2 else []
                return _report(words)
            chain.append(rank)
            following = _following(answer, wait, chain, asked, clock.now())
            late = following.what if following else ""
            words.append(f"rank {rank} {f'was late in {late}' if late else answer.doing}")
            if following is None:
                return _report(words)
            wait = following
        return _report(words, [*chain[chain.index(wait.peer) :], wait.peer])

    def _ask(self, rank: int, ends: float) -> Answer | str:
        """Ask a rank what it is doing, and wait for its answer until the time ``ends`` of the monotonic clock.

        :returns: the answer, or a text that says that the rank does not answer. The text is empty if the rank cannot be
            asked.
        """
        number, reply = next(self._numbers), Reply[Answer]()
        self._asked[number] = rank, reply
        try:
            if not self._notes.say(rank, Question(number)):
                return ""
            try:
                return reply.get(ends - clock.now())
            except TimeoutError:
                return f"does {NO_ANSWER}"
        finally:
            del self._asked[number]

    # ---------------------------------------------------------------------------------------------------- answering

    def hear(self, rank: int, said: Question | Answer) -> None:
        """Handle a question or an answer of a rank. This method never waits, and any thread may call it."""
        if isinstance(said, Answer):
            asked, reply = self._asked.get(said.number, (None, None))
            if reply is not None and asked == rank:
                said.doing = printable(said.doing, 4 * LONGEST)
                reply.put(said)
            return
        with self._lock:  # One thread answers all ranks that ask before it has looked.
            first = not self._askers
            self._askers[rank] = said.number
        if first and not dumps.in_background(self._answer):
            self._take_askers()

    def _take_askers(self) -> dict[int, int]:
        with self._lock:
            askers, self._askers = self._askers, {}
        return askers

    def _answer(self) -> None:
        """Answer all ranks that have asked: tell them what this rank is doing."""
        try:
            text, waits, late, now = self._look()
        finally:
            askers = self._take_askers()
        told = None if late is None else Late(late.peer, now - late.since, _cut(late.what, LONGEST), now - late.until)
        for rank, number in askers.items():
            # A wait for the asker may close a circle, and comes first.
            few = sorted(waits, key=lambda wait: wait.rank != rank)[:SHOWN]
            self._notes.say(rank, Answer(number, text, few, told))

    def _look(self) -> tuple[str, list[Waiting], Wait | None, float]:
        """Return this rank's activity, the ranks for which it waits, its last late receive, and the current time."""
        comm, late = self._comm, self._late
        flying = sorted(comm.in_flight.look(), key=lambda one: one.posted)
        now = clock.now()
        waits: dict[int, float] = {}
        for work, posted, *_ in [one for one in flying if not one.idle][:_LOOKED_AT]:
            for peer in comm.waiting_for(work):
                waits.setdefault(peer, max(0.0, now - posted))
        text = doing(comm.recorder.describe(comm.recorder.look(flying), "").header.brief)
        return _cut(text, _ROOM), [Waiting(peer, age) for peer, age in waits.items() if peer != comm.rank], late, now


def _following(answer: Answer, wait: Wait, chain: Sequence[int], asked: float, heard: float) -> Wait | None:
    """Return a wait of the answering rank that overlaps in time with the waits of all earlier ranks in the chain.

    A wait that closes a circle has priority. Otherwise the oldest pending wait has priority. If there is no such wait,
    return None.

    :param wait: the period in which all earlier ranks have waited.
    :param asked: the time of the question; ``heard`` is the time of the answer. The rank has measured the ages in its
        answer between these times. If the overlap is uncertain, the rank counts as not waiting.
    """
    found = [Wait(one.rank, heard - one.age, asked) for one in answer.waits]
    if (late := answer.late) is not None:
        found.append(Wait(late.rank, heard - late.age, asked - late.ago, printable(late.what)))
    both = [one._replace(since=max(one.since, wait.since), until=min(one.until, wait.until)) for one in found]
    fitting = [one for one in both if one.since <= one.until]
    return next((one for one in fitting if one.peer in chain), fitting[0] if fitting else None)


def _report(words: Sequence[str], circle: Sequence[int] = ()) -> str:
    """Join the texts about the other ranks, and add the circle in which they wait."""
    if not words:
        return ""
    more = [f"and {len(words) - SHOWN} more"] if len(words) > SHOWN else []
    report = f": {', '.join([*words[:SHOWN], *more])}"
    arrows = " -> ".join(f"rank {rank}" for rank in circle)
    return f"{report}: they waited in a circle: {arrows}" if circle else report


def _cut(text: str, room: int) -> str:
    return text.encode(errors="replace")[:room].decode(errors="ignore")
