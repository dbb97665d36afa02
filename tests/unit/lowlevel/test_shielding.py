"""Calls that are awaited to their end, although asyncio's own ``cancel()`` or a scope cancels them."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import torch
from concurrency import cancel_again_and_again

import aiocomms
from aiocomms.lowlevel.shielding import shielded
from aiocomms.testing.simulation import here, simulate

pytestmark = pytest.mark.deterministic


def test_call_ends_before_the_task_that_asyncio_cancels_again_and_again() -> None:
    async def main() -> None:
        go, ended = asyncio.Event(), []

        async def call() -> None:
            await go.wait()
            ended.append(True)

        task = asyncio.ensure_future(shielded(call))
        await cancel_again_and_again(task)
        go.set()
        await asyncio.wait([task])
        assert (task.cancelled(), ended) == (True, [True])

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_call_in_a_cancelled_scope_returns_and_raises_what_it_does(backend: str) -> None:
    async def fails() -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError("it fails")

    async def returns() -> int:
        await anyio.lowlevel.checkpoint()
        return 3

    async def main() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            assert await shielded(returns) == 3
            with pytest.raises(ValueError, match="it fails"):
                await shielded(fails)
            await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught

    anyio.run(main, backend=backend)


def test_close_that_is_cancelled_twice_ends_after_its_puts() -> None:
    memory = torch.zeros(4)

    async def program() -> None:
        store = here().world.store
        async with aiocomms.open_endpoint(timeout=10) as mine:
            if here().rank == 0:
                region = mine.register(memory)
                store.set("address", mine.address)
                peer = await mine.accept()
                await peer.send_object(region.descriptor)
                await peer.lost()
            else:
                while not store.check(["address"]):  # noqa: ASYNC110 - the other process sets it
                    await asyncio.sleep(0.001)
                peer = await mine.connect(store.get("address"))
                remote = await peer.attach(await peer.recv_object())
                remote.put(torch.ones(4), 0).add_done_callback(lambda work: work.exception())
                task = asyncio.ensure_future(peer.aclose())
                while not task.done():
                    await asyncio.sleep(0.01)
                    task.cancel()
                assert memory.tolist() == [1.0] * 4

    simulate(program, 2, seed=1, latency=(0.5, 0.5))
