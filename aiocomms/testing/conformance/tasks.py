"""Worlds in one process: all ranks are tasks of one loop, a new one for each check."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import anyio.lowlevel
import torch
from torch.distributed import HashStore

from aiocomms.testing.conformance.case import Board, Outcome, Place
from aiocomms.testing.conformance.rank import Rank, Reports, Request, other_tasks, with_leftovers
from aiocomms.testing.conformance.world import BACKENDS, GRACE, STOP, World

_LOOKS = 12
"""How often it is looked, after a millisecond, two, four and so on, what a check has left."""
_POOLS = ("AnyIO worker thread", "Trio thread")
"""Threads that the loops keep for a while, in case they are needed again."""


class Tasks(World):
    """Runs each check in a thread with a loop of its own, so that one which blocks its loop can be given up."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        # The first loop of a process opens descriptors that stay: libuv's for signals.
        backend, options = BACKENDS[place.loop]
        anyio.run(anyio.lowlevel.checkpoint, backend=backend, backend_options=options)

    def close(self) -> None:
        """See :meth:`World.close`: nothing outlives a check."""

    def run(self, request: Request) -> list[Outcome]:
        """See :meth:`World.run`."""
        before = _Resources()
        run = _Run(self.place, request)
        thread = threading.Thread(target=run.target, name="conformance", daemon=True)
        thread.start()
        thread.join(2 * self.place.deadline + STOP)  # to run, and to close
        if thread.is_alive():
            stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
            return [Outcome("stopped", f"the loop does not come back; it is here:\n{stack}")] * self.place.size
        if run.error is not None:
            return [Outcome("failed", run.error)] * self.place.size
        left = before.left()
        if left and all(outcome.status == "passed" for outcome in run.outcomes):
            return [Outcome("failed", f"the world was closed and has left behind: {left}")] * self.place.size
        return run.outcomes


class _Run:
    """One check on all ranks of one loop."""

    def __init__(self, place: Place, request: Request) -> None:
        self.outcomes = [Outcome("stopped", "it did not begin")] * place.size
        self.error: str | None = None
        self._place = place
        self._request = request
        self._running = place.size

    def target(self) -> None:
        """What the thread does."""
        torch.set_num_threads(1)  # of this thread; the tensors are small
        backend, options = BACKENDS[self._place.loop]
        try:
            anyio.run(self._main, backend=backend, backend_options=options)
        except BaseException as error:  # it is shown as the check's failure
            self.error = "".join(traceback.format_exception(error))

    async def _main(self) -> None:
        reports, store, board = Reports(), HashStore(), Board()
        reports.install()
        self._changed = anyio.Event()
        ranks = [Rank(self._place, rank, store, board, reports) for rank in range(self._place.size)]
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, ranks)
                for rank, it in enumerate(ranks):
                    tasks.start_soon(self._run_rank, rank, it)
            with anyio.move_on_after(self._place.deadline):
                async with anyio.create_task_group() as tasks:
                    for it in ranks:
                        tasks.start_soon(it.close)
            self.outcomes = with_leftovers(self.outcomes, other_tasks(), reports.take())
        finally:
            reports.remove()

    async def _run_rank(self, rank: int, it: Rank) -> None:
        self.outcomes[rank] = await it.run(self._request)
        self._running -= 1
        self._changed.set()
        self._changed = anyio.Event()

    async def _watch(self, ranks: list[Rank]) -> None:
        with anyio.move_on_after(self._place.deadline):
            await self._until(lambda: any(outcome.status == "failed" for outcome in self.outcomes))
            with anyio.move_on_after(GRACE):
                await self._until(lambda: False)
        if self._running:
            for rank in ranks:
                rank.stop()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._running and not condition():
            await self._changed.wait()


class _Resources:
    """Threads and descriptors of this process, to be compared with later."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def left(self) -> str:
        """What is there now and was not before; threads that end, and files being written, are given time to."""
        for look in range(_LOOKS):
            started = set(threading.enumerate()) - self._threads
            threads = [thread.name for thread in started if not thread.name.startswith(_POOLS)]
            opened = _descriptors() - self._descriptors
            if not threads and not opened:
                return ""
            gc.collect()  # a failed check's tensors, and their memory's descriptors, are held by its traceback
            # What is to end needs the interpreter too, which a collection does not give away.
            time.sleep(2**look / 1000)
        return f"threads {threads}, descriptors {opened}"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add((path.name, str(path.readlink())))
        except OSError:
            continue  # the one that lists them
    return found
