"""Standing receives for messages that may come at any time, and the tasks that wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiocomms.lowlevel.threads import copied
from aiocomms.progress.driver import Promise
from aiocomms.progress.inflight import InFlight, StartedWork
from aiocomms.progress.loops import Waiter


class Expected:
    """The receives that this library keeps pending of its own accord, by tags, with the tasks that wait for each.

    So a receive for which no task waits is not reported as a wait.

    A hang report names only the receives that a task waits for.

    See :class:`aiocomms.progress.inflight.Stands`.
    """

    def __init__(self, in_flight: InFlight, of: str) -> None:
        """Begin with nothing.

        :param of: what it belongs to, in words.
        """
        self._of = of
        self._works: dict[int, tuple[StartedWork[Any], str]] = {}
        self._awaited: dict[int, Promise] = {}
        self._driver = in_flight.driver
        in_flight.stands.add(self)

    def note(self, tag: int, work: StartedWork[Any], what: str = "") -> None:
        """Note the last receive of a tag.

        :param what: of that to which it belongs, in words.
        """
        self._works[tag] = work, what

    async def change(self, tag: int) -> None:
        """Wait until something has changed.

        :param tag: of the message that may change what this task waits for.
        """
        if tag not in self._awaited:
            self._awaited[tag] = Promise(self._driver)
        await self._awaited[tag]

    def changed(self) -> None:
        """Let all who wait go on, and look."""
        awaited, self._awaited = self._awaited, {}
        for promise in awaited.values():
            promise.set()

    def standing(self) -> Iterator[tuple[StartedWork[Any], list[Waiter], str]]:
        """See :class:`aiocomms.progress.inflight.Stands`."""
        awaited = copied(self._awaited.items())
        for tag, (work, what) in copied(self._works.items()):
            waiters = [waiter for wanted, promise in awaited if wanted == tag for waiter in promise.waiters]
            yield work, waiters, f"{self._of}{what}"
