"""Costs of a lane's collective on the nccl transport, against one of the communicator, between two processes.

There is no GPU: calls of CUDA and NCCL return at once, and a collective ends when both ranks have launched it, which
they see in shared memory. So a figure is what the host does: the loops, the control connections, the launcher in
Python. Each way runs in turn, round after round: no lane; lanes as the transport carries them; and lanes by messages,
as on a transport that does not. Run it with ``python -m benchmarks.nccl_lanes [--json FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import EntryPoint
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from aiocomms_nccl import NcclTransport
from aiocomms_nccl.nccl import Nccl
from torch.distributed import TCPStore

import aiocomms
from aiocomms.bootstrap import registry
from aiocomms.communicator.communicator import Communicator
from aiocomms.cuda import Cuda
from benchmarks.launcher import NoComm, NoCuda, NoNccl, NoNcclTransport, NoStream

OPS, TASKS, ROUNDS = 320, 16, 30
CELLS = 1 << 14
"""The number of communicators of NCCL that can be told apart, by their ids."""
WAYS = {"no lane": "carried", "lane": "carried", "lane by messages": "messages"}
"""Each way, and the communicator that it uses."""


class Launches:
    """The number of calls of NCCL that each rank has made in each communicator: memory of both processes."""

    rank = 0
    counts: memoryview

    @classmethod
    def share(cls, fd: int, rank: int) -> None:
        cls.rank = rank
        cls.counts = memoryview(mmap.mmap(fd, 2 * 8 * CELLS)).cast("q")


class Stream(NoStream):
    """A stream of one communicator, whose number its handle is."""

    def __init__(self) -> None:
        self.cuda_stream = -1 - secrets.randbelow(1 << 30)  # until a communicator has used it


class Event:
    cell: int | None = None
    wanted = 0

    def record(self, stream: Any) -> None:
        self.cell = Comm.cells.get(stream.cuda_stream)
        if self.cell is not None:
            self.wanted = Launches.counts[Launches.rank * CELLS + self.cell]

    def query(self) -> bool:
        return self.cell is None or Launches.counts[(1 - Launches.rank) * CELLS + self.cell] >= self.wanted

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(2e-5)


class SharedCuda(NoCuda):
    def functions(self) -> Any:
        return None

    def stream(self, priority: int) -> Stream:
        return Stream()

    def event(self) -> Any:
        return Event()


class Comm(NoComm):
    cells: ClassVar[dict[int, int]] = {}
    """The cells by the handle of a stream."""

    def __init__(self, unique_id: bytes) -> None:
        self._cell = int.from_bytes(unique_id[:4], "little") % CELLS

    def call(self, *arguments: int) -> None:
        self.cells[arguments[-1]] = self._cell
        Launches.counts[Launches.rank * CELLS + self._cell] += 1

    allReduce = reduce = broadcast = allGather = reduceScatter = send = recv = call  # noqa: N815


class SharedNccl(NoNccl):
    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        return Comm(unique_id)

    def functions(self) -> Any:
        return None


class Carried(NoNcclTransport):
    """The real transport, whose ranks are processes."""

    capabilities = msgspec.structs.replace(NoNcclTransport.capabilities, lanes=NcclTransport.capabilities.lanes)

    @classmethod
    def layers(cls, device: torch.device) -> tuple[Cuda, Nccl]:
        return SharedCuda(), SharedNccl()  # type: ignore[return-value]


class Messages(Carried):
    """The same, but that its lanes go by messages."""

    capabilities = NoNcclTransport.capabilities


def caller(comm: Communicator, way: str, lane: int) -> Callable[[torch.Tensor], Awaitable[object]]:
    return comm.all_reduce if way == "no lane" else comm.lane(lane).all_reduce


async def one_by_one(comm: Communicator, way: str) -> list[float]:
    """Await each op before the next is called; µs of each."""
    call, tensor, took = caller(comm, way, 0), torch.ones(2), []
    for _ in range(OPS):
        start = time.perf_counter_ns()
        await call(tensor)
        took.append((time.perf_counter_ns() - start) / 1000)
    return took


async def at_once(comm: Communicator, way: str) -> list[float]:
    """Have tasks do the same at once, each with a lane of its own; µs from one end to the next, in the mean."""

    async def task(lane: int) -> None:
        call, tensor = caller(comm, way, lane), torch.ones(2)
        for _ in range(OPS // TASKS):
            await call(tensor)

    start = time.perf_counter_ns()
    await asyncio.gather(*map(task, range(TASKS)))
    return [(time.perf_counter_ns() - start) / 1000 / OPS]


SUBJECTS = {"one by one": one_by_one, f"{TASKS} tasks": at_once}


async def run(store: Any, rank: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """All times, by subject and way."""
    took: dict[str, dict[str, list[float]]] = {what: {way: [] for way in WAYS} for what in SUBJECTS}
    async with (
        aiocomms.new_comm("carried", store=store, rank=rank, size=2) as carried,
        aiocomms.new_comm("messages", store=store, rank=rank, size=2) as messages,
    ):
        comms = {"carried": carried, "messages": messages}
        for turn in range(rounds + 1):
            for what, subject in SUBJECTS.items():
                for way, name in WAYS.items():
                    await carried.barrier()
                    times = await subject(comms[name], way)
                    took[what][way] += times if turn else ()
    return took


def be(rank: int, port: int, fd: int, rounds: int, results: SimpleQueue[Any]) -> None:
    torch.set_num_threads(1)
    Launches.share(fd, rank)
    module = "benchmarks.nccl_lanes"
    transports = {"carried": Carried, "messages": Messages}
    entries = {name: EntryPoint(name, f"{module}:{cls.__name__}", registry.GROUP) for name, cls in transports.items()}
    registry.entries = lambda: entries
    store = TCPStore("127.0.0.1", port, is_master=False)
    results.put(asyncio.run(run(store, rank, rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    os.environ["AIOCOMMS_PURE"] = "1"
    fd = os.memfd_create("launches")
    os.truncate(fd, 2 * 8 * CELLS)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[Any] = context.SimpleQueue()
    ranks = [context.Process(target=be, args=(r, served.port, fd, arguments.rounds, results)) for r in range(2)]
    for rank in ranks:
        rank.start()
    both = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    figures = {
        what: {way: summary([time for one in both for time in one[what][way]]) for way in WAYS} for what in SUBJECTS
    }
    print(f"{'µs per op: fastest tenth, median, mean':40}" + "".join(f"{way:>26}" for way in WAYS))
    for what, ways in figures.items():
        print(f"{what:40}" + "".join(f"{low:10.1f}{median:8.1f}{mean:8.1f}" for low, median, mean in ways.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def summary(times: list[float]) -> tuple[float, float, float]:
    return statistics.quantiles(times, n=10)[0], statistics.median(times), statistics.mean(times)


if __name__ == "__main__":
    # The registry knows the module by this name, and the module holds what the processes share.
    from benchmarks import nccl_lanes

    nccl_lanes.main()
