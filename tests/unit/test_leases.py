"""Leases between two simulated processes: the data that moves, the waits, and the end of each step."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import aiocomms
from aiocomms import HandedLease
from aiocomms.endpoints import handovers, pools
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    LeaseError,
    ProtocolError,
)
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import here, simulate

pytestmark = pytest.mark.deterministic

BLOCKS, LAYERS, WIDTH = 6, 3, 4
Body = Callable[[aiocomms.Endpoint, aiocomms.Peer], Awaitable[Any]]


def numbers(first: int = 0) -> torch.Tensor:
    """Return blocks whose elements all differ."""
    return torch.arange(first, first + BLOCKS * LAYERS * WIDTH).view(BLOCKS, LAYERS, WIDTH)


def between(owner: Body, borrower: Body, **options: Any) -> list[Any]:
    """Run the two ends of a connection, each with its endpoint and its peer; return their results."""

    async def program() -> Any:
        world = here().world
        async with aiocomms.open_endpoint(timeout=10) as mine:
            if here().rank == 0:
                world.store.set("address", mine.address)
                result = await owner(mine, await mine.accept())
                world.store.set("done", b"")
                return result
            while not world.store.check(["address"]):  # noqa: ASYNC110 - the other process sets it
                await asyncio.sleep(0.001)
            result = await borrower(mine, await mine.connect(world.store.get("address")))
            while not world.store.check(["done"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return result

    return simulate(program, 2, seed=1, **options).results


async def nothing(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
    """Take no lease that is handed over."""


async def read_until_it_raises(handed: aiocomms.HandedLease) -> CommError:
    """Read a lease until a read raises, and return the error."""
    into = torch.zeros(handed.shape, dtype=torch.int64)
    while True:
        try:
            await handed.read(into)
        except CommError as error:
            return error


# ------------------------------------------------------------------------------------------------- what moves where


def test_blocks_are_read_whole_and_by_part_into_tensors_lists_and_leases() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease(1), pool.lease(3) as lease:
            assert (lease.blocks, len(lease), lease.pool) == ((1, 2, 3), 3, pool)
            assert await peer.hand_over(lease, {"a": [1, None]}) == ("read", 7)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        wanted, own = numbers()[1:4], mine.new_pool(torch.zeros(4, LAYERS, WIDTH, dtype=torch.int64))
        async for handed in mine.handed():
            assert (handed.meta, handed.peer, handed.shape, handed.writable) == (
                {"a": [1, None]}, peer, (3, LAYERS, WIDTH), False,
            )  # fmt: skip
            into = torch.zeros(handed.shape, dtype=torch.int64)
            assert await handed.read(into) is into
            assert into.equal(wanted)
            assert (await handed.read(into[:, 0].clone(), 2)).equal(wanted[:, 2])
            each = [torch.zeros(WIDTH, dtype=torch.int64) for _ in range(3)]
            assert await handed.read(each, part=1) is each
            assert torch.stack(each).equal(wanted[:, 1])
            async with own.lease(1), own.lease(3) as lease:
                await handed.read(lease, 0)
                assert own.tensor[1:, 0].equal(wanted[:, 0])
                assert not own.tensor[1:, 1:].any()
                await handed.read(lease)
                assert own.tensor[1:].equal(wanted)
                assert (lease.select([2, 0]).blocks, handed.select([1]).shape) == ((3, 1), (1, LAYERS, WIDTH))
                await handed.select([1, 2]).read(lease.select([2, 0]))
                assert own.tensor[[3, 1]].equal(wanted[1:])
                for some in (lease, handed):
                    with pytest.raises(ArgumentError, match=r"places are \[3\], wanted ints of 0 <= place < 3"):
                        some.select([0, 3])
            await handed.give_back(("read", 7))
            return

    between(owner, borrower)


def test_blocks_are_filled_layer_by_layer_from_tensors_and_leases() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(torch.zeros(BLOCKS, LAYERS, WIDTH, dtype=torch.int64))
        async with pool.lease(2) as first, pool.lease(2) as second:
            call = asyncio.ensure_future(peer.hand_over(first, write=True))
            for layer in range(LAYERS):
                assert await peer.recv_object() == layer
                assert pool.tensor[:2, layer].equal(numbers(100)[:2, layer])
            assert await call is None
            assert pool.tensor[:2].equal(numbers(100)[:2])
            assert not pool.tensor[2:].any()
            await peer.hand_over(second, write=True)
            assert pool.tensor[2:4].equal(numbers(200)[4:])

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        leases = mine.handed()
        async with await anext(leases) as handed:
            for layer in range(LAYERS):
                await handed.write(numbers(100)[:2, layer].clone(), part=layer)
                await handed.flush()
                await peer.send_object(layer)
            assert handed.error is None
        with pytest.raises(LeaseError, match="the lease was given back"):
            await handed.flush()
        own = mine.new_pool(numbers(200))
        async with own.lease(4), own.lease(2) as lease, await anext(leases) as handed:
            await handed.write(lease)

    between(owner, borrower)


def test_long_objects_travel_both_ways_and_longer_ones_are_refused() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease(2) as lease:
            with pytest.raises(ArgumentError, match="meta takes 300016 bytes with the blocks, wanted at most 262144"):
                await peer.hand_over(lease, bytes(300_000))
            with pytest.raises(ArgumentTypeError, match="meta"):
                await peer.hand_over(lease, object())
            calls = (peer.hand_over(lease, [bytes([n]) * 100_000]) for n in range(2))
            assert await asyncio.gather(*calls) == ["0" * 200_000, "1" * 200_000]

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        leases = mine.handed()
        for n in range(2):
            handed = await anext(leases)
            assert handed.meta == [bytes([n]) * 100_000]
            with pytest.raises(ArgumentError, match="answer takes"):
                await handed.give_back(bytes(300_000))
            await handed.give_back(str(n) * 200_000)

    between(owner, borrower)


# --------------------------------------------------------------------------------------------------- wrong arguments


def test_wrong_arguments_of_pools_and_leases_are_refused() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        for wrong in (torch.zeros(4), torch.zeros(0, 4), torch.zeros(2, 0)):
            with pytest.raises(ArgumentError, match=r"wanted \[blocks, ...\] with elements"):
                mine.new_pool(wrong)
        assert not mine._regions
        with pytest.raises(ArgumentTypeError, match=r"^new_pool on 'endpoint': tensor is 5"):
            mine.new_pool(5)  # type: ignore[arg-type]
        pool = mine.new_pool(numbers())
        for count, text in ((0, "count is 0"), (7, "count is 7, wanted 1 to 6"), (1.5, "count is 1.5")):
            with pytest.raises(ArgumentError, match=text):
                async with pool.lease(count):  # type: ignore[arg-type]
                    pass
        async with pool.lease(1, timeout=1) as lease:
            with pytest.raises(ArgumentError, match="timeout is -1"):
                await peer.hand_over(lease, timeout=-1)
            with pytest.raises(ArgumentTypeError, match=r"write is 1 \(int\), wanted a bool"):
                await peer.hand_over(lease, write=1)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="lease is 3"):
            await peer.hand_over(3)  # type: ignore[arg-type]
        with pytest.raises(LeaseError, match="the lease has ended"):
            await peer.hand_over(lease)
        async with aiocomms.open_endpoint() as another, another.new_pool(numbers()).lease() as foreign:
            with pytest.raises(ArgumentError, match="lease is of a pool of another endpoint"):
                await peer.hand_over(foreign)
        assert (pool.free, pool.leased, pool.held) == (BLOCKS, 0, 0)

    between(owner, nothing)


def test_wrong_arguments_of_a_handed_lease_are_refused_and_it_stays_usable() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers()).lease(2) as lease:
            assert await peer.hand_over(lease) == "still there"

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())
        own = mine.new_pool(torch.zeros(4, LAYERS, WIDTH + 1, dtype=torch.int64))
        into = torch.zeros(handed.shape, dtype=torch.int64)
        async with mine.new_pool(numbers()).lease(2) as ended:
            for some in (ended, handed):
                with pytest.raises(ArgumentTypeError, match=r"places is 5 \(int\), wanted a sequence of ints"):
                    some.select(5)  # type: ignore[arg-type]
        for over in (ended, ended.select([0, 1])):
            with pytest.raises(LeaseError, match="the lease has ended: its blocks may belong to another lease"):
                await handed.read(over)
        async with own.lease(2) as misfit:
            for wrong, part, text in (
                (into[:1], None, "wanted a tensor of shape"),
                (into, 0, "wanted a tensor of shape"),
                (7, None, "into is 7"),
                ([into], None, "wanted 2 tensors of shape"),
                ([1, None], None, "wanted 2 tensors of shape"),
                (misfit, None, "into has blocks of shape"),
                (into.float(), None, "dtype"),
                (into[:, 0].clone(), LAYERS, "part is 3"),
                (into[:, 0].clone(), "0", "part is '0'"),
            ):
                with pytest.raises(ArgumentError, match=text):
                    await handed.read(wrong, part)  # type: ignore[arg-type]
        with pytest.raises(LeaseError, match="the blocks were handed over to be read only"):
            await handed.write(into)
        await handed.give_back("still there")
        for use in (lambda: handed.read(into), handed.give_back):
            with pytest.raises(LeaseError, match="the lease was given back"):
                await use()

    between(owner, borrower)


# ------------------------------------------------------------------------------------------------- who waits for whom


def test_leases_are_given_in_the_order_of_the_calls() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool, order, free = mine.new_pool(numbers()), list[str](), asyncio.Event()

        async def take(name: str, count: int, seconds: float | None = None) -> None:
            async with pool.lease(count, timeout=seconds):
                order.append(name)
                await free.wait()

        first = asyncio.ensure_future(take("first", 4))
        await asyncio.sleep(0)
        large, small = (asyncio.ensure_future(take(name, n)) for name, n in (("large", 5), ("small", 2)))
        await asyncio.sleep(0.1)
        assert order == ["first"], "the small one has overtaken the large one"
        assert (pool.free, pool.leased) == (2, 4)
        large.cancel()
        await asyncio.sleep(0.1)
        assert order == ["first", "small"], "the small one still waits behind one that was cancelled"
        with pytest.raises(CommTimeoutError, match=r"1 blocks were not free within .*: 0 are free, 6 leased, 0 held"):
            await take("late", 1, 0.5)
        free.set()
        await asyncio.gather(first, small)
        assert (pool.free, pool.leased) == (BLOCKS, 0)

    between(owner, nothing)


def test_hand_overs_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SLOTS", 2)

    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers()).lease() as lease:
            assert await asyncio.gather(*(peer.hand_over(lease, n) for n in range(5))) == [0, 1, 2, 3, 4]

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        leases = mine.handed()
        for _ in range(5):
            assert len(peer._hand_overs._in) <= 2
            async with await anext(leases) as handed:
                await handed.give_back(handed.meta)

    between(owner, borrower)


def test_endpoint_that_closes_ends_those_who_wait() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with aiocomms.open_endpoint() as another:
            pool = another.new_pool(numbers())
            holds = pool.lease(BLOCKS)
            await holds.__aenter__()

            async def take() -> None:
                async with pool.lease():
                    pass

            async def hear() -> list[Any]:
                return [handed async for handed in another.handed()]

            waits, hears = asyncio.ensure_future(take()), asyncio.ensure_future(hear())
            await asyncio.sleep(0.1)
        with pytest.raises(CommClosedError, match="the endpoint is closed"):
            await waits
        assert await hears == []

    between(owner, nothing)


# --------------------------------------------------------------------------------------------------------- how it ends


def test_read_during_which_the_hand_over_has_ended_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner no longer vouches for the bytes that have arrived, although the connection still stands."""
    owners: list[aiocomms.Endpoint] = []
    vouched = HandedLease._vouched

    async def late(lease: aiocomms.HandedLease, *rest: Any) -> None:
        owners[0]._counter.ledger.wipe(lease._incoming.slot)
        await vouched(lease, *rest)

    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        owners.append(mine)
        async with mine.new_pool(numbers()).lease() as lease:
            with pytest.raises(LeaseError, match="has dropped the lease: LeaseError: read on"):
                await peer.hand_over(lease)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        lease = await anext(mine.handed())
        into = torch.zeros(lease.shape, dtype=torch.int64)
        await lease.read(into)
        monkeypatch.setattr(HandedLease, "_vouched", late)
        with pytest.raises(LeaseError, match="has ended the hand-over while they were read"):
            async with lease:
                await lease.read(into)
        assert not peer.closed

    between(owner, borrower)


