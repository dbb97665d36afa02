"""The operations of torch.distributed over the backend, and the ways to wait for them."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
import trio
import uvloop
from forms import outcomes
from places import group
from processes import HANGS, KILLED, Rank, Run, in_turn
from torch.testing._internal.two_tensor import TwoTensor

import aiocomms.integrations.torch_backend
from aiocomms.errors import ArgumentError, CommError, UnsupportedOperation

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real]
over_ucx = pytest.mark.parametrize("transport", ["ucx"])


async def reduces(place: Rank) -> None:
    found = []
    for backend in ("gloo", aiocomms.integrations.torch_backend.BACKEND):
        with group(place, backend) as world:
            found.append(outcomes(world, place.rank))
    theirs, ours = found
    assert {call: (ours[call], it) for call, it in theirs.items() if ours[call] != it} == {}
    with group(place):
        base = torch.arange(12.0).view(3, 4) + place.rank
        total = sum(torch.arange(12.0).view(3, 4) + rank for rank in range(place.size))
        for tensor in (base.clone(), base.t().clone().t(), base.clone().requires_grad_()):
            dist.all_reduce(tensor)
            assert torch.equal(tensor.detach(), total)
        for op, expected in ((dist.ReduceOp.MAX, base - place.rank + place.size - 1), (dist.ReduceOp.AVG, total / 2)):
            tensor = base.clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected)
        bits = torch.tensor([place.rank == 0, True, False])
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert bits.tolist() == [True, True, False]
        number = torch.tensor([1 + 2j])
        dist.all_reduce(number)
        assert number.tolist() == [2 + 4j]
        negated = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
        dist.all_reduce(negated)
        assert negated.tolist() == [-4.0, 2.0]
        scaled = base.clone()
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor(0.5)))  # torch's only way to make one
        assert torch.equal(scaled, total / 2)
        both = TwoTensor(base.clone(), base * 10)
        dist.all_reduce(both)
        assert torch.equal(both.a, total)
        assert torch.equal(both.b, total * 10)
        rooted = base.clone()
        dist.reduce(rooted, 1)
        assert torch.equal(rooted, total if place.rank == 1 else base)
        several = [torch.ones(2), torch.ones(3)]
        dist.all_reduce_coalesced(several)
        assert [each.tolist() for each in several] == [[2.0] * 2, [2.0] * 3]
        out = torch.empty(2, 2).t()
        dist.reduce_scatter(out, [torch.full((2, 2), float(rank)) for rank in range(2)])
        assert torch.equal(out, torch.full((2, 2), 2.0 * place.rank))
        dist.reduce_scatter_single(out, torch.ones(4, 2))
        assert torch.equal(out, torch.full((2, 2), 2.0))


async def moves(place: Rank) -> None:
    rank = place.rank
    with group(place):
        tensor = torch.full((2, 3), float(rank)).t()
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, torch.ones(3, 2))
        mine = torch.full((2,), float(rank))
        outs = [torch.zeros(4)[::2] for _ in range(2)]
        dist.all_gather(outs, mine)
        assert [out.tolist() for out in outs] == [[0.0, 0.0], [1.0, 1.0]]
        uneven = [torch.zeros(1), torch.zeros(2)]
        dist.all_gather(uneven, torch.ones(rank + 1))
        assert [len(out) for out in uneven] == [1, 2]
        whole = torch.zeros(2, 2)
        dist.all_gather_single(whole, mine)
        assert whole.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        gathered = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
        dist.gather(mine, gathered, 0)
        assert gathered is None or [out.tolist() for out in gathered] == [[0.0, 0.0], [1.0, 1.0]]
        dist.scatter(mine, [torch.full((2,), 5.0), torch.full((2,), 6.0)] if rank == 1 else None, 1)
        assert mine.tolist() == [5.0 + rank] * 2
        out = torch.zeros(4)
        dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank)
        assert out.tolist() == [0.0 + 2 * rank, 1.0 + 2 * rank, 10.0 + 2 * rank, 11.0 + 2 * rank]
        sizes = [1, 2] if rank == 0 else [2, 3]
        out = torch.zeros(sum(sizes))
        dist.all_to_all_single(out, torch.full((3 if rank == 0 else 5,), float(rank)), sizes, sizes)
        assert out.tolist() == [0.0] * sizes[0] + [1.0] * sizes[1]
        out = torch.zeros(2, 2) if rank == 0 else torch.zeros(4, 2)[::2]
        given = torch.arange(4.0).view(2, 2) + 10 * rank
        dist.all_to_all_single(out, given, *(([1, 1], [1, 1]) if rank else ()))  # Rank 0 leaves the sizes out.
        assert out.tolist() == [[2.0 * rank, 2.0 * rank + 1], [10.0 + 2 * rank, 11.0 + 2 * rank]]
        shaped = torch.ones(2, 3) if rank == 0 else torch.zeros(6)
        dist.broadcast(shaped, 0)
        assert bool(shaped.all())
        outs = [torch.zeros(1), torch.zeros(1)]
        dist.all_to_all(outs, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        assert [out.item() for out in outs] == [float(rank), 10.0 + rank]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        words = ["hear", 1] if rank == 0 else [None, None]
        dist.broadcast_object_list(words)
        assert words == ["hear", 1]
        dist.barrier()


async def messages(place: Rank) -> None:
    peer = 1 - place.rank
    with group(place):
        mine, theirs = torch.full((2, 2), float(place.rank)).t(), torch.zeros(4)[::2]
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, torch.zeros(2, 2).t(), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(ops[1].tensor, torch.full((2, 2), float(peer)))
        if place.rank == 0:
            dist.send(torch.tensor([7.0, 8.0]), 1, tag=3)
            dist.send(torch.tensor([9.0]), 1, tag=4)
        else:
            late = torch.zeros(1)
            dist.recv(late, 0, tag=4)
            work = dist.irecv(theirs, 0, tag=3)
            assert work is not None
            work.wait()
            assert (late.item(), theirs.tolist()) == (9.0, [7.0, 8.0])


@pytest.mark.fault(114)
@pytest.mark.parametrize("body", [reduces, moves, messages])
def test_operations_are_those_of_torch(ranks: Run, body: Callable[[Rank], Awaitable[None]]) -> None:
    ranks(2, body)


async def awaited(place: Rank, comes: str) -> None:
    """The first work completes within its call or first await; the second completes after the other rank calls."""
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    (out,) = await work
    assert out is tensor
    assert out.tolist() == [2.0] * 2
    if place.rank == 0:
        pending = dist.all_reduce(tensor, async_op=True)
        beats = []

        async def heart() -> None:
            while not pending.is_completed():
                beats.append(1)
                if len(beats) == 3:
                    place.tell(comes)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heart)
            await pending
        assert len(beats) >= 3
    else:
        await anyio.to_thread.run_sync(place.told, comes)
        await dist.all_reduce(tensor, async_op=True)
    assert tensor.tolist() == [4.0] * 2
    left = dist.all_reduce(tensor, async_op=True)
    with anyio.move_on_after(0):
        await left
    left.wait()
    assert tensor.tolist() == [8.0] * 2


async def on_each_loop(place: Rank) -> None:
    with group(place):
        await awaited(place, "asyncio")

        def elsewhere() -> None:
            uvloop.run(awaited(place, "uvloop"))
            trio.run(awaited, place, "trio")

        await asyncio.to_thread(elsewhere)


@pytest.mark.search
def test_works_are_awaited_on_each_loop(ranks: Run) -> None:
    ranks(2, on_each_loop)


def one_more(seen: threading.Event, future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    seen.set()
    return future.value()[0] + 1


async def futures(place: Rank) -> None:
    """Futures complete without a wait for their work."""
    with group(place):
        tensor = torch.ones(2)
        for late in (False, True):
            if place.rank == 1 and late:
                await asyncio.to_thread(place.told, "asked")
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            future, seen = work.get_future(), threading.Event()
            assert work.get_future() is future
            chained = future.then(functools.partial(one_more, seen))
            if place.rank == 0 and late:
                assert not future.done()
                place.tell("asked")
            assert await asyncio.to_thread(chained.wait) is not None
            assert seen.is_set()
            assert chained.value().tolist() == [5.0 if late else 3.0] * 2
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0] is tensor


def reduces_once_more(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    """Wait for a future within a callback of another one, as the hooks of powerSGD do."""
    tensor = future.value()[0].clone()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future().wait()[0]


async def nested(place: Rank) -> None:
    """A callback may wait for another future."""
    with group(place):
        if place.rank == 1:
            await asyncio.to_thread(place.told, "asked")
        first = dist.all_reduce(torch.ones(2), async_op=True)
        assert first is not None
        chained = first.get_future().then(reduces_once_more)
        place.tell("asked")
        assert (await asyncio.to_thread(chained.wait)).tolist() == [4.0, 4.0]


async def puts_back(place: Rank) -> None:
    """A work of a noncontiguous tensor is done once the values are in it, for each way and number of waits."""
    with group(place):
        for turn in range(20):
            with torch.inference_mode(turn % 2 == 0):
                tensor = torch.ones(300, 200).t()
            if place.rank == 1:
                await asyncio.to_thread(place.told, f"called {turn}")
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            place.tell(f"called {turn}")
            if turn % 4 == 0:
                while not work.is_completed():  # noqa: ASYNC110 - this poll is what is tested
                    await asyncio.sleep(0)
            elif turn % 4 == 1:
                future = work.get_future()
                await asyncio.to_thread(work.wait)
                assert bool((future.wait()[0] == 2).all())
            else:
                await asyncio.gather(asyncio.to_thread(work.wait), asyncio.to_thread(work.wait))
            assert bool((tensor == 2).all())
        tensor.fill_(7.0)
        assert work.is_success()
        work.wait()
        assert bool((tensor == 7).all())  # A later write stays.


async def dies(place: Rank) -> None:
    with group(place) as world:
        dist.barrier()
        if place.rank == 1:
            await place.die()
        tensor = torch.ones(2)
        with pytest.raises(dist.DistBackendError, match="rank 1") as raised:
            dist.all_reduce(tensor)
        assert isinstance(raised.value.__cause__, CommError)  # The cause is the death, or a later refusal.
        assert raised.value.__cause__.peer == 1
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            await dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.new_group([0, 1])
        assert world.comm.aborted


@pytest.mark.fault(1, transport="ucx")
@over_ucx
def test_a_death_is_an_error_that_names_the_rank(ranks: Run) -> None:
    assert ranks(2, dies) == [None, KILLED]


async def waits_at_a_barrier(place: Rank) -> None:
    """A barrier has a deadline of its own."""
    with group(place):
        dist.barrier()
        if place.rank == 1:
            await asyncio.to_thread(place.told, "over")
        else:
            with pytest.raises(dist.DistBackendError, match="rank"):
                dist.barrier(timeout=timedelta(seconds=0.2))
            place.tell("over")


async def aborts(place: Rank) -> None:
    """An abort reaches every rank."""
    with group(place) as world:
        dist.barrier()
        if place.rank == 0:
            await asyncio.to_thread(place.told, "past the barrier")
            world.abort()
        else:
            place.tell("past the barrier")
            with pytest.raises(dist.DistBackendError, match="process group was aborted"):
                dist.all_reduce(torch.ones(2))


async def wrong(place: Rank) -> None:
    """Each mistake raises an error that names it, and the group still works."""
    with group(place):
        with pytest.raises(UnsupportedOperation, match="avg"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
        with pytest.raises(UnsupportedOperation, match="sparse"):
            dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
        with pytest.raises(ArgumentError, match="sparse"):
            dist.broadcast(torch.eye(2).to_sparse(), 0)
        with pytest.raises(ArgumentError, match="splits"):
            dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2))
        with pytest.raises(ArgumentError, match="share memory"):
            dist.all_reduce(torch.ones(1).expand(3))
        if place.rank == 0:
            late = dist.irecv(torch.ones(1), 1)
            assert late is not None
            with pytest.raises(dist.DistBackendError, match="it goes on"):
                late.wait(timedelta(seconds=0.01))
            place.tell("waited")
        else:
            await asyncio.to_thread(place.told, "waited")
            dist.send(torch.ones(1), 0)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 2
    with pytest.raises(CommError, match="no_such"):
        dist.init_process_group("aiocomms", store=dist.HashStore(), rank=0, world_size=1, pg_options="no_such")


@over_ucx
def test_works_and_errors_are_those_of_torch(ranks: Run) -> None:
    ranks(2, in_turn, futures, nested, puts_back, wrong, waits_at_a_barrier, aborts)
