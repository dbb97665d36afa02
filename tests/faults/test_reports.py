"""An error that a program has caught is not reported to the event loop as well: case 100."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from concurrency import ranks, run_on, turns

from aiocomms.errors import CommError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


async def the_other_has_closed(world: list[Any]) -> None:
    await world[1].aclose()
    await turns()
    with pytest.raises(CommError):
        await world[0].new_window(torch.zeros(3))


async def the_other_closes(world: list[Any]) -> None:
    opening = asyncio.ensure_future(world[0].new_window(torch.zeros(3)))
    await turns()
    await world[1].aclose()
    with pytest.raises(CommError):
        await opening


async def the_other_calls_something_else(world: list[Any]) -> None:
    async def each(comm: Any) -> None:
        with contextlib.suppress(CommError):
            await (comm.barrier() if comm.rank else comm.new_window(torch.zeros(3)))

    await ranks(world, each)


async def the_other_aborts(world: list[Any]) -> None:
    opening = asyncio.ensure_future(world[0].new_window(torch.zeros(3)))
    await turns()
    world[1].abort("enough")
    with pytest.raises(CommError):
        await opening


async def the_windows_body_raises(world: list[Any]) -> None:
    """Raise in a window's body: the close is started, and nobody can await it."""

    async def each(comm: Any) -> None:
        window = await comm.new_window(torch.zeros(3))
        if comm.rank:
            await comm.aclose()
        else:
            with pytest.raises(KeyError):
                async with window:
                    raise KeyError

    await ranks(world, each)
    await turns()


@pytest.mark.fault(100)
@pytest.mark.parametrize(
    "case",
    [
        the_other_has_closed,
        the_other_closes,
        the_other_calls_something_else,
        the_other_aborts,
        the_windows_body_raises,
    ],
    ids=lambda case: case.__name__,
)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_caught_error_of_a_window_is_not_reported_again(
    transport: str, case: Callable[[list[Any]], Awaitable[None]]
) -> None:
    reported: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with local_world(2, transport) as world:
            await case(world)
        gc.collect()

    run_on("asyncio", main)
    gc.collect()
    assert not reported
