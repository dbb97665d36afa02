"""A rank's part of a plan: a micro-batch goes through all stages, and in each through all parts at once.

    rank 0                            rank 1              ...    rank n-1
    Batcher ── plan ── stage 0 ─────> stage 1 ─> ...  ─────────> stage n-1
            <── vectors ───────────────────────────────────────────'

Every rank gets the plan, and waits in it for what the stage before it sends. Several micro-batches are on the way at
once, each in another stage; and while the parts of a stage add up for one, another is computed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from .links import Links
    from .model import Stage

THREADS = 1
"""Threads that compute at the same time on one rank; measured, see "The size of the pool" in the README."""

SWITCH = 0.0005  # seconds after which Python's lock goes on to the loop; by default 0.005, which each turn would wait
NICENESS = 5  # of threads that compute, so that the loop gets a core before them
M_ARENA_MAX = -8  # glibc's malloc.h


def settle() -> None:
    """Set this process up for an event loop with threads beside it that compute."""
    sys.setswitchinterval(SWITCH)
    # glibc keeps memory for every thread that has computed, and with each rank that is lost threads are left behind.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    gc.freeze()  # modules stay: no collection need visit them. A communicator is freed by one, so it comes later


class Pipeline:
    """This rank's part of the work.

    :param stage: its share of the model
    :param threads: the size of the pool in which that computes
    """

    def __init__(self, links: Links, stage: Stage, threads: int = THREADS) -> None:
        self._links = links
        self._stage = stage
        self._pool = CapacityLimiter(threads)

    async def execute(self, plan: tuple[int, Tensor, Tensor]) -> tuple[Tensor, list[float]]:
        """Take a micro-batch through this rank's share.

        :param plan: its number, token ids, int64 `[texts, tokens]`, and how many each text has, int64 `[texts]`
        :returns: on rank 0 the vectors, float32 `[texts, 384]`, and the seconds that all stages together have computed,
            and have waited for a thread to do so in
        """
        number, data, lengths = plan
        links, place = self._links, self._links.place
        spent = [0.0, 0.0]
        if place.stage > 0:
            data, spent = await links.receive()
        with links.plan(number):
            data = await self._compute(data, lengths, spent)
        if place.pp > 1:
            if not place.last or place.part == 0:
                await links.send(data, spent)
            if place.rank == 0:
                data, spent = await links.receive()
        return data, spent

    async def _compute(self, data: Tensor, lengths: Tensor, spent: list[float]) -> Tensor:
        if self._links.place.tp == 1:
            return await self._in_pool(spent, self._stage, data, lengths)
        steps, total = self._stage.steps(data, lengths), None
        while True:
            ended, data = await self._in_pool(spent, advance, steps, total)
            if ended:
                return data
            total = await self._links.sum(data)

    async def _in_pool(self, spent: list[float], compute: Callable[..., Any], *args: Any) -> Any:
        """The event loop stays free meanwhile; if a rank is lost, nobody waits for the result."""
        called = time.perf_counter()
        result, seconds = await to_thread.run_sync(timed, compute, *args, abandon_on_cancel=True, limiter=self._pool)
        spent[0] += seconds
        spent[1] += time.perf_counter() - called - seconds
        return result


def advance(steps: Generator[Tensor, Tensor | None, Tensor], total: Tensor | None) -> tuple[bool, Tensor]:
    """Compute up to the next sum, or to the end: whether it is that, and what was computed."""
    try:
        return False, steps.send(total)
    except StopIteration as end:
        return True, end.value


def timed(compute: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What it returns, and how many seconds it took."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))  # on Linux, of this thread
    began = time.perf_counter()
    result = compute(*args)
    return result, time.perf_counter() - began
