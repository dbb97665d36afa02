"""What a lane costs: an all_reduce on one, on a hundred in turn, and within ``with comm.lane(key):``.

Run it with ``python -m benchmarks.lanes [--transport NAME] [--rounds N]``. Two processes. The subjects take turns, some
calls each, in an order that begins with another one in each round, and of each call the time is taken; a ratio is the
median, over the rounds, of a subject's figure against that of the calls without a lane in the same round. The fastest
tenth tells more where others load the machine: a call that loses its core measures them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from benchmarks.processes import in_two_processes

SIZES = {8: 200, 64 * 1024: 60, 1024 * 1024: 20}
"""Bytes, and the calls of a subject in a round."""
LANES = 100
PLAIN = "without a lane"
Row = dict[str, list[list[float]]]
"""By subject, for each round, the seconds of each call."""


async def timed(call: Callable[[int], Any], calls: int) -> list[float]:
    """Seconds of each of some calls."""
    samples = []
    for i in range(calls):
        start = time.perf_counter()
        await call(i)
        samples.append(time.perf_counter() - start)
    return samples


def subjects(
    comm: aiocomms.Communicator, other: aiocomms.Communicator, tensor: torch.Tensor
) -> dict[str, Callable[[int, int], Any]]:
    """How each subject makes its calls; ``other`` is for the one that lets a communicator look for a current lane."""
    lane = comm.lane("one")
    views = [comm.lane(i) for i in range(LANES)]

    async def within(_: int, calls: int) -> list[float]:
        with other.lane("current"):
            return await timed(lambda i: other.all_reduce(tensor), calls)

    return {
        PLAIN: lambda _, calls: timed(lambda i: comm.all_reduce(tensor), calls),
        "on one lane": lambda _, calls: timed(lambda i: lane.all_reduce(tensor), calls),
        f"on {LANES} lanes in turn": lambda _, calls: timed(lambda i: views[i % LANES].all_reduce(tensor), calls),
        f"on {LANES} lanes, each made anew": lambda _, calls: timed(
            lambda i: comm.lane(i % LANES).all_reduce(tensor), calls
        ),
        "with comm.lane(key):": within,
    }


async def measure(rank: int, folder: str, transport: str, rounds: int) -> dict[int, Row]:
    """One rank's samples, by size."""
    samples: dict[int, Row] = {}
    store = dist.FileStore(f"{folder}/store", 2)
    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2) as comm:
        other = await comm.split([0, 1])
        assert other is not None
        async with other:
            for size, calls in SIZES.items():
                tensor = torch.zeros(size // 4)
                takers = list(subjects(comm, other, tensor).items())
                row = samples[size] = {name: [] for name, _ in takers}
                for turn in range(-1, rounds):
                    for i in range(len(takers)):
                        name, take = takers[(turn + i) % len(takers)]
                        await comm.barrier()
                        found = await take(turn, calls)
                        if turn >= 0:  # the first round warms up
                            row[name].append(found)
    return samples


def show(size: int, row: Row) -> None:
    """Print one table."""
    print(
        f"\nall_reduce of {size} bytes\n{'':33}{'mean':>11}{'p99':>11}{'median':>11}{'ratio':>7}{'p10':>11}{'ratio':>7}"
    )
    for name, rounds in row.items():
        values = [value for samples in rounds for value in samples]
        parts = [
            f"{figure(values) * 1e6:>8.2f} µs{against_plain(row, name, figure):>7.2f}"
            for figure in (statistics.median, tenth)
        ]
        mean, late = statistics.fmean(values) * 1e6, statistics.quantiles(values, n=100)[98] * 1e6
        print(f"{name:33}{mean:>8.2f} µs{late:>8.2f} µs{''.join(parts)}")


def tenth(values: list[float]) -> float:
    """What a tenth of the values is below."""
    return statistics.quantiles(values, n=10)[0]


def against_plain(row: Row, name: str, figure: Callable[[list[float]], float]) -> float:
    """The median, over the rounds, of a subject's figure against that of the calls without a lane."""
    return statistics.median([figure(s) / figure(p) for s, p in zip(row[name], row[PLAIN], strict=True)])


def main() -> None:
    """Start both ranks, and print rank 0's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {where}, transport {args.transport}")
    rows = in_two_processes(measure, args.transport, args.rounds)[0]
    for size, row in rows.items():
        show(size, row)


if __name__ == "__main__":
    sys.exit(main())
