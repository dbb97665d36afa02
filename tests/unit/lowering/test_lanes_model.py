"""A model of lanes, checked in every state that 3 ranks and 3 lanes can come to.

The messages of each step are those of the real schedules. Everything else is the protocol as its docstring says it: a
message waits for a receive of its lane and kind, oldest first; a collective begins when the one before it in its lane
has ended on this rank; nothing else is ordered. Ranks call lanes from a task each, or one after the other in one task;
awaiters are cancelled, and their tasks go on before the collective has ended; a rank dies, and the others hear of it
one by one. In no state may a receive take another collective's message, and where nothing can happen any more all works
must have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import lane_models
import pytest
import torch
from lane_models import FIRST, RANKS, TASKS, alive, called, every_order, lost, placed

from aiocomms import ops
from aiocomms.lowering.schedules import SCHEDULES, Context

pytestmark = [pytest.mark.deterministic, pytest.mark.slow]

BARRIER, BROADCAST = ops.Barrier(), ops.Broadcast(torch.zeros(1), 1)
PROGRAM = ((BROADCAST, BROADCAST), (BARRIER,), (BROADCAST,))
"""The collectives of each lane."""
LANES = range(len(PROGRAM))


class Group(NamedTuple):
    rank: int
    size: int = len(RANKS)
    device: torch.device = torch.device("cpu")


class Message(NamedTuple):
    """A message: receives match its lane and kind, and only the checker sees the rest."""

    src: int
    dst: int
    lane: int
    kind: str
    number: int
    step: int


class Place(NamedTuple):
    """The progress of a rank in a lane."""

    called: int = 0
    """The number of collectives that the rank has called."""
    ended: int = 0
    step: int = -1
    """The step of the collective under way; -1: none is."""
    due: frozenset[int] = frozenset()
    """The ranks whose messages this step still needs."""
    patient: bool = True
    """True if the task waits for its call, and was not cancelled."""


class State(NamedTuple):
    places: tuple[tuple[Place, ...], ...]
    """The places, by rank and lane."""
    messages: tuple[Message, ...]
    """The messages on their way or waiting, in the order sent."""
    dead: int | None = None


def steps_of(op: ops.Op, rank: int) -> list[tuple[list[int], list[int]]]:
    """Return for each step of the real schedule the ranks that it sends to, and those that it receives from."""
    steps = SCHEDULES[type(op)](Context(Group(rank), 0), op)  # type: ignore[arg-type]
    return [
        ([p.dst for p in step if isinstance(p, ops.Send)], [p.src for p in step if isinstance(p, ops.Recv)])
        for step in steps
    ]


STEPS = {(op.name, rank): steps_of(op, rank) for op in (BARRIER, BROADCAST) for rank in RANKS}


class Model(lane_models.Model):
    """The protocol.

    :param keyed: whether messages match by lane.
    :param published: whether a lane begins only when those before it have ended everywhere, as in an order that one
        rank publishes.
    """

    counts = tuple(map(len, PROGRAM))
    start = State(tuple(tuple(Place() for _ in LANES) for _ in RANKS), ())

    def __init__(self, orders: tuple[tuple[int, ...], ...], keyed: bool = True, published: bool = False) -> None:
        super().__init__(orders)
        self.keyed = keyed
        self.published = published

    def steps(self, state: State) -> Iterator[State]:
        """Yield all states that follow sooner or later, without a fault."""
        for rank in alive(state):
            for lane, place in enumerate(state.places[rank]):
                if self.may_call(state, rank, lane):
                    yield self.begin(called(state, rank, lane), rank, lane)
                if place.ended < place.called:
                    yield self.begin(state, rank, lane)
                for src in place.due:
                    yield self.receive(state, rank, lane, src)
            if state.dead is not None:
                yield lost(state, rank)

    def ended(self, state: State) -> bool:
        """Return whether no work waits and, if no rank has died, no message is left."""
        return super().ended(state) and (state.dead is not None or not state.messages)

    def begin(self, state: State, rank: int, lane: int) -> State:
        """Take the steps of a lane that need no message: of the collective under way, or of the next called one."""
        place = state.places[rank][lane]
        if place.due or place.called == place.ended or not self.may_begin(state, lane):
            return state
        kind = PROGRAM[lane][place.ended].name
        steps = STEPS[kind, rank]
        if place.step + 1 == len(steps):
            place = place._replace(ended=place.ended + 1, step=-1, patient=True)
            return self.begin(placed(state, rank, lane, place), rank, lane)
        dsts, srcs = steps[place.step + 1]
        place = place._replace(step=place.step + 1, due=frozenset(srcs))
        sent = [Message(rank, dst, lane, kind, place.ended, place.step) for dst in dsts]
        messages = tuple(sorted((*state.messages, *sent), key=self.matched))  # The sort is stable: matches keep order.
        return self.begin(placed(state._replace(messages=messages), rank, lane, place), rank, lane)

    def may_begin(self, state: State, lane: int) -> bool:
        """Return whether nothing holds up a lane."""
        return not self.published or all(
            row != lane_models.LOST and row[i].ended == len(PROGRAM[i]) for row in state.places for i in range(lane)
        )

    def matched(self, message: Message) -> tuple[object, ...]:
        """Return the part of a message that a receive matches."""
        return message[:4] if self.keyed else (message.src, message.dst, message.kind)

    def receive(self, state: State, rank: int, lane: int, src: int) -> State:
        """Take the oldest message from a rank that matches, if there is one."""
        place = state.places[rank][lane]
        wanted = Message(src, rank, lane, PROGRAM[lane][place.ended].name, place.ended, place.step)
        for i, message in enumerate(state.messages):
            if self.matched(message) == self.matched(wanted):
                assert message == wanted, f"the wrong message: {message}, wanted {wanted}"
                rest = state.messages[:i] + state.messages[i + 1 :]
                place = place._replace(due=place.due - {src})
                return self.begin(placed(state._replace(messages=rest), rank, lane, place), rank, lane)
        return state


@every_order
def test_lanes_model_reaches_no_wrong_or_stuck_state(order: tuple[int, ...]) -> None:
    """The model holds in whatever order rank 2 calls the lanes, if it awaits each before it calls the next."""
    states = Model((*TASKS, order)).explore()
    print(f"{states} states")
    assert states > 100_000, "the model is not what it was"


def test_checker_finds_mixed_messages_without_lane_keys() -> None:
    with pytest.raises(AssertionError, match="the wrong message"):
        Model((*TASKS, FIRST), keyed=False).explore()


def test_checker_finds_the_deadlock_of_a_published_order() -> None:
    """A rank that awaits a later lane of the order before it calls the earlier ones waits for ever."""
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        Model((*TASKS, FIRST), published=True).explore()
