"""A heartbeat that asyncio's timers do not blur.

asyncio's selector sleeps in whole milliseconds, rounded up: a task that sleeps for 1 ms is late by up to 1 ms as soon
as anything else happens on its loop. Here the kernel's timer counts, and the loop is told by a file descriptor.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CLOCK_MONOTONIC, _TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 1, os.O_NONBLOCK, os.O_CLOEXEC, 1


@contextmanager
def ticking(period: float, late: list[float]) -> Iterator[None]:
    """Note by how many seconds the running loop comes too late to each tick of a clock.

    :param period: seconds between ticks; ticks that pass while the loop is held up are late, too
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    due = time.monotonic() + period
    nanoseconds = [divmod(round(seconds * 1e9), 10**9) for seconds in (period, due)]
    if libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, struct.pack("4q", *nanoseconds[0], *nanoseconds[1]), None):
        raise OSError(ctypes.get_errno(), "timerfd_settime")

    def tick() -> None:
        nonlocal due
        now = time.monotonic()
        [passed] = struct.unpack("Q", os.read(fd, 8))
        for _ in range(passed):
            late.append(now - due)
            due += period

    loop = asyncio.get_running_loop()
    loop.add_reader(fd, tick)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)
