"""Lanes whose collectives the engine carries: where ranks disagree, leave or die, and what is kept afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import transport_of
from processes import KILLED, Rank, Run, death, in_turn
from simulated import NET

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommTimeoutError, LaneAbortedError, MismatchError, PeerDiedError
from aiocomms.testing import local_world

pytestmark = pytest.mark.real

SMALL, LARGE = 3, 100_000
"""Elements of a collective that each rank writes on its board, and of one that takes its turn in the slots."""
SHORT = 0.2
"""A deadline that passes, in seconds."""


@pytest.fixture
def transport() -> str:
    return "ucx"


Call = Callable[[Any], Work[Any]]


def ones(count: int = SMALL, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "op": (lambda c: c.all_reduce(ones()), lambda c: c.broadcast(ones(), 0), "broadcast"),
    "operator": (lambda c: c.all_reduce(ones()), lambda c: c.all_reduce(ones(), "max"), "max"),
    "size": (lambda c: c.all_reduce(ones()), lambda c: c.all_reduce(ones(4)), r"\(4,\)"),
    "small and large": (lambda c: c.all_reduce(ones()), lambda c: c.all_reduce(ones(LARGE)), f"{LARGE}"),
    "large": (lambda c: c.broadcast(ones(LARGE), 1), lambda c: c.broadcast(ones(LARGE), 2), "broadcast"),
    "dtype": (lambda c: c.all_reduce(ones()), lambda c: c.all_reduce(ones(dtype=torch.int32)), "int32"),
    "root": (lambda c: c.reduce(ones(), 0), lambda c: c.reduce(ones(), 1), "reduce"),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_gather_single(ones(9), ones()), "all_gather"),
}


async def disagree(place: Rank, what: str) -> str:
    async with place.open() as comm:
        usual, other, _ = MISMATCHES[what]
        lane = comm.lane("disputed")
        await comm.lane("fine").all_reduce(ones())
        with pytest.raises((MismatchError, CommAbortedError), match=r"in lane disputed, rank . calls ") as caught:
            await (other if place.rank == 2 else usual)(lane)
        assert comm.aborted
        with pytest.raises(CommAbortedError, match="in lane disputed"):
            comm.lane("fine").barrier()
        return str(caught.value)


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree_in_a_lane_name_lane_and_calls(ranks: Run, what: str) -> None:
    """All are told at once which lane it was and what they call, and no rank gets a result."""
    told = ranks(3, disagree, what)
    assert any("rank 2 calls" in text for text in told) or any("and rank 2 calls" in text for text in told), told


async def come_late(place: Rank) -> None:
    """Rank 1 calls a lane long after the others, whose boards and orders have gone round many times since."""
    async with place.open() as comm:
        late = [comm.lane("late small"), comm.lane("late large")]
        works = (
            [] if place.rank == 1 else [lane.all_reduce(ones(n)) for lane, n in zip(late, (SMALL, LARGE), strict=True)]
        )
        for i in range(300):
            assert (await comm.lane(i % 7).all_reduce(ones(1000)))[0].item() == comm.size
            if i % 30 == 0:
                assert (await comm.lane(i % 7).all_reduce(ones(LARGE)))[-1].item() == comm.size
                await comm.barrier()
        if place.rank == 1:
            works = [lane.all_reduce(ones(n)) for lane, n in zip(late, (SMALL, LARGE), strict=True)]
        for work in works:
            assert (await work)[-1].item() == comm.size
        await comm.barrier()
        lanes = transport_of(comm, "collectives").lanes
        assert not lanes.pending
        assert all(owner is not lanes for owner, *_ in transport_of(comm).shared.pending.values())


async def wait_in_another_order(place: Rank, count: int) -> None:
    """Rank 0 awaits each lane before it calls the next, in an order that is the others' backwards."""
    async with place.open() as comm:
        for _ in range(5):
            keys = [f"key {i}" for i in range(12)]
            if place.rank == 0:
                for i, key in enumerate(keys):
                    tensor = await comm.lane(key).all_reduce(ones(count if i % 2 else SMALL))
                    assert tensor[-1].item() == comm.size
            else:
                calls = [(i, comm.lane(key)) for i, key in enumerate(keys)]
                works = [lane.all_reduce(ones(count if i % 2 else SMALL)) for i, lane in reversed(calls)]
                for work in works:
                    assert (await work)[-1].item() == comm.size


async def die_amid(place: Rank, victim: int) -> bool:
    comm = await place.open()

    async def follow(key: int) -> None:
        while True:
            await comm.lane(key).all_reduce(ones(LARGE if key % 2 else SMALL))

    pending = [] if place.rank == victim else [comm.lane("never").all_reduce(ones(n)) for n in (SMALL, LARGE)]
    await comm.barrier()
    if place.rank == victim:
        place.die_later(0.05)
    error = await death(asyncio.gather(*(follow(key) for key in range(8))))
    for work in pending:
        with pytest.raises(PeerDiedError, match="lane never"):
            await work
    await comm.aclose()
    return error.peer == victim


