"""The order of what happens in a simulated world, and the clock of each process in it."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable
from random import Random
from typing import Any, Final, NamedTuple

_MOMENT: Final = 5e-5
"""Seconds that it takes at most to switch to a thread, or back to the loop."""


class Occurrence(NamedTuple):
    """A call at some time. Of two at the same time, the one that was asked for first comes first."""

    time: float
    number: int
    timeline: Timeline | None
    call: Callable[..., object]
    args: tuple[Any, ...]


class Clockwork:
    """Virtual time, which jumps from one call to the next."""

    def __init__(self, seed: int) -> None:
        """Begin, with nothing to come."""
        self.random = Random(seed)  # noqa: S311 - A seed repeats it.
        self.time = 0.0
        self.only_looks = False
        """True if the call was a look whether other ranks live, and no deadline is to come in its process."""
        self.trace: list[tuple[float, str, str]] = []
        """All that has happened: the time, to which process, and what."""
        self._coming: list[Occurrence] = []
        self._numbers = itertools.count()

    @property
    def next_time(self) -> float:
        """The time of the next call; infinity: none does."""
        return self._coming[0].time if self._coming else float("inf")

    def at(self, when: float, timeline: Timeline | None, call: Callable[..., object], *args: Any) -> None:
        """Have a call made at some time, in a process or in none."""
        when = max(when, self.time)
        if timeline is not None and timeline.slowness:
            when += timeline.slowness * self.random.random()
        heapq.heappush(self._coming, Occurrence(when, next(self._numbers), timeline, call, args))

    def next(self) -> Occurrence | None:
        """Let time pass until the next call, and return it; None: its process has ended, or stands still."""
        coming = heapq.heappop(self._coming)
        timeline = coming.timeline
        if timeline is not None and timeline.over:
            return None
        if timeline is not None and timeline.paused_until > coming.time:
            heapq.heappush(self._coming, coming._replace(time=timeline.paused_until))
            return None
        self.time = coming.time
        return coming

    @property
    def to_come(self) -> list[Occurrence]:
        """The calls that are to come, in no order."""
        return list(self._coming)

    def a_moment(self) -> float:
        """Draw the seconds that a switch of threads takes."""
        return _MOMENT * self.random.random()

    def note(self, who: object, what: str) -> None:
        """Add something to the trace."""
        self.trace.append((self.time, str(who), what))

    def clear(self) -> None:
        """Have nothing happen any more."""
        self._coming.clear()


class Timeline:
    """The time of one process, which has a clock of its own, and ends."""

    def __init__(self, clockwork: Clockwork, rank: int, restarts: int) -> None:
        """Begin.

        :param restarts: how often the rank has been started before.
        """
        self.clockwork, self.rank, self.restarts = clockwork, rank, restarts
        self._name = f"rank {rank}" + (f" (restart {restarts})" if restarts else "")
        draw = clockwork.random.random
        # Monotonic clocks of hosts begin anywhere, and differ by some parts in a hundred thousand.
        self._begins, self._rate = 1000.0 * draw(), 1.0 + 1e-4 * (draw() - 0.5)
        self._least = 0.0
        self.dead = self.over = False
        self.paused_until = 0.0
        self.slowness = 0.0
        """Seconds by which each call comes late at most."""
        self.generators: list[weakref.ref[AsyncGenerator[Any, Any]]] = []
        """The asynchronous generators that have begun in it."""
        self.unraised: list[dict[str, Any]] = []
        """The errors that had no caller, as for a loop's exception handler."""

    def __repr__(self) -> str:
        return self._name

    def now(self) -> float:
        """Return its monotonic clock, in seconds."""
        return max(self._least, self.says_at(self.clockwork.time))

    def says_at(self, time: float) -> float:
        """Return what its monotonic clock says at some time of the world."""
        return self._begins + time * self._rate

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Have a call made when its clock says ``when``."""
        self.clockwork.at((when - self._begins) / self._rate, self, self._punctually, when, call, args)

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Have a call made after some seconds."""
        self.clockwork.at(self.clockwork.time + seconds, self, call, *args)

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Have a call made a moment later, as by another thread."""
        self.later(self.clockwork.a_moment(), call, *args)

    def _punctually(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._least = max(self._least, when)  # A float may be a bit too small.
        call(*args)

    def report(self, context: dict[str, Any]) -> None:
        """Note an error that has no caller."""
        self.unraised.append(context)
