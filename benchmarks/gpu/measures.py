"""Measurements of ours and the peer in turn in the same processes, round after round."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from aiocomms import Communicator
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.targets import TARGETS, bus_bandwidth, figure, paired, percentile
from benchmarks.gpu.ticks import ticking

MIB = 2**20
SMALL = 4096
POSTS = 64
"""Posted before any is waited for; CUDA's own queue of launches holds about a thousand."""
BURST = 20
"""Large ones under way at once, as in nccl-tests; what the host does before the first begins is divided by it."""
WARM = 3
"""Rounds that are not looked at."""
BY_KEY = {target.key: target for target in TARGETS}


class Bench(NamedTuple):
    """The tools and parameters of a measure."""

    comm: Communicator
    stage: Stage
    rounds: int
    nbytes: int = 64 * MIB
    """The bytes that are moved."""
    op_seconds: float = 10e-6
    """The seconds of a short op."""
    long_seconds: float = 10e-3
    """The seconds of a long op."""
    parked_seconds: float = 2.0


Measure = Callable[[Bench], Awaitable[dict[str, Any]]]


async def post(b: Bench) -> dict[str, Any]:
    """Measure the host's time to post an all_reduce: the mean of many, none waited for."""
    tensor = b.stage.tensor(SMALL)
    ours, theirs = [], []
    for number in range(WARM + b.rounds):
        b.stage.synchronize()
        began = time.perf_counter()
        works = [b.comm.all_reduce(tensor) for _ in range(POSTS)]
        took_ours = time.perf_counter() - began
        for work in works:
            await work
        began = time.perf_counter()
        requests = [dist.all_reduce(tensor, async_op=True) for _ in range(POSTS)]
        took_theirs = time.perf_counter() - began
        for request in requests:
            request.wait()
        b.stage.synchronize()
        if number >= WARM:
            ours.append(took_ours / POSTS * 1e6)
            theirs.append(took_theirs / POSTS * 1e6)
    return figure(BY_KEY["post"], paired(ours, theirs), ours_us=ours, torch_us=theirs)


async def await_(b: Bench) -> dict[str, Any]:
    """Measure how much later an `await` comes back than `stream.synchronize()` would have, for the same op."""
    tensor = b.stage.tensor(SMALL)
    awaited, synchronised = [], []
    for number in range(WARM + 20 * b.rounds):
        for times, waits in ((awaited, True), (synchronised, False)):
            b.stage.synchronize()
            began = time.perf_counter()
            b.stage.sleep(b.op_seconds)
            work = b.comm.all_reduce(tensor)
            if waits:
                await work
            else:
                b.stage.order(work)
                b.stage.synchronize()
            took = time.perf_counter() - began
            await work
            if number >= WARM:
                times.append(took * 1e6)
    above = statistics.median(awaited) - statistics.median(synchronised)
    return figure(BY_KEY["await"], above, awaited_us=awaited, synchronised_us=synchronised)


async def heartbeat(b: Bench) -> dict[str, Any]:
    """Measure the loop's lateness at a tick of 1 ms while long collectives run, and with nothing to do."""
    tensor = b.stage.tensor(SMALL)
    idle: list[float] = []
    busy: list[float] = []
    with ticking(1e-3, idle):
        await asyncio.sleep(b.rounds * b.long_seconds)
    with ticking(1e-3, busy):
        for _ in range(10 * b.rounds):
            b.stage.sleep(b.long_seconds)
            await b.comm.all_reduce(tensor)
            await asyncio.sleep(0)
    late = percentile(busy, 99) * 1e3
    return figure(BY_KEY["heartbeat"], late, idle_p99_ms=percentile(idle, 99) * 1e3, ticks=len(busy))


async def parked(b: Bench) -> dict[str, Any]:
    """Measure the share of a core that all threads of the process use while an op of seconds is awaited."""
    tensor = b.stage.tensor(SMALL)
    await b.comm.all_reduce(tensor)
    b.stage.synchronize()
    await asyncio.sleep(0.2)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    b.stage.sleep(b.parked_seconds)
    await b.comm.all_reduce(tensor)
    after, took = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return figure(BY_KEY["parked"], 100 * spent / took, seconds=took, cpu_seconds=spent)


