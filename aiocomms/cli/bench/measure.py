"""The measurements: the time of one contender, the lateness of the loop beside it, and its share of the processor."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence

from aiocomms.cli.bench.ours import Call

_PERIOD = 0.001
"""The period of the heartbeat, in seconds."""
BEATING = 0.1
"""Seconds for which the loop is watched."""
_YIELD = 0


async def turn(call: Call | None, blocking: bool, count: int) -> tuple[list[int], float]:
    """Call it ``count`` times, one behind the other.

    :returns: the nanoseconds of each, and the seconds of the processor that this process has spent on all of them; of a
        rank that has no part: none, and 0.
    """
    took: list[int] = []
    if call is None:
        return took, 0.0
    note, now = took.append, time.perf_counter_ns
    used = time.process_time()
    if blocking:
        for _ in range(count):
            began = now()
            call()
            note(now() - began)
    else:
        for _ in range(count):
            began = now()
            await call()
            note(now() - began)
    return took, time.process_time() - used


async def lateness(call: Call | None, blocking: bool, count: int) -> float:
    """Call it ``count`` times beside a task that sleeps for 1 ms over and over.

    The loop comes round once between two calls, so that what is late is late because of a call.

    :returns: the seconds by which 99 of 100 of the sleeps were too long at most.
    """
    async with _heartbeat() as late:
        for _ in range(count if call is not None else 0):
            made = call()  # type: ignore[misc]
            if not blocking:
                await made
            await asyncio.sleep(_YIELD)
        if call is None:
            await asyncio.sleep(BEATING)
    return percentile(late, 99)


async def idle_lateness() -> float:
    """Return the same of a loop that has nothing else to do, which timers of the system make late."""
    async with _heartbeat() as late:
        await asyncio.sleep(BEATING)
    return percentile(late, 99)


@contextlib.asynccontextmanager
async def _heartbeat() -> AsyncIterator[list[float]]:
    late: list[float] = []
    beaten = asyncio.Event()

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_PERIOD)
            late.append(time.perf_counter() - began - _PERIOD)
            beaten.set()

    task = asyncio.create_task(beat())
    await asyncio.sleep(_YIELD)
    try:
        yield late
        await beaten.wait()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def percentile(values: Sequence[float], which: int) -> float:
    """Return a percentile by the nearest rank: one of the values."""
    return sorted(values)[max(0, -(-len(values) * which // 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the median of the values."""
    return statistics.median(values)
