"""One rank of one contender: ``python -m benchmarks.peers.worker KIND SOCKET STORE_PORT SIZE TRANSPORT BOUND [RANK]``.

It does what the driver says, and in between waits in a blocking read.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Protocol

CORES = 2
"""How many cores are used, however many there are."""


def cores() -> list[int]:
    """The cores that are used."""
    return sorted(os.sched_getaffinity(0))[:CORES]


def pin(rank: int, size: int, bound: bool) -> None:
    """Bind this process, and the threads that it will have, to the rank's core; or, not bound, to all the cores.

    Where there are more ranks than cores, to all in any case: bound to one with another rank, MPICH's ranks wait for
    the end of each other's time slices, and a small all_reduce takes 1 to 2 ms instead of 13 to 70 µs.
    """
    used = cores()
    os.sched_setaffinity(0, {used[rank % len(used)]} if bound and size <= len(used) else used)


def keep_busy() -> None:
    """Want a core all the time, as a program does that has nothing to do with the ranks."""
    os.setsid()
    os.sched_setaffinity(0, cores())
    while True:
        pass


def die_with_parent() -> None:
    """Be killed when the parent ends, however it ends: a rank that stands still would stay for ever."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Contender(Protocol):
    """What the driver can ask of each."""

    async def open(self, store: Any) -> None: ...
    async def aclose(self) -> None: ...
    async def barrier(self) -> None: ...
    async def ways(self, b: Any) -> dict[str, Any]: ...


class Worker:
    """Carries out the driver's commands."""

    def __init__(self, contender: Contender, rank: int, size: int, driver: Connection) -> None:
        self.contender, self.rank, self.size, self.driver = contender, rank, size, driver
        self.ways: dict[str, Any] = {}

    async def serve(self) -> None:
        """Until ``close``; an error is reported, and ends it."""
        verb = ""
        while verb != "close":
            verb, *args = self.driver.recv()
            self.driver.send(("ok", await getattr(self, verb)(*args)))

    async def close(self) -> None:
        """Part from the other ranks."""
        await self.contender.aclose()

    async def prepare(self, case: Any) -> list[str]:
        """Make a case's tensors, do it once in each way and check the outcome.

        :returns: the names of the ways.
        """
        from benchmarks.peers.cases import Buffers

        buffers = Buffers(case, self.rank, self.size)
        self.ways = await self.contender.ways(buffers)
        for way in self.ways.values():
            buffers.fill()
            await self.contender.barrier()
            await timed(way, 1)
            await self.contender.barrier()
            buffers.check()
        buffers.clear()
        return list(self.ways)

    async def trial(self, name: str, n: int) -> tuple[float, list[float]]:
        """Seconds per iteration: the mean over ``n`` that are not looked at, then each of ``n`` others."""
        way = self.ways[name]
        await self.contender.barrier()
        mean = await untimed(way, n)
        await self.contender.barrier()
        each = await timed(way, n)
        await self.contender.barrier()
        return mean, each

    async def probe(self, name: str, *args: Any) -> Any:
        """Run one of :mod:`benchmarks.peers.probes`; ours only."""
        probes = importlib.import_module("benchmarks.peers.probes")
        ready = lambda: self.driver.send(("ok", "ready"))  # noqa: E731
        return await getattr(probes, name)(self.contender.comm, ready, *args)  # type: ignore[attr-defined]


async def untimed(way: Any, n: int) -> float:
    """Mean seconds of ``n`` iterations."""
    call = way.call
    if call is None:
        return 0.0
    start = time.perf_counter()
    if way.blocking:
        for _ in range(n):
            call()
    else:
        for _ in range(n):
            await call()
    return (time.perf_counter() - start) / n


async def timed(way: Any, n: int) -> list[float]:
    """Seconds of each of ``n`` iterations."""
    call, clock, stamps = way.call, time.perf_counter, [time.perf_counter()]
    if call is None:
        return []
    if way.blocking:
        for _ in range(n):
            call()
            stamps.append(clock())
    else:
        for _ in range(n):
            await call()
            stamps.append(clock())
    return [after - before for before, after in itertools.pairwise(stamps)]


CONTENDERS = {"ours": "ours:Ours", "mpich": "mpich:Mpich", "gloo": "gloo:Gloo", "ucxx": "ucxx_asyncio:Ucxx"}


async def run(kind: str, driver: Connection, store_port: int, rank: int, size: int, transport: str) -> None:
    """A rank's life."""
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    module, _, name = CONTENDERS[kind].partition(":")
    store = TCPStore("127.0.0.1", store_port, None, is_master=False, wait_for_workers=False)
    contender = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)(rank, size, transport)
    await contender.open(store)
    driver.send(("ok", os.getpid()))
    await Worker(contender, rank, size, driver).serve()


def main() -> None:
    """Pin first, import afterwards: threads keep the binding of the one that starts them."""
    die_with_parent()
    kind, path, store_port, size, transport, bound, *rest = sys.argv[1:]
    rank = int(rest[0] if rest else os.environ["PMI_RANK"])
    pin(rank, int(size), bound == "bound")
    door = socket.socket(socket.AF_UNIX)
    door.connect(path)
    driver = Connection(door.detach())
    driver.send(rank)
    try:
        asyncio.run(run(kind, driver, int(store_port), rank, int(size), transport))
    except Exception as error:
        traceback.print_exc()  # to the log, which the driver shows
        driver.send(("error", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
