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

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

RANKS = range(3)
PROGRAM = (2, 1, 1)
"""How many collectives each lane has."""
LANES = range(len(PROGRAM))


class Place(NamedTuple):
    """Where a rank is in a lane."""

    called: int = 0
    """How many collectives it has called."""
    ended: int = 0
    patient: bool = True
    """Whether the task waits for what it has called, and was not cancelled."""


LOST: tuple[Place, ...] = ()
"""The places of a rank that knows that another one has died."""
Call = tuple[int, int]
"""A lane, and the number of a collective in it."""


class State(NamedTuple):
    places: tuple[tuple[Place, ...], ...]
    """By rank and lane."""
    order: tuple[Call, ...] = ()
    begun: tuple[int, ...] = (0,) * len(RANKS)
    """How many entries of the order each rank has begun."""
    done: tuple[int, ...] = (0,) * len(RANKS)
    dead: int | None = None


class Model:
    """The protocol.

    :param orders: of each rank the order in which its one task calls the lanes; empty: it has a task for each.
    :param callers: how many ranks must have called a collective before it is appended; right are all.
    """

    def __init__(self, orders: tuple[tuple[int, ...], ...], callers: int = len(RANKS)) -> None:
        self.orders = orders
        self.callers = callers

    def explore(self) -> int:
        """Go to every state, and count them.

        :raises AssertionError: ranks run different collectives at the same time, or works wait for ever.
        """
        start = State(tuple(tuple(Place() for _ in LANES) for _ in RANKS))
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            steps = {*self.steps(state)}
            assert steps or ended(state), f"nothing can happen any more: {state}"
            following = (steps | {*self.faults(state)}) - seen
            left += following
            seen |= following
        return len(seen)

    def steps(self, state: State) -> Iterator[State]:
        """All that happens next by itself, sooner or later."""
        for rank in alive(state):
            for lane, place in enumerate(state.places[rank]):
                if self.may_call(state, rank, lane):
                    yield placed(state, rank, lane, place._replace(called=place.called + 1, patient=True))
            if rank == 0:
                yield from self.append(state)
            yield from self.run(state, rank)
            if state.dead is not None:  # it hears of that, and all its works end
                yield state._replace(places=(*state.places[:rank], LOST, *state.places[rank + 1 :]))

    def faults(self, state: State) -> Iterator[State]:
        """What may happen, and cannot be waited for: an awaiter is cancelled, a rank dies."""
        for rank in alive(state):
            for lane, place in enumerate(state.places[rank]):
                matters = self.orders[rank] or place.called < PROGRAM[lane]  # else to nobody
                if place.ended < place.called and matters:
                    yield placed(state, rank, lane, place._replace(patient=False))
            if state.dead is None:
                yield state._replace(dead=rank)

    def may_call(self, state: State, rank: int, lane: int) -> bool:
        """Whether the task that calls a lane's collectives has come to the next one."""
        order, places = self.orders[rank], state.places[rank]
        before = order[: order.index(lane)] if order else ()
        idle = all(places[i].ended == places[i].called or not places[i].patient for i in (*before, lane))
        return idle and places[lane].called < PROGRAM[lane] and all(places[i].called == PROGRAM[i] for i in before)

    def append(self, state: State) -> Iterator[State]:
        """The first rank appends what enough ranks have called, when it is its turn in its lane."""
        for lane in LANES:
            number = sum(it == lane for it, _ in state.order)
            rows = [row for row in state.places if row != LOST]
            if sum(row[lane].called > number and row[lane].ended == number for row in rows) >= self.callers:
                yield state._replace(order=(*state.order, (lane, number)))

    def run(self, state: State, rank: int) -> Iterator[State]:
        """Begin what stands next in the order, or end what all have begun."""
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
    """The counts with one more of a rank."""
    return (*counts[:rank], counts[rank] + 1, *counts[rank + 1 :])


def alive(state: State) -> list[int]:
    """The ranks that live, and have not heard of a death."""
    return [rank for rank in RANKS if rank != state.dead and state.places[rank] != LOST]


def placed(state: State, rank: int, lane: int, place: Place) -> State:
    """The state with a rank at another place of a lane."""
    row = state.places[rank]
    row = (*row[:lane], place, *row[lane + 1 :])
    return state._replace(places=(*state.places[:rank], row, *state.places[rank + 1 :]))


def ended(state: State) -> bool:
    """Whether no work waits: all were called and have ended, or every rank that is left knows that one has died."""
    if state.dead is not None:
        return all(row == LOST for rank, row in enumerate(state.places) if rank != state.dead)
    return all(row[lane].ended == PROGRAM[lane] for row in state.places for lane in LANES)


TASKS: tuple[tuple[int, ...], ...] = ((), ())
"""Ranks 0 and 1 have a task for each lane."""


@pytest.mark.parametrize(
    "order",
    [
        (2, 1, 0),
        *(pytest.param(order, marks=pytest.mark.long) for order in itertools.permutations(LANES) if order != (2, 1, 0)),
    ],
)
def test_every_state(order: tuple[int, ...]) -> None:
    """Whatever rank 2 calls first, and awaits before it calls the next."""
    states = Model((*TASKS, order)).explore()
    print(f"{states} states")
    assert states > 100_000, "the model is not what it was"


@pytest.mark.parametrize("callers", [1, 2])
def test_the_checker_finds_that_an_order_of_what_some_have_called_deadlocks(callers: int) -> None:
    """With a rank that awaits the lane which is second in it before it calls the first."""
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        Model((*TASKS, (2, 1, 0)), callers).explore()
