"""A rank's part in what is no race: each is called with the communicator and ``ready``, which tells the driver so."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from aiocomms import Communicator
from aiocomms.errors import CommError
from aiocomms.progress.work import Work
from benchmarks.heartbeat import beat

Ready = Callable[[], None]
PAGE = 4096


async def outstanding(comm: Communicator, _: Ready, count: int, repeats: int) -> float:
    """Seconds per receive to post ``count`` of them on rank 0 and see all completed; they are met in random order."""
    tensors = [torch.full((2,), float(tag if comm.rank else -1)) for tag in range(count)]
    go = torch.zeros(1)
    order = random.Random(1).sample(range(count), count)
    total = 0.0
    for _ in range(repeats):
        await comm.barrier()
        if comm.rank == 0:
            start = time.perf_counter()
            works = [comm.recv(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
            await comm.send(go, 1, count)
            for work in works:
                await work
            total += time.perf_counter() - start
        else:
            await comm.recv(go, 0, count)
            for tag in order:
                await comm.send(tensors[tag], 0, tag)
    assert all(tensor[1] == tag for tag, tensor in enumerate(tensors))
    return total / count / repeats


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


async def memory_of_recvs(comm: Communicator, _: Ready, count: int) -> tuple[float, float]:
    """Bytes per pending receive beyond its tensor: by the process's growth, and what Python alone allocated."""
    tensors = [torch.zeros(2) for _ in range(count)]
    go = torch.zeros(1)
    grown = traced = 0
    for python in (False, True):  # the growth first, while nothing that was freed can be used again
        await comm.barrier()
        if comm.rank == 0:
            gc.collect()
            if python:
                tracemalloc.start()
            before = resident()
            works = [comm.recv(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
            if python:
                traced, _peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            else:
                grown = resident() - before
            await comm.send(go, 1, count)
            for work in works:
                await work
        else:
            await comm.recv(go, 0, count)
            for tag, tensor in enumerate(tensors):
                await comm.send(tensor, 0, tag)
    return grown / count, traced / count


async def busy_peer(comm: Communicator, _: Ready, nbytes: int, repeats: int) -> list[float]:
    """Seconds that rank 0's all_reduce takes while rank 1, which posted its own first, computes for 200 ms."""
    tensor = torch.zeros(nbytes // 4)
    await comm.all_reduce(tensor)
    took = []
    for _ in range(repeats):
        await comm.barrier()
        if comm.rank == 1:
            work = comm.all_reduce(tensor)
            ends = time.perf_counter() + 0.2
            while time.perf_counter() < ends:
                pass
            await work
        else:
            await asyncio.sleep(0.02)
            start = time.perf_counter()
            await comm.all_reduce(tensor)
            took.append(time.perf_counter() - start)
    return took


async def heartbeat(comm: Communicator, _: Ready, nbytes: int, ops: int) -> tuple[list[float], list[float]]:
    """Seconds by which a task that sleeps for 1 ms is late: on an idle loop, and beside all_reduces."""
    tensor = torch.zeros(nbytes // 4)
    idle: list[float] = []
    busy: list[float] = []
    for late, rounds in ((idle, 0), (busy, ops)):
        await comm.barrier()
        task = asyncio.create_task(beat(late))
        for _ in range(rounds):
            await comm.all_reduce(tensor)
        if not rounds:
            await asyncio.sleep(1)
        task.cancel()
    return idle, busy


async def overhead(comm: Communicator, _: Ready, nbytes: int, ops: int, bare: bool) -> float:
    """Seconds per all_reduce: as it is; or, in this process from now on, with neither flight recorder nor heartbeat."""
    if bare:
        os.environ["AIOCOMMS_HEARTBEAT"] = "0"  # read where a communicator is made
    child = await comm.split(range(comm.size))
    assert child is not None
    if bare:
        child._core.trace = None
        if child._shortcuts is not None:
            child._shortcuts.record(False)
    tensor = torch.zeros(nbytes // 4)
    async with child:
        for count in (ops // 4, ops):  # the first ones warm up
            await child.barrier()
            start = time.perf_counter()
            for _ in range(count):
                await child.all_reduce(tensor)
            took = (time.perf_counter() - start) / count
        await child.barrier()
    return took


async def idle(comm: Communicator, ready: Ready, waiting: bool, seconds: float) -> None:
    """Do nothing, with or without a receive that never comes."""
    await comm.barrier()
    work = comm.recv(torch.zeros(2), 1 - comm.rank) if waiting else None
    await asyncio.sleep(0.1)
    ready()
    await asyncio.sleep(seconds)
    if work is not None:
        assert await work.cancel()


async def survive(comm: Communicator, ready: Ready, victim: int) -> dict[str, tuple[float, str, int | None]]:
    """Have all kinds of works pending while a rank is killed: when each ended, with which error, naming which rank."""
    await comm.barrier()
    if comm.rank == victim:
        ready()
        await asyncio.sleep(60)
        raise AssertionError("it was to be killed")
    living = next(rank for rank in range(comm.size) if rank not in (comm.rank, victim))
    works = {
        "recv from it": comm.recv(torch.zeros(2), victim, 1),
        "recv from another": comm.recv(torch.zeros(2), living, 2),
        "send of 64 MiB to it": comm.send(torch.zeros(2**24), victim, 3),
        "all_reduce": comm.all_reduce(torch.zeros(2**20)),
    }
    ends: dict[str, float] = {}

    def ended(name: str, _: Work[object]) -> None:
        ends[name] = time.monotonic()

    for name, work in works.items():
        work.add_done_callback(partial(ended, name))
    await asyncio.sleep(0.1)
    ready()
    answers = {}
    for name, work in works.items():
        try:
            async with asyncio.timeout(20):
                await work
            answers[name] = (time.monotonic(), "nothing", None)
        except (CommError, TimeoutError) as error:
            answers[name] = (ends.get(name, time.monotonic()), type(error).__name__, getattr(error, "peer", None))
    return answers
