"""A group beside its operations: ranges of the profiler, splits, coalescing, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import group
from processes import HANGS, Rank, Run, in_turn
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile

import aiocomms.integrations.torch_backend
from aiocomms import blocking
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.integrations.torch_backend import Group
from aiocomms.integrations.torch_backend.completer import Completer

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real]
over_ucx = pytest.mark.parametrize("transport", ["ucx"])


def calls(rank: int) -> None:
    """Call one operation of each kind, each with its own number of elements."""
    peer = 1 - rank
    dist.all_reduce(torch.ones(2, 1).t())
    dist.all_gather_single(torch.zeros(6), torch.ones(3))
    dist.all_to_all_single(torch.zeros(4), torch.ones(4))
    dist.barrier()
    works = [dist.isend(torch.ones(5), peer), dist.irecv(torch.ones(5), peer), dist.isend(torch.ones(6), peer)]
    dist.recv(torch.ones(6))
    for work in works:
        work.wait()


SHOWN = {
    "aiocomms:all_reduce": [[[1, 2]]],
    "aiocomms:all_gather_single": [[[3]]],
    "aiocomms:all_to_all_single": [[[4]]],
    "aiocomms:barrier": [[]],
    "aiocomms:send": [[[5]], [[6]]],
    "aiocomms:recv": [[[5]]],
    "aiocomms:recvAnySource": [[[6]]],
}


def shown(events: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith("aiocomms:"):
            assert event.is_async == (event.name in SHOWN)  # The range ends on another thread, as in torch.
            found.setdefault(event.name, []).append(event.input_shapes)
    return found


async def profiled(place: Rank) -> None:
    """Each of torch's profilers shows a range of each operation, which has ended by the time that the work has."""
    with group(place):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as kineto:
            calls(place.rank)
        assert shown(kineto.events()) == SHOWN
        with autograd_profile(record_shapes=True) as legacy:
            calls(place.rank)
            with pytest.raises(ArgumentError):
                dist.broadcast(torch.eye(2).to_sparse(), 0)
        assert shown(legacy.function_events) == SHOWN | {"aiocomms:broadcast": [[[2, 2]]]}  # The broadcast was refused.
        calls(place.rank)


async def monitored(place: Rank) -> None:
    """A monitored barrier names one missing rank or all, and the group and its barriers still work."""
    with group(place) as world:
        world.monitored_barrier(timedelta(seconds=60))
        if place.rank == 0:
            for all_ranks, words in ((False, "Rank 1 failed"), (True, "Ranks 1, 2 failed")):
                with pytest.raises(dist.DistBackendError, match=f"{words} to pass monitoredBarrier"):
                    world.monitored_barrier(timedelta(seconds=0.1), all_ranks)
            place.tell("failed")
        else:
            await asyncio.to_thread(place.told, "failed")
            for _ in range(2):
                with pytest.raises(dist.DistBackendError, match=rf"Rank {place.rank} successfully .* from rank 0"):
                    world.monitored_barrier(timedelta(seconds=0.1))
        world.monitored_barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 3.0


