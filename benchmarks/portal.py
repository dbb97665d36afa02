"""What another thread pays for an op: a portal's, against the ``await`` of the loop's own thread.

Run it with ``python -m benchmarks.portal``. A world of one, all_reduce of 8 bytes, which completes within its call:
what is left is the way to the loop's thread and back. The subjects take turns, and of each call the time is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch
import uvloop

import aiocomms

ROUNDS = 40
BATCH = 250


def timed(call: Callable[[], object]) -> list[float]:
    """Seconds of each of some calls."""
    samples = []
    for _ in range(BATCH):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


async def awaited(comm: aiocomms.Communicator, tensor: torch.Tensor) -> list[float]:
    """Seconds of each of some ops of the loop's own thread."""
    samples = []
    for _ in range(BATCH):
        start = time.perf_counter()
        await comm.all_reduce(tensor)
        samples.append(time.perf_counter() - start)
    return samples


def many(portal: aiocomms.Portal, tensor: torch.Tensor) -> list[float]:
    """Seconds of an op where some are called before the last one is waited for."""
    start = time.perf_counter()
    works = [portal.all_reduce(tensor) for _ in range(BATCH)]
    works[-1].wait()
    return [(time.perf_counter() - start) / BATCH]


async def measure() -> dict[str, list[float]]:
    """The samples of each subject."""
    tensor = torch.ones(2)
    samples: dict[str, list[float]] = {}
    loop = asyncio.get_running_loop()
    async with aiocomms.new_comm("local") as comm:
        portal = comm.portal()
        threaded: dict[str, Callable[[], list[float]]] = {
            "a thread and back: call_soon_threadsafe": lambda: timed(knock(loop)),
            "portal.all_reduce(t).wait()": lambda: timed(lambda: portal.all_reduce(tensor).wait()),
            "the same, 250 under way": lambda: many(portal, tensor),
        }
        for _ in range(ROUNDS):
            samples.setdefault("await comm.all_reduce(t)", []).extend(await awaited(comm, tensor))
            for name, call in threaded.items():
                samples.setdefault(name, []).extend(await asyncio.to_thread(call))
    return samples


def knock(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    """The least that a call on another thread's loop can cost."""
    lock = threading.Lock()
    lock.acquire()

    def call() -> None:
        loop.call_soon_threadsafe(lock.release)
        lock.acquire()

    return call


def show(title: str, samples: dict[str, list[float]]) -> None:
    """Print one table."""
    print(f"\n{title}\n{'':42}{'mean':>10}{'median':>10}{'p99':>10}{'ratio':>8}{'above':>11}")
    base = statistics.median(samples["await comm.all_reduce(t)"])
    for name, values in samples.items():
        median = statistics.median(values)
        p99 = statistics.quantiles(values, n=100)[98]
        row = "".join(f"{value * 1e6:>7.2f} µs" for value in (statistics.fmean(values), median, p99))
        print(f"{name:42}{row}{median / base:>8.2f}{(median - base) * 1e6:>8.2f} µs")


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {where}")
    show("asyncio", asyncio.run(measure()))
    show("uvloop", uvloop.run(measure()))


if __name__ == "__main__":
    sys.exit(main())
