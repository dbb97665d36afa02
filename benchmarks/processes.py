"""Ranks, each in a new process with an event loop of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch

PATIENCE = 600
"""Seconds that a benchmark may take."""

Call = Callable[[], Awaitable[object]]
Measure = Callable[..., Coroutine[Any, Any, Any]]


async def timed(call: Call, count: int) -> list[float]:
    """Return the seconds of each of some calls, after one that is not counted."""
    await call()
    each = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        each.append(time.perf_counter() - began)
    return each


def in_two_processes(measure: Measure, *args: Any) -> list[Any]:
    """See :func:`in_processes`."""
    return in_processes(2, measure, *args)


def in_processes(count: int, measure: Measure, *args: Any, lost: int = 0) -> list[Any]:
    """Run ``await measure(rank, folder, *args)`` in so many new processes, and return what each returned.

    :param measure: an async function of a module. ``folder`` is a new one, where the ranks can meet.
    :param lost: how many of the last ranks do not live to return anything.
    """
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=_main, args=(measure, rank, folder, args, results)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=PATIENCE) for _ in ranks[lost:])
        for rank in ranks:
            rank.join(30)
    return [found[rank] for rank in range(count - lost)]


def _main(measure: Measure, rank: int, folder: str, args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    results.put((rank, asyncio.run(measure(rank, folder, *args))))
