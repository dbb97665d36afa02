"""The order in which plans begin: those that wait for their turn."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio


@dataclass(order=True)
class _InTurn:
    """The place of one caller that waits."""

    priority: float
    number: int
    news: anyio.Event = field(compare=False)


class Admission:
    """Callers that wait until there is room: the lowest priority first, and among equals who came first.

    :param room: whether there is room for another one; what it raises the caller gets whose turn it would be.
    """

    def __init__(self, room: Callable[[], bool]) -> None:
        self._room = room
        self._numbers = itertools.count()
        self._places: list[_InTurn] = []

    @property
    def waiting(self) -> int:
        """The number of callers that wait."""
        return len(self._places)

    async def wait(self, priority: float) -> None:
        """Wait for a turn. The caller takes the room before it awaits anything else."""
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
        """Have the next caller look whether there is room: something has changed."""
        if self._places:
            self._places[0].news.set()
