"""Leases between processes: a borrower is killed, stands still beyond a deadline and goes on, or leaves, at any step.

Each trial strikes after another time, drawn by a fixed seed: mostly amid a copy, which the borrower makes over and
over. Every element of a block has the number of the trial for which it was leased, or what its borrower wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from processes import KILLED, Rank, Run

import aiocomms
from aiocomms.endpoints import handovers
from aiocomms.errors import (
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    LeaseError,
    PeerDiedError,
)

pytestmark = [pytest.mark.real, pytest.mark.search]

BLOCKS, LENT = 12, 8
"""The numbers of all blocks, and of those that are lent."""
LARGE, SMALL = 2**18, 2**13
"""Elements of a block: all that is lent is copied by another thread, or within the call."""
WORDS = 1024
"""Every so many elements of a block are looked at, so that copies take most of the time."""
TRIALS, MOST = 8, 200


@pytest.fixture
def transport() -> str:
    return "ucx"


def impatient(rank: int) -> None:
    """Have an owner give up soon on a borrower that does not let go."""
    handovers.CLOSE_GRACE = 0.1  # type: ignore[misc]


class Owner:
    """The rank that has the blocks, and the borrower of a trial."""

    def __init__(self, here: aiocomms.Endpoint, width: int = LARGE) -> None:
        self.here, self.pool = here, here.new_pool(torch.zeros(BLOCKS, width, dtype=torch.int64))

    @contextlib.asynccontextmanager
    async def lent(self, number: int, **how: Any) -> AsyncIterator[tuple[asyncio.Future[Any], aiocomms.Lease]]:
        """Lease blocks to the next endpoint that connects, for a block in which something happens to that."""
        peer = await self.here.accept()
        async with self.pool.lease(LENT) as lease:
            self.pool.tensor[list(lease.blocks)] = number
            call = asyncio.ensure_future(peer.hand_over(lease, number, **how))
            yield call, lease
            await asyncio.wait([call])

    async def is_whole(self) -> None:
        """Wait until nobody holds a block."""
        while self.pool.held:  # noqa: ASYNC110 - the kernel tells of a death, or the borrower says it
            await asyncio.sleep(0.001)
        assert sorted(self.pool._free) == list(range(BLOCKS))


async def use_over_and_over(handed: aiocomms.HandedLease, into: torch.Tensor) -> None:
    """Read or write the blocks until that raises; a read gets what was lent, or raises."""
    while True:
        if handed.writable:
            await handed.write(into.fill_(-handed.meta))
        else:
            into[:, ::WORDS] = 0
            await handed.read(into)
            assert into[:, ::WORDS].eq(handed.meta).all(), f"another lease's bytes in {handed.meta}"


async def stopped(place: Rank, write: bool, width: int, trials: int) -> Any:
    """Stop rank 1 amid its copies, beyond the deadline of its lease; then lease its blocks again.

    It has no more trials once a word has refused another lease's bytes.
    """
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            return await go_on_after_stops(place, here, width, trials)
        place.give("address", here.address)
        owner, draw, held = Owner(here, width), random.Random(1), 0
        for number in range(1, trials + 1):
            async with owner.lent(number, write=write, timeout=0.1) as (call, lease):
                await place.heard(f"begun {number}")
                await asyncio.sleep(draw.random() * 0.01)
                place.stop(1)
                await asyncio.wait([call])
                assert isinstance(call.exception(), CommTimeoutError)
            held += owner.pool.held
            free = [block for block in range(BLOCKS) if block in owner.pool._free]
            assert not write or not {*free} & {*lease.blocks}, "blocks that may be written are free"
            async with owner.pool.lease(len(free)) as others:
                owner.pool.tensor[list(others.blocks)] = 1000 + number
                place.go_on(1)
                await place.heard(f"noticed {number}")
                assert owner.pool.tensor[list(others.blocks)].eq(1000 + number).all(), "another lease was written"
            place.tell(f"again {number}")
            if (place.folder / "refused").exists():
                break
        await here.accept()  # Asked on this connection, the borrower says that it let go.
        await owner.is_whole()
        place.tell("over")
        return held


async def go_on_after_stops(place: Rank, here: aiocomms.Endpoint, width: int, trials: int) -> list[CommError]:
    """Use what is lent, connect again when that is lost; return the errors with which foreign bytes were refused."""
    place.say_who()
    address, foreign = await place.heard_of("address"), list[CommError]()
    leases, into = here.handed(), torch.zeros(LENT, width, dtype=torch.int64)
    for number in range(1, trials + 1):
        peer = await here.connect(address)
        handed = await anext(leases)
        assert handed.meta == number
        place.tell(f"begun {number}")
        try:
            await use_over_and_over(handed, into)
        except CommError as error:
            if into.eq(1000 + number).any():
                foreign.append(error)
            if into.eq(1000 + number).any() and isinstance(error, LeaseError):
                place.tell("refused")
        assert isinstance(await peer.lost(), CommError)
        place.tell(f"noticed {number}")
        await place.heard(f"again {number}")
        if (place.folder / "refused").exists():
            break
    await here.connect(address)
    await place.heard("over")
    return foreign


def test_reader_that_was_stopped_gets_no_bytes_of_another_lease(ranks: Run) -> None:
    held, foreign = ranks(2, stopped, False, LARGE, TRIALS, before=impatient)
    assert held == 0
    print(
        f"{len(foreign)} of {TRIALS} reads have seen another lease's bytes, and raised"
    )  # The others had none in hand.


def test_word_refuses_a_read_before_its_connection_is_known_to_be_lost(ranks: Run) -> None:
    """Have a reader go on until a word refuses what it has read; without the word it takes that for its lease's."""
    _, foreign = ranks(2, stopped, False, SMALL, MOST, before=impatient)
    assert any(isinstance(error, LeaseError) for error in foreign)
    print(f"the last of {len(foreign)} reads that have seen another lease's bytes was refused by its word")


