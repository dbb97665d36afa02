"""What another thread pays for an op: a portal's, against the ``await`` of the loop's own thread.

Run it with ``python -m benchmarks.portal``. All_reduce of 8 bytes, in three places: a world of one on ``local``, whose
ops the loop posts, so that what is left is the way to its thread and back; a world of one on ``ucx``, which posts where
it is called; and two processes on ``ucx``. The subjects take turns, and of each call the time is taken; between
processes both ranks take them together. Where the other rank is late, it calls :data:`LATE` seconds later, so that the
op is pending when its post returns; of these the time is that after the other rank's call, both read from one clock.
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
from typing import Any

import torch
import torch.distributed as dist
import uvloop

import aiocomms
from benchmarks.processes import in_two_processes

ROUNDS = 40
BATCH = 250
LATE = 0.002
FEW = 10
"""Calls of a turn in which the other rank is late."""
AWAITED = "await comm.all_reduce(t)"
AWAITED_LATE = "the other rank is late: await"
PLAINLY = "portal.all_reduce(t).wait()"
PLAINLY_LATE = "the other rank is late: portal"


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


async def alone(transport: str) -> dict[str, list[float]]:
    """The samples of each subject, in a world of one."""
    tensor = torch.ones(2)
    samples: dict[str, list[float]] = {}
    loop = asyncio.get_running_loop()
    async with aiocomms.new_comm(transport) as comm:
        portal = comm.portal()
        threaded: dict[str, Callable[[], list[float]]] = {
            "a thread and back: call_soon_threadsafe": lambda: timed(knock(loop)),
            PLAINLY: lambda: timed(lambda: portal.all_reduce(tensor).wait()),
            "the same, 250 under way": lambda: many(portal, tensor),
        }
        for _ in range(ROUNDS):
            samples.setdefault(AWAITED, []).extend(await awaited(comm, tensor))
            for name, call in threaded.items():
                samples.setdefault(name, []).extend(await asyncio.to_thread(call))
    return samples


async def of_two(rank: int, folder: str) -> dict[str, list[float]]:
    """One rank's samples of each subject; of a late rank, when it called and when rank 0's call was done."""
    tensor = torch.ones(2)
    samples: dict[str, list[float]] = {}
    store = dist.FileStore(f"{folder}/store", 2)
    async with aiocomms.new_comm("ucx", store=store, rank=rank, size=2) as comm:
        portal = comm.portal()
        for turn in range(-1, ROUNDS):
            await comm.barrier()
            found = {AWAITED: await awaited(comm, tensor)}
            await comm.barrier()
            found[PLAINLY] = await asyncio.to_thread(timed, lambda: portal.all_reduce(tensor).wait())
            found[AWAITED_LATE] = [await late(comm) for _ in range(FEW)]
            found[PLAINLY_LATE] = await asyncio.to_thread(lambda: [late_elsewhere(portal) for _ in range(FEW)])
            for name, values in found.items():
                if turn >= 0:  # the first round warms up
                    samples.setdefault(name, []).extend(values)
    return samples


async def late(comm: aiocomms.Communicator) -> float:
    """When rank 1 calls, after some time; and on rank 0 when it has what it has waited for."""
    await comm.barrier()
    if comm.rank == 1:
        await asyncio.sleep(LATE)
        called = time.perf_counter()
        await comm.barrier()
        return called
    await comm.barrier()
    return time.perf_counter()


def late_elsewhere(portal: aiocomms.Portal) -> float:
    """The same by another thread."""
    portal.barrier().wait()
    if portal.rank == 1:
        time.sleep(LATE)
        called = time.perf_counter()
        portal.barrier().wait()
        return called
    portal.barrier().wait()
    return time.perf_counter()


def between_processes() -> dict[str, list[float]]:
    """The samples of rank 0."""
    ours, theirs = in_two_processes(of_two)
    for name in (AWAITED_LATE, PLAINLY_LATE):
        ours[name] = [done - called for done, called in zip(ours[name], theirs[name], strict=True)]
    samples: dict[str, list[float]] = ours
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
    """Print one table; *above* is what the median is above that of the await in the same place."""
    print(f"\n{title}\n{'':42}{'mean':>10}{'median':>10}{'p99':>10}{'ratio':>8}{'above':>11}")
    for name, values in samples.items():
        base = statistics.median(samples[AWAITED_LATE if name in (AWAITED_LATE, PLAINLY_LATE) else AWAITED])
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
    loops: dict[str, Callable[[Any], dict[str, list[float]]]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}
    for loop, run in loops.items():
        show(f"{loop}, local, a world of one", run(alone("local")))
    show("asyncio, ucx, a world of one", asyncio.run(alone("ucx")))
    show("asyncio, ucx, two processes", between_processes())


if __name__ == "__main__":
    sys.exit(main())
