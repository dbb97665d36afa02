"""The parts of Python that a simulation replaces: the module ``time``, and the end of dropped async generators."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from asyncio.events import _set_running_loop
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from aiocomms.testing.simulation.backend import replace_backend
from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import watched


@contextmanager
def outside_the_loop() -> Iterator[None]:
    """Unset this thread's running loop and current task within the context, and restore both afterwards."""
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
    """End each asynchronous generator that the program has dropped, in a task of the generator's process.

    A generator of an ended process takes no further step. Until the end of the context, the list ``forgotten`` keeps
    the generator alive, because Python calls the finalizer of a generator only once.

    :param running: a function that returns the running process, or None.
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


def _functions_of_time(real: Any, now: Callable[[], float], wall: Callable[[], float]) -> dict[str, Callable[..., Any]]:
    """Return substitutes for the functions of the module ``time`` that read a clock, by name.

    The substitutes return virtual time. Clocks that measure processor time are not replaced.

    :param real: an object that has the real functions as attributes.
    """
    clocks = {getattr(real, f"CLOCK_{name}", None): now for name in ("MONOTONIC", "MONOTONIC_RAW", "BOOTTIME")}
    clocks[real.CLOCK_REALTIME] = wall
    read: dict[str, Callable[..., float]] = {
        "clock_gettime": lambda clock: clocks[clock]() if clock in clocks else real.clock_gettime(clock),
        "monotonic": now,
        "perf_counter": now,
        "time": wall,
    }
    return {
        **read,
        **{f"{name}_ns": lambda *given, read=call: int(read(*given) * 1e9) for name, call in read.items()},
        "asctime": lambda given=None: real.asctime(real.localtime(wall()) if given is None else given),
        "ctime": lambda seconds=None: real.ctime(wall() if seconds is None else seconds),
        "gmtime": lambda seconds=None: real.gmtime(wall() if seconds is None else seconds),
        "localtime": lambda seconds=None: real.localtime(wall() if seconds is None else seconds),
        "strftime": lambda form, given=None: real.strftime(form, real.localtime(wall()) if given is None else given),
    }


@contextmanager
def _virtual_time(now: Callable[[], float], wall: Callable[[], float]) -> Iterator[None]:
    """Make the module ``time`` return virtual time to simulated programs, and real time to other threads."""

    def replace(name: str, function: Callable[..., Any], virtual: Callable[..., Any]) -> None:
        setattr(time, name, lambda *given: virtual(*given) if watched() else function(*given))
        undo.callback(setattr, time, name, function)

    with ExitStack() as undo:
        for name, virtual in _functions_of_time(SimpleNamespace(**vars(time)), now, wall).items():
            replace(name, getattr(time, name), virtual)
        yield


@contextmanager
def simulated_surroundings(
    running: Callable[[], Timeline | None], now: Callable[[], float], wall: Callable[[], float]
) -> Iterator[None]:
    """Simulate the clocks and other surroundings of a program within the context.

    :param running: a function that returns the running process, or None.
    :param now: a function that returns the time of the running process's monotonic clock.
    :param wall: a function that returns the seconds since 1970.
    """
    replace_backend()
    with outside_the_loop(), _virtual_time(now, wall), _generators_end(running):
        yield
