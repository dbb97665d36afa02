"""The works of one communicator that are in flight, and their deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from aiocomms.errors import CommError
from aiocomms.lowlevel import memory
from aiocomms.progress.deadlines import watchdog
from aiocomms.progress.driver import Driver, Promise
from aiocomms.progress.heartbeat import Heartbeat
from aiocomms.progress.work import StartedWork

AGAIN: Final = 5.0
"""Seconds after which a work is looked at again that is still there after its deadline. It ends sooner, also where its
error waits for an explanation, unless the exception of a signal handler has cut its end short."""


class Expirer(Protocol):
    """The communicator's side of its works in flight."""

    driver: Driver

    def expire(self, work: StartedWork[Any]) -> None:
        """Act on a work whose deadline has passed, and again while it has not ended; on the watchdog's thread."""

    def lose(self, error: CommError) -> None:
        """The communicator has failed."""


class Queue(dict[StartedWork[Any], float]):
    """Works of one timeout, and their deadlines."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class Flying(NamedTuple):
    """A pending work as it was at one time."""

    work: StartedWork[Any]
    posted: float
    """When it was noted as pending, in seconds of the monotonic clock."""
    waiters: list[object]
    """Its suspended awaiters."""


class InFlight:
    """Keeps works, and with them their tensors, until they are done.

    Other threads look at them. ``list(dict)`` copies the keys in one call that runs no Python code once it has begun:
    neither another thread nor a finalizer changes the dictionary in between, as it could amid ``list(dict.items())``,
    which allocates a tuple for each item.

    Timeouts are few, so there is a queue per timeout: each is in the order of its deadlines by itself, and an op costs
    one insertion and one deletion whatever else is pending.
    """

    def __init__(self, owner: Expirer, heartbeat: Heartbeat) -> None:
        self._owner = owner
        self._heartbeat = heartbeat
        self._queues: dict[float, Queue] = {}
        self._drained: Promise | None = None
        watchdog.register(self)
        memory.register(self)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def __iter__(self) -> Iterator[StartedWork[Any]]:
        return iter([flying.work for flying in self.look()])

    def look(self) -> list[Flying]:
        """Note all works, those of each timeout in the order of the calls. On any thread or signal handler."""
        flying = []
        for queue in list(self._queues.values()):
            for work in list(queue):
                posted = queue.get(work, time.monotonic()) - queue.seconds  # it may have become done meanwhile
                flying.append(Flying(work, posted, work.waiters()))
        return flying

    def add(self, work: StartedWork[Any], seconds: float) -> None:
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
                self._owner.lose(CommError(f"nobody watches its deadlines: {error}"))

    def remove(self, work: StartedWork[Any]) -> float:
        """Forget a work that has just become done.

        :returns: when it was added.
        """
        queue: Queue = work.queue
        added = queue.pop(work) - queue.seconds
        work.queue = None
        if self._drained is not None and not self:
            self._drained.set()
        return added

    def held(self) -> list[Tensor]:
        """The tensors of all works. On any thread."""
        ops = [flying.work.op for flying in self.look()]
        return [tensor for op in ops for _, tensor in op.reads() + op.writes()]

    async def drained(self) -> None:
        """Wait until nothing is pending."""
        if self:
            self._drained = Promise(self._owner.driver)
            await self._drained

    def unwatch(self) -> None:
        """Stop watching deadlines. Idempotent."""
        watchdog.unregister(self)

    def expire(self, now: float) -> float:
        """See :class:`Watched`; copies before it looks, for the loop's thread goes on meanwhile."""
        earliest = float("inf")
        if self:
            self._heartbeat.look(now)
            earliest = now + self._heartbeat.period
        for queue in list(self._queues.values()):
            for work in list(queue):
                deadline = queue.get(work, float("inf"))  # infinity: the work has become done meanwhile
                if now < deadline < float("inf"):
                    earliest = min(earliest, deadline)
                    break
                if deadline <= now:
                    self._owner.expire(work)
                    earliest = min(earliest, now + AGAIN)
        return earliest
