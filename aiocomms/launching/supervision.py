"""The decisions of a supervisor: which process to start, and which process gets a signal.

A :class:`Supervision` takes events and returns orders. The supervisor executes the orders, and reports their results as
events. This module itself starts no processes and sends no signals. So a test can simulate the processes and the clock.

Each process of a rank has a number, its *incarnation*. The processes that the supervisor starts together are a
*generation*. Within a generation, a process that replaces a dead process is a *newcomer*. The newcomer joins the ranks
that have formed a communicator. If no rank with a communicator is left, the generation ends and the next generation
begins.
"""

from __future__ import annotations

import heapq
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

WINDOW: Final = 60.0
"""The length in seconds of the period in which a rank's restarts are counted."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""``FIRST_PAUSE`` is the pause in seconds before a rank's second restart within :data:`WINDOW`.

The pause doubles with each restart, up to ``LONGEST_PAUSE``. The first restart has no pause.
"""
LINGER: Final = 1.0
"""The seconds for which a process may continue after the other ranks have lost the process.

Then the supervisor kills the process.
"""
SILENCE: Final = 30.0
"""The time limit, in seconds, for a host to report the end of a killed process.

After the limit, the host counts as failed.
"""
ENDING: Final = 5.0
"""The seconds between SIGTERM and SIGKILL for the processes of a generation that cannot continue."""
PATIENCE: Final = 60.0
"""The seconds after a process's start until the supervisor prints which ranks have not formed a communicator."""


class Start(msgspec.Struct, frozen=True):
    """An order to start a process for a rank."""

    rank: int
    incarnation: int
    generation: int
    restarts: int
    """The number of earlier processes of this rank in this generation."""


class Tell(msgspec.Struct, frozen=True):
    """An order to send a signal to the process of a rank."""

    rank: int
    signal: int
    replaced: bool = False
    """True if a new process replaces this process while the other ranks continue.

    The supervisor reports the replacement to the process before it sends the signal.
    """


class Say(msgspec.Struct, frozen=True):
    """An order to print a sentence."""

    text: str


Deed = Start | Tell | Say
"""An order to the supervisor."""


class SupervisedRank:
    """One rank, and its current process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.incarnation = -1
        self.restarts = 0
        self.alive = False
        self.formed: dict[str, int] = {}
        """The last epoch of each communicator that the process has formed, by name. Each reconfiguration begins an
        epoch."""
        self.lost: set[str] = set()
        """The communicators whose other ranks have lost the process, until the process has formed a later epoch."""
        self.leaving = False
        """True once the process was told to end, or has reported that it leaves.

        A new process then replaces this process.
        """
        self.due = False
        """True during the pause before the start of the next process."""
        self.code: int | None = None
        """The exit code of the last ended process; None: no process has ended.

        If a signal ended the process, the value is the negative number of the signal.
        """
        self.order = 0
        """The position of this rank's last ended process in the order in which all processes have ended."""
        self.begun: deque[float] = deque()
        """The times within :data:`WINDOW` at which this rank was restarted after a process had failed or left."""

    def allow(self, most: int, now: float) -> bool:
        """Count a restart, and return whether at most ``most`` restarts lie within the last :data:`WINDOW` seconds."""
        while self.begun and self.begun[0] <= now - WINDOW:
            self.begun.popleft()
        self.begun.append(now)
        return len(self.begun) <= most

    def pause(self) -> float:
        """Return the pause in seconds before the restart that :meth:`allow` has counted last."""
        again = len(self.begun) - 2
        return 0.0 if again < 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**again)