def test_body_that_raises_tells_the_owner_why() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            with pytest.raises(LeaseError, match="has dropped the lease: ValueError: no room") as caught:
                await peer.hand_over(lease)
            assert caught.value.op == "hand_over"
        assert pool.free == BLOCKS
        assert not peer.closed

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        with pytest.raises(ValueError, match="no room"):
            async with await anext(mine.handed()):
                raise ValueError("no room")

    between(owner, borrower)


def test_cancelled_hand_over_waits_until_the_borrower_has_let_go() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            call = asyncio.ensure_future(peer.hand_over(lease, write=True))
            await asyncio.sleep(1)
            for _ in range(3):
                call.cancel()
                await asyncio.sleep(0)
                assert not call.done(), "it does not wait for the borrower's word"
            await asyncio.wait([call])
            assert call.cancelled()
            seen = lease[0].clone()
            await asyncio.sleep(1)
            assert lease[0].equal(seen)
        assert (pool.free, peer.closed) == (BLOCKS, False)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())

        async def write() -> None:
            for n in itertools.count():
                await handed.write(torch.full(handed.shape, n))

        with pytest.raises(LeaseError, match="the owner has taken the lease back: its owner was cancelled"):
            await write()
        with pytest.raises(LeaseError, match="the owner has taken the lease back"):
            await handed.give_back()

    between(owner, borrower)


