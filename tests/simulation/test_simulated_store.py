"""The store of a simulated world dies: the ranks serve another one, or say what they lack."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from repeating import repeated
from test_simulated_recovery import PATIENCE, RANKS, go_on, summed

import aiocomms
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import CommAbortedError, CommError, StoreLostError
from aiocomms.testing.simulation import Faults, here

pytestmark = pytest.mark.deterministic


async def lose_store_then_rank() -> Any:
    """Lose the store, and then one rank after the other, as long as most are left."""
    comm = await aiocomms.new_comm(timeout=5)
    sizes = []
    try:
        for doomed in (0, 1):
            await comm.barrier()
            if here().rank == doomed:
                await asyncio.sleep(0.1)  # The others are past the barrier.
                here().world.lose_store()
                here().world.kill(doomed)
                await asyncio.sleep(0)
            with pytest.raises(CommError):
                await comm.barrier()
            comm = await comm.reconfigure(timeout=PATIENCE)
            await summed(comm)
            sizes.append(comm.size)
        return sizes
    finally:
        await comm.aclose()


def test_survivors_serve_a_store_which_dies_with_its_rank_and_then_another_one():
    for seed in range(6):
        history = repeated(lose_store_then_rank, 4, seed=seed)
        assert history.results == [None, None, [3, 2], [3, 2]]
        # The store of rank 1 is the second communicator's, and dies with it.
        assert sum("serves a store" in line for line in history.trace) == 2


async def outlive(size: int | None = None, ranks: list[int] | None = None) -> Any:
    """Outlive rank 0, with which the store is lost."""
    comm = await aiocomms.new_comm(timeout=5)
    try:
        await comm.barrier()
        if comm.rank == 0:
            await asyncio.sleep(0.1)  # The others are past the barrier.
            here().world.lose_store()
            here().world.kill(0)
            await asyncio.sleep(0)
        with pytest.raises(CommError):
            await comm.barrier()
        comm = await comm.reconfigure(ranks, size=size, timeout=PATIENCE)
        return comm.size
    except StoreLostError as error:
        return error.message
    finally:
        await comm.aclose()


def test_one_of_two_ranks_does_not_go_on_without_a_store_unless_it_is_named():
    (_, alone) = repeated(outlive, 2, seed=1).results
    assert "whether ranks [0], on other hosts, are dead or cut off cannot be told" in alone
    assert repeated(lambda: outlive(ranks=[1]), 2, seed=1).results == [None, 1]


def test_no_newcomer_is_waited_for_without_a_store():
    results = repeated(lambda: outlive(size=3), 3, seed=1).results
    assert "no newcomer finds the others" in results[1]
    assert results[1] == results[2]


async def go_on_or_say_why(goes: Callable[[], Awaitable[Any]] = go_on) -> Any:
    """Go on with whoever is left; return the reason where that is refused."""
    try:
        return await goes()
    except (StoreLostError, CommAbortedError) as error:
        return type(error).__name__


@pytest.mark.parametrize("seed", range(6))
def test_the_store_dies_amid_other_faults(seed):
    faults = Faults(stores=1, deaths=1, cuts=1, pauses=1, partitions=1, within=1.5)
    history = repeated(go_on_or_say_why, RANKS + 1, seed=seed, faults=faults)
    # More than half of the ranks go on, or none does.
    sizes = [result for result in history.results if isinstance(result, int)]
    assert sizes or "StoreLostError" in history.results


async def form() -> int:
    async with aiocomms.new_comm() as comm:
        return comm.size


async def split() -> Any:
    """Split a communicator, which outlives the split."""
    async with aiocomms.new_comm() as comm:
        result = await go_on_or_say_why(lambda: formed_by_split(comm))
        await summed(comm)
        return result


async def formed_by_split(comm: aiocomms.Communicator) -> int:
    child = await comm.split([1, 0, 2], "formed")
    assert child is not None
    await child.aclose()
    return child.size


@pytest.mark.parametrize("call", [form, split])
@pytest.mark.parametrize("fails", [True, False], ids=["rank 2 fails", "rank 2 is slow"])
def test_ranks_that_connect_go_on_without_the_store_for_two_seconds(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Awaitable[Any]], fails: bool
):
    """A rank that has failed cannot report that in the store, and does not connect. A slow rank still connects."""
    exchange = StoreRendezvous.exchange

    async def lost_afterwards(rendezvous: StoreRendezvous, key: str, value: bytes) -> list[bytes]:
        values = await exchange(rendezvous, key, value)
        if rendezvous.rank == 2 and rendezvous.name == ("world" if call is form else "formed"):
            await asyncio.sleep(0.1)  # The others have the values, too.
            here().world.lose_store()
            if fails:
                raise StoreLostError("the store is lost")
            await asyncio.sleep(1)
        return values

    monkeypatch.setattr(StoreRendezvous, "exchange", lost_afterwards)
    history = repeated(lambda: go_on_or_say_why(call), 3, seed=1)
    assert history.results == (["StoreLostError"] * 3 if fails else [3, 3, 3])
    assert history.seconds < 3


def test_a_split_ends_on_all_ranks_if_one_rank_alone_loses_the_store(monkeypatch: pytest.MonkeyPatch):
    """The others have the store, where the rank cannot report anything. The communicator tells them."""
    exchange = StoreRendezvous.exchange

    async def lost_for_one(rendezvous: StoreRendezvous, key: str, value: bytes) -> list[bytes]:
        if rendezvous.rank == 2 and rendezvous.name == "formed":
            raise StoreLostError("the store is lost")
        return await exchange(rendezvous, key, value)

    monkeypatch.setattr(StoreRendezvous, "exchange", lost_for_one)
    history = repeated(lambda: go_on_or_say_why(split), 3, seed=1)
    assert history.results == ["StoreLostError"] * 3
    assert history.seconds < 1
