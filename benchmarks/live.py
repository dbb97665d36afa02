"""Live groups: partial collectives against a communicator's whole ones, and how long a death holds up the others.

Processes, bound to the cores in turn, call each collective with 8 B and 1 MiB: over ``ucx``, in a lane of a live group,
and for all_reduce in a lane of a group in a store. Then three of which the last kills itself: the seconds until
the others have the next result, in the live group, and by ``comm.reconfigure()`` and the call once more. Run it with
``python -m benchmarks.live [--ranks N] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

import aiocomms
from aiocomms import Communicator
from aiocomms.cli.bench.machine import bind
from aiocomms.errors import CommError
from aiocomms.live import forming
from aiocomms.live.lane import LiveLane
from benchmarks.processes import Call, in_processes, timed

SIZES = {8: 2000, 2**20: 200}
"""The number of calls of each in a round, by its bytes."""
Found = dict[tuple[str, int, str], list[float]]
"""Seconds by collective, bytes and way."""


async def grouped(store: dist.Store, rank: int, size: int, native: bool = True) -> aiocomms.LiveGroup:
    """Form a group, in memory or in the store."""
    found = forming.native
    if not native:
        forming.native = lambda: None
    try:
        return await aiocomms.live_group("shared" if native else "store", store=store, rank=rank, size=size)
    finally:
        forming.native = found


def calls(comm: Communicator, lane: LiveLane, nbytes: int) -> Iterator[tuple[str, Call, Call]]:
    """Return each collective, as a call of the communicator and as one of the lane.

    :param nbytes: the bytes of each contribution; those of reduce_scatter and all_to_all are split between the ranks.
    """
    tensor, outputs = torch.zeros(nbytes // 4), [torch.zeros(nbytes // 4) for _ in range(comm.size)]
    parts, received = (list(torch.zeros(max(nbytes // 4, comm.size)).tensor_split(comm.size)) for _ in range(2))
    yield "all_reduce", lambda: comm.all_reduce(tensor), lambda: lane.all_reduce(tensor)
    yield "all_gather", lambda: comm.all_gather(outputs, tensor), lambda: lane.all_gather(tensor)
    yield "reduce_scatter", lambda: comm.reduce_scatter(received[comm.rank], parts), lambda: lane.reduce_scatter(parts)
    yield "all_to_all", lambda: comm.all_to_all(received, parts), lambda: lane.all_to_all(parts)
    yield "broadcast", lambda: comm.broadcast(tensor, 0), lambda: lane.broadcast(tensor)
    yield "barrier", lambda: comm.barrier(), lambda: lane.barrier()


async def whole(rank: int, folder: str, ranks: int, rounds: int) -> Found:
    """Return the seconds of each call."""
    bind(rank, ranks)
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[no-untyped-call]
    comm = await aiocomms.new_comm("ucx", store=store, rank=rank, size=ranks)
    groups = [await grouped(store, rank, ranks, native) for native in (True, False)]
    found: Found = {}
    async with comm, groups[0], groups[1]:
        memory, stored = [await group.lane() for group in groups]
        for _ in range(rounds):
            for nbytes, count in SIZES.items():
                for name, plain, live in calls(comm, memory, nbytes):
                    for way, call in (("communicator", plain), ("live group", live)):
                        await comm.barrier()
                        found.setdefault((name, nbytes, way), []).extend(await timed(call, count))
                tensor = torch.zeros(nbytes // 4)
                in_store = found.setdefault(("all_reduce", nbytes, "live group, store"), [])
                in_store += await timed(partial(stored.all_reduce, tensor), 5)
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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.rounds} rounds in turn, load before {os.getloadavg()[0]:.2f}")
    found = in_processes(args.ranks, whole, args.ranks, args.rounds)[0]
    print(f"| awaited, {args.ranks} processes | | | median | mean | p99 | times the whole one |")
    print("|---|---|---|---:|---:|---:|---:|")
    for (name, nbytes, way), each in found.items():
        median, p99 = statistics.median(each), sorted(each)[int(0.99 * len(each))]
        ratio = median / statistics.median(found[name, nbytes, "communicator"])
        times = " | ".join(f"{it * 1e6:.1f} µs" for it in (median, statistics.mean(each), p99))
        print(f"| {name} | {nbytes} B | {way} | {times} | {ratio:.2f} |")
    print("| from a death to the next result, 3 processes | median | most |\n|---|---:|---:|")
    for way in ("communicator", "live group"):
        each = [max(in_processes(3, without, way, lost=1)) for _ in range(args.rounds)]
        print(f"| {way} | {statistics.median(each) * 1e3:.1f} ms | {max(each) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
