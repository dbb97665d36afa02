"""Hundreds of requests at once, each with a lane: tasks that overtake each other, give up waiting, and fail."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from fake_cuda import FakeCuda
from fake_nccl import FakeNccl, FakeNcclTransport
from processes import HANGS, Rank, Run

from aiocomms import Lane
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import LaneAbortedError
from aiocomms.lowering import lane_messages as lanes
from aiocomms.progress.inflight import LaneWork
from aiocomms.testing import local_world

pytestmark = [pytest.mark.real, pytest.mark.search]

REQUESTS, STEPS, SIZES = 200, 8, (2, 2, 2, 300, 20_011)


class GivesUpError(Exception):
    """Raised by a request's task."""


async def request(comm: Communicator, seed: int, key: int, mix: random.Random, fails_before: int | None) -> int:
    """Eight collectives of one lane, which the request's layers know nothing of; how many results were looked at."""
    looked_at = 0
    with comm.lane(name(seed, key)):
        for step in range(STEPS + 1):
            if step == fails_before:
                raise GivesUpError(key)
            if step == STEPS:
                break
            for _ in range(mix.randrange(4)):
                await asyncio.sleep(0)
            count = SIZES[(key + step) % len(SIZES)]
            work = comm.all_reduce(torch.full((count,), float(1000 * step + key + comm.rank)))
            if mix.random() < 0.1:
                waiting = asyncio.ensure_future(work)
                await asyncio.sleep(0)
                waiting.cancel()
            elif mix.random() < 0.1:
                continue  # no task awaits this work
            else:
                want = comm.size * (1000 * step + key) + sum(range(comm.size))
                assert torch.equal(await work, torch.full((count,), float(want))), (key, step)
                looked_at += 1
    return looked_at


def name(seed: int, key: int) -> str:
    """A lane that fails is never used again."""
    return f"request {key} of {seed}"


async def serve(comm: Communicator, seed: int, failing: float) -> None:
    """All requests at once, in another order on each rank; then everything has ended, and nothing is kept."""
    mix, same = random.Random(f"{seed} {comm.rank}"), random.Random(seed)
    failures = {
        key: (same.randrange(comm.size), same.randrange(STEPS + 1))
        for key in range(REQUESTS)
        if same.random() < failing
    }
    keys = list(range(REQUESTS))
    mix.shuffle(keys)
    tasks = []
    for key in keys:
        rank, step = failures.get(key, (-1, -1))
        before = step if rank == comm.rank else None
        tasks.append(request(comm, seed, key, random.Random(f"{seed} {comm.rank} {key}"), before))
    ends = dict(zip(keys, await asyncio.gather(*tasks, return_exceptions=True), strict=True))
    for key, end in ends.items():
        if key not in failures:
            assert isinstance(end, int), (key, end)
        elif failures[key][0] == comm.rank:
            assert isinstance(end, GivesUpError), (key, end)
        else:  # the rank may have called all, and have awaited no more of them
            assert isinstance(end, int) or (isinstance(end, LaneAbortedError) and "GivesUpError" in str(end)), (
                key,
                end,
            )
    assert sum(end for end in ends.values() if isinstance(end, int)) > REQUESTS * STEPS // 2
    for key in keys:  # the last collectives of those that gave up waiting
        await comm.lane(name(seed, key)).aclose()
    await comm.barrier()
    assert not comm._core.router.turns
    assert not comm._core.in_flight


async def many(place: Rank, seeds: int, failing: float) -> None:
    torch.set_num_threads(1)  # all ranks share the processors
    async with place.open() as comm:
        before = living()
        for seed in range(seeds):
            await serve(comm, seed, failing)
        left = living() - before
        assert left.total() < REQUESTS // 2, left  # each request has made dozens; transports keep some frames


def living() -> Counter[str]:
    """Count the works, lanes, schedules and tensors that something still holds."""
    gc.collect()
    types = (Lane, LaneWork, lanes._LaneRun, lanes._Turn, torch.Tensor)
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in types)


SEEDS = pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.search)])
FAILING = pytest.mark.parametrize("failing", [0, 0.01])


@pytest.mark.real
@pytest.mark.timeout(4 * HANGS)
@pytest.mark.parametrize("transport", ["c10d", "ucx"])
@SEEDS
@FAILING
def test_random_lanes_between_processes_stay_apart(ranks: Run, seeds: int, failing: float) -> None:
    ranks(4, many, seeds, failing)


@pytest.fixture
def nccl_fake(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The nccl transport over a fake GPU of this test."""
    cuda = FakeCuda()
    monkeypatch.setattr(FakeNcclTransport, "cuda_layer", cuda)
    monkeypatch.setattr(FakeNcclTransport, "nccl_layer", FakeNccl(cuda))
    install(nccl_fake=FakeNcclTransport)


@pytest.mark.usefixtures("nccl_fake")
@pytest.mark.timeout(4 * HANGS)
@pytest.mark.parametrize("transport", ["local", "nccl_fake"])
@SEEDS
@FAILING
def test_random_lanes_in_one_process_stay_apart_and_leak_nothing(transport: str, seeds: int, failing: float) -> None:
    async def main() -> None:
        async with local_world(4, transport) as world:
            before = living()
            for seed in range(seeds):
                await asyncio.gather(*(serve(comm, seed, failing) for comm in world))
            left = living() - before
            assert left.total() < REQUESTS // 2, left

    asyncio.run(main())