@pytest.mark.parametrize("victim", [0, 2])
def test_death_amid_lanes_is_noticed_by_all(ranks: Run, victim: int) -> None:
    """The victim may also be the rank that makes the order."""
    results = ranks(3, die_amid, victim)
    assert results == [KILLED if rank == victim else True for rank in range(3)]


async def leave(place: Rank, count: int) -> None:
    async with place.open() as comm:
        assert (await comm.lane("first").all_reduce(ones(count)))[0].item() == comm.size
        if place.rank == 1:
            return
        before = comm.lane("not called").all_reduce(ones(count))
        with pytest.raises(CommAbortedError, match="rank 1") as caught:
            await before
        assert "lane not called" in str(caught.value)
        assert comm.aborted


@pytest.mark.parametrize("transport", [NET, "ucx"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_close_before_calling_a_lane_fails_it_on_the_peer(ranks: Run, transport: str, count: int) -> None:
    ranks(2, leave, count)


async def wait_in_vain(place: Rank, count: int) -> None:
    async with place.open() as comm:
        for key in range(3):
            await comm.lane(key).all_reduce(ones(count))
        if place.rank == 1:
            await comm.lost()
            return
        works = [comm.lane(key).all_reduce(ones(count), timeout=SHORT) for key in range(3)]
        for key, work in enumerate(works):
            with pytest.raises(CommTimeoutError, match=f"lane {key}") as caught:
                await work
            assert "waiting for rank 1" in str(caught.value) or key, caught.value


@pytest.mark.parametrize("transport", [NET, "ucx"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_timeout_error_names_the_lane_and_the_missing_rank(ranks: Run, transport: str, count: int) -> None:
    ranks(2, wait_in_vain, count)


async def lose_its_memory(place: Rank) -> None:
    """Check that ops under way keep their tensors after a loss until the close, and that nothing is kept then."""
    comm = await place.open()
    if place.rank == 0:
        works = [comm.lane(key).all_reduce(ones(LARGE if key % 2 else SMALL)) for key in range(20)]
        comm.abort("enough")
        for work in works:
            with pytest.raises(CommAbortedError, match=r"lane \d+.*enough|enough"):
                await work
    else:
        assert "enough" in str(await comm.lost())
    shared = transport_of(comm).shared
    await comm.aclose()
    assert not shared.pending


def test_lost_communicator_releases_the_tensors_of_its_lanes(ranks: Run) -> None:
    ranks(2, lose_its_memory)


async def give_up_amid(place: Rank) -> None:
    """Half of the lanes are given up, each by another rank, while small and large collectives are under way there."""
    done = 0
    async with place.open() as comm:

        async def follow(key: int) -> None:
            nonlocal done
            count, lane = (SMALL, LARGE)[key // 2 % 2], comm.lane(key)
            for step in range(4):
                if key % 2 and (comm.rank, step) == (key // 4 % comm.size, key % 3):
                    lane.abort(f"request {key} failed")
                tensor = ones(count)
                try:
                    await lane.all_reduce(tensor)
                except LaneAbortedError as error:
                    told = str(error)
                    tensor.fill_(-1.0)  # no other rank may see this
                    break
                assert tensor.eq(comm.size).all()
                done += key % 2
            else:
                told = ""
            assert (f"request {key} failed" in told) == bool(key % 2)

        await asyncio.gather(*(follow(key) for key in range(48)))
        await comm.barrier()
        lanes = transport_of(comm, "collectives").lanes
        assert not lanes.pending
        assert not lanes.given_up
        assert not comm._core.in_flight
    assert done < 24 * 4, "none of those ended otherwise"


def test_late_and_reordered_and_aborted_lanes_leave_other_lanes_right(ranks: Run) -> None:
    orders = [(wait_in_another_order, count) for count in (SMALL, LARGE)]
    ranks(3, in_turn, come_late, *orders, give_up_amid)


@pytest.mark.deterministic
def test_equal_lane_keys_of_split_communicators_stay_apart() -> None:
    """The same key on each of them is another lane, on one engine."""

    async def of(comm: Communicator) -> None:
        child = await comm.split([1, 0])
        assert child is not None
        async with child:
            order = [comm, child] if comm.rank else [child, comm]
            works = {it: it.lane("same").all_reduce(torch.full((SMALL,), float(1 + (it is child)))) for it in order}
            assert [(await works[it])[0].item() for it in (comm, child)] == [2.0, 4.0]

    async def main() -> None:
        async with local_world(2, "ucx") as world:
            await asyncio.gather(*map(of, world))

    asyncio.run(main())
