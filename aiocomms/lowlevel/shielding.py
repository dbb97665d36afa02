"""The await of a call to its end, however often the task is cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

_T = TypeVar("_T")


async def shielded(call: Callable[[], Awaitable[_T]]) -> _T:
    """Await a call to its end, even if the task is cancelled. The cancellation is raised after the call has ended.

    A shielded scope of anyio protects from other scopes, but not from asyncio's own ``cancel()``. A task group waits
    for its tasks also after such a ``cancel()``. The cancellation of an outer scope is raised at the next await.

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
