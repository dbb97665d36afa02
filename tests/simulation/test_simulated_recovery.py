"""Recovery in a simulated world: who is left goes on, whatever else a communicator does at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch
from aiocomms_net import NetTransport
from repeating import repeated

import aiocomms
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError
from aiocomms.testing.simulation import Faults, here

pytestmark = pytest.mark.deterministic

RANKS = 3
PATIENCE = 60.0
"""Seconds for a recovery; a partition or a pause takes at most 20."""


async def summed(comm: aiocomms.Communicator) -> None:
    """Have an ``all_reduce`` give the sum over the ranks there are."""
    x = torch.full((4,), float(comm.rank))
    await comm.all_reduce(x)
    assert x.tolist() == [sum(range(comm.size))] * 4


async def recovering(times: int, use: Callable[[aiocomms.Communicator], Awaitable[None]]) -> Any:
    """Use a communicator some times, and what takes its place when it is lost.

    :returns: how many ranks are left; or that the others go on without this one.
    """
    comm = await aiocomms.new_comm(timeout=5)
    try:
        for _ in range(times):
            lost = False
            try:
                await use(comm)
            except* (CommError, anyio.BrokenResourceError):
                lost = True
            if lost:
                comm = await comm.reconfigure(timeout=PATIENCE)
        return comm.size
    except CommAbortedError:
        return "excluded"
    finally:
        await comm.aclose()


async def go_on() -> Any:
    """Sum up for some seconds, with whoever is left."""

    async def sum_up(comm: aiocomms.Communicator) -> None:
        await summed(comm)
        await asyncio.sleep(0.1)

    return await recovering(20, sum_up)


@pytest.mark.parametrize("seed", range(6))
def test_survivors_of_a_death_go_on(seed):
    history = repeated(go_on, RANKS, seed=seed, faults=Faults(deaths=1, within=1.5))
    # One that has ended by then is not needed, and one may be left that all others have left.
    assert sum(result is not None for result in history.results) >= RANKS - 1
    assert "excluded" not in history.results
    assert RANKS - 1 in history.results


@pytest.mark.parametrize("seed", range(6))
def test_cuts_pauses_and_partitions_leave_one_group_of_ranks(seed):
    history = repeated(go_on, RANKS, seed=seed, faults=Faults(cuts=1, pauses=1, partitions=1, within=1.5))
    assert any(result != "excluded" for result in history.results)


async def say_with_whom() -> Any:
    """Go on with whoever is left; return the ranks that this one was last with."""
    comm, last = await aiocomms.new_comm(timeout=5), []
    try:
        for _ in range(40):
            try:
                last = await comm.all_gather_object(here().rank)
                await asyncio.sleep(0.1)
            except CommError:
                comm = await comm.reconfigure(timeout=PATIENCE)
        return last
    except CommAbortedError:
        return []
    finally:
        await comm.aclose()


@pytest.mark.parametrize("seed", [51, 7, 8, 9])
def test_no_two_parts_of_the_ranks_go_on_without_each_other(seed):
    """The first seed shows a rank that could not form what the others had formed, and then went on alone."""
    faults = Faults(pauses=1, partitions=1, cuts=2, slow=1, within=1.5)
    parts = [set(part) for part in repeated(say_with_whom, RANKS, seed=seed, faults=faults).results if part]
    assert parts
    assert all(one & other for one in parts for other in parts)


async def take_in() -> Any:
    """Go on until a process was taken in that was started anew."""
    comm = await aiocomms.new_comm(timeout=5, join=here().restarts > 0)
    try:
        while True:
            try:
                await summed(comm)
                restarts = await comm.all_gather_object(here().restarts)
                if any(restarts):
                    return restarts
                await asyncio.sleep(0.05)
            except CommError:
                comm = await comm.reconfigure(size=RANKS, timeout=PATIENCE)
    finally:
        await comm.aclose()


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_was_started_anew_is_taken_in(seed):
    history = repeated(take_in, RANKS, seed=seed, faults=Faults(deaths=1, restarts=True, within=1.0))
    assert [result for result in history.results if result is not None] == [history.results[0]] * RANKS
    assert sum(history.results[0]) == 1


async def everything(comm: aiocomms.Communicator) -> None:
    """Use a communicator in each way that it has."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    pair = await comm.split([] if 0 < rank < size - 1 else sorted({0, size - 1}), "pair")
    if pair is not None:
        async with pair:
            await summed(pair)
    with comm.lane("one") as one, comm.lane("two") as two:
        ones, twos = torch.ones(3), torch.full((3,), 2.0)
        for work in (
            (one.all_reduce(ones), two.all_reduce(twos)) if rank else (two.all_reduce(twos), one.all_reduce(ones))
        ):
            await work
        assert (ones[0], twos[0]) == (size, 2 * size)
    async with await comm.new_window(torch.zeros(4)) as window:
        window.put(torch.full((2,), float(rank)), right)
        await window.signal(right)
        await window.wait_signal(left)
        assert window.tensor.tolist() == [left, left, 0, 0]
    assert await comm.all_gather_object({"rank": rank}) == [{"rank": it} for it in range(size)]
    await stream(comm, right, left)
    got = torch.zeros(1)
    await asyncio.gather(comm.send(torch.full((1,), float(rank)), right, tag=7), comm.recv(got, left, tag=7))
    assert got[0] == left