async def bandwidth(b: Bench) -> dict[str, Any]:
    """Bus bandwidth of ours and torch's: of an all_reduce, or with one rank of an all_gather into another tensor."""
    kind = "all_reduce" if b.comm.size > 1 else "all_gather"
    tensor, other = b.stage.tensor(b.nbytes), b.stage.tensor(b.nbytes)
    if kind == "all_reduce":
        calls = (lambda: b.comm.all_reduce(tensor), lambda: dist.all_reduce(tensor, async_op=True))
    else:
        calls = (
            lambda: b.comm.all_gather_single(other, tensor),
            lambda: dist.all_gather_into_tensor(other, tensor, async_op=True),
        )
    ours, theirs = [], []
    for number in range(WARM + b.rounds):
        for times, call, own in ((ours, calls[0], True), (theirs, calls[1], False)):
            await b.comm.barrier()
            b.stage.synchronize()
            began = time.perf_counter()
            works = [call() for _ in range(BURST)]
            for work in works:
                b.stage.order(work) if own else work.wait()
            b.stage.synchronize()
            took = (time.perf_counter() - began) / BURST
            for work in works if own else ():
                await work
            if number >= WARM:
                times.append(bus_bandwidth(kind, b.nbytes, took, b.comm.size) / 1e9)
    key = f"bandwidth{b.comm.size}"
    return figure(BY_KEY[key], paired(ours, theirs), kind=kind, ours_gb_per_s=ours, torch_gb_per_s=theirs)


async def p2p(b: Bench) -> dict[str, Any]:
    """Messages from rank 0 to rank 1, several under way, against a copy within the GPU."""
    tensors = [b.stage.tensor(b.nbytes) for _ in range(BURST)]
    took = []
    for number in range(WARM + b.rounds):
        await b.comm.barrier()
        began = time.perf_counter()
        works = [b.comm.send(t, 1) if b.comm.rank == 0 else b.comm.recv(t, 0) for t in tensors]
        for work in works:
            await work
        if number >= WARM:
            took.append((time.perf_counter() - began) / len(tensors))
    copy = b.stage.seconds_of_copy(b.nbytes, 3 + b.rounds)
    messages = statistics.median(took)
    detail = {"message_gb_per_s": b.nbytes / messages / 1e9, "copy_gb_per_s": b.nbytes / copy / 1e9}
    return figure(BY_KEY["p2p"], copy / messages, **detail)


async def get(b: Bench) -> dict[str, Any]:
    """A window of rank 1, which rank 0 writes and reads, several puts or gets under way; and small ones, one by one."""
    window = await b.comm.new_window(b.stage.tensor(b.nbytes))
    tensor, small, mapped = b.stage.tensor(b.nbytes), b.stage.tensor(SMALL), window.mapped(1)
    took: dict[str, list[float]] = {"put": [], "get": [], "small_put": [], "small_get": []}
    for number in range(WARM + b.rounds if b.comm.rank == 0 else 0):
        for name, of, times in (("", tensor, BURST), ("small_", small, 1)):
            for kind, call in (("put", window.put), ("get", window.get)):
                began = time.perf_counter()
                works = [call(of, 1) for _ in range(times)]
                if kind == "put":
                    await window.flush(1)
                for work in works:
                    await work
                if number >= WARM:
                    took[name + kind].append((time.perf_counter() - began) / times)
    await window.aclose()
    if b.comm.rank != 0:
        return figure(BY_KEY["get"], 1.0)  # no rank asks this one
    detail = {f"{kind}_gb_per_s": [b.nbytes / seconds / 1e9 for seconds in took[kind]] for kind in ("put", "get")}
    detail |= {f"{kind}_us": [seconds * 1e6 for seconds in took[kind]] for kind in ("small_put", "small_get")}
    return figure(BY_KEY["get"], paired(took["get"], took["put"]), mapped=mapped, **detail)


MEASURES: dict[str, Measure] = {
    "post": post, "await": await_, "heartbeat": heartbeat, "parked": parked, "bandwidth1": bandwidth,
    "bandwidth2": bandwidth, "p2p": p2p, "get": get,
}  # fmt: skip


async def settle() -> None:
    """Leave nothing of one measure to the next."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    await asyncio.sleep(0)
