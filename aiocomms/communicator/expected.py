"""The class that records the receives that this library itself posts, and the tasks that wait for them.

The library keeps these receives pending, because the messages may arrive at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiocomms.lowlevel.threads import copied
from aiocomms.progress.driver import Promise
from aiocomms.progress.inflight import InFlight, StartedWork
from aiocomms.progress.loops import Waiter


class Expected:
    """The receives that one part of this library keeps pending, and the tasks that wait for each receive.

    Each tag has one pending receive.

    A hang report names only the receives for which a task waits.

    See :class:`aiocomms.progress.inflight.Stands`.
    """

    def __init__(self, in_flight: InFlight, of: str) -> None:
        """Create an object that has no receives yet.

        :param of: the name of the part that posts the receives. Reports show this name.
        """
        self._of = of
        self._works: dict[int, tuple[StartedWork[Any], str]] = {}
        self._awaited: dict[int, Promise] = {}
        self._driver = in_flight.driver
        in_flight.stands.add(self)

    def note(self, tag: int, work: StartedWork[Any], what: str = "") -> None:
        """Record the latest receive that was posted for a tag.

        :param what: a text that reports show after the name of the part that posts the receives.
        """
        self._works[tag] = work, what

    async def change(self, tag: int) -> None:
        """Wait until the part of the library that owns this object calls :meth:`changed`.

        :param tag: the tag of the message for which this task waits.
        """
        if tag not in self._awaited:
            self._awaited[tag] = Promise(self._driver)
        await self._awaited[tag]

    def changed(self) -> None:
        """Wake all waiting tasks. Each task then checks what has changed."""
        awaited, self._awaited = self._awaited, {}
        for promise in awaited.values():
            promise.set()

    def standing(self) -> Iterator[tuple[StartedWork[Any], list[Waiter], str]]:
        """See :class:`aiocomms.progress.inflight.Stands`."""
        awaited = copied(self._awaited.items())
        for tag, (work, what) in copied(self._works.items()):
            waiters = [waiter for wanted, promise in awaited if wanted == tag for waiter in promise.waiters]
            yield work, waiters, f"{self._of}{what}"