async def stream(comm: aiocomms.Communicator, right: int, left: int) -> None:
    """Send numbers to the right and receive them from the left."""
    if comm.size == 1:
        return
    async with contextlib.AsyncExitStack() as stack:
        opened: list[Any] = await asyncio.gather(
            comm.open_stream(right, 2, "on" if comm.rank < right else "back"),
            comm.open_stream(left, 2, "on" if left < comm.rank else "back"),
        )
        out, into = [await stack.enter_async_context(one) for one in opened]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say, out)
            for number in range(5):
                assert (await into.receive())[0] == number


async def say(out: Any) -> None:
    """Send some numbers."""
    for number in range(5):
        await out.send(torch.full((2,), float(number)))


async def use_all() -> Any:
    """Use a communicator in each way."""
    return await recovering(3, everything)


def test_each_way_to_use_a_communicator_runs_in_a_simulation():
    for seed in range(4):
        assert repeated(use_all, RANKS, seed=seed).results == [RANKS] * RANKS


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_fault_ends_is_done_again_by_who_is_left(seed):
    history = repeated(use_all, RANKS, seed=seed, faults=Faults(deaths=1, cuts=1, pauses=1, partitions=1))
    assert any(isinstance(result, int) for result in history.results)


async def leave_at_once() -> Any:
    """Leave ``async with`` by an error, of which the others hear."""
    try:
        async with aiocomms.new_comm(timeout=5) as comm:
            await summed(comm)
            if comm.rank == 1:
                raise KeyError("enough")
            await comm.recv(torch.zeros(1), 1)
    except (KeyError, CommError) as error:
        return type(error).__name__, getattr(error, "peer", None)
    raise AssertionError


def test_the_others_hear_of_the_error_by_which_a_rank_leaves_async_with():
    for seed in range(8):
        results = repeated(leave_at_once, RANKS, seed=seed).results
        assert results[1] == ("KeyError", None)
        assert {results[0][0], results[2][0]} == {CommAbortedError.__name__}


async def wait_for_the_dead() -> Any:
    """Wait for a rank that dies."""
    async with aiocomms.new_comm() as comm:
        if comm.rank == 1:
            await asyncio.sleep(0.5)
            here().world.kill(1)
            await asyncio.sleep(0)
        with pytest.raises(PeerDiedError):
            await comm.recv(torch.zeros(1), 1)
        return "noticed"


def test_a_death_is_noticed_without_a_deadline():
    for seed in range(8):
        assert repeated(wait_for_the_dead, 2, seed=seed).results == ["noticed", None]


RESTART = 0.2
"""Seconds after which another process takes the place of one that has died."""


async def sum_up_while_ranks_die() -> float:
    """Sum up with all ranks; processes of ranks 1 and 2 die shortly after each other, newcomers among them.

    :returns: the longest time between two sums.
    """
    me, loop, times, longest = here(), asyncio.get_running_loop(), 60, 0.0
    comm = await aiocomms.new_comm(timeout=20, join=me.restarts > 0)
    if me.rank == 0:
        delay = 0.5
        for _ in range(4):
            loop.call_later(delay, me.world.kill, random.choice([1, 2]), RESTART)
            delay += random.choice([0.01, 0.1, RESTART, 0.25, 0.5]) * random.random()
    before = loop.time()
    while True:
        total = torch.tensor([1.0, float(me.rank == 0 and times <= 0)])
        try:
            await comm.all_reduce(total)
        except CommError:
            comm = await comm.reconfigure(size=RANKS, timeout=PATIENCE)
            continue
        assert total[0] == RANKS
        longest, before, times = max(longest, loop.time() - before), loop.time(), times - 1
        if total[1]:
            await comm.aclose()
            return longest
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("connected", [True, False], ids=["connections", "no connections"])
def test_ranks_that_die_while_others_take_their_places_hold_nobody_up(connected, monkeypatch):
    """A death is told by the old communicator's connections, or by the claim of who comes in the dead one's place."""
    if not connected:
        monkeypatch.setattr(NetTransport, "side_channel", lambda self: None)
    for seed in range(5):
        longest = repeated(sum_up_while_ranks_die, RANKS, seed=seed).results[0]
        assert RESTART < longest < 1.5
