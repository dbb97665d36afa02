"""A function that awaits a call until the call has ended, even if the task is cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

_T = TypeVar("_T")


async def shielded(call: Callable[[], Awaitable[_T]]) -> _T:
    """Await a call until the call ends, even if the task is cancelled. The cancellation is raised afterwards.

    A shielded scope of anyio does not protect a task from asyncio's own ``cancel()``. So the call runs in a task group,
    which waits for its tasks even after a ``cancel()``. If an outer scope of anyio was cancelled, the next await of the
    task raises the cancellation.

    :returns: the result of the call.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                results.append(await call())
            except Exception as error:
                errors.append(error)

    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
    if errors:
        raise errors.pop()
    return results[0]
