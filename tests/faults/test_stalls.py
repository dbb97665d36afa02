"""A process is stopped, and goes on: the cases 12 and 13 of the catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import named, oracle
from processes import LARGE, Rank, Run, exchange, free_port, hear, numbers
from simulated import IN_BOTH, NET, PROCESSES

import aiocomms
from aiocomms.communicator import formation
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError
from aiocomms.lowlevel import clock

pytestmark = pytest.mark.real

Notice = Callable[[list[float]], None]
DEADLINE = 3.0  # A rank that is not stopped calls the collective of the others within these seconds.


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


async def introduced(place: Rank, comm: Communicator) -> None:
    """Have all ranks say who they are, so that others can stop them."""
    place.say_who()
    await comm.barrier()


async def reduced(comm: Communicator, turn: int, **more: Any) -> None:
    """Run one collective, and check its result."""
    total = await comm.all_reduce(numbers(LARGE, comm.rank, turn), **more)
    assert torch.equal(total, sum(numbers(LARGE, rank, turn) for rank in range(comm.size)))


async def stop_past_a_deadline(place: Rank) -> Any:
    """Stop rank 2 amid collectives: the others give up and go on without it. Its old messages reach no rank."""
    async with oracle(place, 2):
        comm = await place.open()
        await introduced(place, comm)
        if place.rank == 0:
            place.stop(2, after=0.05, simulated=6.0)
        error, took = await late(comm)
        if place.rank == 2:
            return await be_told(place, comm)
        named(error, comm, [2] if own(error) else [])
        new = await comm.reconfigure([0, 1])
        await exchange(new, 1000)
        place.tell(f"gone on {place.rank}")
        if place.rank == 0:
            await hear(place, "gone on", 1)
            place.go_on(2)
        await hear(place, "told", 2)
        await exchange(new, 1000)
        await new.aclose()
        return took


async def late(comm: Communicator) -> tuple[CommError, float]:
    """Return the error that ends collectives, and the seconds since the start of the one that it ends.

    A rank that was stopped may see a collective end at the moment when its deadline passes: then the next one fails.
    """
    turn, before = 0, clock.now()
    while True:
        began = clock.now()
        try:
            await reduced(comm, turn, timeout=DEADLINE)
        except CommTimeoutError as error:
            took = clock.now() - began
            if own(error) and clock.now() - before < DEADLINE:
                raise AssertionError(f"its deadline passed after {took} s: {error}") from None
            return error, took
        except (CommAbortedError, PeerDiedError) as error:
            return error, clock.now() - began
        turn, before = turn + 1, began


def own(error: CommError) -> bool:
    """Return whether this rank's own deadline passed, and not that of an earlier op of a rank that the error names."""
    return isinstance(error, CommTimeoutError) and error.peer is None


async def be_told(place: Rank, comm: Communicator) -> str:
    """Go on after a stop, and check that the others have excluded this rank."""
    with pytest.raises(CommAbortedError):
        comm.send(torch.ones(1), 0, 9)
    with pytest.raises(CommAbortedError, match="excluded") as caught:
        await comm.reconfigure()
    await comm.aclose()
    place.tell("told 2")
    return str(caught.value)


@IN_BOTH
@pytest.mark.fault(12)
def test_rank_stopped_past_a_deadline_is_excluded(ranks: Run, notice: Notice) -> None:
    *times, text = ranks(3, stop_past_a_deadline)
    notice([took - DEADLINE for took in times])
    assert "ranks [0, 1] go on without it" in text


async def stop_the_host_of_the_store(place: Rank, port: int) -> float:
    """Stop rank 0, by whose store the others would learn who is missing: the error does not wait for the store."""
    async with oracle(place, 0):
        place.launch(port)
        comm = await aiocomms.new_comm(place.transport)
        await introduced(place, comm)
        place.tell(f"met {place.rank}")
        await hear(place, "met", 0, 1, 2)
        if place.rank == 0:
            await hear(place, "over", 1, 2)  # Rank 0 is stopped nearly all of this time.
            await comm.aclose()
            return 0.0
        if place.rank == 1:
            place.stop(0)
            place.tell("stopped 1")
        await hear(place, "stopped", 1)
        error, took = await late(comm)
        named(error, comm, [0] if own(error) else [])
        place.tell(f"over {place.rank}")
        if place.rank == 1:
            await hear(place, "over", 2)
            place.go_on(0)
        await comm.aclose()
        formation._launched.clear()  # a launcher's store is kept for the next communicator
        del comm, error
        return took


@PROCESSES
@pytest.mark.fault(12)
def test_stopped_store_host_is_noticed_at_the_deadline(ranks: Run, notice: Notice) -> None:
    _, *times = ranks(3, stop_the_host_of_the_store, free_port())
    notice([took - DEADLINE for took in times])


async def stop_for_a_moment(place: Rank) -> None:
    """Stop rank 2 for less than the heartbeat's time and any deadline: no rank is taken for dead."""
    async with oracle(place):
        comm = await place.open(hints={"heartbeat": 20.0})
        await introduced(place, comm)
        back = asyncio.Event()
        if place.rank == 0:
            task = asyncio.create_task(stop_and_go(place, back))
        turn, done = 0, False
        while not done:
            await reduced(comm, turn)
            done = bool(await comm.broadcast(torch.tensor([back.is_set()]), 0))
            turn += 1
        if place.rank == 0:
            await task
        await exchange(comm, 1000)
        await comm.aclose()


async def stop_and_go(place: Rank, back: asyncio.Event) -> None:
    place.stop(2, simulated=1.0)
    await asyncio.sleep(1)
    place.go_on(2)
    back.set()


@pytest.mark.fault(13)
def test_rank_stopped_for_a_moment_goes_on(ranks: Run) -> None:
    ranks(3, stop_for_a_moment)


async def ask_who_is_stopped(place: Rank) -> None:
    """Stop rank 1 while a receive of rank 0 waits for it; then it goes on, and answers."""
    async with oracle(place):
        comm = await place.open(hints={"heartbeat": 20.0})
        await introduced(place, comm)
        if place.rank == 0:
            place.stop(1, simulated=5.0)
            try:
                error = await late_receive(comm)
            finally:
                place.go_on(1)
            assert "; it was withdrawn: rank 1 does not answer: dead, stopped or busy" in error
            while "is in recv(src=0, tag=3): they waited in a circle: rank 0 -> rank 1 -> rank 0" not in error:
                error = await late_receive(comm)
            await comm.send(torch.ones(1), 1, 3)
        else:
            await comm.recv(torch.zeros(1), 0, 3)
        await exchange(comm, 1000)
        await comm.aclose()


async def late_receive(comm: Communicator) -> str:
    with pytest.raises(CommTimeoutError) as caught:
        await comm.recv(torch.zeros(1), 1, 9, timeout=0.6)  # Ranks may be asked again by then.
    return caught.value.message


@pytest.mark.fault(13)
def test_stopped_rank_is_said_not_to_answer(ranks: Run) -> None:
    ranks(2, ask_who_is_stopped)
