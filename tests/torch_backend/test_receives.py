"""Receives from any source: the order in which they match, and their end without a message."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from concurrency import in_threads
from places import group
from processes import HANGS, KILLED, Rank, Run, in_turn
from torch.distributed import HashStore

from aiocomms import blocking
from aiocomms.errors import ArgumentError, CommClosedError, MessageTruncatedError
from aiocomms.integrations.torch_backend.any_source import Receives

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real]
over_ucx = pytest.mark.parametrize("transport", ["ucx"])
TAG = 5


def received(source: int | None, tag: int = TAG) -> tuple[int, float]:
    """Receive one number, and return its source and the number."""
    tensor = torch.zeros(1)
    return dist.recv(tensor, source, tag=tag), tensor.item()


@pytest.mark.deterministic
def test_a_communicator_that_is_closed_as_a_receive_comes():
    """A receive that is posted on a communicator as it closes ends at once, with CommClosedError."""
    store = HashStore()
    one, two = in_threads(
        *(lambda rank=rank: blocking.new_comm("local", store=store, rank=rank, size=2) for rank in range(2))
    )
    with two, one:
        put = one._door.put

        def late(call: Callable[..., object], *args: object) -> None:
            one._door.put = put
            one.close()
            put(call, *args)

        one._door.put = late
        receive = Receives(one).from_any(torch.zeros(1), TAG)
        assert receive.done()
        with pytest.raises(CommClosedError):
            receive.wait()


async def in_order(place: Rank) -> None:
    """Receives with and without a source match in the order of the calls, beside those with other tags."""
    with group(place):
        if place.rank == 1:
            await asyncio.to_thread(place.told, "posted")
            for value in (10.0, 11.0, 12.0, 13.0):
                dist.send(torch.tensor([value]), 0, tag=TAG)
            dist.send(torch.tensor([20.0]), 0, tag=TAG + 1)
        elif place.rank == 0:
            tensors = [torch.zeros(1) for _ in range(4)]
            works = [dist.irecv(t, s, tag=TAG) for t, s in zip(tensors, (None, 1, None, 1), strict=True)]
            place.tell("posted")
            assert received(None, TAG + 1) == (1, 20.0)
            assert [tensor.item() for tensor in tensors if [work.wait() for work in works]] == [10.0, 11.0, 12.0, 13.0]
            assert [work._source_rank() for work in works] == [1, 1, 1, 1]
        dist.barrier()
        alone = dist.new_group([place.rank], use_local_synchronization=True)
        with pytest.raises(ArgumentError, match="no other rank"):
            dist.irecv(torch.zeros(1), group=alone)


async def keeps(place: Rank) -> None:
    """Messages of both ranks arrive before the first receive: none is lost, or overtakes another of its rank."""
    with group(place):
        if place.rank:
            for value in range(6):
                dist.send(torch.tensor([float(value)]), 0, tag=TAG)
        dist.barrier()
        if place.rank == 0:
            seen: dict[int, list[float]] = {1: [], 2: []}
            for source in (None, 1, 2, None, 2, 1, None, 1, None, None, None, None):
                rank, value = received(source)
                seen[rank].append(value)
                assert source in (None, rank)
            assert seen == {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 4, 5]}
            assert not dist.group.WORLD.comms.cpu.receives._waiting
        dist.barrier()


async def from_threads(place: Rank) -> None:
    """Two threads receive at once, from any rank and from rank 1: each sees a rank's messages in their order."""
    count = 100
    with group(place):
        if place.rank:
            for value in range(2 * count if place.rank == 1 else count):  # There are enough for both threads.
                dist.send(torch.tensor([float(value)]), 0, tag=TAG)
        else:
            seen: list[list[tuple[int, float]]] = [[], []]

            def receives(into: list[tuple[int, float]], source: int | None) -> None:
                into.extend(received(source) for _ in range(count))

            threads = [threading.Thread(target=receives, args=each) for each in zip(seen, (None, 1), strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            seen.append([received(None) for _ in range(count)])
            for rank in (1, 2):
                of_each = [[value for source, value in part if source == rank] for part in seen]
                assert all(values == sorted(values) for values in of_each)
                assert sorted(value for values in of_each for value in values) == list(
                    range(2 * count if rank == 1 else count)
                )
        dist.barrier()


async def without(place: Rank) -> None:
    """A receive from any source ignores a rank that has left; a receive that times out leaves the group usable."""
    with group(place) as world:
        if place.rank == 0:
            world.set_timeout(timedelta(seconds=0.1))
            with pytest.raises(dist.DistBackendError, match="Timed out"):
                received(None)
            world.set_timeout(timedelta(seconds=60))
            place.tell("over")
            await asyncio.to_thread(place.told, "left")
            assert received(None) == (1, 3.0)
            with pytest.raises(dist.DistBackendError) as raised:
                received(None, TAG + 1)
            assert isinstance(raised.value.__cause__, MessageTruncatedError)
            place.tell("all over")
        elif place.rank == 1:
            await asyncio.to_thread(place.told, "left")
            dist.send(torch.tensor([3.0]), 0, tag=TAG)
            dist.send(torch.ones(2), 0, tag=TAG + 1)
            await asyncio.to_thread(place.told, "all over")
        else:
            await asyncio.to_thread(place.told, "over")
    if place.rank == 2:
        place.tell("left")


async def left_behind(place: Rank) -> None:
    """The end or an abort of a group ends receives under way, and receives queued behind them."""
    with group(place):
        for end in (dist.destroy_process_group, lambda some: some.abort()):
            some = dist.new_group()
            works = [dist.irecv(torch.zeros(2, 2).t(), source, some) for source in (None, (place.rank + 1) % 3, None)]
            futures = [work.get_future() for work in works]
            dist.barrier()
            end(some)
            for work, future in zip(works, futures, strict=True):
                with pytest.raises(RuntimeError):
                    await asyncio.to_thread(future.wait)
                assert isinstance(work.exception(), dist.DistBackendError)
            dist.barrier()


@pytest.mark.parametrize("body", [in_order, keeps, from_threads, without, left_behind])
def test_from_any_source(ranks: Run, body: Callable[[Rank], Any]) -> None:
    ranks(3, body)


async def interrupted(place: Rank) -> None:
    """A wait that Ctrl-C ends leaves no receive posted, for any layout of the tensor, and any source."""
    with group(place):
        peer = 1 - place.rank
        for number, (tensor, source) in enumerate([(torch.zeros(2, 2).t(), peer), (torch.zeros(4), None)]):
            if place.rank == 0:
                work = dist.irecv(tensor, source)
                await interrupts(work, lambda work=work: bells(work._parts[0]))
                with pytest.raises(dist.DistBackendError, match="withdrawn"):
                    work.wait()
                place.tell(f"withdrawn {number}")
                later = torch.zeros(4)
                assert dist.recv(later, source) == 1
                assert later.tolist() == [7.0] * 4
                assert not bool(tensor.any())
            else:
                await asyncio.to_thread(place.told, f"withdrawn {number}")
                dist.send(torch.full((4,), 7.0), 0)


def bells(part: Any) -> int:
    """Return the number of threads that wait for a part."""
    own = sum(isinstance(bell, type(threading.Lock())) for bell in getattr(part, "_bells", []))
    return own + sum(bells(each) for each in getattr(part, "_parts", []))


async def interrupts(work: Any, waiting: Callable[[], int]) -> None:
    """Raise KeyboardInterrupt in a thread that waits, as Ctrl-C does in the main thread."""
    threads: list[int] = []

    def wait() -> None:
        threads.append(threading.get_ident())
        with pytest.raises(KeyboardInterrupt):
            work.wait()

    task = asyncio.ensure_future(asyncio.to_thread(wait))
    while not waiting():  # noqa: ASYNC110 - no event reports a waiting thread
        await asyncio.sleep(0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[0]), ctypes.py_object(KeyboardInterrupt))
    await task


async def interrupted_beside_another(place: Rank) -> None:
    """A work continues after Ctrl-C in a waiting thread while a task still awaits it."""
    with group(place):
        tensor = torch.zeros(2, 2).t()
        if place.rank == 0:
            work = dist.irecv(tensor, 1)

            async def waits() -> None:
                await work

            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0)
            await interrupts(work, lambda: bells(work._parts[0]))
            place.tell("interrupted")
            await task
            assert bool((tensor == 7).all())
        else:
            await asyncio.to_thread(place.told, "interrupted")
            dist.send(torch.full((4,), 7.0), 0)


async def dies(place: Rank) -> None:
    """A death ends a receive from any source."""
    with group(place):
        dist.barrier()
        if place.rank == 1:
            await place.die()
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            received(None)


@pytest.mark.fault(1, transport="ucx")
@over_ucx
def test_a_receive_is_ended_by_an_interrupt_or_a_death(ranks: Run) -> None:
    assert ranks(2, in_turn, interrupted, interrupted_beside_another, dies) == [None, KILLED]
