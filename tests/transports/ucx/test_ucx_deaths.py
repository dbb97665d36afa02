"""A rank of the ucx transport is killed amid large things; and what goes on without it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiocomms_ucx.status import BROKEN
from aiocomms_ucx.transport import PLAIN
from inside import transport_of
from processes import KILLED, LARGE, Rank, Run, death, numbers, together
from simulated import NET

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, PeerDiedError

pytestmark = pytest.mark.real

HUGE = 16 * 2**20
"""Elements of float32: 64 MiB, and one more than three ranks can share evenly."""


@pytest.fixture
def transport() -> str:
    return "ucx"


def pair(comm: Communicator, victim: int, give: bool) -> Any:
    """A message between the victim and each of the others; ``give``: from the victim."""
    others = [rank for rank in range(comm.size) if rank != victim] if comm.rank == victim else [victim]
    call = comm.send if give == (comm.rank == victim) else comm.recv
    return asyncio.gather(*(call(torch.ones(HUGE), rank) for rank in others))


HUGE_THINGS: dict[str, Callable[[Communicator, int], Any]] = {
    "all_reduce": lambda comm, victim: comm.all_reduce(torch.ones(HUGE)),
    "reduce": lambda comm, victim: comm.reduce(torch.ones(HUGE), 1),
    "broadcast": lambda comm, victim: comm.broadcast(torch.ones(HUGE), victim),
    "all_gather": lambda comm, victim: comm.all_gather_single(torch.ones(3 * HUGE // 4), torch.ones(HUGE // 4)),
    "all_to_all": lambda comm, victim: comm.all_to_all_single(torch.ones(HUGE - 1), torch.ones(HUGE - 1)),
    "to the victim": lambda comm, victim: pair(comm, victim, give=False),
    "from the victim": lambda comm, victim: pair(comm, victim, give=True),
}


async def lose_amid(place: Rank, what: str, victim: int, delay: float) -> bool:
    comm = await place.open()
    # These do not need to be at fault to be told.
    receives = [
        comm.recv(torch.zeros(8), rank, 9) for rank in range(place.size) if rank != place.rank for _ in range(3)
    ]
    await comm.barrier()

    async def go_on() -> None:
        while True:
            await HUGE_THINGS[what](comm, victim)

    if place.rank == victim:
        place.die_later(delay)
        await go_on()
    error = await death(go_on())
    for work in receives:
        with pytest.raises(PeerDiedError) as other:
            await work
        assert other.value.peer == victim, other.value
    with pytest.raises(CommAbortedError, match=f"rank {victim}"):
        comm.barrier()
    await comm.aclose()
    assert f"rank {victim} " in error.message
    return error.peer == victim


@pytest.mark.fault(1, transport="ucx")
@pytest.mark.parametrize(("victim", "delay"), [(0, 0.02), (2, 0.09)])
@pytest.mark.parametrize("what", HUGE_THINGS)
def test_death_amid_an_op_names_the_dead_rank(ranks: Run, what: str, victim: int, delay: float) -> None:
    results = ranks(3, lose_amid, what, victim, delay)
    assert results.pop(victim) is KILLED
    for named in results:
        assert named


async def live_on(place: Rank) -> None:
    """Show that all goes on that needs no dead rank: its own family, and others; old communicators, and new ones."""
    comm = await place.open()
    survivors = [0, 1]
    apart = None if place.rank == 2 else await place.open("apart", survivors)
    child = await comm.split(survivors if place.rank in survivors else [])
    if place.rank == 2:
        await comm.recv(torch.zeros(1), 0)
        await place.die()
    assert apart is not None
    assert child is not None
    window = await child.new_window(torch.zeros(LARGE))
    under_way = [it.recv(torch.zeros(LARGE, dtype=torch.int64), 1 - place.rank, 3) for it in (apart, child)]
    waiting = window.wait_signal(1 - place.rank)
    lost = comm.all_reduce(torch.ones(LARGE))
    await child.barrier()
    if place.rank == 0:
        await comm.send(torch.zeros(1), 2)
    with pytest.raises(PeerDiedError) as caught:
        await lost
    assert caught.value.peer == 2
    assert (apart.aborted, child.aborted, comm.aborted) == (False, False, True)
    await comm.aclose()
    for it, work in zip((apart, child), under_way, strict=True):
        await it.send(numbers(LARGE, place.rank), 1 - place.rank, 3)
        assert torch.equal(await work, numbers(LARGE, 1 - place.rank))
    await window.put(torch.ones(LARGE), 1 - place.rank)
    await window.signal(1 - place.rank)
    await waiting
    assert window.tensor.sum() == LARGE
    grandchild = await child.split(survivors[::-1])
    assert grandchild is not None
    fresh = await place.open("fresh", survivors)
    for it in (apart, child, grandchild, fresh):
        for count in (3, LARGE, HUGE):
            assert (await it.all_reduce(torch.ones(count)) == 2).all()
    await window.aclose()
    for it in (fresh, child, apart, grandchild):
        await it.aclose()


@pytest.mark.fault(1, transport="ucx")
def test_ops_that_do_not_need_the_dead_rank_go_on(ranks: Run) -> None:
    assert ranks(3, live_on) == [None, None, KILLED]


async def leave_after_a_death(place: Rank) -> None:
    """A close after a death cuts nothing off, either, between those who live."""
    comm = await place.open()
    child = await comm.split([0, 1] if place.rank < 2 else [])
    if place.rank == 2:
        await place.all_told("posted", 0, 1)
        await place.die()
    assert child is not None
    lost = comm.barrier()
    place.tell(f"posted {place.rank}")
    with pytest.raises(PeerDiedError):
        await lost
    counts = [5, LARGE, 2**20]
    if place.rank == 0:
        works = [child.send(numbers(count, 0, i), 1, i) for i, count in enumerate(counts)]
        del works
    else:
        await asyncio.sleep(0.05)
        for i, count in enumerate(counts):
            got = await child.recv(torch.zeros(count, dtype=torch.int64), 0, i)
            assert torch.equal(got, numbers(count, 0, i))
    await child.aclose()
    await comm.aclose()


@pytest.mark.parametrize("transport", [NET, "ucx"])
def test_close_after_a_death_delivers_all_data(ranks: Run, transport: str) -> None:
    for _ in range(3):
        assert ranks(3, leave_after_a_death) == [None, None, KILLED]


async def lose_two(place: Rank) -> set[int | None]:
    """Two at the same time, one of them the first."""
    comm = await place.open()
    await together(place, comm)
    if place.rank in (0, 3):
        await place.all_told("posted", 1, 2)
        await place.die()
    peers = set()
    works = [
        comm.recv(torch.zeros(3), 0),
        comm.recv(torch.zeros(3), 3),
        comm.all_reduce(torch.zeros(LARGE if place.simulated else HUGE)),
    ]
    place.tell(f"posted {place.rank}")
    for work in works:
        with pytest.raises(PeerDiedError) as caught:
            await work
        peers.add(caught.value.peer)
    await comm.aclose()
    return peers


@pytest.mark.fault(6, transport="ucx")
@pytest.mark.parametrize("transport", [NET, "ucx"])
def test_simultaneous_deaths_name_one_dead_rank_each(ranks: Run, transport: str) -> None:
    for peers in ranks(4, lose_two)[1:3]:
        assert len(peers) == 1
        assert peers < {0, 3}


SHARED_MEMORY = 17
"""UCX's error for memory that it cannot map (ucs/type/status.h, without the sign)."""


