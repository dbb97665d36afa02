"""The test kit without pytest: worlds in memory, and one function on every rank."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import anyio
import anyio.lowlevel
import pytest
import torch
from concurrency import together
from torch.distributed import HashStore

import aiocomms
from aiocomms import functional
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommTimeoutError, MismatchError
from aiocomms.testing import local_world, run_ranks, world

pytestmark = pytest.mark.deterministic


def test_local_world_opens_without_store_or_threads(run, monkeypatch):
    """A store would cost each rank a look-up of every other rank."""

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


def test_run_ranks_says_once_why_several_ranks_failed(run):
    async def main():
        async with local_world(4) as comms:
            with pytest.raises(MismatchError) as caught:
                await run_ranks(comms, lambda comm: comm.all_reduce(torch.ones(1 + comm.rank // 2)))
            notes = [f"it was raised on rank {caught.value.rank} of 4"]
            alike = sorted({0, 1, 2, 3} - {caught.value.rank})
            assert caught.value.__notes__ == [
                *notes,
                f"ranks {alike[0]}, {alike[1]}, {alike[2]} failed too, for the same reason",
            ]

    run(main)


def test_run_ranks_says_once_why_several_asserts_failed(run):
    async def main():
        async with local_world(3) as comms:

            async def each(comm):
                await comm.barrier()
                raise AssertionError(f"<object at 0x{comm.rank:x}> is no tensor" if comm.rank else "no sum")

            with pytest.raises(AssertionError) as caught:
                await run_ranks(comms, each)
            notes, alike = caught.value.__notes__[1:], "ranks 1, 2 failed too: AssertionError: <object at 0x"
            if str(caught.value) == "no sum":
                assert notes[0].startswith(alike)
            else:
                assert notes[0].endswith("failed too, for the same reason")
                assert notes[1:] == ["rank 0 failed too: AssertionError: no sum"]

    run(main)


def test_run_ranks_says_each_of_two_reasons(run):
    async def main():
        async with local_world(3) as comms:

            async def each(comm):
                await comm.barrier()
                raise CommTimeoutError(
                    f"its deadline passed on rank {comm.rank}", rank=comm.rank, late=[comm.rank // 2 + 3]
                )

            with pytest.raises(CommTimeoutError) as caught:
                await run_ranks(comms, each)
            first, text = caught.value.rank, "failed too: CommTimeoutError: (rank {0}): its deadline passed on rank {0}"
            if first == 2:
                assert caught.value.__notes__[1].startswith("ranks 0, 1 failed too: CommTimeoutError: (rank ")
            else:
                alike = f"rank {1 - first} failed too, for the same reason"
                assert caught.value.__notes__[1:] == [alike, f"rank 2 {text.format(2)}"]

    run(main)


def test_a_failed_test_is_not_told_again_what_nobody_asked_for(run, caplog):
    """A mismatch ends the communicator, so the work of the other rank, which no task awaits, is not reported."""

    async def main():
        async with local_world(2) as comms:
            works = [comm.all_reduce(torch.ones(1 + comm.rank)) for comm in comms]
            with pytest.raises(MismatchError):
                await works[0]
            del works
            gc.collect()

    run(main)
    assert caplog.records == []


@pytest.mark.parametrize("mismatched", [True, False])
def test_the_repr_of_a_communicator_names_the_failure_and_does_not_tell_it(run, mismatched):
    async def main():
        async with local_world(2) as comms:
            if mismatched:
                await together(*[lambda c=c: outcome(c.all_reduce(torch.ones(1 + c.rank))) for c in comms])
                assert [repr(comm) for comm in comms] == [
                    f"<Communicator 'world' rank {rank} of 2 on cpu (lost: MismatchError)>" for rank in range(2)
                ]
        assert mismatched or repr(comms[0]) == "<Communicator 'world' rank 0 of 2 on cpu (closed)>"

    run(main)


async def outcome(work):
    with contextlib.suppress(MismatchError):
        await work


@pytest.mark.fault(120)
def test_run_ranks_names_the_rank_that_awaited_a_cancelled_future():
    """A CancelledError without a cancellation of the test is an error of the rank that raises it."""

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


def test_run_ranks_refuses_what_is_not_a_list_of_communicators(run):
    async def main():
        async with local_world(1) as comms:
            with pytest.raises(
                ArgumentTypeError, match=r"world is .* \(Communicator\), wanted a list of communicators"
            ):
                await run_ranks(comms[0], lambda comm: comm.barrier())
            with pytest.raises(ArgumentTypeError, match=r"world\[1\] is 2 \(int\), wanted a Communicator"):
                await run_ranks([comms[0], 2], lambda comm: comm.barrier())

    run(main)


def test_run_ranks_refuses_a_function_that_is_not_async(run):
    async def main():
        async with local_world(2) as comms:
            with pytest.raises(ArgumentTypeError, match="fn returned 0, wanted an awaitable: write 'async def'"):
                await run_ranks(comms, lambda comm: comm.rank)

    run(main)