class Supervision:
    """The decisions about the ranks of a job.

    :param size: the number of ranks.
    :param restart: whether the supervisor starts a new process for a failed rank.
    :param most: the largest number of restarts of one rank within :data:`WINDOW` seconds.
    :param grace: the seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, size: int, *, restart: bool, most: int, grace: float) -> None:
        self.ranks: list[SupervisedRank] = [SupervisedRank(number) for number in range(size)]
        self.generation = -1
        self.restarts = 0
        """The number of processes that have replaced earlier processes."""
        self.first: tuple[int, int] | None = None
        """The rank that failed first, and its exit code."""
        self.stopping: str | None = None
        """The reason for the end of all ranks; None: the job continues."""
        self._restart, self._most, self._grace = restart, most, grace
        self._gave_up: int | None = None
        self._ends = 0
        self._anew: float | None = None
        """The pause in seconds before the next generation; None if the current generation can continue."""
        self._rolling: list[int] = []
        """The ranks that a planned replacement has not replaced yet, in order."""
        self._alarms: list[tuple[float, int, int, str]] = []
        self._deeds: list[Deed] = []
        self._now = 0.0

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def over(self) -> bool:
        """True once every process has ended and no process will be started."""
        return self._anew is None and not any(rank.alive or rank.due for rank in self.ranks)

    @property
    def ready(self) -> bool:
        """True while every rank has formed a communicator."""
        return all(rank.alive and rank.formed for rank in self.ranks)

    @property
    def deadline(self) -> float | None:
        """The time at which :meth:`tick` must be called next; None if no alarm is set."""
        return self._alarms[0][0] if self._alarms else None

    def code(self) -> int:
        """Return the exit code of the job.

        If the supervisor gave up because of a rank, return the code of this rank's last ended process. Otherwise,
        return the code of the rank whose last process failed first. Without a failure, return 0.
        """
        if self._gave_up is not None:
            return status(self._gave_up)
        failed = sorted((rank.order, rank.code) for rank in self.ranks if rank.code)
        return status(failed[0][1]) if failed else 0

    def summary(self) -> list[str]:
        """Return the lines that describe the outcome of the job."""
        ends = "; ".join(f"rank {rank.number}: {described(rank.code)}" for rank in self.ranks)
        lines = [f"{counted(len(self.ranks), 'rank')}, {counted(self.restarts, 'restart')}; {ends}"]
        if self.first is not None and self.code():
            rank, code = self.first
            lines.append(f"rank {rank} failed first: {described(code)}")
        return lines

    # --------------------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> Sequence[Deed]:
        """Start all ranks."""
        self._now = now
        self._start_all()
        return self._done()

    def formed(self, number: int, incarnation: int, name: str, epoch: int, now: float) -> Sequence[Deed]:
        """Record that a process has formed a communicator."""
        self._now, rank = now, self.ranks[number]
        if rank.alive and rank.incarnation == incarnation:
            rank.formed[name] = epoch
            rank.lost.discard(name)
            if self._rolling[:1] == [number] and not rank.leaving:
                self._rolling.pop(0)
                self._roll()
        return self._done()

    def lost(self, number: int, name: str, epoch: int, now: float) -> Sequence[Deed]:
        """Record that the other ranks of a communicator have lost a rank.

        The supervisor kills the process of the lost rank if the process does not end within :data:`LINGER` seconds.
        """
        self._now = now
        if 0 <= number < len(self.ranks) and self.stopping is None:
            rank = self.ranks[number]
            # A process that has formed a later epoch is a newer one, or has joined again.
            if rank.alive and not rank.leaving and rank.formed.get(name, epoch + 1) <= epoch and name not in rank.lost:
                rank.lost.add(name)
                self._alarm(LINGER, rank, "lost")
        return self._done()

    def leaves(self, number: int, incarnation: int, now: float) -> Sequence[Deed]:
        """Record that a process leaves.

        If the process does not end within the grace time, the supervisor kills the process. A new process then replaces
        the ended process.
        """
        self._now, rank = now, self.ranks[number]
        if rank.alive and rank.incarnation == incarnation and not rank.leaving and self.stopping is None:
            rank.leaving = True
            self._say(f"rank {number} leaves")
            self._alarm(self._grace, rank, "late")
        return self._done()

    def ended(self, number: int, incarnation: int, code: int, now: float) -> Sequence[Deed]:
        """Record that a process has ended.

        :param code: the exit code, or minus the number of the signal that has ended the process.
        """
        self._now, rank = now, self.ranks[number]
        if rank.alive and rank.incarnation == incarnation:
            self._ends += 1
            rank.alive, rank.code, rank.order = False, code, self._ends
            self._after_end(rank, code)
        return self._done()

    def miss(self, numbers: Iterable[int], now: float) -> Sequence[Deed]:
        """Record that the host of some ranks has failed, or has never joined."""
        self._now = now
        for number in numbers:
            if self.ranks[number].alive or self.ranks[number].due:
                self._miss(self.ranks[number])
        return self._done()

    def stop(self, why: str, now: float) -> Sequence[Deed]:
        """End all ranks. If the ranks were already told to end, kill the ranks."""
        self._now = now
        if self.stopping is None:
            self._stop(why)
        else:
            self._tell_all(signal.SIGKILL)
        return self._done()

    def replace_all(self, now: float) -> Sequence[Deed]:
        """Replace one rank after the other, from the highest rank to rank 0."""
        self._now = now
        if self._rolling:
            self._say("the ranks are being replaced already")
        elif not self.ready or self.stopping is not None:
            self._say("no rank is replaced, for not all have formed a communicator")
        else:
            self._rolling = [rank.number for rank in reversed(self.ranks)]
            self._roll()
        return self._done()

    def tick(self, now: float) -> Sequence[Deed]:
        """Handle the alarms whose time has come."""
        self._now = now
        return self._done()

    # ------------------------------------------------------------------------------------------------------ decisions

    def _ring(self, rank: SupervisedRank, what: str) -> None:
        match what:
            case "start" if rank.due:
                self._start(rank)
            case "anew" if self._anew is not None:
                self._start_all()
            case "unformed" if rank.alive and not rank.formed and self.stopping is None:
                self._name_unformed(rank)
            case "lost" if rank.alive and rank.lost and not rank.leaving:
                self._kill(rank, "is lost to the others, and has not ended")
            case "late" if rank.alive:
                self._kill(rank, "has not ended in time")
            case "silent" if rank.alive:
                self._miss(rank)

    def _name_unformed(self, rank: SupervisedRank) -> None:
        late = [it.number for it in self.ranks if it.alive and not it.formed]
        if rank.number == late[0]:
            who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"
            self._say(f"{who} not formed a communicator after {PATIENCE:g} s")

    def _kill(self, rank: SupervisedRank, why: str) -> None:
        self._say(f"rank {rank.number} {why}: it is killed")
        self._deeds.append(Tell(rank.number, signal.SIGKILL))
        self._alarm(SILENCE, rank, "silent")

    def _miss(self, rank: SupervisedRank) -> None:
        """Treat a rank as killed, because its host has failed."""
        rank.alive, rank.due, rank.code = False, False, -signal.SIGKILL
        if self.stopping is None:
            self._gave_up = rank.code
            self._stop(f"the host of rank {rank.number} does not answer: giving up")

    def _after_end(self, rank: SupervisedRank, code: int) -> None:
        if self._anew is not None:
            self._begin_anew()
        elif self.stopping is not None:
            if code != -signal.SIGTERM:
                self._note(rank, code)
        elif rank.leaving:
            self._say(f"rank {rank.number} has ended, to be replaced: {described(code)}")
            self._replace(rank, 0.0 if self._rolling[:1] == [rank.number] else self._pause_after_leaving(rank))
        elif code == 0:
            self._look_for_newcomers()
        else:
            self._note(rank, code)
            self._fail(rank, code)

    def _pause_after_leaving(self, rank: SupervisedRank) -> float:
        """Count a restart, and return the pause before the restart in seconds.

        If a rank leaves often, the pauses become longer, but the restarts never end the job.
        """
        rank.allow(self._most, self._now)
        return rank.pause()

    def _note(self, rank: SupervisedRank, code: int) -> None:
        if code and self.first is None:
            self.first = rank.number, code

    def _fail(self, rank: SupervisedRank, code: int) -> None:
        how = described(code)
        if not self._restart:
            self._stop(f"rank {rank.number} has failed: {how}")
        elif not rank.allow(self._most, self._now):
            self._gave_up = code
            self._stop(
                f"rank {rank.number} has failed: {how}; it was restarted {self._most} times within {WINDOW:g} s: "
                "giving up"
            )
        else:
            self._say(f"rank {rank.number} has failed: {how}")
            self._replace(rank, rank.pause())

    def _replace(self, rank: SupervisedRank, pause: float) -> None:
        """Start a newcomer.

        If no rank is left that could form a communicator with the newcomer, start all ranks again.
        """
        if any(it.alive and it.formed for it in self.ranks):
            rank.due = True
            self._alarm(pause, rank, "start")
        else:
            self._end_generation(pause)

    def _end_generation(self, pause: float) -> None:
        """End the remaining processes of a generation that no newcomer can join. Then begin the next generation."""
        self._anew, self._rolling = pause, []
        if any(it.alive for it in self.ranks):
            self._say("no rank is left that could take in another: all are started anew")
        for it in self.ranks:
            it.due = False
            if it.alive and it.restarts:  # A newcomer has only waited to be taken in, so it can be killed.
                self._deeds.append(Tell(it.number, signal.SIGKILL))
            elif it.alive:
                self._deeds.append(Tell(it.number, signal.SIGTERM))
                self._alarm(ENDING, it, "late")
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._anew is not None and not any(rank.alive for rank in self.ranks):
            self._alarm(self._anew, self.ranks[0], "anew")

    def _look_for_newcomers(self) -> None:
        """End the job if newcomers wait for ranks that have ended.

        During a planned replacement, start all ranks again instead.
        """
        waiting = [it for it in self.ranks if it.due or (it.alive and it.restarts and not it.formed)]
        if not waiting or any(it.alive and it.formed for it in self.ranks):
            return
        if self._rolling:  # The program has ended all ranks together with the replaced one.
            self._end_generation(0.0)
        else:
            self._gave_up = waiting[0].code
            self._stop(f"rank {waiting[0].number} was restarted, and the ranks that could take it in have ended")

    def _roll(self) -> None:
        if self._rolling:
            rank = self.ranks[self._rolling[0]]
            rank.leaving = True
            self._say(f"rank {rank.number} is being replaced")
            if rank.alive:
                self._deeds.append(Tell(rank.number, signal.SIGTERM, replaced=True))
                self._alarm(self._grace, rank, "late")
        else:
            self._say("all ranks have been replaced")

    def _stop(self, why: str) -> None:
        self._say(why)
        self.stopping, self._anew, self._rolling = why, None, []
        for rank in self.ranks:
            rank.due = False
        self._tell_all(signal.SIGTERM, self._grace)

    def _tell_all(self, number: int, patience: float | None = None) -> None:
        for rank in self.ranks:
            if rank.alive:
                self._deeds.append(Tell(rank.number, number))
                if patience is not None:
                    self._alarm(patience, rank, "late")

    def _start_all(self) -> None:
        self.generation += 1
        self._anew = None
        for rank in self.ranks:
            rank.restarts = -1
            self._start(rank)

    def _start(self, rank: SupervisedRank) -> None:
        self.restarts += rank.incarnation >= 0
        rank.incarnation += 1
        rank.restarts += 1
        rank.alive, rank.due, rank.leaving, rank.formed, rank.lost = True, False, False, {}, set()
        self._deeds.append(Start(rank.number, rank.incarnation, self.generation, rank.restarts))
        self._alarm(PATIENCE, rank, "unformed")

    def _alarm(self, seconds: float, rank: SupervisedRank, what: str) -> None:
        heapq.heappush(self._alarms, (self._now + seconds, rank.number, rank.incarnation, what))

    def _say(self, text: str) -> None:
        self._deeds.append(Say(text))

    def _done(self) -> Sequence[Deed]:
        while self._alarms and self._alarms[0][0] <= self._now:  # A start without a pause is due at once.
            _, number, incarnation, what = heapq.heappop(self._alarms)
            if self.ranks[number].incarnation == incarnation:
                self._ring(self.ranks[number], what)
        deeds, self._deeds = self._deeds, []
        return deeds


def status(code: int) -> int:
    """Return the exit code as a shell reports it: after a signal, 128 plus the number of the signal."""
    return 128 - code if code < 0 else code


def described(code: int | None) -> str:
    """Describe the end of a process: ``"exit code 1"``, ``"SIGKILL"``."""
    if code is None:
        return "not ended"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
