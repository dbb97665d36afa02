"""A bad cable between two hosts: every byte arrives as it was sent, or the error says what has happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cable import Cable, Weather, cable
from hosts import Enter, address, ip
from processes import Rank, Run, empty, exchange, numbers

from aiocomms.communicator.communicator import Communicator

pytestmark = [pytest.mark.real, pytest.mark.search]

ROUTE = {"MASTER_ADDR": address(0)}
WEATHERS = {
    "1 % is lost": Weather(loss=0.01),
    "5 % is lost": Weather(loss=0.05),
    "up to 50 ms late": Weather(delay=0.005, jitter=0.05),
    "reordered": Weather(jitter=0.002),
    "repeated": Weather(repeats=0.2),
    "1 Mbit/s": Weather(rate=125_000),
    "everything": Weather(loss=0.02, repeats=0.05, delay=0.001, jitter=0.005, rate=2_000_000),
}
QUICK = {"reordered", "everything"}
HUGE = 2**18
"""Elements of int64: 2 MiB."""


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def line() -> Iterator[tuple[list[str], Cable]]:
    with cable() as made:
        yield made


async def talk(place: Rank, counts: tuple[int, ...]) -> None:
    """Exchange tensors of several sizes and objects, put into a window, and split off a child."""
    async with place.open() as comm:
        for count in counts:
            await exchange(comm, count)
        given = {"from": comm.rank, "tensor": numbers(500, comm.rank)}
        work = comm.send_object(given, 1 - comm.rank)
        got = await comm.recv_object(1 - comm.rank)
        await work
        assert got["from"] == 1 - comm.rank
        assert torch.equal(got["tensor"], numbers(500, 1 - comm.rank))
        await put(comm, 3000)
        child = await comm.split([0, 1])
        assert child is not None
        await exchange(child, 3)
        await child.aclose()


async def put(comm: Communicator, count: int) -> None:
    window = await comm.new_window(empty(count))
    await window.put(numbers(count, comm.rank), 1 - comm.rank)
    await window.signal(1 - comm.rank)
    await window.wait_signal(1 - comm.rank)
    assert torch.equal(window.tensor, numbers(count, 1 - comm.rank))
    await window.aclose()


@pytest.mark.fault(107)
@pytest.mark.parametrize(
    "weather",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.search) for name in WEATHERS],
)
def test_transfers_over_a_bad_cable_are_right(ranks: Run, line: tuple[list[str], Cable], weather: str) -> None:
    names, wire = line
    wire.set(WEATHERS[weather])
    ranks(2, talk, (3, 1000, 20_000), before=Enter(names, "01", **ROUTE))


async def transfer(place: Rank) -> None:
    """Send a large message each way."""
    async with place.open() as comm:
        await comm.barrier()
        into = empty(HUGE)
        await asyncio.gather(comm.send(numbers(HUGE, comm.rank), 1 - comm.rank), comm.recv(into, 1 - comm.rank))
        assert torch.equal(into, numbers(HUGE, 1 - comm.rank))
        assert (await comm.all_reduce(torch.ones(3000)) == 2).all()


def amid_a_transfer(ranks: Run, line: tuple[list[str], Cable], happens: Callable[[], None]) -> None:
    """Call ``happens`` amid a transfer, when the first frames of the messages have passed."""
    names, wire = line
    wire.set(Weather(rate=4_000_000))

    def wait() -> None:
        wire.wait(600)
        happens()

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(wait)
        ranks(2, transfer, before=Enter(names, "01", **ROUTE))
        waiting.result()


@pytest.mark.fault(106, 107)
@pytest.mark.parametrize("cut", [(0,), (1,), (0, 1)], ids=str)
def test_transfer_survives_a_temporary_outage(ranks: Run, line: tuple[list[str], Cable], cut: tuple[int, ...]) -> None:
    """A transfer survives an outage in which TCP retransmits in vain several times."""
    wire = line[1]

    def happens() -> None:
        wire.set(Weather(cut=cut))
        time.sleep(2.0)
        wire.set(Weather())

    amid_a_transfer(ranks, line, happens)


@pytest.mark.fault(107)
def test_transfer_survives_a_smaller_mtu(ranks: Run, line: tuple[list[str], Cable]) -> None:
    def happens() -> None:
        for name in line[0]:
            ip("-n", name, "link", "set", "net0", "mtu", "600")

    amid_a_transfer(ranks, line, happens)
