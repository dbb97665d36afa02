"""The works of one communicator that are pending, and their deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

from aiocomms.errors import CommError
from aiocomms.progress.deadlines import watchdog
from aiocomms.progress.driver import Driver, Promise
from aiocomms.progress.heartbeat import Heartbeat
from aiocomms.progress.work import Work


class Expirer(Protocol):
    """What acts on a deadline that has passed."""

    driver: Driver

    def expire(self, work: Work[Any]) -> None:
        """A work is late; called on the watchdog's thread."""

    def _fail(self, error: CommError) -> None:
        """The communicator is lost."""


class Queue(dict[Work[Any], float]):
    """Works of one timeout, and their deadlines."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class Pending:
    """Keeps works, and with them their tensors, until they are done.

    Timeouts are few, so there is a queue per timeout: each is in the order of its deadlines by itself, and an op costs
    one insertion and one deletion whatever else is pending.
    """

    def __init__(self, comm: Expirer, heartbeat: Heartbeat) -> None:
        self._comm = comm
        self._heartbeat = heartbeat
        self._queues: dict[float, Queue] = {}
        self._drained: Promise | None = None
        watchdog.register(self)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def __iter__(self) -> Iterator[Work[Any]]:
        for queue in list(self._queues.values()):
            yield from list(queue)

    def add(self, work: Work[Any], seconds: float) -> None:
        """Keep a work, and watch its deadline, ``seconds`` from now."""
        queue = self._queues.get(seconds)
        if queue is None:
            self._queues = {s: q for s, q in self._queues.items() if q}
            queue = self._queues[seconds] = Queue(seconds)
        now = time.monotonic()
        deadline = queue[work] = now + seconds
        work.queue = queue
        if not work.op.moves:
            work.hold()
        period = self._heartbeat.period
        look = deadline if seconds < period else now + period
        if look < watchdog.wakes_at:
            try:
                watchdog.wake_by(look)
            except RuntimeError as error:  # what nobody watches might never end
                self._comm._fail(CommError(f"nobody watches its deadlines: {error}"))

    def remove(self, work: Work[Any]) -> float:
        """Forget a work that has just become done.

        :returns: when it was added.
        """
        queue = work.queue
        assert queue is not None
        added = queue.pop(work) - queue.seconds
        work.queue = None
        if self._drained is not None and not self:
            self._drained.set()
        return added

    async def drained(self) -> None:
        """Wait until nothing is pending."""
        if self:
            self._drained = Promise(self._comm.driver)
            await self._drained

    def unwatch(self) -> None:
        """Watch no deadlines any more. Twice is once."""
        watchdog.unregister(self)

    def expire(self, now: float) -> float:
        """See :class:`Watched`; copies before it looks, for the loop's thread goes on meanwhile."""
        earliest = float("inf")
        if self:
            self._heartbeat.look(now)
            earliest = now + self._heartbeat.period
        for queue in list(self._queues.values()):
            for work, deadline in list(queue.items()):
                if deadline > now:
                    earliest = min(earliest, deadline)
                    break
                self._comm.expire(work)
        return earliest
