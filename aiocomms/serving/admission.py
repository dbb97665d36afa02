"""The queue of plans that wait until they may begin."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio


@dataclass(order=True)
class _InTurn:
    """The position of one waiting caller in the queue."""

    priority: float
    number: int
    news: anyio.Event = field(compare=False)


class Admission:
    """The queue of callers that wait until their plans may begin.

    The caller with the lowest priority value is first. Callers with equal values are in the order of arrival.

    :param room: a function that returns whether one more plan may begin now. If the function raises, the first caller's
        :meth:`wait` raises the same error.
    """

    def __init__(self, room: Callable[[], bool]) -> None:
        self._room = room
        self._numbers = itertools.count()
        self._places: list[_InTurn] = []

    @property
    def waiting(self) -> int:
        """The number of waiting callers."""
        return len(self._places)

    async def wait(self, priority: float) -> None:
        """Wait until the caller's plan may begin. The caller must begin the plan before it awaits anything else."""
        if not self._places and self._room():
            return
        mine = _InTurn(priority, next(self._numbers), anyio.Event())
        bisect.insort(self._places, mine)
        try:
            while self._places[0] is not mine or not self._room():
                mine.news = anyio.Event()
                await mine.news.wait()
        finally:
            self._places.remove(mine)
            self.look()

    def look(self) -> None:
        """Wake the first caller, which then checks whether its plan may begin."""
        if self._places:
            self._places[0].news.set()
