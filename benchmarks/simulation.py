"""Measure how many histories a simulation runs in a minute, and how long a server's day takes.

Run it with ``python -m benchmarks.simulation``. A history is that of 3 ranks which meet, call 10 ``all_reduce`` and
close; as many processes as there are cores run them side by side, each by seeds of its own. A day is that of a service
of 3 ranks, with 10,000 requests, 20 deaths of workers that are started anew, and a deadline of 30 s for each request.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter

import anyio
import torch

import aiocomms
from aiocomms.errors import CommError
from aiocomms.serving import Driver, Service
from aiocomms.testing import here, simulate

DAY, REQUESTS, DEATHS, DEADLINE = 86_400.0, 10_000, 20, 30.0


async def ten_sums() -> None:
    """Form a communicator, call 10 collectives, and close it."""
    async with aiocomms.new_comm() as comm:
        for _ in range(10):
            total = await comm.all_reduce(torch.full((4,), float(comm.rank)))
            assert total[0] == sum(range(comm.size))


def histories(first: int, count: int) -> tuple[float, float]:
    """Run histories, and return the seconds of one, and those of a processor."""
    simulate(ten_sums, 3, seed=first)  # The first one imports modules.
    begins, used = time.perf_counter(), time.process_time()
    for seed in range(first, first + count):
        simulate(ten_sums, 3, seed=seed)
    return (time.perf_counter() - begins) / count, (time.process_time() - used) / count


class Day:
    """The day of a service, and what has become of its requests."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self._draw = random.Random(1)

    async def rank(self) -> None:
        """Be one of its ranks."""
        comm = await aiocomms.new_comm(timeout=DEADLINE, join=here().restarts > 0)
        async with Service(comm, self._recover) as service:

            async def execute(number: int) -> float:
                total = torch.full((4,), float(number + service.comm.rank))
                return (await service.comm.all_reduce(total))[0].item()

            if comm.rank:
                await service.work(execute)
                return
            async with service.drive(execute) as driver, anyio.create_task_group() as tasks:
                tasks.start_soon(self._kill)
                for number in range(REQUESTS):
                    await anyio.sleep(self._draw.expovariate(REQUESTS / DAY))
                    tasks.start_soon(self._ask, driver, number)

    async def _recover(self, lost: aiocomms.Communicator) -> aiocomms.Communicator:
        return await lost.reconfigure(size=lost.size, timeout=DEADLINE)

    async def _kill(self) -> None:
        for _ in range(DEATHS):
            await anyio.sleep(DAY / (DEATHS + 1))
            here().world.kill(self._draw.choice((1, 2)), 2.0)

    async def _ask(self, driver: Driver, number: int) -> None:
        with anyio.fail_after(DEADLINE):
            while True:
                try:
                    assert await driver.run(number) == 3 * number + 3
                except CommError:
                    self.answers["asked again"] += 1
                    await anyio.sleep(0.5)
                else:
                    self.answers["right"] += 1
                    return


def day() -> None:
    """Simulate it, and print how long that took."""
    logging.disable(logging.WARNING)  # Each recovery is told.
    its = Day()
    begins, used = time.perf_counter(), time.process_time()
    history = simulate(its.rank, 3, seed=1, longest=2 * DAY)
    seconds, used = time.perf_counter() - begins, time.process_time() - used
    took = f"{seconds:.1f} s, {used:.1f} s of a processor"
    print(f"a day of {history.seconds:.0f} s in {took}: {dict(its.answers)}, {DEATHS} deaths")


def main() -> None:
    """Run both, or, in a process of its own, some histories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="histories of each process (default: %(default)s)")
    parser.add_argument("--first", type=int, help="run histories from this seed on, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first is not None:
        print(*histories(options.first, options.count))
        return
    command = [sys.executable, "-m", "benchmarks.simulation", "--count", str(options.count), "--first"]
    firsts = [1_000_000 * core for core in range(len(os.sched_getaffinity(0)))]
    runs = [subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True) for first in firsts]
    each = [tuple(map(float, run.communicate()[0].split())) for run in runs]
    rate = sum(60 / seconds for seconds, _ in each)
    used = 1e3 * sum(cpu for _, cpu in each) / len(each)
    print(f"{rate:.0f} histories a minute in {len(each)} processes, {used:.2f} ms of a processor each")
    day()


if __name__ == "__main__":
    main()
