"""What many communicators cost: a wake-up, descriptors and shared memory, of a family of splits beside one split.

Rank 1 sends its clock to rank 0, which has parked; the two share the machine's. The pairs of families take turns, so
that the machine's drift hits both alike. Run it with ``python -m benchmarks.many [--transport NAME] [--splits N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from benchmarks.processes import in_two_processes

ROUNDS = 15
WAKES = 20
"""Wake-ups in each round."""
PAUSE = 0.004
"""Seconds in which the receiver parks."""


async def wake_ups(comm: aiocomms.Communicator) -> list[float]:
    """Seconds from a send to the receiver's task, once for each of :data:`WAKES`."""
    took, stamp = [], torch.zeros(1, dtype=torch.int64)
    for _ in range(WAKES):
        if comm.rank == 0:
            await comm.recv(stamp, 1)
            took.append((time.monotonic_ns() - int(stamp)) / 1e9)
        else:
            await asyncio.sleep(PAUSE)
            await comm.send(stamp.fill_(time.monotonic_ns()), 0)
    return took


def shared_memory() -> int:
    """Bytes of memory that processes share, of this machine."""
    found = re.search(r"^Shmem:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def measure(rank: int, folder: str, transport: str, splits: int) -> dict[str, Any]:
    """The wake-ups with one split and with many; what the many take."""
    families, costs = [], {}
    for number, count in (("one", 1), ("many", splits)):
        store = dist.FileStore(f"{folder}/{number}", 2)  # type: ignore[no-untyped-call]
        root = await aiocomms.new_comm(transport, store=store, rank=rank, size=2, name=number)
        await root.barrier()
        before = descriptors(), shared_memory(), time.perf_counter()
        comms = [await root.split([0, 1]) for _ in range(count)]
        for comm in comms:
            await comm.all_reduce(torch.ones(2))
        costs[number] = {
            "descriptors": descriptors() - before[0],
            "bytes": shared_memory() - before[1],
            "seconds": time.perf_counter() - before[2],
        }
        families.append((root, comms))
    rounds = [
        [statistics.median(took) for _, comms in families if (took := await wake_ups(comms[0]))] for _ in range(ROUNDS)
    ]
    for root, comms in families:
        await asyncio.gather(*(comm.aclose() for comm in comms))
        await root.aclose()
    return {"rounds": rounds, "costs": costs}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--splits", type=int, default=150)
    args = parser.parse_args()
    found = in_two_processes(measure, args.transport, args.splits)[0]
    one, many = (statistics.median(column) * 1e6 for column in zip(*found["rounds"], strict=True))
    ratio = statistics.median(b / a for a, b in found["rounds"])
    print(f"\na wake-up between 2 processes over {args.transport}, median of {ROUNDS} rounds of {WAKES}")
    print(f"with 1 communicator {one:.0f} us, with {args.splits} {many:.0f} us; ratio of the rounds {ratio:.2f}")
    for number, cost in found["costs"].items():
        print(
            f"{number}: {cost['descriptors']} descriptors, {cost['bytes'] / 2**20:.1f} MiB of the machine's shared "
            f"memory, {cost['seconds']:.2f} s to form"
        )


if __name__ == "__main__":
    main()