def test_lease_that_ends_takes_its_hand_overs_back() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        calls: list[asyncio.Future[Any]] = []

        async def leave() -> None:
            async with pool.lease() as lease:
                calls.extend(asyncio.ensure_future(peer.hand_over(lease)) for _ in range(2))
                await asyncio.sleep(1)
                raise ZeroDivisionError("enough")

        with pytest.raises(ZeroDivisionError):
            await leave()
        assert pool.free == BLOCKS
        for call in calls:
            with pytest.raises(LeaseError, match="the lease was taken back: ZeroDivisionError: enough"):
                await call

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        with pytest.raises(LeaseError, match="the owner has taken the lease back: ZeroDivisionError: enough"):
            async with await anext(mine.handed()):
                await asyncio.sleep(2)  # The second one is not taken by then, and does not come any more.
        assert not mine._counter.came

    between(owner, borrower)


def test_task_that_is_cancelled_while_its_lease_begins_or_ends_loses_no_block() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())

        async def take() -> None:
            async with pool.lease(2):
                await asyncio.sleep(0)

        for turns in range(8):
            task = asyncio.ensure_future(take())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert pool.free == BLOCKS, f"blocks are lost by who is cancelled after {turns} turns of the loop"

    between(owner, nothing)


def test_lease_whose_task_is_cancelled_again_and_again_waits_for_the_borrower() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())

        async def lend() -> None:
            async with pool.lease(2) as lease:
                await peer.hand_over(lease)

        task = asyncio.ensure_future(lend())
        await asyncio.sleep(1)
        while not task.done():
            assert pool.leased == 2, "blocks are free that are read"
            task.cancel()
            await asyncio.sleep(0.01)
        assert (task.cancelled(), pool.free) == (True, BLOCKS)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())
        assert isinstance(await read_until_it_raises(handed), LeaseError)

    between(owner, borrower, latency=(0.5, 0.5))


