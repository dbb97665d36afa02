"""The surroundings of a simulated program beside its loop: the module ``time``, the end of its generators."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from aiocomms.testing.simulation.backend import replace_backend
from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import watched


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
    replace_backend()
    with _virtual_time(now, wall), _generators_end(running):
        yield
