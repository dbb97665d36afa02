"""The parts of anyio's backend that a simulation replaces: threads, and the order in which scopes are cancelled.

anyio cancels the child scopes of a scope in the order of a set. This order depends on addresses in memory, so the order
differs from run to run. Scopes of simulated programs keep their child scopes in the order of entry.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import anyio
from anyio._backends._asyncio import AsyncIOBackend, CancelScope

from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.refusing import watched

_begin = CancelScope.__init__
_in_worker = AsyncIOBackend.run_sync_in_worker_thread
_installed: list[bool] = []


class _InOrder(dict[Any, None]):
    """A replacement of anyio's sets, which keeps the items in the order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def replace_backend() -> None:
    """Replace parts of anyio's asyncio backend for simulated programs, from now on."""
    if not _installed:
        CancelScope.__init__ = _begin_in_order  # type: ignore[method-assign, assignment]
        AsyncIOBackend.run_sync_in_worker_thread = _in_simulated_thread  # type: ignore[method-assign]
        _installed.append(True)


def _begin_in_order(scope: CancelScope, *args: Any, **options: Any) -> None:
    _begin(scope, *args, **options)
    if watched():
        scope._child_scopes = _InOrder()  # type: ignore[assignment]


async def _in_simulated_thread(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> Any:
    """See :func:`anyio.to_thread.run_sync`."""
    if clock.simulation is None or not watched():
        return await _in_worker(func, args, abandon_on_cancel, limiter)
    await anyio.lowlevel.checkpoint()
    context = copy_context()
    async with limiter or AsyncIOBackend.current_default_thread_limiter():
        with anyio.CancelScope(shield=not abandon_on_cancel):
            return await clock.simulation.run_in_thread(lambda: context.run(func, *args))
