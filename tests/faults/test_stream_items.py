"""When ``await stream.send(x)`` has ended, in whatever way, ``x`` is the program's again: case 104."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from concurrency import run_on, together, turns

from aiocomms.testing import local_world

OVERWRITTEN = -1.0


async def cancel_after(scope: anyio.CancelScope, count: int) -> None:
    await turns(count)
    scope.cancel()


@pytest.mark.fault(104)
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_what_a_cancelled_send_leaves(transport: str, loop: str) -> None:
    """The tensor is overwritten as soon as the cancelled send has ended, and no message has any of that."""
    draw = random.Random(104)

    async def send(stream: Any) -> None:
        item = torch.empty(300_000)
        for number in range(60):
            item.fill_(number)
            async with anyio.create_task_group() as tasks:
                scope = anyio.CancelScope()
                tasks.start_soon(cancel_after, scope, draw.choice([0, 0, 1, 2, 3, 5]))
                with scope:
                    await stream.send(item)
                item.fill_(OVERWRITTEN)
        await stream.send_eof()

    async def receive(stream: Any) -> None:
        last = -1.0
        async for message in stream:
            value = message[0].item()
            assert (message == value).all()
            assert value > last
            last = value
        assert last >= 0, "none has arrived, so nothing is shown"

    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            streams = await together(lambda: one.open_stream(1, capacity=2), lambda: two.open_stream(0, capacity=2))
            await together(lambda: send(streams[0]), lambda: receive(streams[1]))

    run_on(loop, main)


@pytest.mark.fault(104)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_a_send_that_waits_for_a_credit_is_taken_back(transport: str) -> None:
    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            streams = await together(lambda: one.open_stream(1), lambda: two.open_stream(0, capacity=1))
            await streams[0].send(torch.zeros(10))
            for number in (1.0, 2.0):
                waiting = asyncio.create_task(streams[0].send(torch.full((10,), number)))
                await turns()
                if number == 1.0:
                    waiting.cancel()
            assert (await streams[1].receive() == 0).all()
            await waiting
            assert (await streams[1].receive() == 2).all()

    run_on("asyncio", main)
