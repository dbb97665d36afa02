"""The order of events in a simulated world, and the clock of each process."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable
from random import Random
from typing import Any, Final, NamedTuple

_MOMENT: Final = 5e-5
"""The longest time, in seconds, that a switch from the event loop to a thread or back takes."""


class Occurrence(NamedTuple):
    """A scheduled call. Calls at the same time run in the order in which they were scheduled."""

    time: float
    number: int
    timeline: Timeline | None
    call: Callable[..., object]
    args: tuple[Any, ...]


class Clockwork:
    """The virtual time of a world. The time jumps from one scheduled call to the next scheduled call."""

    def __init__(self, seed: int) -> None:
        """Begin without scheduled calls."""
        self.random = Random(seed)  # noqa: S311 - A seed repeats it.
        self.time = 0.0
        self.only_looks = False
        """True if the last call only checked that other ranks are alive, and its process has no pending deadline."""
        self.trace: list[tuple[float, str, str]] = []
        """The events until now. Each entry has the time, the process, and the event."""
        self._coming: list[Occurrence] = []
        self._numbers = itertools.count()

    @property
    def next_time(self) -> float:
        """The time of the next call; infinity if no call is scheduled."""
        return self._coming[0].time if self._coming else float("inf")

    def at(self, when: float, timeline: Timeline | None, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call at a virtual time. The call belongs to one process, or to none."""
        when = max(when, self.time)
        if timeline is not None and timeline.slowness:
            when += timeline.slowness * self.random.random()
        heapq.heappush(self._coming, Occurrence(when, next(self._numbers), timeline, call, args))

    def next(self) -> Occurrence | None:
        """Advance the time to the next call, and return the call.

        Return None if the call's process has ended or is paused.
        """
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
        """The scheduled calls, in no particular order."""
        return list(self._coming)

    def a_moment(self) -> float:
        """Return a random time in seconds for the switch to another thread."""
        return _MOMENT * self.random.random()

    def note(self, who: object, what: str) -> None:
        """Add an event to the trace."""
        self.trace.append((self.time, str(who), what))

    def clear(self) -> None:
        """Drop all scheduled calls."""
        self._coming.clear()


class Timeline:
    """The time of one process: the clock of the process, and its end."""

    def __init__(self, clockwork: Clockwork, rank: int, restarts: int) -> None:
        """Begin the time of a process.

        :param restarts: the number of times that the rank has been started again.
        """
        self.clockwork, self.rank, self.restarts = clockwork, rank, restarts
        self._name = f"rank {rank}" + (f" (restart {restarts})" if restarts else "")
        draw = clockwork.random.random
        # Monotonic clocks of hosts begin anywhere, and their rates differ by some parts in a hundred thousand.
        self._begins, self._rate = 1000.0 * draw(), 1.0 + 1e-4 * (draw() - 0.5)
        self._least = 0.0
        self.dead = self.over = False
        self.paused_until = 0.0
        self.slowness = 0.0
        """The longest time in seconds by which a call of the process is delayed."""
        self.generators: list[weakref.ref[AsyncGenerator[Any, Any]]] = []
        """The asynchronous generators that have begun in the process."""
        self.unraised: list[dict[str, Any]] = []
        """The errors that could not be raised to a caller.

        Each entry is a context dict for the exception handler of an event loop.
        """

    def __repr__(self) -> str:
        return self._name

    def now(self) -> float:
        """Return the time of the process's monotonic clock, in seconds."""
        return max(self._least, self.says_at(self.clockwork.time))

    def says_at(self, time: float) -> float:
        """Convert a time of the world to the time of the process's monotonic clock."""
        return self._begins + time * self._rate

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call for the time ``when`` of the process's clock."""
        self.clockwork.at((when - self._begins) / self._rate, self, self._punctually, when, call, args)

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call after some seconds."""
        self.clockwork.at(self.clockwork.time + seconds, self, call, *args)

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call after a very short random time, as if another thread had made the call."""
        self.later(self.clockwork.a_moment(), call, *args)

    def _punctually(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._least = max(self._least, when)  # Rounding may make the computed time a bit too small.
        call(*args)

    def report(self, context: dict[str, Any]) -> None:
        """Record an error that cannot be raised to a caller."""
        self.unraised.append(context)
