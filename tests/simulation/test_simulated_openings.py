"""Sources and targets whose ``open`` ends early, or which are closed: what each rank gets, and what it releases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiocomms
from aiocomms.errors import ArgumentError
from aiocomms.resharding import Target
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
