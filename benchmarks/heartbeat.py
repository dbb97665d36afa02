"""Whether the event loop stays free while large collectives run between two processes.

A task sleeps for 1 ms over and over while its rank runs 64 MiB all_reduces; how late it wakes is how long a request
handler would have waited. Ours and the usual ways to await gloo run in turn in the same processes, and an idle loop
is the yardstick. Run it with ``make bench`` or ``python -m benchmarks.heartbeat [--json FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from benchmarks.processes import in_two_processes

MIB = 64
OPS = 8
ROUNDS = 3
PERIOD = 0.001


async def beat(late: list[float]) -> None:
    """Sleep for a period, over and over, and note by how much each sleep was too long."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(PERIOD)
        late.append(time.perf_counter() - start - PERIOD)


async def measure(call: Callable[[], Awaitable[Any]], late: list[float], took: list[float]) -> None:
    """Run the ops with the heartbeat beside them."""
    task = asyncio.create_task(beat(late))
    try:
        for _ in range(OPS):
            start = time.perf_counter()
            await call()
            took.append(time.perf_counter() - start)
    finally:
        task.cancel()


async def run_rank(rank: int, folder: str, transport: str) -> dict[str, Any]:
    """One rank's part: every subject in turn, several rounds."""
    store = dist.FileStore(f"{folder}/ours", 2)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/gloo", 2), rank=rank, world_size=2)
    tensor = torch.ones(MIB * 2**20 // 4)
    loop = asyncio.get_running_loop()

    async def in_executor() -> None:
        await loop.run_in_executor(None, dist.all_reduce, tensor)

    async def spinning() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():  # noqa: ASYNC110 - the usual recipe is what is measured
            await asyncio.sleep(0)

    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2) as comm:
        subjects: dict[str, Callable[[], Awaitable[Any]]] = {
            "idle loop": lambda: asyncio.sleep(0.1),
            f"aiocomms {transport}": lambda: comm.all_reduce(tensor),
            "gloo in an executor": in_executor,
            "gloo polled by sleep(0)": spinning,
        }
        late: dict[str, list[float]] = {name: [] for name in subjects}
        took: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(ROUNDS):
            for name, call in subjects.items():
                await comm.barrier()
                tensor.fill_(1.0)
                await measure(call, late[name], took[name])
    dist.destroy_process_group()
    return {name: summary(late[name], took[name]) for name in subjects}


def summary(late: list[float], took: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        "late_p50_ms": statistics.median(late) * 1e3,
        "late_p99_ms": statistics.quantiles(late, n=100)[98] * 1e3,
        "late_max_ms": max(late) * 1e3,
        "beats": len(late),
        "op_median_ms": statistics.median(took) * 1e3,
    }


def main() -> None:
    """Start both ranks, print rank 0's table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--transport", default="c10d")
    args = parser.parse_args()
    rows = in_two_processes(run_rank, args.transport)[0]
    print(f"\nlateness of a 1 ms heartbeat during {MIB} MiB float32 all_reduces between 2 processes (rank 0)")
    print(f"{'':26}{'median':>10}{'p99':>10}{'max':>10}{'beats':>8}{'all_reduce':>13}")
    for name, row in rows.items():
        print(
            f"{name:26}{row['late_p50_ms']:>7.2f} ms{row['late_p99_ms']:>7.2f} ms{row['late_max_ms']:>7.2f} ms"
            f"{row['beats']:>8}{row['op_median_ms']:>10.1f} ms"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
