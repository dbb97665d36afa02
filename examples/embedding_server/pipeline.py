"""A rank's part of a plan: a micro-batch goes through all stages, and through all parts of a stage at the same time.

    rank 0                            rank 1              ...    rank n-1
    Batcher ── plan ── stage 0 ─────> stage 1 ─> ...  ─────────> stage n-1
            <── vectors ───────────────────────────────────────────'

Every rank gets the plan, and waits for the data of the previous stage. Several micro-batches are in the pipeline at the
same time, each in another stage. While the parts of a stage add up results for one, they compute another.
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
"""The number of threads that compute on one rank. See "The size of the pool" in the README for measurements."""

SWITCH = 0.0005  # seconds after which a thread passes Python's lock to the loop; the default is 0.005
NICENESS = 5  # the niceness of threads that compute, so that the loop gets a core first
M_ARENA_MAX = -8  # from glibc's malloc.h


def settle() -> None:
    """Set this process up for an event loop and threads that compute."""
    sys.setswitchinterval(SWITCH)
    # glibc keeps memory for every thread that has computed, and each loss of a rank leaves threads behind.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    gc.freeze()  # collections skip modules, which stay; communicators come later, because collections free them


class Pipeline:
    """This rank's part of the work.

    :param stage: the rank's share of the model
    :param threads: the size of the pool of threads that compute
    """

    def __init__(self, links: Links, stage: Stage, threads: int = THREADS) -> None:
        self._links = links
        self._stage = stage
        self._pool = CapacityLimiter(threads)

    async def execute(self, plan: tuple[int, Tensor, Tensor]) -> tuple[Tensor, list[float]]:
        """Take a micro-batch through this rank's share.

        :param plan: the plan's number, token ids, int64 `[texts, tokens]`, and each text's tokens, int64 `[texts]`
        :returns: on rank 0 the vectors, float32 `[texts, 384]`, and the seconds of all stages for computation and for
            waits for a thread
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
        """Compute in a thread, so that the event loop stays free. If a rank is lost, the result is abandoned."""
        called = time.perf_counter()
        result, seconds = await to_thread.run_sync(timed, compute, *args, abandon_on_cancel=True, limiter=self._pool)
        spent[0] += seconds
        spent[1] += time.perf_counter() - called - seconds
        return result


def advance(steps: Generator[Tensor, Tensor | None, Tensor], total: Tensor | None) -> tuple[bool, Tensor]:
    """Compute up to the next sum or to the end. Return whether it is the end, and the result."""
    try:
        return False, steps.send(total)
    except StopIteration as end:
        return True, end.value


def timed(compute: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Return a call's result and its seconds."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))  # on Linux, of this thread
    began = time.perf_counter()
    result = compute(*args)
    return result, time.perf_counter() - began
