"""Async functions and threads run side by side, for tests: on each event loop, on every rank of a world, bounded."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio.lowlevel
from processes import HANGS

LOOPS = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_on(loop: str, main: Main, *args: Any) -> Any:
    """Run an async function in a new loop; a test that hangs fails."""

    async def bounded() -> Any:
        with anyio.fail_after(HANGS):
            return await main(*args)

    return anyio.run(bounded, **LOOPS[loop])


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