@pytest.mark.parametrize("write", [False, True])
def test_lease_of_a_cancelled_read_or_write_keeps_its_blocks_until_no_data_moves(write: bool) -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            await peer.hand_over(lease, write=write, timeout=60)
            assert lease[0].equal(numbers(100)[1] if write else numbers()[0])

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        own, handed = mine.new_pool(numbers(100)[:2]), await anext(mine.handed())
        move = handed.write if write else handed.read
        await handed.read(torch.zeros(handed.shape, dtype=torch.int64))  # This opens the region.
        async with own.lease():
            with anyio.move_on_after(0.3) as scope:
                async with own.lease() as lease:
                    await move(lease.select([0]))
            assert scope.cancelled_caught
            assert (lease.ended, own.free, own.leased, own.held) == (True, 0, 1, 1)
            async with own.lease() as later:
                later[0].fill_(-1)
                await asyncio.sleep(5)
                assert later[0].eq(-1).all(), "the cancelled operation has changed the blocks of another lease"
            assert (own.free, own.held) == (1, 0)
        await handed.give_back()

    between(owner, borrower, latency=(0.5, 0.5))


def test_lease_of_a_read_that_its_lost_connection_ends_is_held_until_the_connection_is_closed() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers()).lease() as lease:
            with pytest.raises(CommError):
                await peer.hand_over(lease)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        own, handed = mine.new_pool(numbers()), await anext(mine.handed())
        await handed.read(torch.zeros(handed.shape, dtype=torch.int64))
        close = asyncio.Event()
        peer._hand_overs.part = close.wait  # type: ignore[assignment, method-assign]
        async with own.lease() as lease:
            read = asyncio.ensure_future(handed.read(lease))
            await asyncio.sleep(0.3)
            peer.abort("it is enough")
            with pytest.raises(CommError, match="it is enough"):
                await read
        assert own.held == 1
        close.set()
        async with own.lease(BLOCKS):
            pass

    between(owner, borrower, latency=(0.5, 0.5))


