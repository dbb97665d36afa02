"""How long an object of 64 MiB keeps the event loop from everything else, and how long it takes beside a plain send.

A callback runs on every turn of the loop of both ranks, so that the longest time between two of them is the longest
turn: in CPU time of the loop's thread, which the other programs of a busy machine do not add to, and in wall time; and
how much of that the thread has waited for a core. A send of the same tensor is the yardstick. Run it with
``python -m benchmarks.objects [--transport NAME]``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from benchmarks.processes import in_two_processes

MIB = 63  # the description is part of an object's 64 MiB
ROUNDS = 15
Call = Callable[[], Awaitable[Any]]


class Turns:
    """Watches the turns of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.longest = (0.0, 0.0, 0.0)
        self._running = True
        self._tick(self._now())

    def _now(self) -> tuple[float, float, float]:
        waited = int(os.pread(self._statistics, 100, 0).split()[1])
        return time.perf_counter(), time.thread_time(), waited / 1e9

    def _tick(self, before: tuple[float, float, float]) -> None:
        now = self._now()
        wall, cpu, waited = (b - a for a, b in zip(before, now, strict=True))
        self.longest = max(self.longest, (wall, cpu, waited))
        if self._running:
            self._loop.call_soon(self._tick, now)
        else:
            os.close(self._statistics)

    def stop(self) -> tuple[float, float, float]:
        """The longest turn, in seconds: wall time, CPU time, and how long the thread waited for a core."""
        self._running = False
        return self.longest


def subjects(comm: aiocomms.Communicator) -> dict[str, Call]:
    """What is measured; rank 0 sends."""
    count = MIB * 2**20 // 4
    tensor, into = torch.ones(count), torch.zeros(count)
    halves = {"a": tensor[: count // 2], "b": [tensor[count // 2 :]]}
    values: dict[str, tuple[Any, ...]] = {
        "object: one tensor": ({"tensor": tensor},),
        "object: two tensors": (halves,),
        "object: transposed": ({"tensor": tensor.view(1024, -1).T},),
        "object: bytes": ({"bytes": bytes(MIB * 2**20)},),
        "object: str": ({"str": "x" * (MIB * 2**20)},),
        "object: 100,000 ints": (list(range(100_000)),),
    }
    if comm.rank == 0:
        objects = {name: lambda value=value[0]: comm.send_object(value, 1) for name, value in values.items()}
        return {"send of the tensor": lambda: comm.send(tensor, 1), **objects}
    return {
        "send of the tensor": lambda: comm.recv(into, 0),
        **{name: lambda: comm.recv_object(0) for name in values},
    }


async def measure(call: Call) -> tuple[float, ...]:
    """Return the longest turn, and how long it took."""
    turns = Turns()
    start = time.perf_counter()
    result = await call()
    took = time.perf_counter() - start
    await asyncio.sleep(0)
    del result
    return (*turns.stop(), took)


async def run_rank(rank: int, folder: str, transport: str) -> dict[str, list[tuple[float, ...]]]:
    """One rank's part."""
    gc.collect()
    gc.freeze()  # what torch has brought along need not be looked through
    store = dist.FileStore(f"{folder}/store", 2)
    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2) as comm:
        figures: dict[str, list[tuple[float, ...]]] = {}
        for name, call in subjects(comm).items():
            for _ in range(ROUNDS):
                await comm.barrier()
                figures.setdefault(name, []).append(await measure(call))
        return figures


def main() -> None:
    """Start both ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    args = parser.parse_args()
    figures = in_two_processes(run_rank, args.transport)
    print(f"\n{MIB} MiB between 2 processes over {args.transport}, {ROUNDS} times; the longest turn of each, in ms")
    sides = "".join(f"{f'{side}: wall':>16}{'CPU':>8}{'worst':>8}{'queued':>8}" for side in ("sender", "receiver"))
    print(f"{'':24}{sides}{'took':>8}   (medians, the worst, and how long that one waited for a core)")
    for name in figures[0]:
        row = f"{name:24}"
        for side in figures:
            wall, cpu, _, took = (statistics.median(column) * 1e3 for column in zip(*side[name], strict=True))
            worst, _, queued, _ = (figure * 1e3 for figure in max(side[name]))
            row += f"{wall:>16.1f}{cpu:>8.2f}{worst:>8.1f}{queued:>8.1f}"
        print(f"{row}{took:>8.1f}")


if __name__ == "__main__":
    main()
