"""What a program finds around it beside its loop: the module ``time``, anyio's threads, the end of its generators.

Web frameworks call ``anyio.to_thread.run_sync``, which makes its call in a simulated thread here.
"""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from anyio import CancelScope, CapacityLimiter
from anyio._backends._asyncio import AsyncIOBackend
from anyio.lowlevel import checkpoint

from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import watched
from aiocomms.testing.simulation.scopes import order_scopes
from aiocomms.testing.simulation.threads import run_in_thread


@contextmanager
def _simulated_workers(running: Callable[[], Timeline]) -> Iterator[None]:
    """Have anyio's calls in threads be made in simulated ones.

    :param running: returns the process that runs.
    """

    async def run_sync(
        cls: type[AsyncIOBackend],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        abandon_on_cancel: bool = False,
        limiter: CapacityLimiter | None = None,
    ) -> Any:
        await checkpoint()
        async with limiter or cls.current_default_thread_limiter():
            with CancelScope(shield=not abandon_on_cancel):
                return await run_in_thread(running(), partial(copy_context().run, func, *args))

    before = AsyncIOBackend.__dict__["run_sync_in_worker_thread"]
    setattr(AsyncIOBackend, before.__name__, classmethod(run_sync))
    try:
        yield
    finally:
        setattr(AsyncIOBackend, before.__name__, before)


@contextmanager
def _generators_end(running: Callable[[], Timeline | None]) -> Iterator[None]:
    """End an asynchronous generator that is forgotten in a task of its process, as asyncio does.

    One of a process that is over ends without a step. It is finalized once, so what keeps it now may drop it.

    :param running: returns the process that runs; None: none does.
    """
    forgotten: list[AsyncGenerator[Any, Any]] = []

    def begin(generator: AsyncGenerator[Any, Any]) -> None:
        timeline = running()
        if timeline is not None:
            timeline.generators.append(weakref.ref(generator))

    def end(generator: AsyncGenerator[Any, Any]) -> None:
        timeline = running()
        if timeline is None or timeline.over:
            forgotten.append(generator)
        else:
            timeline.soon(lambda: asyncio.get_running_loop().create_task(generator.aclose()))

    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(begin, end)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*before)


@contextmanager
def _virtual_time(now: Callable[[], float], wall: Callable[[], float]) -> Iterator[None]:
    """Have the module ``time`` tell a simulated program its virtual time, and other threads the real one."""
    before = {name: getattr(time, name) for name in ("monotonic", "perf_counter", "time")}

    def replace(name: str, real: Callable[[], float], virtual: Callable[[], float]) -> None:
        real_ns = getattr(time, f"{name}_ns")
        setattr(time, name, lambda: virtual() if watched() else real())
        setattr(time, f"{name}_ns", lambda: int(virtual() * 1e9) if watched() else real_ns())
        undo.callback(setattr, time, name, real)
        undo.callback(setattr, time, f"{name}_ns", real_ns)

    with ExitStack() as undo:
        for name, real in before.items():
            replace(name, real, wall if name == "time" else now)
        yield


@contextmanager
def simulated_surroundings(
    running: Callable[[], Timeline | None], now: Callable[[], float], wall: Callable[[], float]
) -> Iterator[None]:
    """Have all of it be simulated.

    :param running: returns the process that runs; None: none does.
    :param now: returns its monotonic clock.
    :param wall: returns the seconds since 1970.
    """

    def process() -> Timeline:
        found = running()
        assert found is not None
        return found

    order_scopes()
    with _virtual_time(now, wall), _simulated_workers(process), _generators_end(running):
        yield
