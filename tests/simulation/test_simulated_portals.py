"""Portals in a simulated world: threads of a process that block for what others say, while its loop goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from repeating import repeated

import aiocomms
import aiocomms.blocking
from aiocomms.errors import CommAbortedError, CommClosedError, CommError, PeerDiedError, SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import Faults, here

pytestmark = pytest.mark.deterministic


def use(portal: Any, name: str) -> list[float]:
    """Use a portal in one lane, on a thread that blocks."""
    sums = []
    rank, size = portal.rank, portal.size
    with portal.lane(name) as lane:
        for number in range(5):
            x = torch.full((2,), float(rank + number))
            lane.all_reduce(x).wait()
            sums.append(x[0].item())
        got = torch.zeros(1)
        sending = lane.send(torch.full((1,), float(rank)), (rank + 1) % size)
        lane.recv(got, (rank - 1) % size).wait()
        sending.wait()
        assert got[0] == (rank - 1) % size
        assert lane.all_gather_object(name).wait() == [name] * size
    return sums


async def use_threads() -> Any:
    """Use a portal on several threads, and the communicator on the loop."""
    async with aiocomms.new_comm(timeout=5) as comm:
        portal = comm.portal()
        threads = [asyncio.to_thread(use, portal, "a"), anyio.to_thread.run_sync(use, portal, "b")]
        threads.append(asyncio.get_running_loop().run_in_executor(None, use, portal, "c"))
        *sums, _ = await asyncio.gather(*threads, *(comm.barrier() for _ in range(3)), wait_for_all())
        return sums[:3]


async def wait_for_all() -> None:
    """Let time pass on the loop."""
    await asyncio.sleep(0.01)


def test_threads_use_portals_while_the_loop_goes_on():
    for seed in range(6):
        history = repeated(use_threads, 3, seed=seed)
        assert history.results == [[[3.0 + 3 * number for number in range(5)]] * 3] * 3


def open_all(portal: Any) -> Any:
    """Open and close, on a thread, what a communicator has."""
    other = 1 - portal.rank
    with portal.new_window(torch.zeros(2)) as window:
        window.put(torch.full((1,), portal.rank + 1.0), other).wait()
        window.signal(other).wait()
        window.wait_signal(other).wait()
        assert window.tensor[0] == other + 1.0
    with portal.open_stream(other, 2) as stream:
        for number in range(4):
            stream.send(torch.tensor([number]))
            assert stream.receive().item() == number
    part = portal.split([0, 1], "part")
    x = torch.ones(1)
    part.all_reduce(x).wait()
    part.close()
    portal.close()
    with pytest.raises(CommClosedError):
        portal.barrier().wait()
    return x.item()


async def use_one_thread() -> Any:
    comm = await aiocomms.new_comm(timeout=10)
    return await asyncio.to_thread(open_all, comm.portal())


def test_a_thread_opens_and_closes_all_that_a_communicator_has():
    for seed in range(4):
        assert repeated(use_one_thread, 2, seed=seed).results == [2.0, 2.0]


def impatient(portal: Any) -> float:
    """Wait for less long than an op takes, and withdraw it."""
    began = clock.now()
    receiving = portal.recv(torch.zeros(1), 1)
    with pytest.raises(TimeoutError):
        receiving.wait(timeout=2.5)
    assert receiving.cancel()
    return round(clock.now() - began, 1)


async def wait_in_vain() -> Any:
    async with aiocomms.new_comm() as comm:
        if comm.rank == 0:
            waited = await asyncio.to_thread(impatient, comm.portal())
            await comm.barrier()
            return waited
        return await comm.barrier()


def test_a_thread_waits_for_as_long_as_it_says():
    assert repeated(wait_in_vain, 2, seed=1).results == [2.5, None]


async def lose_rank() -> Any:
    """Lose a rank for which a thread waits."""
    async with aiocomms.new_comm() as comm:
        if comm.rank == 1:
            asyncio.get_running_loop().call_later(0.5, here().world.kill, 1)
        try:
            await asyncio.to_thread(lambda: comm.portal().recv(torch.zeros(1), 1 - comm.rank).wait())
        except PeerDiedError as error:
            return error.peer
    raise AssertionError


def test_a_thread_hears_that_a_rank_died():
    for seed in range(4):
        assert repeated(lose_rank, 2, seed=seed).results == [1, None]


def sum_or_recover(comm: Any) -> Any:
    """Sum up on a thread, with whoever is left."""
    portal, done = comm.portal(), 0
    while done < 10:
        try:
            x = torch.ones(1)
            portal.all_reduce(x).wait()
            assert x.item() == portal.size
            clock.sleep(0.1)
            done += 1
        except CommError:
            portal = portal.reconfigure(timeout=60)
    portal.close()
    return portal.size


async def recover_on_a_thread() -> Any:
    comm = await aiocomms.new_comm(timeout=5)
    try:
        return await asyncio.to_thread(sum_or_recover, comm)
    except CommAbortedError:
        return "excluded"


@pytest.mark.parametrize("seed", range(6))
def test_a_thread_goes_on_with_whoever_is_left(seed):
    history = repeated(recover_on_a_thread, 3, seed=seed, faults=Faults(deaths=1, cuts=1, pauses=1, within=1.0))
    assert any(isinstance(result, int) for result in history.results)


async def start_what_cannot_be_simulated() -> Any:
    with pytest.raises(SimulationError, match=r"a thread of the system cannot be simulated: .*test_simulated_portals"):
        threading.Thread(target=print).start()
    with pytest.raises(SimulationError, match=r"the loop thread of .* cannot be simulated"):
        aiocomms.blocking.new_comm()
    return "refused"


def test_other_threads_and_loops_are_refused():
    assert repeated(start_what_cannot_be_simulated, 1, seed=1).results == ["refused"]
