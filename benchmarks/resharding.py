"""Weights from two ranks, which have them by rows, to two others, which want them by columns: ours and other ways.

* ours: ``move`` of a source
* a file: ``torch.distributed.checkpoint``, saved by the first two and loaded by the others, in ``--folder``
* ``DTensor.redistribute``: from rows to columns within one gloo world of two ranks, so half of it stays where it is
* everything: each of the first two broadcasts what it has to all four, over one communicator
* a copy of as many bytes within the source ranks, each with one thread: the memory's speed

The ways take turns, round by round, on memory that has been touched before.

Then the target answers requests, at 80 % of what it can: in turn alone, while the source moves a version each second,
and while the source ranks make that plain copy each second. A request is a step with the weights: a product with a
layer of them in a thread, and an ``all_reduce`` of what it comes to. Requests come at random times, as they do from
clients, and their latency counts from then on. What the target can is what it does alone while requests always wait,
for some seconds before each of the three. If the machine gets slower after that, a round is an overload: so see the
median of the rounds, too.

Run it with ``python -m benchmarks.resharding [--mib N] [--rounds N] [--apart]``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import aiocomms
from aiocomms import Communicator
from aiocomms.resharding import Source, Target
from benchmarks.processes import in_processes

MIB = 2**20
WIDTH, LAYERS = 4096, 8
"""Columns of each tensor, and how many there are."""
LOAD = 0.8
FULL, SECONDS, PAUSE = 4.0, 8.0, 1.0
"""Seconds for which a server is asked at full speed, and then at LOAD of that; and those between two moves."""
KIND = {0: "target", 1: "source"}


class Rank:
    """One of four processes: two of the target, and two of the source."""

    def __init__(self, rank: int, folder: str, mib: int, shelf: str, apart: bool) -> None:
        self.side, self.rank = divmod(rank, 2)
        self.folder, self.shelf, self.place = folder, shelf, rank
        self.rows, self.apart = rows(mib), apart
        self.found: dict[str, Any] = {}

    async def open(self) -> None:
        """Meet the other rank of this side, all four, and the other side. Each target rank keeps to a core of its own.

        Else the scheduler puts both on one core for some seconds, as one wakes the other: they are half as quick then.
        """
        cores = sorted(os.sched_getaffinity(0))
        if self.apart:
            half = len(cores) // 2
            cores = cores[half:] if self.side else cores[:half]
            os.sched_setaffinity(0, cores)
        if self.side == 0:
            os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        self.all = await self._comm("all", self.place, 4)
        self.comm = await self._comm(KIND[self.side], self.rank, 2)
        store = dist.FileStore(f"{self.folder}/gloo {self.side}", 2)  # type: ignore[no-untyped-call]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        self.mesh: DeviceMesh = init_device_mesh("cpu", (2,))
        self.here = await aiocomms.open_endpoint("ucx")
        self.tensors = {f"layer {n}": self._zeros(Shard(self.side ^ 1)) for n in range(LAYERS)}
        address = None
        if self.side == 0:
            self.target = await Target.open(self.comm, self.tensors, self.here)
            address = self.target.address
        address = await self.all.broadcast_object(address, 0)
        if self.side == 1:
            self.source = await Source.open(self.comm, self.tensors, self.here, address)
            self.found["bytes"] = self.source.nbytes
            self.sinks = [torch.zeros_like(tensor.to_local()) for tensor in self.tensors.values()]
            for _ in range(2):  # Each of the two buffers is touched.
                await self.source.move(self.source.version + 1)

    def _zeros(self, placement: Shard) -> DTensor:
        return zeros(self.rows, WIDTH, device_mesh=self.mesh, placements=[placement])

    async def _comm(self, name: str, rank: int, size: int) -> Communicator:
        store = dist.FileStore(f"{self.folder}/{name}", size)  # type: ignore[no-untyped-call]
        return await aiocomms.new_comm("ucx", store=store, rank=rank, size=size, name=name)

    async def timed(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        """Take the seconds of something that all four ranks do, from the first to the last."""
        await self.all.barrier()
        began = time.perf_counter()
        await call()
        await self.all.barrier()
        self.found.setdefault(what, []).append(time.perf_counter() - began)

    # --------------------------------------------------------------------------------------------------------- ways

    async def move(self) -> None:
        """Ours."""
        if self.side == 1:
            await self.source.move(self.source.version + 1)

    async def file(self) -> None:
        """A file between two jobs."""
        path = f"{self.shelf}/checkpoint"
        if self.side == 1:
            await asyncio.to_thread(dcp.save, self.tensors, checkpoint_id=path)
        await self.all.barrier()
        if self.side == 0:
            await asyncio.to_thread(dcp.load, self.tensors, checkpoint_id=path)

    async def redistribute(self) -> None:
        """Rows to columns within one job."""
        if self.side == 1:
            for tensor in self.tensors.values():
                await asyncio.to_thread(tensor.redistribute, placements=[Shard(1)])

    async def everything(self) -> None:
        """Each source rank's rows to all."""
        for root in (2, 3):
            mine = self.side == 1 and root == self.place
            for tensor in self.tensors.values():
                rows = tensor.to_local() if mine else torch.empty(self.rows // 2, WIDTH)
                await self.all.broadcast(rows, root)
                if self.side == 0:
                    place = tensor.to_local()[self.rows // 2 * (root - 2) :][: self.rows // 2]
                    place.copy_(rows.chunk(2, 1)[self.rank])

    async def copy(self) -> None:
        """A copy within each source rank."""
        if self.side == 1:
            await asyncio.to_thread(self._copied)

    def _copied(self) -> None:
        for sink, tensor in zip(self.sinks, self.tensors.values(), strict=True):
            sink.copy_(tensor.to_local())

    # ------------------------------------------------------------------------------------------------------ serving

    async def answer(self, last: bool) -> bool:
        """Answer a request on both ranks of the target; return whether it is the last one."""
        async with self.target.step() as weights:
            y = await asyncio.to_thread(self._product, weights["layer 0"])
            told = await self.comm.all_reduce(torch.cat([y, torch.tensor([float(last)])]))
        return bool(told[1])

    def _product(self, part: torch.Tensor) -> torch.Tensor:
        return (self.x @ part).sum().view(1)

    async def serve(self, seconds: float, rate: float) -> list[float]:
        """Answer for some seconds; return latencies.

        :param rate: requests a second; infinity: as many as it can.
        """
        draw, latencies = random.Random(7), []
        began = due = time.perf_counter()
        while self.rank == 0 and due - began < seconds:
            due = due + draw.expovariate(rate) if rate < math.inf else time.perf_counter()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self.answer(False)
            latencies.append(time.perf_counter() - due)
        if self.rank == 0:
            await self.answer(True)
        while self.rank and not await self.answer(False):
            pass
        return latencies

    async def under_load(self, rounds: int) -> None:
        """Answer at LOAD of full speed: in turn alone, with moves, and with plain copies in the place of these."""
        self.x = torch.ones(1, self.rows)
        self.found["seconds"] = {what: [] for what in BESIDE}
        self.found["latencies"] = {what: [] for what in BESIDE}
        self.found["rates"] = []
        for _ in range(rounds):
            for what, way in BESIDE.items():
                rate = 0.0
                await self.all.barrier()
                if self.side == 0:
                    rate = LOAD * len(await self.serve(FULL, math.inf)) / FULL
                    self.found["rates"].append(rate)
                await self.all.barrier()
                if self.side == 0:
                    self.found["latencies"][what].append(await self.serve(SECONDS, rate))
                elif way is not None:
                    self.found["seconds"][what] += await self.each_second(way)

    async def each_second(self, way: Way) -> list[float]:
        """Do something in each second or so; return how long it took, on both ranks."""
        ends, each = time.perf_counter() + SECONDS, []
        while True:
            began = time.perf_counter()
            await way(self)
            await self.comm.barrier()
            each.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE)
            if await self.comm.broadcast_object(time.perf_counter() > ends, 0):
                return each

    async def aclose(self) -> None:
        """Part from the others."""
        await self.all.barrier()
        await (self.source if self.side else self.target).aclose()
        await self.here.aclose()
        for comm in (self.comm, self.all):
            await comm.aclose()
        dist.destroy_process_group()


Way = Callable[[Rank], Awaitable[object]]
MOVES, COPY = "ours: move", "a copy within each source rank"
WAYS: dict[str, Way] = {
    MOVES: Rank.move,
    "a file: torch.distributed.checkpoint": Rank.file,
    "DTensor.redistribute, one gloo world of 2": Rank.redistribute,
    "everything: a broadcast to all 4, and a copy": Rank.everything,
    COPY: Rank.copy,
}
UNDER_LOAD = {MOVES: "beside moves", COPY: "beside plain copies"}
BESIDE: dict[str, Way | None] = {"alone": None, "beside moves": Rank.move, "beside plain copies": Rank.copy}


async def measure(place: int, folder: str, mib: int, rounds: int, shelf: str, apart: bool) -> dict[str, Any]:
    """Return what one rank has found."""
    rank = Rank(place, folder, mib, shelf, apart)
    await rank.open()
    for _ in range(rounds):
        for what, way in WAYS.items():
            await rank.timed(what, lambda way=way: way(rank))  # type: ignore[misc]
    await rank.under_load(rounds)
    await rank.aclose()
    return rank.found


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of all tensors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="target and source have one half of the cores each")
    parser.add_argument("--folder", help="for the file (default: a new one where temporary files are)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as shelf:
        found = in_processes(4, measure, args.mib, args.rounds, shelf, args.apart)
    show(found, args.mib, args.rounds, load)


def show(found: list[dict[str, Any]], mib: int, rounds: int, load: float) -> None:
    """Print the tables."""
    sent = sum(one["bytes"] for one in found[2:])
    print(f"torch {torch.__version__}, {mib} MiB in {LAYERS} tensors, {rounds} rounds in turn, load before {load:.2f}")
    print(f"bytes of a move: {sent:,}; the least that the two shardings need: {4 * WIDTH * LAYERS * rows(mib):,}\n")
    print("| from rows to columns | median | least | most | GiB/s |\n|---|---:|---:|---:|---:|")
    loaded = {f"{what}, under load": found[2]["seconds"][which] for what, which in UNDER_LOAD.items()}
    for what, each in [*((it, found[0][it]) for it in WAYS), *loaded.items()]:
        median = statistics.median(each)
        speed = mib / 1024 / median
        print(f"| {what} | {median:.3f} s | {min(each):.3f} s | {max(each):.3f} s | {speed:.2f} |")
    least, most = min(found[0]["rates"]), max(found[0]["rates"])
    print(f"\n| requests at {least:.0f} to {most:.0f}/s | p50 | p99 | most | p99 of each round | their median |")
    print("|---|---:|---:|---:|---:|---:|")
    for what, windows in found[0]["latencies"].items():
        each = [it for window in windows for it in window]
        rounds_p99 = [1e3 * percentile(window, 0.99) for window in windows]
        p50, p99, longest = (f"{1e3 * percentile(each, part):.2f} ms" for part in (0.5, 0.99, 1.0))
        of_each, median = ", ".join(f"{it:.2f}" for it in rounds_p99), statistics.median(rounds_p99)
        print(f"| {what} | {p50} | {p99} | {longest} | {of_each} | {median:.2f} ms |")


def percentile(each: list[float], part: float) -> float:
    """Return the value that a part of all do not exceed."""
    return sorted(each)[max(0, math.ceil(part * len(each)) - 1)]


def rows(mib: int) -> int:
    """Return the rows of each tensor."""
    return mib * MIB // (4 * WIDTH * LAYERS)


if __name__ == "__main__":
    main()
