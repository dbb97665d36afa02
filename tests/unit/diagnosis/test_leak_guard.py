"""The leak guard: it closes what is open when its event loop ends, and warns."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
import trio
import uvloop
from aiocomms_local import LocalTransport

import aiocomms
from aiocomms.errors import CommError

pytestmark = pytest.mark.deterministic


def in_loop_of_ones_own(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a program in an event loop of its own, without ``asyncio.run()``."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


LOOPS = {
    "asyncio": lambda main: asyncio.run(main()),
    "uvloop": lambda main: uvloop.run(main()),
    "trio": trio.run,
    "by hand": in_loop_of_ones_own,
}
run_loop = pytest.mark.parametrize("run_loop", LOOPS.values(), ids=LOOPS)


async def world_of_two() -> list[Any]:
    store = dist.HashStore()
    comms: list[Any] = [None, None]

    async def enter(rank: int) -> None:
        comms[rank] = await aiocomms.new_comm("local", name="forgotten", store=store, rank=rank, size=2)

    async with anyio.create_task_group() as group:
        for rank in range(2):
            group.start_soon(enter, rank)
    return comms


@pytest.mark.fault(56, transport="local")
@run_loop
def test_communicator_left_open_is_closed_with_a_warning_when_its_loop_ends(run_loop: Callable[..., Any]) -> None:
    """Each rank has a work that waits for the other rank, and no task awaits the works."""
    kept: list[Any] = []

    async def main() -> None:
        one, two = await world_of_two()
        kept.extend([one, two, one.recv(torch.empty(3), 1), two.all_reduce(torch.ones(3))])

    with pytest.warns(ResourceWarning, match="unclosed <Communicator 'forgotten' rank . of 2 on cpu") as caught:
        run_loop(main)
    places = {re.search(r"opened at (.*):\d+: use", str(it.message)).group(1) for it in caught}
    assert (len(caught), places) == (2, {__file__})
    one, two, *works = kept
    assert one.closed
    assert two.closed
    assert all(isinstance(work.exception(), CommError) for work in works)


@run_loop
def test_closed_communicator_causes_no_warning(run_loop: Callable[..., Any]) -> None:
    async def main() -> None:
        for comm in await world_of_two():
            await comm.aclose()
        comm = await aiocomms.new_comm("local")
        await comm.aclose()
        await comm.aclose()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_loop(main)
        gc.collect()


def test_communicator_left_open_is_closed_though_the_warning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    aclose = LocalTransport.aclose

    async def note(self: LocalTransport) -> None:
        await aclose(self)
        closed.append(self)

    monkeypatch.setattr(LocalTransport, "aclose", note)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: closed.append(context["exception"]))
        await aiocomms.new_comm("local")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
    transport, error = closed
    assert isinstance(transport, LocalTransport)
    assert isinstance(error, ResourceWarning)
