"""Sources and targets whose ``open`` ends early, or which are closed: what each rank gets, and what it releases."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch
from notices import found, leave
from torch import Tensor

import aiocomms
from aiocomms import Communicator, Endpoint
from aiocomms.errors import ArgumentError, CommError, CommTimeoutError, MoveLostError
from aiocomms.resharding import Source, Target
from aiocomms.resharding.versions import VersionMemory
from aiocomms.testing.simulation import here, simulate

pytestmark = pytest.mark.deterministic


async def for_ever(*_: Any) -> None:
    """Wait without end."""
    await asyncio.Event().wait()


def test_open_ends_when_the_loop_cancels_all_tasks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionMemory, "make", for_ever)

    async def program() -> None:
        here().launched_as("server", 0, 1)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            before = asyncio.all_tasks()
            opening = asyncio.ensure_future(Target.open(comm, {"w": torch.zeros(2)}, mine))
            await asyncio.sleep(1)
            for task in asyncio.all_tasks() - before:
                task.cancel()
            done, _ = await asyncio.wait({opening}, timeout=10)
            assert done, "open waits for its own cancelled task"

    simulate(program, 1, seed=1)


@pytest.mark.parametrize(
    ("timeout", "thread", "kind"), [(-1, 0, ArgumentError), (None, 1, RuntimeError)], ids=["deadline", "thread"]
)
def test_refused_open_of_one_rank_does_not_count(timeout: Any, thread: int, kind: type[Exception]) -> None:
    """The ranks' later calls match, although one of the ranks has made one more call."""

    async def program() -> int | None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            if comm.rank == 0:
                comm._core.thread += thread  # The communicator belongs to another thread for now.
                with pytest.raises(kind, match=r"thread|timeout is -1"):
                    await Target.open(comm, {"w": torch.zeros(2)}, mine, timeout=timeout)
                comm._core.thread -= thread
            async with await Target.open(comm, {"w": torch.zeros(2)}, mine) as target:
                await comm.barrier()
                return target.version

    assert simulate(program, 2, seed=1).results == [0, 0]


@pytest.mark.parametrize("closes", [0, 1])
def test_close_whose_task_is_cancelled_is_told_to_the_other_rank(closes: int) -> None:
    async def program() -> None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            target = await Target.open(comm, {"w": torch.zeros(2)}, mine)
            if comm.rank == closes:
                closing = asyncio.ensure_future(target.aclose())
                await asyncio.sleep(0)
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing
                assert not target._memory._tensors, "the target keeps its buffers"
            await asyncio.sleep(1)
            if comm.rank != closes:
                assert target._leader.lost == f"target rank {closes} was closed"
                await target.aclose()

    simulate(program, 2, seed=1)


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_open_that_ends_early_keeps_no_weights(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is kept, even without the garbage collector, and although the other rank has not opened its side."""
    memories = list[VersionMemory]()
    make = VersionMemory.make

    async def noted(self: VersionMemory, number: int) -> None:
        memories.append(self)
        await make(self, number)
        if ends == "failed" and number == 1:
            raise ArgumentError("no memory")

    monkeypatch.setattr(VersionMemory, "make", noted)

    async def opened(comm: Communicator, mine: Endpoint) -> weakref.ref[Tensor]:
        weights = torch.zeros(2)
        opening = asyncio.ensure_future(Target.open(comm, {"w": weights}, mine, timeout=20))
        await asyncio.sleep(1)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled() or isinstance(opening.exception(), ArgumentError)
        return weakref.ref(weights)

    async def program() -> None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            if comm.rank == 0 or ends == "failed":
                assert (await opened(comm, mine))() is None
                assert not any(it._tensors or it._regions for it in memories)
            else:
                await asyncio.sleep(5)
                with pytest.raises(MoveLostError, match="target rank 0: CommError: its task was cancelled"):
                    await Target.open(comm, {"w": torch.zeros(2)}, mine)
            await comm.barrier()

    gc.disable()
    try:
        simulate(program, 2, seed=1)
    finally:
        gc.enable()


def test_cancelled_open_takes_no_connection_from_the_next_target() -> None:
    async def serve(comm: Communicator, mine: Endpoint) -> None:
        await asyncio.sleep(5 * comm.rank)
        first = asyncio.ensure_future(Target.open(comm, {"w": torch.zeros(2)}, mine))
        if comm.rank == 0:
            leave("address", mine.address)
            await asyncio.sleep(1)
            first.cancel()
            await asyncio.wait({first})
        else:
            with pytest.raises(MoveLostError, match="its task was cancelled"):
                await first
        async with await Target.open(comm, {"w": torch.zeros(2)}, mine):
            await found("opened")

    async def program() -> None:
        trains = here().rank == 2
        here().launched_as("trainer" if trains else "server", here().rank % 2, 1 if trains else 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            if trains:
                address = await found("address")
                async with await Source.open(comm, {"w": torch.ones(2)}, mine, address) as source:
                    await source.move(1)
                    leave("opened")
            else:
                await serve(comm, mine)

    simulate(program, 3, seed=1)


def test_source_and_target_of_one_communicator_refuse_each_other() -> None:
    async def program() -> None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            weights, other = {"w": torch.zeros(2)}, await comm.broadcast_object(mine.address, 1)
            opening = Target.open(comm, weights, mine) if comm.rank else Source.open(comm, weights, mine, other)
            with pytest.raises(ArgumentError, match=r"comm opens a \w+ on this rank, wanted a \w+ as on rank \d"):
                await opening
            await comm.barrier()

    simulate(program, 2, seed=1)


def test_target_that_does_not_answer_leaves_the_source_its_communicator() -> None:
    async def program() -> None:
        trains = here().rank < 2
        here().launched_as("trainer" if trains else "server", here().rank % 2, 2 if trains else 1)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            if not trains:
                leave("address", mine.address)
                await mine.accept()
                await found("failed")
                return
            with pytest.raises(CommError, match="source rank 0" if comm.rank else "deadline") as failed:
                await Source.open(comm, {"w": torch.ones(2)}, mine, await found("address"), timeout=10)
            assert isinstance(failed.value, MoveLostError if comm.rank else CommTimeoutError)
            await comm.barrier()
            leave("failed")

    simulate(program, 3, seed=1)


@pytest.mark.parametrize(("ends", "how"), [("closed", "step"), ("closed", "pin"), ("late", "step")])
def test_wait_for_a_current_version_ends(ends: str, how: str) -> None:
    """No version is current, because the ranks' versions differ."""

    async def read(target: Target) -> None:
        async with target.step(timeout=2) if how == "step" else target.pin() as weights:
            raise AssertionError(weights.version)

    async def program() -> None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            target = await Target.open(comm, {"w": torch.zeros(2)}, mine, version=comm.rank)
            why = "target rank 1 was closed" if ends == "closed" else "rank 0 has waited 2 s for one"
            if comm.rank == 0:
                with pytest.raises(MoveLostError, match=f"no version is current: {why}"):
                    await asyncio.wait_for(read(target), 10)
            elif ends == "closed":
                await asyncio.sleep(1)
                await target.aclose()
                if how == "step":
                    assert "was closed" in await comm.broadcast_object(None, 0)
            else:
                await asyncio.sleep(1)
                with pytest.raises(MoveLostError, match=why):
                    await read(target)
            await comm.barrier()

    simulate(program, 2, seed=1)
