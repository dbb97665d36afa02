"""The command ``aiocomms bench``: how fast each transport is between two processes of this machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

import aiocomms
from aiocomms.bootstrap.registry import available
from aiocomms.communicator import Communicator

SIZES = (8, 64 << 10, 1 << 20)
_WARM_UP, _LEAST, _LONGEST = 20, 20, 60.0
_OPEN = 20.0
"""The deadline of the two processes' communicator, in seconds."""

Row = tuple[str, int, float, float]
"""What was measured, the size in bytes, and the median and the 99th percentile in µs."""


def run(transports: Sequence[str], seconds: float) -> int:
    """Measure the transports, and print a table.

    :param transports: the names of transports; empty: all that are available.
    :param seconds: the time for which each row is measured.
    :returns: 1 if a transport that was named could not be measured.
    :raises ValueError: ``seconds`` makes no sense.
    """
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"--seconds is {seconds}, wanted more than 0 and at most {_LONGEST:g}")
    names = transports or [name for name, why in available(torch.device("cpu")).items() if why is None]
    failed = False
    print(f"2 processes, {len(os.sched_getaffinity(0))} processors\n{'':24}{'bytes':>10}{'median':>13}{'p99':>13}")
    for name in names:
        rows = _measure(name, seconds)
        if isinstance(rows, str):
            print(f"{name}: {rows}")
            failed = failed or bool(transports)
        else:
            for what, size, median, p99 in rows:
                print(f"{f'{name} {what}':24}{size:>10}{median:>10.1f} µs{p99:>10.1f} µs")
    return int(failed)


def _measure(transport: str, seconds: float) -> list[Row] | str:
    """Return the rows of one transport, or the reason why it cannot be measured."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="aiocomms") as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_rank, args=(rank, transport, str(Path(folder) / "store"), seconds, sender))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            rows: list[Row] | str = (
                receiver.recv() if receiver.poll(3 * _OPEN + 12 * seconds) else "it did not come to an end"
            )
        except EOFError:
            rows = f"its processes ended with {[process.exitcode for process in processes]}"
        finally:
            for process in processes:
                process.join(_OPEN if not isinstance(rows, str) else 1)
                process.kill()
                process.join()
    return rows


def _rank(rank: int, transport: str, store: str, seconds: float, pipe: Connection) -> None:
    """Run one of the two processes. Rank 0 decides how often both repeat each operation."""
    torch.set_num_threads(1)
    try:
        rows: list[Row] | str = asyncio.run(_measure_all(rank, transport, FileStore(store, 2), seconds))
    except Exception as error:
        rows = str(error).partition("\n")[0]
    if rank == 0:
        pipe.send(rows)


async def _measure_all(rank: int, transport: str, store: FileStore, seconds: float) -> list[Row]:
    rows = []
    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2, name="bench", timeout=_OPEN) as comm:
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            rows.append(await _row("send/recv, one way", comm, tensor, partial(_ping, comm, tensor), 2, seconds))
            rows.append(await _row("all_reduce", comm, tensor, partial(comm.all_reduce, tensor), 1, seconds))
        await comm.barrier()
    return sorted(rows)


async def _ping(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        await comm.send(tensor, 1)
        await comm.recv(tensor, 1)
    else:
        await comm.recv(tensor, 0)
        await comm.send(tensor, 0)


async def _row(
    what: str, comm: Communicator, tensor: torch.Tensor, call: Callable[[], Awaitable[Any]], trips: int, seconds: float
) -> Row:
    began = time.perf_counter()
    for _ in range(_WARM_UP):
        await call()
    each = (time.perf_counter() - began) / _WARM_UP
    turns = await comm.broadcast_object(max(_LEAST, int(seconds / each)), 0)
    samples = []
    for _ in range(turns):
        began = time.perf_counter()
        await call()
        samples.append((time.perf_counter() - began) * 1e6 / trips)
    return what, tensor.nbytes, statistics.median(samples), statistics.quantiles(samples, n=100)[98]
