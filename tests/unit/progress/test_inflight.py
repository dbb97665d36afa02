"""The table of works in flight, to which several threads add at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from concurrency import run_on

from aiocomms.progress.inflight import InFlight, Queue
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

OURS, OTHER = 7.0, 8.0
"""Deadlines of works, in seconds."""


class Queues(dict[float, Queue]):
    """The queues of all timeouts, with a step of another thread before a removal or after a look-up."""

    before_drop: Callable[[], object] | None = None
    after_look: Callable[[], object] | None = None

    def __delitem__(self, seconds: float) -> None:
        meanwhile, self.before_drop = self.before_drop, None
        if meanwhile is not None:
            meanwhile()
        super().__delitem__(seconds)

    def get(self, seconds: float, default: Any = None) -> Any:
        found = super().get(seconds, default)
        meanwhile, self.after_look = self.after_look, None
        if meanwhile is not None:
            meanwhile()
        return found


@pytest.mark.parametrize("when", ["before_drop", "after_look"])
def test_work_added_while_its_empty_queue_is_dropped_stays_tracked(when: str) -> None:
    """A work with a new timeout drops empty queues; a work that is added to one meanwhile is not lost."""

    async def main() -> None:
        async with local_world(2) as (comm, other):
            in_flight: InFlight = comm._core.in_flight
            receives = [comm.recv(torch.zeros(1), 1, tag=tag) for tag in range(3)]
            for work in receives:
                in_flight.remove(work)
            ours, theirs, third = receives
            in_flight.add(ours, OURS)
            in_flight.remove(ours)
            in_flight._queues = queues = Queues(in_flight._queues)
            if when == "before_drop":
                queues.before_drop = lambda: in_flight.add(ours, OURS)
                in_flight.add(theirs, OTHER)
            else:
                queues.after_look = lambda: in_flight.add(theirs, OTHER)
                in_flight.add(ours, OURS)
            assert set(in_flight) == {ours, theirs}
            assert set(queues) == {OURS, OTHER}, "those that are empty are dropped, and no others"
            in_flight.add(third, OURS)
            assert list(queues[OURS]) == [ours, third], "there is one of each timeout"
            for tag in range(3):
                await other.send(torch.zeros(1), 0, tag=tag)
            for work in receives:
                await work
            assert not in_flight

    run_on("asyncio", main)
