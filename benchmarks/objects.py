"""How long an object of 64 MiB keeps the event loop from everything else, and how long it takes beside a plain send.

A callback runs on every turn of the loop of both ranks, so that the longest time between two of them is the longest
turn: in CPU time of the loop's thread, which the other programs of a busy machine do not add to, and in wall time. A
send of the same tensor is the yardstick. Run it with ``python -m benchmarks.objects [--transport NAME]``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
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
        self.cpu = self.wall = 0.0
        self._running = True
        self._tick(time.thread_time(), time.perf_counter())

    def _tick(self, cpu: float, wall: float) -> None:
        now = time.thread_time(), time.perf_counter()
        self.cpu, self.wall = max(self.cpu, now[0] - cpu), max(self.wall, now[1] - wall)
        if self._running:
            self._loop.call_soon(self._tick, *now)

    def stop(self) -> tuple[float, float]:
        """The longest turn, in CPU time and in wall time, in seconds."""
        self._running = False
        return self.cpu, self.wall


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


async def measure(call: Call) -> tuple[float, float, float]:
    """Longest turn in CPU time and in wall time, and how long it took."""
    turns = Turns()
    start = time.perf_counter()
    result = await call()
    took = time.perf_counter() - start
    await asyncio.sleep(0)
    del result
    return (*turns.stop(), took)


async def run_rank(rank: int, folder: str, transport: str) -> dict[str, list[tuple[float, float, float]]]:
    """One rank's part."""
    store = dist.FileStore(f"{folder}/store", 2)
    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2) as comm:
        figures: dict[str, list[tuple[float, float, float]]] = {}
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
    print(f"\n{MIB} MiB between 2 processes over {args.transport}, median of {ROUNDS}, in ms")
    print(f"{'':24}{'sender: CPU':>12}{'wall':>8}{'receiver: CPU':>16}{'wall':>8}{'took':>8}   (the longest turn)")
    for name in figures[0]:
        turns = [[statistics.median(column) * 1e3 for column in zip(*figures[r][name], strict=True)] for r in (0, 1)]
        (cpu, wall, _), (cpu_in, wall_in, took) = turns
        print(f"{name:24}{cpu:>12.2f}{wall:>8.1f}{cpu_in:>16.2f}{wall_in:>8.1f}{took:>8.1f}")


if __name__ == "__main__":
    main()
