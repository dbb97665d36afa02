"""The test kit without pytest: worlds in memory, and one function on every rank."""

from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.lowlevel
import pytest
import torch
from torch.distributed import HashStore

import aiocomms
from aiocomms import functional
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommTimeoutError
from aiocomms.testing import local_world, run_ranks, world

pytestmark = pytest.mark.deterministic


def test_local_world_opens_without_store_or_threads(run, monkeypatch):
    """Otherwise each of a thousand ranks looks for every other one."""

    class Untouched(HashStore):
        def set(self, *args):
            raise AssertionError("the store was used")

        get = check = wait = compare_set = set

    monkeypatch.setattr(world, "HashStore", Untouched)

    async def main():
        threads = {thread.ident for thread in threading.enumerate()}
        async with local_world(300) as comms:
            started = [thread.name for thread in threading.enumerate() if thread.ident not in threads]
            assert [name for name in started if "aiocomms deadlines" not in name] == []
            totals = await run_ranks(comms, lambda comm: comm.all_reduce(torch.ones(1)))
            assert [total.item() for total in totals] == [300] * 300

    run(main)


@pytest.mark.parametrize("transport", ["local", "c10d"])
def test_local_world_ranks_split_and_reconfigure(run, transport):
    async def main():
        async with local_world(3, transport) as comms:
            children = await run_ranks(comms, lambda comm: comm.split([0, 2] if comm.rank != 1 else []))
            assert [child and child.size for child in children] == [2, None, 2]
            await run_ranks([children[0], children[2]], lambda comm: comm.barrier())
            await run_ranks([children[0], children[2]], lambda comm: comm.aclose())
            for comm in comms:
                comm.abort("enough")
            left = await run_ranks([comms[0], comms[2]], lambda comm: comm.reconfigure([0, 2]))
            assert [(comm.rank, comm.size) for comm in left] == [(0, 2), (1, 2)]
            await run_ranks(left, lambda comm: comm.barrier())
            await run_ranks(left, lambda comm: comm.aclose())

    run(main)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [({"size": 0}, "size is 0"), ({"timeout": 0}, "timeout is 0"), ({"name": ""}, "name has 0 characters")],
)
def test_wrong_arguments_of_local_world_are_refused(run, given, wrong):
    async def main():
        with pytest.raises(ArgumentError, match=wrong):
            async with local_world(**{"size": 2, **given}):
                raise AssertionError("it opened")

    run(main)


def test_run_ranks_returns_results_in_rank_order(run):
    async def main():
        async with local_world(3) as comms:

            async def each(comm):
                await comm.barrier()
                return comm.rank

            assert await run_ranks(comms, each) == [0, 1, 2]
            assert await run_ranks(
                comms[1:2], lambda comm: comm.recv_object(1) if comm.rank == 0 else anyio.lowlevel.checkpoint()
            ) == [None]

    run(main)


def test_each_rank_of_run_ranks_finds_its_own_communicator(run):
    async def main():
        async with local_world(3) as comms:

            async def each(comm):
                assert aiocomms.get_comm() is comm
                return (await functional.all_gather(torch.tensor(comm.rank))).tolist()

            assert await run_ranks(comms, each) == [[0, 1, 2]] * 3

    run(main)


def test_run_ranks_names_the_failing_rank_and_cancels_the_others(run):
    async def main():
        async with local_world(3) as comms:
            ended = []

            async def each(comm):
                if comm.rank == 2:
                    raise KeyError("weights")
                try:
                    await comm.barrier()
                finally:
                    ended.append(comm.rank)

            with pytest.raises(KeyError, match="weights") as caught:
                await run_ranks(comms, each)
            assert caught.value.__notes__ == ["it was raised on rank 2 of 3"]
            assert sorted(ended) == [0, 1]
            comms[0].abort("the test is over")

    run(main)


def test_run_ranks_names_every_failing_rank(run):
    async def main():
        async with local_world(2) as comms:

            async def each(comm):
                await comm.all_reduce(torch.ones(1), timeout=0.05) if comm.rank == 0 else await comm.recv(
                    torch.ones(1), 0
                )

            with pytest.raises(CommTimeoutError) as caught:
                await run_ranks(comms, each)
            assert caught.value.__notes__[0].startswith("it was raised on rank ")

    run(main)


@pytest.mark.fault(120)
def test_run_ranks_names_the_rank_that_awaited_a_cancelled_future():
    """Nobody has cancelled the test: it is this rank that fails."""

    async def main():
        async with local_world(2) as comms:

            async def each(comm):
                if comm.rank:
                    future = asyncio.get_running_loop().create_future()
                    future.cancel()
                    await future

            with pytest.raises(asyncio.CancelledError) as caught:
                await run_ranks(comms, each)
            assert caught.value.__notes__ == ["it was raised on rank 1 of 2"]

    asyncio.run(main())


def test_run_ranks_names_the_rank_of_a_pytest_failure(run):
    async def main():
        async with local_world(2) as comms:

            async def each(comm):
                if comm.rank:
                    pytest.fail("no")

            with pytest.raises(pytest.fail.Exception, match="no") as caught:
                await run_ranks(comms, each)
            assert caught.value.__notes__ == ["it was raised on rank 1 of 2"]

    run(main)


def test_run_ranks_refuses_a_function_that_is_not_async(run):
    async def main():
        async with local_world(2) as comms:
            with pytest.raises(ArgumentTypeError, match="fn returned 0, wanted an awaitable: write 'async def'"):
                await run_ranks(comms, lambda comm: comm.rank)

    run(main)
