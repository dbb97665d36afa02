"""Debug mode: the error if two tasks have collectives of one communicator under way at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms.errors import ConcurrentCollectivesError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

HERE = __file__


def line_of(text):
    """Return the number of the line of this file that ends with a comment."""
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


@pytest.fixture(autouse=True)
def _debug(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_DEBUG", "1")


async def reduce(comm):
    return (await comm.all_reduce(torch.ones(2))).tolist()  # the first


@pytest.mark.parametrize("transport", ["local", "c10d"])
def test_concurrent_collectives_error_names_both_tasks_and_sends_nothing(run, loop, transport):
    async def main():
        async with local_world(2, transport) as (one, two), anyio.create_task_group() as tasks:
            tasks.start_soon(reduce, one)
            await turns()
            assert [work.op.name for work in one._core.in_flight] == ["all_reduce"]
            with pytest.raises(ConcurrentCollectivesError) as caught:
                one.broadcast(torch.ones(2), 0)  # the second
            text = str(caught.value)
            assert text.startswith("broadcast on 'world' (rank 0): two tasks have collectives under way at once")
            assert f"has called all_reduce #0 at {HERE}:{line_of('the first')}" in text
            assert f"calls broadcast at {HERE}:{line_of('the second')}" in text
            if loop != "trio":
                assert f"task {asyncio.current_task().get_name()!r} calls" in text
            assert "comm.lane(key)" in text
            assert [work.op.name for work in one._core.in_flight] == ["all_reduce"]
            assert await reduce(two) == [2, 2]
            assert not one.aborted

    run(main)


def test_concurrent_collectives_of_two_tasks_are_refused_within_one_lane_only(run):
    async def main():
        async with local_world(2) as (one, two), anyio.create_task_group() as tasks:
            tasks.start_soon(reduce, one.lane("a"))
            tasks.start_soon(reduce, one.lane("b"))
            tasks.start_soon(reduce, one)
            await turns()
            with pytest.raises(ConcurrentCollectivesError, match=r"world, lane a.*: two tasks have") as caught:
                one.lane("a").barrier()
            assert f" at {HERE}:{line_of('the first')}, and task" in str(caught.value)
            for view in (two, two.lane("b"), two.lane("a")):
                assert await reduce(view) == [2, 2]
            assert await ranks([one.lane("a"), two.lane("a")], reduce) == [[2, 2]] * 2

    run(main)


def test_communicator_stays_usable_and_numbering_agrees_after_a_refusal(run):
    async def main():
        async with local_world(2) as (one, two), anyio.create_task_group() as tasks:
            tasks.start_soon(reduce, one)
            await turns()
            for call in (one.barrier, lambda: one.all_gather_object(1)):
                with pytest.raises(ConcurrentCollectivesError):
                    call()
            with pytest.raises(ConcurrentCollectivesError):
                await one.new_window(torch.ones(1))
            await reduce(two)
            await turns()
            assert await ranks([one, two], reduce) == [[2, 2]] * 2
            assert one._core.ledger.calls == two._core.ledger.calls == 2

    run(main)


def test_new_window_counts_as_a_collective(run):
    async def window(comm):
        async with await comm.new_window(torch.ones(1)):
            pass

    async def main():
        async with local_world(2) as (one, two), anyio.create_task_group() as tasks:
            tasks.start_soon(window, one)
            await turns()
            with pytest.raises(ConcurrentCollectivesError, match="has called new_window #0 at "):
                one.barrier()
            await window(two)

    run(main)


def test_one_task_may_start_several_collectives(run):
    async def each(comm):
        works = [comm.all_reduce(torch.ones(1)) for _ in range(3)]
        works.append(comm.barrier())
        async with anyio.create_task_group() as tasks:  # Other tasks may await the works.
            for work in works:
                tasks.start_soon(work.wait)
        return works[0].result().item()

    async def main():
        async with local_world(2) as world:
            assert await ranks(world, each) == [2, 2]

    run(main)


def test_asyncio_gather_of_works_is_no_hazard():
    async def main():
        async with local_world(2) as world:
            await asyncio.gather(*(comm.all_reduce(torch.ones(1)) for comm in world for _ in range(3)))

    asyncio.run(main())


def test_concurrent_child_tasks_are_refused(run):
    async def main():
        async with local_world(2) as (one, two):
            failed = []

            async def child(comm):
                try:
                    await reduce(comm)
                except ConcurrentCollectivesError as error:
                    failed.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child, one)
                tasks.start_soon(child, one)
                await turns()
                await reduce(two)
            assert len(failed) == 1

    run(main)


def test_messages_and_other_communicators_are_no_hazard(run):
    async def main():
        async with local_world(2) as (one, two):
            children = await ranks([one, two], lambda comm: comm.split([0, 1]))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reduce, one)
                tasks.start_soon(one.recv_object(1).wait)
                await turns()
                await together(lambda: reduce(children[0]), lambda: reduce(children[1]))
                await two.send_object(1, 0)
                await reduce(two)
            await ranks(children, lambda comm: comm.aclose())

    run(main)


def test_pending_collective_of_an_ended_task_is_no_hazard(run):
    """A collective whose task was cancelled stays under way, and the next one follows it on every rank."""

    async def main():
        async with local_world(2) as (one, two):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reduce, one)
                await turns()
                tasks.cancel_scope.cancel()
            assert [work.op.name for work in one._core.in_flight] == ["all_reduce"]
            work = one.all_reduce(torch.ones(2))
            await reduce(two)
            await reduce(two)
            assert (await work).tolist() == [2, 2]

    run(main)


def test_collective_started_by_a_callback_is_no_hazard(run):
    async def main():
        async with local_world(2) as (one, two):
            started = []

            def begin(_):
                started.append(one.barrier())

            one.send(torch.ones(1), 1).add_done_callback(begin)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reduce, one)
                await turns()
                await two.recv(torch.ones(1), 0)
                await turns()
                assert len(started) == 1
                await reduce(two)
                await two.barrier()
            await started[0]

    run(main)


def test_concurrent_collectives_are_allowed_outside_debug_mode(run, monkeypatch):
    monkeypatch.delenv("AIOCOMMS_DEBUG")

    async def main():
        async with local_world(2) as (one, two), anyio.create_task_group() as tasks:
            tasks.start_soon(reduce, one)
            await turns()
            work = one.all_reduce(torch.ones(2))
            await reduce(two)
            await reduce(two)
            await work

    run(main)