async def split(place: Rank) -> None:
    """The group splits as torch 2.15 calls it for the CPU; torch 2.13 refuses before that call."""
    with group(place) as world:
        assert world.supports_splitting
        mine = world.split_group([0, 2], timedelta(seconds=50), None, "some", "theirs")
        if place.rank == 1:
            assert mine is None
        else:
            assert (mine.rank(), mine.size()) == (place.rank // 2, 2)
            assert (mine.group_name, mine.group_desc, mine.comm.timeout) == ("some", "theirs", 50.0)
            tensor = torch.ones(1)
            mine.allreduce([tensor]).wait()
            assert tensor.item() == 2.0
            mine.shutdown()
        with pytest.raises(ArgumentError, match="pg_options"):
            world.split_group([0, 1, 2], opts="ucx")
        reversed_ranks = world.split_group([2, 1, 0], group_name="turned")
        assert reversed_ranks.rank() == 2 - place.rank
        reversed_ranks.shutdown()


async def groups(place: Rank) -> None:
    """Groups of some ranks may have a transport of their own."""
    with group(place) as world:
        assert dist.get_backend() == "aiocomms"
        assert isinstance(world, aiocomms.integrations.torch_backend.Group)
        pair, alone = dist.new_group([0, 2], pg_options=place.transport), dist.new_group([1])
        tensor = torch.ones(1)
        if place.rank == 1:
            dist.all_reduce(tensor, group=alone)
        else:
            dist.all_reduce(tensor, group=pair)
        assert tensor.item() == (1.0 if place.rank == 1 else 2.0)
        dist.all_reduce(tensor)
        assert tensor.item() == 5.0


def test_three_ranks(ranks: Run) -> None:
    ranks(3, in_turn, monitored, split, groups)


async def coalesced(place: Rank) -> None:
    """Torch coalesces collectives in two ways: torch keeps them for one call, or the group does."""
    with group(place) as world:
        for device in (None, torch.device("cpu")):
            tensors = [torch.full((n,), 1.0 + place.rank) for n in (2, 3)]
            outs, halves = [torch.zeros(4), torch.zeros(6)], [torch.zeros(1), torch.zeros(2)]
            with dist._coalescing_manager(device=device):
                for tensor in tensors:
                    dist.all_reduce(tensor, async_op=device is not None)
            assert [tensor.tolist() for tensor in tensors] == [[3.0] * 2, [3.0] * 3]
            with dist._coalescing_manager(world, device, async_ops=True) as gathers:
                for out, tensor in zip(outs, tensors, strict=True):
                    dist.all_gather_single(out, tensor + place.rank, async_op=True)
            gathers.wait()
            assert [out.tolist() for out in outs] == [[3.0] * 2 + [4.0] * 2, [3.0] * 3 + [4.0] * 3]
            with dist._coalescing_manager(world, device, async_ops=True) as scatters:
                for half, width in zip(halves, (1, 2), strict=True):
                    dist.reduce_scatter_single(half, torch.arange(2.0 * width), async_op=True)
            scatters.wait()
            assert [half.tolist() for half in halves] == [[2.0 * place.rank], [4.0 * place.rank, 4.0 * place.rank + 2]]


async def by_default(place: Rank) -> None:
    """The group's own methods have torch's defaults: the sum, and rank 0."""
    with group(place) as world:
        ones = [torch.ones(2)]
        world.allreduce(ones).wait()
        world.broadcast([torch.zeros(1)]).wait()
        world.reduce(ones).wait()
        assert ones[0].tolist() == [4.0 if place.rank == 0 else 2.0] * 2
        world.reduce_scatter(ones, [[torch.ones(2), torch.ones(2)]]).wait()
        assert ones[0].tolist() == [2.0] * 2


async def is_destroyed(place: Rank) -> None:
    """The end of a group waits for callbacks of futures, and for values copied back into noncontiguous tensors."""
    with group(place):
        for turn in range(5):
            some, tensor = dist.new_group(), torch.ones(400, 300).t()
            ending, ended = threading.Event(), threading.Event()
            if place.rank == 1:
                await asyncio.to_thread(place.told, f"called {turn}")
            works = [dist.all_reduce(each, group=some, async_op=True) for each in (torch.ones(1), tensor)]
            if place.rank == 0:
                works[0].get_future().then(lambda _, ending=ending, ended=ended: (ending.wait(), ended.set()))
                drain = some.completer.drain
                some.completer.drain = lambda ending=ending, drain=drain: (ending.set(), drain())
                place.tell(f"called {turn}")
            await asyncio.to_thread(dist.destroy_process_group, some)
            assert works[1].exception() is None
            assert bool((tensor == 2).all())
            assert ended.is_set() == (place.rank == 0)


async def is_aborted(place: Rank) -> None:
    """An abort waits for no callback."""
    with group(place):
        some = dist.new_group()
        if place.rank == 0:
            may_end, ended = threading.Event(), threading.Event()
            work = dist.all_reduce(torch.ones(1), group=some, async_op=True)
            work.get_future().add_done_callback(lambda _: (may_end.wait(), ended.set()))
            some.abort()
            assert not ended.is_set()
            may_end.set()
            await asyncio.to_thread(ended.wait)
            place.tell("aborted")
        else:
            await asyncio.to_thread(place.told, "aborted")
            with pytest.raises(dist.DistBackendError, match="aborted"):
                dist.all_reduce(torch.ones(1), group=some)


async def is_destroyed_by_a_callback(place: Rank) -> None:
    with group(place):
        some = dist.new_group()
        if place.rank == 1:
            await asyncio.to_thread(place.told, "asked")
        future = dist.all_reduce(torch.ones(1), group=some, async_op=True).get_future()
        ended = future.then(lambda _: dist.destroy_process_group(some))
        place.tell("asked")
        await asyncio.to_thread(ended.wait)
        with pytest.raises(dist.DistBackendError, match="closed"):
            some.allreduce([torch.ones(1)])


@pytest.mark.parametrize(
    "body", [profiled, coalesced, by_default, is_destroyed, is_aborted, is_destroyed_by_a_callback]
)
@over_ucx
def test_two_ranks(ranks: Run, body: Callable[[Rank], Awaitable[None]]) -> None:
    ranks(2, body)


@pytest.mark.deterministic
def test_a_timeout_is_a_number_or_a_timedelta() -> None:
    with blocking.new_comm("local", rank=0, size=1) as comm:
        group = Group(comm, dist.HashStore())
        for timeout in (5, 5.0, timedelta(seconds=5)):
            comm.set_timeout(60)
            group.set_timeout(timeout)
            assert comm.timeout == 5.0
            group.monitored_barrier(timeout)
            part = group.split_group([0], timeout)
            assert part is not None
            assert part.comm.timeout == 5.0
            part.shutdown()
        wrong: Any = "soon"
        for call in (group.set_timeout, group.monitored_barrier, lambda timeout: group.split_group([0], timeout)):
            with pytest.raises(ArgumentTypeError, match="timeout is 'soon'"):
                call(wrong)
        with pytest.raises(dist.DistBackendError, match="timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))
        group.shutdown()


@pytest.mark.deterministic
def test_draining_waits_for_what_was_submitted() -> None:
    """A drain waits for each submitted call, except a call that itself drains."""
    completer, order = Completer(), []
    inside = threading.Event()

    def drains() -> None:
        inside.set()
        completer.drain()
        order.append("drained within")

    completer.submit(drains)
    inside.wait()
    completer.drain()
    order.append("drained")
    assert order == ["drained within", "drained"]
    completer.close()


@pytest.mark.deterministic
def test_torch_finds_the_backend_by_its_entry_point() -> None:
    """Torch 2.14 and later loads the entry point of a backend whose name is not registered."""
    (found,) = entry_points(group="torch.distributed.backends", name=aiocomms.integrations.torch_backend.BACKEND)
    register = found.load()
    register()
    register()
    assert "AIOCOMMS" in dist.Backend._plugins
