"""Plans of a service in reports: those under way, their start, and the state of each rank."""

from __future__ import annotations

import os

import anyio
import msgspec
import pytest
import torch
from concurrency import run_on, together, turns
from rich.console import Console

from aiocomms.cli import main as command
from aiocomms.cli.top import looking
from aiocomms.cli.top.drawing import drawn
from aiocomms.diagnosis.live import Sight
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


def frame(world, name):
    """Return the lines that `aiocomms top` draws for a communicator."""
    encoded = [msgspec.json.encode(comm._sight()) for comm in world]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looking, "_listeners", dict)
        sights = [looking._checked(msgspec.json.decode(each, type=Sight)) for each in encoded]
        patch.setattr(looking, "_ask", lambda _: [(os.getpid(), sights)])
        console = Console(width=250)
        with console.capture() as captured:
            console.print(drawn(looking.Top(None, name).look()))
    return captured.get().splitlines()


def called(comm):
    return any(item.name == "all_reduce" for item in comm._core.recorder.snapshot("").pending)


async def held_up(world, look):
    """Let a service execute two plans, and call ``look`` while rank 1 has not begun the first plan's collective."""
    go = anyio.Event()

    async def serve(comm):
        async def execute(plan):
            if comm.rank == 1 and plan == "slow":
                await go.wait()
            return await service.comm.all_reduce(torch.ones(2)) if plan == "slow" else await go.wait()

        async with Service(comm) as service:
            if comm.rank:
                await service.work(execute)
                return
            async with service.drive(execute) as driver, anyio.create_task_group() as tasks:
                for plan in ("slow", "idle"):
                    tasks.start_soon(driver.run, plan)
                while not (called(comm) and all(len(c.statistics().plans) == 2 for c in world)):
                    await turns()
                look()
                go.set()
            while world[0].statistics().plans or world[1].statistics().plans:
                await turns()

    await together(*(lambda comm=comm: serve(comm) for comm in world))


def test_top_shows_plans_and_where_each_rank_is():
    async def main():
        async with local_world(2) as world:

            def look():
                lines = frame(world, "*")
                rows = [line.split(maxsplit=3) for line in lines if "of its lane" in line]
                assert [(row[0], row[2]) for row in rows] == [("0", "s"), ("1", "s")]
                assert rows[0][3].rstrip() == "rank 0 in all_reduce; rank 1 in no operation of its lane"
                assert rows[1][3].rstrip() == "ranks 0, 1 in no operation of its lane"
                assert any("all_reduce of plan 0" in line for line in lines)
                assert not any("aiocomms.serving plan" in line for line in lines)
                only = [line for line in frame(world, "plan 1") if "of its lane" in line]
                assert [line.split()[0] for line in only] == ["1"]

            await held_up(world, look)

    run_on("asyncio", main)


def test_trace_calls_a_plan_by_its_number(tmp_path, capsys):
    async def main():
        async with local_world(2) as world:

            def look():
                for comm in world:
                    comm.dump(tmp_path)
                assert command(["trace", str(tmp_path), "--name", "plan 0"]) == 1
                assert "all_reduce of plan 0: rank 0 is in it" in capsys.readouterr().out
                assert command(["trace", str(tmp_path), "--name", "plan 1"]) == 0

            await held_up(world, look)

    run_on("asyncio", main)