async def two_of_them() -> list[Communicator]:
    store = dist.HashStore()
    return await asyncio.gather(*(aiocomms.new_comm("ucx", store=store, rank=rank, size=2) for rank in range(2)))


@pytest.fixture
def ended() -> int:
    """A process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


async def fail_first_contact(ended: int) -> None:
    """UCX cannot reach a rank whose process has just ended, and says so before its connection does."""
    one, two = await two_of_them()
    work: Any = one.recv(torch.zeros(1), 1)
    transport: Any = transport_of(one)
    transport.pids[1] = ended
    transport.finish(work, PLAIN, BROKEN, SHARED_MEMORY, 0)
    with pytest.raises(PeerDiedError) as caught:
        await work
    assert (caught.value.peer, one.aborted) == (1, True)
    with pytest.raises(CommAbortedError):
        await two.recv(torch.zeros(1), 0)
    await one.aclose()
    await two.aclose()


async def fail_to_map(ended: int) -> None:
    """The memory of a window's part is gone with its rank."""
    one, two = await two_of_them()
    transport: Any = transport_of(one, "rma")
    transport.pids[1] = ended
    outcomes = await asyncio.gather(*(it.new_window(torch.zeros(4)) for it in (one, two)), return_exceptions=True)
    error = outcomes[0]
    assert isinstance(error, PeerDiedError)
    assert (error.peer, one.aborted) == (1, True)
    await one.aclose()
    await two.aclose()


def test_rank_that_ends_before_the_first_contact_or_while_a_window_opens_is_noticed(ended: int) -> None:
    asyncio.run(fail_first_contact(ended))
    asyncio.run(fail_to_map(ended))
