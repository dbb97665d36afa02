"""Worlds whose ranks are tasks of one event loop in this process, with a new loop for each check."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable

import anyio.lowlevel
import torch
from torch.distributed import HashStore

from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import CaseBoard, Outcome, Place
from aiocomms.testing.conformance.rank import Rank, Reports, Request, other_tasks, with_leftovers
from aiocomms.testing.conformance.world import BACKENDS, GRACE, STOP, World

_LOOKS = 12
"""The number of searches for threads and descriptors that a check has left.

The pauses after the searches are 1 ms, 2 ms, 4 ms and so on.
"""
_POOLS = ("AnyIO worker thread", "Trio thread")
"""The beginnings of the names of threads that the event loops keep for reuse."""


class Tasks(World):
    """A world that runs each check in a new loop, on one thread.

    If a check blocks the loop, the world abandons the thread.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._thread = _Thread()
        # The first loop of a process opens descriptors that stay open, such as libuv's for signals.
        backend, options = BACKENDS[place.loop]
        anyio.run(anyio.lowlevel.checkpoint, backend=backend, backend_options=options)

    def close(self) -> None:
        """See :meth:`World.close`. Raise an error if a check has changed the shared random data."""
        self._thread.end()
        data.verify()

    def run(self, request: Request) -> list[Outcome]:
        """See :meth:`World.run`."""
        before = _Resources()
        run = _Run(self.place, request)
        # The check has one deadline to run, and one to close.
        if not self._thread.run(run.target, 2 * self.place.deadline + STOP):
            stack, self._thread = self._thread.stack(), _Thread()
            return [Outcome("stopped", f"the loop does not come back; it is here:\n{stack}")] * self.place.size
        data.forget()
        if run.error is not None:
            return [Outcome("failed", run.error)] * self.place.size
        left = before.left()
        if left and all(outcome.status == "passed" for outcome in run.outcomes):
            return [Outcome("failed", f"the world was closed and has left behind: {left}")] * self.place.size
        return run.outcomes


class _Thread:
    """A thread that runs functions, one after another."""

    def __init__(self) -> None:
        self._functions = queue.SimpleQueue[Callable[[], None] | None]()
        self._ended = queue.SimpleQueue[None]()
        self._thread = threading.Thread(target=self._main, name="conformance", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], None], timeout: float) -> bool:
        """Run a function, and return whether the function has ended in time."""
        self._functions.put(function)
        try:
            self._ended.get(timeout=timeout)
        except queue.Empty:
            return False
        return True

    def stack(self) -> str:
        """Return the stack of the thread."""
        return "".join(traceback.format_stack(sys._current_frames()[self._thread.ident or 0]))

    def end(self) -> None:
        """End the thread. The thread must not be running a function."""
        self._functions.put(None)
        self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(1)  # The setting applies to this thread only. The tensors are small.
        for function in iter(self._functions.get, None):
            function()
            self._ended.put(None)


class _Run:
    """One check, which runs on all ranks of one event loop."""

    def __init__(self, place: Place, request: Request) -> None:
        self.outcomes = [Outcome("stopped", "it did not begin")] * place.size
        self.error: str | None = None
        self._place = place
        self._request = request
        self._running = place.size

    def target(self) -> None:
        """Run the check."""
        backend, options = BACKENDS[self._place.loop]
        try:
            anyio.run(self._main, backend=backend, backend_options=options)
        except BaseException as error:  # the error is shown as the check's failure
            self.error = "".join(traceback.format_exception(error))

    async def _main(self) -> None:
        reports, store, board = Reports(), HashStore(), CaseBoard()
        reports.install()
        self._changed = anyio.Event()
        ranks = [Rank(self._place, index, store, board, reports) for index in range(self._place.size)]
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, ranks)
                for index, rank in enumerate(ranks):
                    tasks.start_soon(self._run_rank, index, rank)
            with anyio.move_on_after(self._place.deadline):
                async with anyio.create_task_group() as tasks:
                    for rank in ranks:
                        tasks.start_soon(rank.close)
            self.outcomes = with_leftovers(self.outcomes, other_tasks(), reports.take())
        finally:
            reports.remove()

    async def _run_rank(self, index: int, rank: Rank) -> None:
        self.outcomes[index] = await rank.run(self._request)
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
    """The threads and descriptors of this process at one time, for a later comparison."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def left(self) -> str:
        """Wait at most 4 seconds until the check's new threads and descriptors are gone.

        Describe the threads and descriptors that remain.
        """
        for look in range(_LOOKS):
            started = set(threading.enumerate()) - self._threads
            threads = [thread.name for thread in started if not thread.name.startswith(_POOLS)]
            opened = _descriptors() - self._descriptors
            if not threads and not opened:
                return ""
            # Ending threads need the GIL, which a garbage collection does not release.
            threading.Event().wait(2**look / 1000)
            if look:
                gc.collect()  # the traceback of a failed check keeps its tensors, and the descriptors of their memory
        return f"threads {threads}, descriptors {opened}"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - os.listdir is three times as fast as a Path.
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))  # noqa: PTH115
        except OSError:
            continue  # the descriptor that lists the folder is gone
    return found
