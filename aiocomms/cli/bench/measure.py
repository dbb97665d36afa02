"""The measurements of a contender: aiocomms, or a library that is compared with aiocomms.

The measurements are the time of each call, the lateness of the event loop during the calls, and the processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence

from aiocomms.cli.bench.ours import Call

_PERIOD = 0.001
"""The duration in seconds of each sleep that measures the event loop's lateness."""
BEATING = 0.1
"""The duration in seconds of a measurement of the event loop's lateness."""
_YIELD = 0


async def turn(call: Call | None, blocking: bool, count: int) -> tuple[list[int], float]:
    """Make a call ``count`` times, one after the other.

    On a rank that does not take part in the operation, return an empty list and 0.

    :returns: the time of each call in nanoseconds, and the processor time of this process for all calls in seconds.
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
    """Make a call ``count`` times while another task repeatedly sleeps for 1 ms.

    The loop runs other tasks between two calls, so that only a call can make a sleep late.

    :returns: the 99th percentile of the seconds by which the sleeps were too long.
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
    """Return the result of :func:`lateness` for an idle loop. Only the system's timers make the sleeps late."""
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
    """Return a percentile of the values by the nearest-rank method. The result is always one of the values."""
    return sorted(values)[max(0, -(-len(values) * which // 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the median of the values."""
    return statistics.median(values)
