"""The surroundings of a simulated program beside its loop: the module ``time``, and the end of async generators."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from asyncio.events import _set_running_loop
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from aiocomms.testing.simulation.backend import replace_backend
from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import watched


@contextmanager
def outside_the_loop() -> Iterator[None]:
    """Leave the loop that runs in this thread and its task, and enter both again at the end of the context."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if loop is not None and task is not None:
        asyncio.tasks._leave_task(loop, task)
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(loop)
        if loop is not None and task is not None:
            asyncio.tasks._enter_task(loop, task)


@contextmanager
def _generators_end(running: Callable[[], Timeline | None]) -> Iterator[None]:
    """End a forgotten asynchronous generator by a task of its process, as asyncio does.

    A generator of a process that has ended runs no further step: the list ``forgotten`` keeps it until the end. Python
    calls its finalizer only once.

    :param running: returns the running process, or None.
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
    """Make the module ``time`` return virtual time to simulated programs, and real time to other threads."""
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
    """Simulate the clocks and other surroundings of a program within the context.

    :param running: returns the running process, or None.
    :param now: returns the time of the running process's monotonic clock.
    :param wall: returns the seconds since 1970.
    """
    replace_backend()
    with outside_the_loop(), _virtual_time(now, wall), _generators_end(running):
        yield
