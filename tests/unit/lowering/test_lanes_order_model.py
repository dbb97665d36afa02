"""A model of lanes that share one sequence of slots, checked in every state that 3 ranks and 3 lanes can come to.

The protocol is that of a transport whose ranks share memory: a rank tells the first rank that it has called a lane's
next collective when it is that one's turn in its lane; when the first rank has heard that of all, it appends the
collective to an order; each rank reads the order, and runs what stands in it one after the other. A collective ends on
a rank when all ranks have begun it. What is told is heard, and what is written is read, at any later time: so a
collective is appended at any time after all have called it, and begun at any time after it was appended. Ranks call
lanes from a task each, or one after the other in one task; awaiters are cancelled, and their tasks go on; a rank dies,
and the others hear of it one by one. Where nothing can happen any more all works must have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import lane_models
import pytest
from lane_models import FIRST, LOST, RANKS, TASKS, alive, called, every_order, lost, placed

pytestmark = [pytest.mark.deterministic, pytest.mark.slow]

PROGRAM = (2, 1, 1)
"""The number of collectives of each lane."""
LANES = range(len(PROGRAM))


class Place(NamedTuple):
    """The progress of a rank in a lane."""

    called: int = 0
    """The number of collectives that the rank has called."""
    ended: int = 0
    patient: bool = True
    """True if the task waits for its call, and was not cancelled."""


Call = tuple[int, int]
"""A lane, and the number of a collective in it."""


class State(NamedTuple):
    places: tuple[tuple[Place, ...], ...]
    """The places, by rank and lane."""
    order: tuple[Call, ...] = ()
    begun: tuple[int, ...] = (0,) * len(RANKS)
    """The number of entries of the order that each rank has begun."""
    done: tuple[int, ...] = (0,) * len(RANKS)
    dead: int | None = None


class Model(lane_models.Model):
    """The protocol.

    :param callers: the number of ranks that must have called a collective before it is appended; correct is all.
    """

    counts = PROGRAM
    start = State(tuple(tuple(Place() for _ in LANES) for _ in RANKS))

    def __init__(self, orders: tuple[tuple[int, ...], ...], callers: int = len(RANKS)) -> None:
        super().__init__(orders)
        self.callers = callers

    def steps(self, state: State) -> Iterator[State]:
        """Yield all states that follow sooner or later, without a fault."""
        for rank in alive(state):
            for lane in LANES:
                if self.may_call(state, rank, lane):
                    yield called(state, rank, lane)
            if rank == 0:
                yield from self.append(state)
            yield from self.run(state, rank)
            if state.dead is not None:
                yield lost(state, rank)

    def append(self, state: State) -> Iterator[State]:
        """Append on the first rank the collectives that enough ranks have called, in the order of each lane."""
        for lane in LANES:
            number = sum(it == lane for it, _ in state.order)
            rows = [row for row in state.places if row != LOST]
            if sum(row[lane].called > number and row[lane].ended == number for row in rows) >= self.callers:
                yield state._replace(order=(*state.order, (lane, number)))

    def run(self, state: State, rank: int) -> Iterator[State]:
        """Begin the next collective of the order, or end the one that all ranks have begun."""
        at = state.done[rank]
        if at == len(state.order):
            return
        lane, number = state.order[at]
        place = state.places[rank][lane]
        if state.begun[rank] == at:
            if place.called > number:
                assert place.ended == number, f"rank {rank} runs another collective of its lane: {state}"
                yield state._replace(begun=more(state.begun, rank))
            else:
                assert self.callers < len(RANKS), f"rank {rank} has not called what it is to run: {state}"
        elif all(begun > at for begun in state.begun):
            after = placed(state, rank, lane, place._replace(ended=number + 1, patient=True))
            yield after._replace(done=more(state.done, rank))


def more(counts: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the counts with one more for a rank."""
    return (*counts[:rank], counts[rank] + 1, *counts[rank + 1 :])


@every_order
def test_lanes_order_model_reaches_no_wrong_or_stuck_state(order: tuple[int, ...]) -> None:
    """The model holds in whatever order rank 2 calls the lanes, if it awaits each before it calls the next."""
    states = Model((*TASKS, order)).explore()
    print(f"{states} states")
    assert states > 100_000, "the model is not what it was"


@pytest.mark.parametrize("callers", [1, 2])
def test_checker_finds_the_deadlock_of_an_order_by_some_callers(callers: int) -> None:
    """A rank that awaits a later lane of the order before it calls the earlier ones waits for ever."""
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        Model((*TASKS, FIRST), callers).explore()
