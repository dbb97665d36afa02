"""Async functions and threads run side by side, for tests: on each event loop, on every rank of a world, bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio.lowlevel
import pytest
from processes import HANGS
from torch.distributed import HashStore

from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import here, simulate

LOOPS = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}

VIRTUAL = pytest.param("simulated", marks=pytest.mark.deterministic)
"""The parameter by which a test runs in virtual time."""

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_on(loop: str, main: Main, *args: Any) -> Any:
    """Run an async function in a new loop; a test that hangs fails. On ``simulated`` it waits in virtual time."""
    if loop == "simulated":
        return simulate(lambda: main(*args), 1, longest=HANGS).results[0]

    async def bounded() -> Any:
        with anyio.fail_after(HANGS):
            return await main(*args)

    return anyio.run(bounded, **LOOPS[loop])


def new_store() -> Any:
    """Return a store at which ranks of this process meet; in virtual time, its world's."""
    return HashStore() if clock.simulation is None else here().world.store


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run async functions concurrently and return their results in order."""
    results: list[Any] = [None] * len(calls)

    async def one(i: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[i] = await call()

    async with anyio.create_task_group() as tasks:
        for i, call in enumerate(calls):
            tasks.start_soon(one, i, call)
    return results


async def ranks(world: list[Any], each: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    """Run ``each(comm)`` for all ranks of a world concurrently and return the results in rank order."""
    return await together(*(lambda comm=comm: each(comm) for comm in world))


async def turns(n: int = 10) -> None:
    """Let the loop come round some times."""
    for _ in range(n):
        await anyio.lowlevel.checkpoint()


async def cancel_again_and_again(task: asyncio.Task[Any]) -> None:
    """Cancel a task of asyncio in several turns of the loop, none of which may end it."""
    for _ in range(5):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()


async def until(holds: Callable[[], object]) -> None:
    """Let the loop turn until something holds of which no event tells."""
    while not holds():
        await anyio.lowlevel.checkpoint()


def in_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Run functions, each in a thread of its own, and return their results, or raise the first error."""
    results: list[Any] = [None] * len(targets)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            results[i] = targets[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), name=f"rank {i}") for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results
