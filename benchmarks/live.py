"""Live groups: a partial all_reduce against a communicator's whole one, and how long a death holds up the others.

Two processes, each bound to a core where there are two, reduce 8 B and 1 MiB in turn: by ``comm.all_reduce`` over
``ucx``, by a lane of a live group, and by that in a store. Then three of which the last kills itself: the seconds until
the others have the next result, in the live group, and by ``comm.reconfigure()`` and the call once more. Run it with
``python -m benchmarks.live [--rounds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time

import torch
import torch.distributed as dist

import aiocomms
from aiocomms.cli.bench.machine import bind
from aiocomms.errors import CommError
from aiocomms.live import forming
from benchmarks.processes import Call, in_processes, in_two_processes, timed

SIZES = {8: 2000, 2**20: 200}
"""The number of calls of each in a round, by its bytes."""


async def grouped(store: dist.Store, rank: int, size: int, native: bool = True) -> aiocomms.LiveGroup:
    """Form a group, in memory or in the store."""
    found = forming.native
    if not native:
        forming.native = lambda: None
    try:
        return await aiocomms.live_group("shared" if native else "store", store=store, rank=rank, size=size)
    finally:
        forming.native = found


async def whole(rank: int, folder: str, rounds: int) -> dict[tuple[int, str], list[float]]:
    """Seconds of each call, by its bytes and way."""
    bind(rank, 2)
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[no-untyped-call]
    comm = await aiocomms.new_comm("ucx", store=store, rank=rank, size=2)
    groups = [await grouped(store, rank, 2, native) for native in (True, False)]
    async with comm, groups[0], groups[1]:
        memory, stored = [await group.lane() for group in groups]
        found: dict[tuple[int, str], list[float]] = {}
        for _ in range(rounds):
            for nbytes, count in SIZES.items():
                tensor = torch.zeros(nbytes // 4)
                ways: dict[str, tuple[Call, int]] = {
                    "communicator": (lambda tensor=tensor: comm.all_reduce(tensor), count),  # type: ignore[misc]
                    "live group": (lambda tensor=tensor: memory.all_reduce(tensor), count),  # type: ignore[misc]
                    "live group, store": (lambda tensor=tensor: stored.all_reduce(tensor), 5),  # type: ignore[misc]
                }
                for way, (call, times) in ways.items():
                    await comm.barrier()
                    found.setdefault((nbytes, way), []).extend(await timed(call, times))
        await comm.barrier()
    return found


async def without(rank: int, folder: str, way: str) -> float:
    """Return the seconds from the death of the last rank to the next result of this one."""
    store = dist.FileStore(f"{folder}/store", 3)  # type: ignore[no-untyped-call]
    tensor = torch.zeros(2)
    comm = await aiocomms.new_comm("ucx", store=store, rank=rank, size=3, timeout=60)
    group = await grouped(store, rank, 3)
    live = await group.lane()
    for _ in range(100):
        await (comm if way == "communicator" else live).all_reduce(tensor)
    if rank == 2:
        await asyncio.sleep(0.2)
        store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "communicator":
        try:
            await comm.all_reduce(tensor)
        except CommError:
            comm = await comm.reconfigure()
            await comm.all_reduce(tensor)
    else:
        assert (await live.all_reduce(tensor)).ranks == (0, 1)
    ended = time.monotonic()
    await group.aclose()
    await comm.aclose()
    return ended - float(store.get("died"))


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.rounds} rounds in turn, load before {os.getloadavg()[0]:.2f}")
    found = in_two_processes(whole, args.rounds)[0]
    print("| awaited all_reduce, 2 processes | | median | mean | p99 | times the whole one |")
    print("|---|---|---:|---:|---:|---:|")
    for (nbytes, way), each in found.items():
        median, p99 = statistics.median(each), sorted(each)[int(0.99 * len(each))]
        ratio = median / statistics.median(found[nbytes, "communicator"])
        times = " | ".join(f"{it * 1e6:.1f} µs" for it in (median, statistics.mean(each), p99))
        print(f"| {nbytes} B | {way} | {times} | {ratio:.2f} |")
    print("| from a death to the next result, 3 processes | median | most |\n|---|---:|---:|")
    for way in ("communicator", "live group"):
        each = [max(in_processes(3, without, way, lost=1)) for _ in range(args.rounds)]
        print(f"| {way} | {statistics.median(each) * 1e3:.1f} ms | {max(each) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
