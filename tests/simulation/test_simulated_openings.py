"""Sources and targets whose ``open`` ends early, or which are closed: what each rank gets, and what it releases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiocomms
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
