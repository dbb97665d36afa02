"""The common parts of models of lanes: a checker that visits every state, tasks that call lanes, and faults."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

RANKS = range(3)
LOST: tuple[Any, ...] = ()
"""The places of a rank that knows that another one has died."""
TASKS: tuple[tuple[int, ...], ...] = ((), ())
"""Ranks 0 and 1 have a task for each lane."""
FIRST = (2, 1, 0)
every_order = pytest.mark.parametrize(
    "order",
    [FIRST, *(pytest.param(o, marks=pytest.mark.search) for o in itertools.permutations(range(3)) if o != FIRST)],
)
"""Whatever rank 2 calls first, and awaits before it calls the next."""


class Model(ABC):
    """A protocol. A state is a tuple with ``places``, by rank and lane, and ``dead``; a place has ``called``, how many
    collectives a rank has called in a lane, ``ended``, how many of these have, and ``patient``, whether its task waits.

    :param orders: of each rank the order in which its one task calls the lanes; empty: it has a task for each.
    """

    counts: tuple[int, ...]
    """The number of collectives of each lane."""
    start: Any
    """The state in which nothing was called."""

    def __init__(self, orders: tuple[tuple[int, ...], ...]) -> None:
        self.orders = orders

    @abstractmethod
    def steps(self, state: Any) -> Iterator[Any]:
        """All that happens next by itself, sooner or later."""

    def explore(self) -> int:
        """Go to every state, and count them.

        :raises AssertionError: a step found that the protocol is wrong, or works wait for ever.
        """
        seen, left = {self.start}, [self.start]
        while left:
            state = left.pop()
            steps = {*self.steps(state)} - {state}
            assert steps or self.ended(state), f"nothing can happen any more: {state}"
            following = (steps | {*self.faults(state)}) - seen
            left += following
            seen |= following
        return len(seen)

    def faults(self, state: Any) -> Iterator[Any]:
        """Yield the faults that may happen and cannot be waited for: an awaiter is cancelled, a rank dies."""
        for rank in alive(state):
            for lane, place in enumerate(state.places[rank]):
                matters = self.orders[rank] or place.called < self.counts[lane]  # no task would see the fault otherwise
                if place.ended < place.called and matters:
                    yield placed(state, rank, lane, place._replace(patient=False))
            if state.dead is None:
                yield state._replace(dead=rank)

    def may_call(self, state: Any, rank: int, lane: int) -> bool:
        """Return whether the task that calls a lane's collectives has come to the next one."""
        order, places = self.orders[rank], state.places[rank]
        before = order[: order.index(lane)] if order else ()
        idle = all(places[i].ended == places[i].called or not places[i].patient for i in (*before, lane))
        return (
            idle and places[lane].called < self.counts[lane] and all(places[i].called == self.counts[i] for i in before)
        )

    def ended(self, state: Any) -> bool:
        """Return whether no work waits: all have ended, or every rank that is left knows that one has died."""
        if state.dead is not None:
            return all(row == LOST for rank, row in enumerate(state.places) if rank != state.dead)
        return all(place.ended == count for row in state.places for place, count in zip(row, self.counts, strict=True))


def called(state: Any, rank: int, lane: int) -> Any:
    """The state in which a rank has called a lane's next collective."""
    place = state.places[rank][lane]
    return placed(state, rank, lane, place._replace(called=place.called + 1, patient=True))


def lost(state: Any, rank: int) -> Any:
    """The state in which a rank hears of a death, and all its works end."""
    return state._replace(places=(*state.places[:rank], LOST, *state.places[rank + 1 :]))


def alive(state: Any) -> list[int]:
    """The ranks that live, and have not heard of a death."""
    return [rank for rank in RANKS if rank != state.dead and state.places[rank] != LOST]


def placed(state: Any, rank: int, lane: int, place: Any) -> Any:
    """The state with a rank at another place of a lane."""
    row = state.places[rank]
    row = (*row[:lane], place, *row[lane + 1 :])
    return state._replace(places=(*state.places[:rank], row, *state.places[rank + 1 :]))
