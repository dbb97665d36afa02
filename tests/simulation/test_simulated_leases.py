"""Leases in simulated worlds: random requests of an owner to two borrowers, with faults; bytes are checked.

The owner leases blocks, stamps them with the request's number, and hands them over to be read or filled. It is
impatient at times, and cancels. The borrowers read and write whole blocks or parts of them, give back, fail, forget
what they have, or leave. What a read returns has the stamp that came with the blocks; what the owner gets has the
borrower's. In the end each block is free once.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from typing import Any

import anyio
import pytest
import torch
from repeating import repeated

import aiocomms
from aiocomms.endpoints import endpoint
from aiocomms.endpoints.credentials import read_address
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import Faults, explore, here

pytestmark = pytest.mark.deterministic

BLOCKS, PARTS, WIDTH = 6, 2, 3
OWNER, BORROWERS = 0, (1, 2)
REQUESTS = 12
PATIENCE = 300.0
"""Seconds of a history after which somebody waits for ever."""
SEARCHED = os.environ.get("SIMULATION_SEEDS", "1000000-1100000")
FAULTS = Faults(deaths=1, cuts=1, partitions=1, pauses=1, slow=1, within=0.4)


def tell(name: str, value: bytes = b"") -> None:
    """Leave something for the other ranks, as in a file that all of them see."""
    assert clock.simulation is not None
    clock.simulation.launched()[0].set(name, value)


async def told(name: str) -> bytes:
    """Wait for what another rank has left."""
    assert clock.simulation is not None
    store, pause = clock.simulation.launched()[0], 0.001
    while not store.check([name]):
        await asyncio.sleep(pause)
        pause *= 1.5  # Each look is an event of the history.
    return store.get(name)


# ------------------------------------------------------------------------------------------------------------ the owner


class Owner:
    """The rank that has the blocks."""

    def __init__(self, mine: aiocomms.Endpoint, calm: bool) -> None:
        self.here, self.calm = mine, calm
        self.pool = mine.new_pool(torch.zeros(BLOCKS, PARTS, WIDTH, dtype=torch.int64))
        self.ends: dict[str, int] = {}

    async def run(self, draw: random.Random) -> dict[str, int]:
        """Make requests, several at once, and return how they have ended."""
        try:
            async with asyncio.timeout(PATIENCE):
                addresses = {rank: await told(f"address {rank}") for rank in BORROWERS}
        except TimeoutError:
            return {"alone": 1}
        limit = asyncio.Semaphore(3)

        async def one(number: int) -> None:
            async with limit:
                end = await self.request(number, addresses[draw.choice(BORROWERS)], draw)
                self.ends[end] = self.ends.get(end, 0) + 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(1, REQUESTS + 1):
                tasks.create_task(one(number))
        await self.check_pool(addresses.values())
        return self.ends

    async def meets_again(self, address: bytes) -> bool:
        """Return whether a borrower can be reached, which is asked for what it holds."""
        try:
            await self.here.connect(address, timeout=10)
        except CommError:
            return False
        await asyncio.sleep(1)
        return True

    async def check_pool(self, addresses: Iterable[bytes]) -> None:
        """Check that each block is free once, but for those that are held by whoever has died."""
        pool, held_by = self.pool, self.here._counter.ledger.held_by
        for _ in range(25):  # Until then nobody stands still, or is cut off, any more.
            there = {read_address(address).endpoint: await self.meets_again(address) for address in addresses}
            if not any(map(held_by, there)):
                break
        assert not [held_by(borrower) for borrower, reachable in there.items() if reachable and held_by(borrower)]
        assert pool.leased == 0, pool
        assert pool.held == 0 or not all(there.values()), pool
        assert len(pool._free) == len({*pool._free}) == BLOCKS - pool.held, pool._free

    async def request(self, number: int, address: bytes, draw: random.Random) -> str:
        """Make one request."""
        write, count, delay = draw.random() < 0.5, draw.randint(1, 3), draw.random() * 0.05
        timeout = draw.choice((0.02, 1.0, 20.0)) if not self.calm else 20.0
        try:
            peer = await self.here.connect(address, timeout=10)
            async with self.pool.lease(count, timeout=100) as lease:
                for block in range(count):
                    lease[block].fill_(number)
                call = asyncio.ensure_future(peer.hand_over(lease, number, write=write, timeout=timeout))
                if draw.random() < 0.3 and not self.calm:
                    asyncio.get_running_loop().call_later(delay, call.cancel)
                try:
                    answer = await call
                except asyncio.CancelledError:
                    if not call.cancelled():
                        raise
                    return "cancelled"
                assert answer == -number, answer
                for block in range(count):
                    wanted = answer if write else number
                    assert lease[block].eq(wanted).all(), f"{lease[block].tolist()} of request {number}"
            return "answered"
        except CommError as error:
            return type(error).__name__


# --------------------------------------------------------------------------------------------------------- a borrower


async def borrow(mine: aiocomms.Endpoint, draw: random.Random, calm: bool) -> None:
    """Do something with each lease that is handed over."""

    async def one(handed: aiocomms.HandedLease) -> None:
        try:
            await use(handed, draw, calm)
        except (CommError, ZeroDivisionError):
            pass

    async with asyncio.TaskGroup() as tasks:
        async for handed in mine.handed():
            tasks.create_task(one(handed))


async def use(handed: aiocomms.HandedLease, draw: random.Random, calm: bool) -> None:
    """Use a lease in one of the ways that there are."""
    choice = draw.random() + calm
    if choice < 0.1:
        return  # The lease is forgotten, and the owner has a deadline.
    if choice < 0.2:
        handed.peer.abort("it was drawn") if draw.random() < 0.5 else await handed.peer.aclose()
        return
    async with handed:
        for part in draw.choice(((None,), (0, 1), (1, 0), (0, None))):
            await asyncio.sleep(draw.choice((0.0, 0.003, 0.03)))
            with anyio.move_on_after(1000.0 if calm else draw.choice((0.001, 1000.0, 1000.0))) as impatient:
                await move(handed, part)
            if impatient.cancelled_caught or draw.random() + calm < 0.05:
                raise ZeroDivisionError("it was drawn")
        await handed.give_back(-handed.meta)


async def move(handed: aiocomms.HandedLease, part: int | None) -> None:
    """Read or write what was handed over, and check what was read."""
    shape = (len(handed), *((PARTS, WIDTH) if part is None else (WIDTH,)))
    if handed.writable:
        await handed.write(torch.full(shape, -handed.meta), part)
    else:
        found = await handed.read(torch.zeros(shape, dtype=torch.int64), part)
        assert found.eq(handed.meta).all(), f"{found.tolist()} of request {handed.meta}"


# -------------------------------------------------------------------------------------------------------- the histories


async def borrower(mine: aiocomms.Endpoint, draw: random.Random, calm: bool) -> str:
    """Borrow until the owner is done."""
    try:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(borrow(mine, draw, calm))
            await told("done")
            task.cancel()
    except TimeoutError:
        return "alone"
    return "done"


async def program(calm: bool = False) -> Any:
    """Be the owner, or a borrower until the owner is done."""
    rank, draw = here().rank, random.Random(random.random())
    async with aiocomms.open_endpoint(timeout=10) as mine:
        if rank != OWNER:
            tell(f"address {rank}", mine.address)
            return await borrower(mine, draw, calm)
        ends = await Owner(mine, calm).run(draw)
        tell("done")
        return ends


@pytest.fixture(params=["hosts", "one host"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks be on hosts of their own, or on one, where whoever was lost may still write into a block."""
    if request.param == "one host":
        monkeypatch.setattr(endpoint, "this_process", lambda: ("here", 0))


def test_each_request_of_a_calm_history_is_answered() -> None:
    for seed in range(4):
        history = repeated(lambda: program(calm=True), 3, seed=seed)
        assert history.results == [{"answered": REQUESTS}, "done", "done"]


def test_blocks_come_back_once_and_no_foreign_byte_is_read_whatever_goes_wrong() -> None:
    explore(program, 3, seeds=range(60), faults=FAULTS, longest=PATIENCE * 2)


@pytest.mark.search
@pytest.mark.timeout(0)
def test_blocks_come_back_in_many_histories() -> None:
    first, last = map(int, SEARCHED.split("-"))
    print(explore(program, 3, seeds=range(first, last), faults=FAULTS, longest=PATIENCE * 2), "histories")
