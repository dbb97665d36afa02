"""Many communicators of a family that carry large collectives: what shared memory they hold, also after a death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch
from processes import KILLED, PATIENCE, Rank, Run, death, in_turn

from aiocomms.communicator.communicator import Communicator
from benchmarks.many import memory

pytestmark = pytest.mark.real

RANKS, SPLITS = 3, 24
ELEMENTS = 2**18 + 3
"""The number of float32: 1 MiB, which takes all slots of a communicator, and a line more than ranks share evenly."""
KEPT = 36 * 128 * 1024
"""Bytes of the pool, of each rank."""
LINES = 32 * 1024
"""Bytes of each communicator that are not slots, of all ranks."""
BOUND = RANKS * KEPT + (2 * SPLITS + 1) * LINES
"""The most bytes that a test's splits may hold; without a pool they hold 72 MiB."""


@pytest.fixture
def transport() -> str:
    return "ucx"


async def memory_of_all(comm: Communicator) -> int:
    """The shared memory of all ranks of the communicator, at one moment at which none of them does anything."""
    await comm.barrier()
    total = torch.tensor(memory()[0])
    await comm.all_reduce(total)
    return int(total)


async def comes_to_rest(comm: Communicator) -> None:
    """Wait until what all ranks hold is within bounds."""
    ends = time.monotonic() + PATIENCE
    while (held := await memory_of_all(comm)) > BOUND:
        assert time.monotonic() < ends, f"{held} bytes of shared memory are held, and {BOUND} should be"
        await asyncio.sleep(0.02)


async def splits_of(comm: Communicator, ranks: Sequence[int]) -> list[Communicator]:
    found = [await comm.split(ranks if comm.rank in ranks else []) for _ in range(SPLITS)]
    return [split for split in found if split is not None]


async def add_up(comm: Communicator) -> None:
    """A large all_reduce, whose result is looked at."""
    tensor = torch.full((ELEMENTS,), comm.rank + 1.0)
    await comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((ELEMENTS,), comm.size * (comm.size + 1) / 2))


async def together(comms: list[Communicator]) -> None:
    """One in each of them, all at once; each rank calls them in an order of its own."""
    place = comms[0].rank
    await asyncio.gather(*(add_up(comm) for comm in comms[place:] + comms[:place]))


async def one_after_the_other(place: Rank) -> None:
    """Successive communicators use the pool's memory again."""
    async with place.open() as comm:
        splits = await splits_of(comm, range(RANKS))
        for _ in range(2):
            for split in splits:
                await add_up(split)
        held = await memory_of_all(comm)
        await asyncio.gather(*(split.aclose() for split in splits))
    assert RANKS * KEPT / 4 < held < BOUND


async def all_at_once(place: Rank) -> None:
    """Its pages are released after concurrent collectives."""
    async with place.open() as comm:
        splits = await splits_of(comm, range(RANKS))
        for _ in range(2):
            await together(splits)
            await comes_to_rest(comm)
        # Closed while others may still read what they hold, and followed by others.
        for _ in range(SPLITS):
            split = await comm.split(range(RANKS))
            assert split is not None
            await add_up(split)
            await split.aclose()
        await asyncio.gather(*(split.aclose() for split in splits))
        assert await memory_of_all(comm) < BOUND


def test_pool_memory_is_used_again_and_released(ranks: Run) -> None:
    ranks(RANKS, in_turn, one_after_the_other, all_at_once)


async def lose_while_pages_go_back(place: Rank, victim: int, delay: float) -> int:
    comm = await place.open()
    doomed = await splits_of(comm, range(RANKS))
    survivors = [rank for rank in range(RANKS) if rank != victim]
    apart = await splits_of(comm, survivors)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(0.11)  # pages stay for as long
            await together(doomed)

    await together(doomed)
    if place.rank == victim:
        place.die_later(delay)
        await go_on()
    error = await death(go_on())
    assert error.peer == victim
    await asyncio.gather(*(it.aclose() for it in (comm, *doomed)))
    await together(apart)
    for split in apart:
        await add_up(split)
    await comes_to_rest(apart[0])
    held = await memory_of_all(apart[0])
    await asyncio.gather(*(split.aclose() for split in apart))
    return held


@pytest.mark.fault(1, transport="ucx")
@pytest.mark.parametrize(("victim", "delay"), [(0, 0.1), (2, 0.11), (1, 0.3)])
def test_death_while_pool_pages_are_released_is_survived(ranks: Run, victim: int, delay: float) -> None:
    results = ranks(RANKS, lose_while_pages_go_back, victim, delay)
    assert results.pop(victim) is KILLED
    for held in results:
        assert held < BOUND
