"""A search for threads and descriptors that closed objects have left in this process."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import anyio

from aiocomms.progress.deadlines import watchdog

LOOKS = 150
"""The largest number of times that a check counts the threads and descriptors. The counts are 10 ms apart.

The check counts again if a slow rank has not released all threads and descriptors yet.
"""


async def expect_no_more_than(before: tuple[int, int]) -> None:
    """Wait until the numbers of threads and descriptors are not higher than the numbers in ``before``."""
    for _ in range(LOOKS):
        now = resources()
        if all(count <= then for count, then in zip(now, before, strict=True)):
            return
        await anyio.sleep(0.01)  # threads take a moment to end, and no event reports their end
    raise AssertionError(f"threads, descriptors: {before}, now {now}")


def resources() -> tuple[int, int]:
    """Count the threads and descriptors of this process."""
    # The call starts the watchdog's thread, which otherwise starts with the first op that waits.
    watchdog.wake_by(time.monotonic())
    gc.collect()
    return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())
