"""Costs of many communicators: a wake-up, descriptors and memory, of a family of splits beside one split.

Rank 1 sends its clock to rank 0, which has parked; the two share the machine's. The pairs of families take turns, so
that the machine's drift hits both alike. Then each split carries something large. Run it with
``python -m benchmarks.many [--transport NAME] [--ranks N] [--splits N] [--bytes N]``.
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
from benchmarks.processes import in_processes

ROUNDS = 15
WAKES = 20
"""Wake-ups in each round."""
PAUSE = 0.004
"""Seconds in which the receiver parks."""


REST = 0.5
"""Seconds after which all is at rest."""


async def wake_ups(comm: aiocomms.Communicator) -> list[float]:
    """Seconds from a send to the receiver's task, once for each of :data:`WAKES`; the other ranks have parked, too."""
    took, stamp = [], torch.zeros(1, dtype=torch.int64)
    for _ in range(WAKES):
        if comm.rank == 0:
            await comm.recv(stamp, 1)
            took.append((time.monotonic_ns() - int(stamp)) / 1e9)
        elif comm.rank == 1:
            await asyncio.sleep(PAUSE)
            await comm.send(stamp.fill_(time.monotonic_ns()), 0)
    await comm.barrier()
    return took


def memory() -> tuple[int, int]:
    """This process's part of the bytes that communicators share, and its page tables'."""
    shared, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = "memfd:aiocomms" in line
        elif counts and line.startswith("Pss:"):
            shared += 1024 * int(line.split()[1])
    found = re.search(r"^VmPTE:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return shared, 1024 * int(found[1])


def descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def splits_of(root: aiocomms.Communicator, count: int) -> list[aiocomms.Communicator]:
    """Return so many communicators of all ranks, which have all carried something small."""
    comms = [await root.split(range(root.size)) for _ in range(count)]
    found = [comm for comm in comms if comm is not None]
    for comm in found:
        await comm.all_reduce(torch.ones(2))
    return found


def taken() -> dict[str, int]:
    """Return the resources that this process has taken for communicators by now."""
    shared, tables = memory()
    return {"descriptors": descriptors(), "shared": shared, "tables": tables}


async def carry(root: aiocomms.Communicator, comms: list[aiocomms.Communicator], count: int) -> dict[str, Any]:
    """An all_reduce of so many bytes on each, one after the other; twice, and as often on one. What stays."""
    tensor = torch.ones(count // 4)
    seconds: dict[str, float] = {}
    for name, which in (("first", comms), ("in turn", comms), ("on one", [comms[0]] * len(comms))):
        await root.barrier()
        began = time.perf_counter()
        for comm in which:
            await comm.all_reduce(tensor)
        seconds[name] = (time.perf_counter() - began) / len(which)
    await root.barrier()
    await asyncio.sleep(REST)
    await root.barrier()
    return {"seconds": seconds, **taken()}


async def measure(rank: int, folder: str, transport: str, ranks: int, splits: int, count: int) -> dict[str, Any]:
    """The wake-ups with one split and with many; what the many take, before they have carried much and after it."""
    families: list[tuple[aiocomms.Communicator, list[aiocomms.Communicator]]] = []
    costs: dict[str, Any] = {}
    for number, splits_of_it in (("one", 1), ("many", splits)):
        store = dist.FileStore(f"{folder}/{number}", ranks)  # type: ignore[no-untyped-call]
        root = await aiocomms.new_comm(transport, store=store, rank=rank, size=ranks, name=number)
        await root.barrier()
        before, began = taken(), time.perf_counter()
        comms = await splits_of(root, splits_of_it)
        costs[number] = {"seconds": time.perf_counter() - began, "before": before, "small": taken()}
        families.append((root, comms))
    rounds = []
    for _ in range(ROUNDS):
        took = [await wake_ups(comms[0]) for _, comms in families]
        rounds.append([statistics.median(each) for each in took if each])
    costs["many"]["large"] = await carry(*families[1], count)
    for root, comms in families:
        await asyncio.gather(*(comm.aclose() for comm in comms))
        await root.aclose()
    return {"rounds": rounds, "costs": costs}


def report(found: list[dict[str, Any]], number: str, size: str) -> str:
    """Report the costs of a family's splits: descriptors of the first rank, and memory of all."""
    costs = [rank["costs"][number] for rank in found]
    grown = {key: [cost[size][key] - cost["before"][key] for cost in costs] for key in costs[0]["before"]}
    shared, tables = (sum(grown[key]) / 2**20 for key in ("shared", "tables"))
    return f"{grown['descriptors'][0]} descriptors, {shared:.1f} MiB of shared memory, {tables:.1f} MiB of page tables"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--splits", type=int, default=150)
    parser.add_argument("--bytes", type=int, default=2**20)
    args = parser.parse_args()
    found = in_processes(args.ranks, measure, args.transport, args.ranks, args.splits, args.bytes)
    rounds, costs = found[0]["rounds"], found[0]["costs"]
    one, many = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(
        f"\na wake-up between 2 of {args.ranks} processes over {args.transport}, median of {ROUNDS} rounds of {WAKES}"
    )
    print(f"with 1 communicator {one:.0f} us, with {args.splits} {many:.0f} us; ratio of the rounds {ratio:.2f}")
    for number, cost in costs.items():
        print(f"{number}: {report(found, number, 'small')}; {cost['seconds']:.2f} s to form")
    print(f"each of the many has carried {args.bytes} bytes, twice: {report(found, 'many', 'large')}")
    took = costs["many"]["large"]["seconds"]
    print("an all_reduce of that size: " + ", ".join(f"{name} {each * 1e6:.0f} us" for name, each in took.items()))


if __name__ == "__main__":
    main()