def test_writer_that_was_stopped_writes_into_no_other_lease(ranks: Run) -> None:
    held, _ = ranks(2, stopped, True, LARGE, TRIALS, before=impatient)
    assert held == TRIALS * LENT


async def killed(place: Rank, write: bool) -> Any:
    """Kill each rank but the first amid its copies."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank > 0:
            return await use_until_the_end(place, here)
        owner, draw = Owner(here), random.Random(2)
        place.give("address", here.address)
        for rank in range(1, place.size):
            place.tell(f"turn of {rank}")
            async with owner.lent(rank, write=write) as (call, _):
                await place.heard(f"begun {rank}")
                await asyncio.sleep(draw.random() * 0.01)
                os.kill(int((place.folder / f"pid {rank}").read_text()), signal.SIGKILL)
                await asyncio.wait([call])
                assert isinstance(call.exception(), PeerDiedError), call.exception()
            await owner.is_whole()
        return "whole"


async def use_until_the_end(place: Rank, here: aiocomms.Endpoint, leave: str = "") -> str:
    """Use what is lent until this process is killed, or has left in some way."""
    place.say_who()
    await place.heard(f"turn of {place.rank}")
    peer = await here.connect(await place.heard_of("address"))
    handed = await anext(here.handed())
    place.tell(f"begun {place.rank}")
    copies = asyncio.ensure_future(use_over_and_over(handed, torch.zeros(LENT, LARGE, dtype=torch.int64)))
    if leave:
        await asyncio.sleep(random.Random(place.rank).random() * 0.01)
        await peer.aclose() if leave == "close" else peer.abort("it leaves")
    await asyncio.wait([copies])
    assert isinstance(copies.exception(), CommError), copies.exception()
    return leave


@pytest.mark.parametrize("write", [False, True])
def test_blocks_of_a_borrower_that_is_killed_come_back(ranks: Run, write: bool) -> None:
    assert ranks(7, killed, write) == ["whole", *[KILLED] * 6]


async def left(place: Rank, write: bool) -> Any:
    """Have each rank but the first close or abort its connection amid its copies, and live on."""
    async with aiocomms.open_endpoint("ucx") as here:
        ways = ["", *("close", "abort") * 3]
        if place.rank > 0:
            way = await use_until_the_end(place, here, ways[place.rank])
            await place.heard("over")
            return way
        owner = Owner(here)
        place.give("address", here.address)
        for rank in range(1, place.size):
            place.tell(f"turn of {rank}")
            async with owner.lent(rank, write=write) as (call, _):
                await asyncio.wait([call])
                wanted = CommClosedError if ways[rank] == "close" else CommAbortedError
                assert isinstance(call.exception(), wanted), repr(call.exception())
            assert owner.pool.held == 0
            await owner.is_whole()
        place.tell("over")
        return "whole"


@pytest.mark.parametrize("write", [False, True])
def test_blocks_of_a_borrower_that_leaves_come_back_although_it_lives(ranks: Run, write: bool) -> None:
    assert ranks(7, left, write) == ["whole", *("close", "abort") * 3]


async def killed_while_held(place: Rank) -> Any:
    """Stop rank 1 beyond the deadline, so that its blocks are held, and then kill it."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank > 0:
            return await use_until_the_end(place, here)
        owner = Owner(here)
        place.give("address", here.address)
        place.tell("turn of 1")
        async with owner.lent(1, write=True, timeout=0.1) as (call, _):
            await place.heard("begun 1")
            place.stop(1)
            await asyncio.wait([call])
        assert owner.pool.held == LENT
        with pytest.raises(CommTimeoutError, match=r"not free within .*: 4 are free, 0 leased, 8 held"):
            async with owner.pool.lease(LENT, timeout=0.1):
                pass
        os.kill(int((place.folder / "pid 1").read_text()), signal.SIGKILL)
        async with owner.pool.lease(BLOCKS):  # waits until the process has ended
            assert owner.pool.held == 0
        return "whole"


def test_held_blocks_come_back_when_the_borrower_has_died(ranks: Run) -> None:
    assert ranks(2, killed_while_held, before=impatient) == ["whole", KILLED]
