"""Measurements that compare no two libraries: receives, a busy peer, the recorder, cores, idling, a peer's death."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

import aiocomms
from aiocomms import Communicator
from aiocomms.errors import CommError
from aiocomms.progress.work import Work
from benchmarks.processes import in_processes, in_two_processes

MIB = 2**20
PAGE = 4096
IDLE = 2.0
"""Seconds for which an idle rank is watched."""
SETTLED = 2.0
"""Seconds before. Once, up to 1 s after the last op, the watchdog looks whether a peer is silent."""
Result = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Figures and verdicts, as a row of the report has them."""


def verdict(what: str, value: float, unit: str, must: float | None, aim: float | None = None) -> dict[str, Any]:
    """A figure with its limits."""
    return {"what": what, "value": value, "unit": unit, "must": must, "aim": aim}


def figure(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median, and the 99th percentile, or the worst of fewer than 100."""
    ordered = sorted(seconds)
    p99 = ordered[-1 - len(ordered) // 100]
    return {"name": name, "median_us": statistics.median(ordered) * 1e6, "p99_us": p99 * 1e6, "gb_per_s": None}


def meet(
    rank: int, folder: str, transport: str, size: int = 2, *, turn: int = 0, heartbeat: float | None = None
) -> AbstractAsyncContextManager[Communicator]:
    """The communicator of this run, or of one of its turns."""
    hints = {} if heartbeat is None else {"heartbeat": heartbeat}
    store = FileStore(f"{folder}/store{turn}", size)
    return aiocomms.new_comm(transport, store=store, rank=rank, size=size, timeout=60, hints=hints)


# ------------------------------------------------------------------------------------------------------ many receives


def many_recvs(transport: str, rounds: int) -> Result:
    """10,000 outstanding receives against 100."""
    memory, few, many = in_two_processes(receive_many, transport, max(3, rounds // 2))[0]
    figures = [figure("100 outstanding, each", few), figure("10,000 outstanding, each", many)]
    # Growth misses what was freed before and is used again, tracing misses what is not Python's: the larger counts.
    return figures, [
        verdict("time each / with 100", statistics.median(many) / statistics.median(few), "x", 1.5, 1.1),
        verdict("memory each, beyond the tensor", memory, "B", 1024.0),
    ]


async def receive_many(rank: int, folder: str, transport: str, rounds: int) -> tuple[float, list[float], list[float]]:
    """Bytes per pending receive, and seconds per receive of few and of many."""
    async with meet(rank, folder, transport) as comm:
        memory = await memory_of_recvs(comm, 10_000)
        await outstanding(comm, 1_000, 1)
        few, many = [], []
        for _ in range(rounds):
            few.append(await outstanding(comm, 100, 100))
            many.append(await outstanding(comm, 10_000, 1))
    return memory, few, many


async def outstanding(comm: Communicator, count: int, repeats: int) -> float:
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


async def memory_of_recvs(comm: Communicator, count: int) -> float:
    """Bytes per pending receive beyond its tensor: the process's growth, or what Python allocated if that is more."""
    tensors = [torch.zeros(2) for _ in range(count)]
    go = torch.zeros(1)
    found = 0
    for python in (False, True):  # the growth first, while nothing that was freed can be used again
        await comm.barrier()
        if comm.rank == 0:
            gc.collect()
            if python:
                tracemalloc.start()
            before = resident()
            works = [comm.recv(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
            found = max(found, tracemalloc.get_traced_memory()[0] if python else resident() - before)
            tracemalloc.stop()
            await comm.send(go, 1, count)
            for work in works:
                await work
        else:
            await comm.recv(go, 0, count)
            for tag, tensor in enumerate(tensors):
                await comm.send(tensor, 0, tag)
    return found / count


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# --------------------------------------------------------------------------------------------------------- a busy peer


def busy_peer(transport: str, rounds: int) -> Result:
    """Time an all_reduce whose peer computes without awaiting."""
    figures, verdicts = [], []
    for nbytes, title in ((8, "8 B"), (MIB, "1 MiB")):
        took = in_two_processes(beside_busy_peer, transport, nbytes, max(5, rounds))[0]
        figures.append(figure(f"all_reduce {title}", took))
        verdicts.append(verdict(f"await of {title}", statistics.median(took) * 1e3, "ms", 5.0))
    return figures, verdicts


async def beside_busy_peer(rank: int, folder: str, transport: str, nbytes: int, repeats: int) -> list[float]:
    """Seconds that rank 0's all_reduce takes while rank 1, which posted its own first, computes for 200 ms."""
    took = []
    async with meet(rank, folder, transport) as comm:
        tensor = torch.zeros(nbytes // 4)
        await comm.all_reduce(tensor)
        for _ in range(repeats):
            await comm.barrier()
            if rank == 1:
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


# ---------------------------------------------------------------------------------------- flight recorder and heartbeat


def overhead(transport: str, rounds: int) -> Result:
    """Time all_reduces with and without the flight recorder and the heartbeat; the slower rank's time counts."""
    ranks = in_two_processes(reduce, transport, 10 * rounds)
    figures, verdicts = [], []
    for at, title in enumerate(("8 B", "1 MiB")):
        took = [max(pair) for pair in zip(*(rank[at] for rank in ranks), strict=True)]
        whole, bare = took[::2], took[1::2]
        figures += [figure(f"all_reduce {title}", whole), figure(f"all_reduce {title}, without both", bare)]
        ratio = statistics.median(whole) / statistics.median(bare)
        verdicts.append(verdict(f"{title}: time / without", ratio, "x", 1.02, 1.01))
    return figures, verdicts


async def reduce(rank: int, folder: str, transport: str, turns: int) -> tuple[list[float], list[float]]:
    """Seconds per all_reduce of each size: in even turns as it is, in odd turns without recorder and heartbeat.

    Where things lie in memory is a matter of luck, so each turn has a new communicator.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        async with meet(rank, folder, transport, turn=turn, heartbeat=0.0 if turn % 2 else None) as comm:
            comm._core.ledger.recording = not turn % 2
            for times, nbytes, ops in zip(found, (8, MIB), (20_000, 400), strict=True):
                tensor = torch.zeros(nbytes // 4)
                for count in (ops // 4, ops):  # the first ones warm up
                    await comm.barrier()
                    start = time.perf_counter()
                    for _ in range(count):
                        await comm.all_reduce(tensor)
                    took = (time.perf_counter() - start) / count
                times.append(took)
    return found


# ------------------------------------------------------------------------------------------------- cores and switches


A_WHILE = 1.0
"""Seconds of a measurement. The kernel adds up a running thread's time by ticks of some milliseconds."""


def cores_used(transport: str, rounds: int) -> Result:
    """Measure the cores that the busiest rank uses while it awaits one op after the other, and its threads' waits."""
    figures, verdicts = [], []
    for size in (1, 2, 3, 4):
        ranks = in_processes(size, await_in_a_loop, transport, size)
        took, cores, switches = map(max, zip(*ranks, strict=True))
        title = "a world of one" if size == 1 else f"{size} ranks"
        figures.append(figure(f"all_reduce 8 B, {title}", [took]))
        verdicts += [
            verdict(f"cores, {title}", cores, "x", 1.02, 1.0),
            verdict(f"switches per 1,000 ops, {title}", switches, "", 5.0 if size == 1 else None, 1.0),
        ]
    return figures, verdicts


async def await_in_a_loop(rank: int, folder: str, transport: str, size: int) -> tuple[float, float, float]:
    """Return the seconds per all_reduce, the cores used, and the waits of all threads that ended, per 1,000 ops."""
    async with meet(rank, folder, transport, size) as comm:
        tensor = torch.zeros(2)

        async def repeat(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                await comm.all_reduce(tensor)
            return (time.perf_counter() - began) / times

        count = torch.tensor(A_WHILE / await repeat(1_000))
        await comm.broadcast(count, 0)
        used, times = usage(os.getpid()), int(count)
        each, now = await repeat(times), usage(os.getpid())
        return each, (now[0] - used[0]) / (each * times), (now[1] - used[1]) * 1000 / times


# --------------------------------------------------------------------------------------------------------------- idle


def idling(transport: str, rounds: int) -> Result:
    """CPU time and wake-ups of a rank whose loop has nothing to do, seen from outside."""
    cpu, _ = in_two_processes(watch_idle, transport, True)[0]
    _, wakes = in_two_processes(watch_idle, transport, False)[0]
    return [], [
        verdict("CPU while a recv never comes", 100 * cpu / IDLE, "%", 1.0),
        verdict(f"wake-ups in {IDLE:.0f} s with nothing pending", wakes, "", 0.0),
    ]


async def watch_idle(rank: int, folder: str, transport: str, waiting: bool) -> tuple[float, int]:
    """Rank 1 does nothing, with or without a receive that never comes, and rank 0 watches its process."""
    async with meet(rank, folder, transport) as comm:
        _, pid = await comm.all_gather_object(os.getpid())
        work = comm.recv(torch.zeros(2), 1 - rank, 1) if waiting else None
        if rank == 0:
            await asyncio.sleep(SETTLED)
            before = usage(pid)
            await asyncio.sleep(IDLE)
            after = usage(pid)
        else:
            before = after = (0.0, 0)
            await asyncio.sleep(SETTLED + IDLE + 1.0)
        if work is not None:
            assert await work.cancel()
        await comm.barrier()
    return after[0] - before[0], after[1] - before[1]


def usage(pid: int) -> tuple[float, int]:
    """Seconds on a core, and how often it woke from a wait: all threads of a process so far."""
    seconds, wakes = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds += int((task / "schedstat").read_text().split()[0]) * 1e-9
        status = (task / "status").read_text()
        wakes += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return seconds, wakes


# --------------------------------------------------------------------------------------------------------------- death


def death(transport: str, rounds: int) -> Result:
    """``kill -9`` of one of three ranks: when the last pending work of the others has ended, and with which error."""
    took, wrong = [], 0
    for _ in range(min(3, rounds)):
        answers = in_processes(3, survive, transport, lost=1)
        ends = [end for _, ended in answers for end in ended]
        took.append(max(at for at, _, _ in ends) - next(killed for killed, _ in answers if killed))
        wrong += sum((name, peer) != ("PeerDiedError", 2) for _, name, peer in ends)
    return [figure("until the last pending work ended", took)], [
        verdict("until the last pending work ended", max(took) * 1e3, "ms", 1000.0),
        verdict("works that ended otherwise than by PeerDiedError naming the rank", wrong, "", 0.0),
    ]


async def survive(rank: int, folder: str, transport: str) -> tuple[float, list[tuple[float, str, int | None]]]:
    """Have all kinds of works pending while rank 0 kills rank 2.

    :returns: when that was; and when each work ended, with which error, naming which rank.
    """
    comm = await meet(rank, folder, transport, 3).__aenter__()
    pids = await comm.all_gather_object(os.getpid())
    if rank == 2:
        await asyncio.sleep(60)
        raise AssertionError("it was to be killed")
    works = [
        comm.recv(torch.zeros(2), 2, 1),
        comm.recv(torch.zeros(2), 1 - rank, 2),
        comm.send(torch.zeros(2**24), 2, 3),
        comm.all_reduce(torch.zeros(2**20)),
    ]
    ends: dict[int, float] = {}

    def ended(number: int, _: Work[object]) -> None:
        ends[number] = time.monotonic()

    for number, work in enumerate(works):
        work.add_done_callback(partial(ended, number))
    await asyncio.sleep(0.3)
    killed = 0.0
    if rank == 0:
        killed = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
    answers: list[tuple[float, str, int | None]] = []
    for number, work in enumerate(works):
        try:
            async with asyncio.timeout(20):
                await work
            answers.append((time.monotonic(), "nothing", None))
        except (CommError, TimeoutError) as error:
            answers.append((ends.get(number, time.monotonic()), type(error).__name__, getattr(error, "peer", None)))
    await comm.aclose()
    return killed, answers


SPECIAL: dict[str, Callable[[str, int], Result]] = {
    "10,000 outstanding recvs": many_recvs,
    "peer computes for 200 ms after posting": busy_peer,
    "flight recorder and heartbeat": overhead,
    "ops awaited in a loop": cores_used,
    "idle": idling,
    "kill -9 of a peer": death,
}