def test_block_that_is_cancelled_ends_when_its_operations_have_ended() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers(1)).lease() as lease:
            with pytest.raises(LeaseError, match="has dropped the lease"):
                await peer.hand_over(lease)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        into, opened = torch.zeros(1, LAYERS, WIDTH, dtype=torch.int64), asyncio.Event()

        async def use() -> None:
            async with await anext(mine.handed()) as handed:
                await handed.read(into.clone())
                opened.set()
                await handed.read(into)

        task = asyncio.ensure_future(use())
        await opened.wait()
        for _ in range(2):
            await asyncio.sleep(0.3)
            task.cancel()
        assert not into.any()
        await asyncio.wait([task])
        assert task.cancelled()
        assert into.all(), "the block has ended before the operation"

    between(owner, borrower, latency=(0.5, 0.5))


def test_hand_over_that_nobody_takes_ends_at_its_deadline_and_the_connection_stays() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers()).lease() as lease:
            began = clock.now()
            with pytest.raises(CommTimeoutError, match="has not given the lease back within 2 s"):
                await peer.hand_over(lease, timeout=2)
            assert 2 <= clock.now() - began < 2.1
        assert not peer.closed

    between(owner, nothing)


def test_answer_that_comes_while_the_lease_is_taken_back_counts() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with mine.new_pool(numbers()).lease() as lease:
            assert await peer.hand_over(lease, timeout=1) == "just in time"

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())
        await asyncio.sleep(0.2)
        await handed.give_back("just in time")  # The answer arrives after 1.2 s, and the recall after 1.5 s.

    between(owner, borrower, latency=(0.5, 0.5))


def test_peer_that_does_not_let_go_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handovers.Incoming, "end", lambda *args: None)

    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            began = clock.now()
            with pytest.raises(CommTimeoutError, match="has not given the lease back within 1 s"):
                await peer.hand_over(lease, timeout=1)
            assert 6 <= clock.now() - began < 8
        assert isinstance(await peer.lost(), CommTimeoutError)
        assert (pool.free, pool.held) == (BLOCKS, 0)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())
        assert "did not release a lease within 5 s" in str(await peer.lost())
        with pytest.raises(CommTimeoutError, match="did not release a lease"):
            await handed.read(torch.zeros(handed.shape, dtype=torch.int64))

    between(owner, borrower)


def test_connection_that_its_owner_closes_takes_everything_back_first() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            call = asyncio.ensure_future(peer.hand_over(lease))
            await asyncio.sleep(1)
            await peer.aclose()
            with pytest.raises(LeaseError, match="the lease was taken back: the connection was closed"):
                await call
            with pytest.raises(CommClosedError):
                await peer.hand_over(lease)
        assert pool.free == BLOCKS

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        handed = await anext(mine.handed())
        with pytest.raises(CommClosedError):
            await peer.lost()
        with pytest.raises(LeaseError, match="the owner has taken the lease back"):
            await handed.give_back()

    between(owner, borrower)


def test_closed_endpoint_keeps_no_pool() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> Any:
        pool = mine.new_pool(numbers())
        async with pool.lease() as lease:
            await peer.hand_over(lease)
        return weakref.ref(pool)

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        async with await anext(mine.handed()) as handed:
            await handed.read(torch.zeros(handed.shape, dtype=torch.int64))

    gc.disable()
    try:
        assert between(owner, borrower)[0]() is None, "only the garbage collector frees it"
    finally:
        gc.enable()


def test_close_that_is_cancelled_while_it_waits_for_the_borrower_releases_everything() -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        waits, parts = asyncio.Event(), asyncio.Event()

        async def part() -> None:
            waits.set()
            await parts.wait()

        peer._hand_overs.part = part  # type: ignore[method-assign]
        close = asyncio.ensure_future(peer.aclose())
        await waits.wait()
        close.cancel()
        await asyncio.wait([close])
        assert (close.cancelled(), peer._comm._core.over.is_set, peer._released.is_set) == (True, True, True)

    between(owner, nothing)


# ------------------------------------------------------------------------------------------------------------- nonsense


@pytest.mark.parametrize(
    "word",
    [
        handovers.Shelf(1, b"", b"", ()),
        handovers.Lend(1, 1, 1, False, b"\x92\xc4\x00\xc0"),
        handovers.Piece(b"x"),
        handovers.GiveBack(1, b"", 10**6),
        handovers.Lend(1, 1, 1, False, b"nonsense"),
    ],
    ids=lambda word: type(word).__name__,
)
def test_words_that_make_no_sense_end_the_connection_alone(word: Any) -> None:
    async def owner(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        peer._attachments.say(handovers.Shelf(1, b"", b"", (2, 3)))
        peer._attachments.say(word)
        await peer.lost()

    async def borrower(mine: aiocomms.Endpoint, peer: aiocomms.Peer) -> None:
        assert isinstance(await peer.lost(), ProtocolError)
        assert not mine.closed

    between(owner, borrower)
