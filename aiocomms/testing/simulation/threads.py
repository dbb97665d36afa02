"""The threads of simulated processes. Each of these threads is a system thread.

The simulated world resumes one thread at a time. A blocked thread keeps its stack, so blocking code runs in a
simulation without changes. A thread runs until it waits for a :class:`SimulatedEvent`. Then the world continues. The
thread and the world wake each other by locks, on one processor. A wake-up of a thread on another processor takes ten
times as long (docs/benchmarks/core.md).
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from aiocomms.errors import SimulationError
from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import refuse, watch

_here = threading.local()
"""The simulated thread that runs on the current system thread."""


_PATIENCE: Final = 60.0
"""The maximum number of real seconds for which a simulated thread may run before the thread waits or ends."""


def _taken() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


_T = TypeVar("_T")


class Killed(BaseException):
    """The exception that ends a waiting thread after the thread's process has died or the simulated run has ended."""


class _Runner:
    """A system thread that runs one simulated thread after another."""

    def __init__(self) -> None:
        self.go, self.back = _taken(), _taken()
        self.thread: SimulatedThread | None = None
        threading.Thread(target=self._run, name="aiocomms simulated thread", daemon=True).start()

    def where(self) -> str:
        """Return the line of code that the thread runs."""
        frame = sys._current_frames().get(self._ident)
        return "it has ended" if frame is None else traceback.format_stack(frame, limit=1)[0].strip()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        _tids.append(threading.get_native_id())
        while True:
            self.go.acquire()
            _here.thread, thread = self.thread, self.thread
            assert thread is not None
            watch(True)
            try:
                thread.target()
            except Killed:
                pass
            except BaseException as error:
                thread.timeline.report({"message": "a thread has raised", "exception": error})
            finally:
                watch(False)
                _here.thread = self.thread = None
                thread.runner = None
                _alive.pop(thread, None)
                del thread
                _idle.append(self)
                self.back.release()


_idle: Final[list[_Runner]] = []
_alive: Final[dict[SimulatedThread, None]] = {}
"""The threads that have not ended, in the order of their starts."""
_tids: Final[list[int]] = []
"""The operating system's ids of the system threads that run simulated threads."""


def _forget() -> None:
    """Clear the lists of threads in a forked child, because a fork does not copy these threads."""
    _idle.clear()
    _tids.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread and the simulated threads on the current processor, unless torch uses several threads."""
    if not hasattr(os, "sched_setaffinity") or torch.get_num_threads() > 1:
        yield
        return
    before, here = os.sched_getaffinity(0), {ctypes.CDLL(None).sched_getcpu()}
    for thread in (0, *_tids):  # Threads that start later inherit this thread's processor.
        os.sched_setaffinity(thread, here)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class SimulatedThread:
    """One thread of a simulated process."""

    def __init__(self, timeline: Timeline, target: Callable[[], object]) -> None:
        self.timeline = timeline
        self.target = target
        self.runner: _Runner | None = None
        self.killed = False

    def resume(self) -> None:
        """Run the thread until it waits or ends. Only the simulated world calls this method."""
        runner = self.runner
        if runner is None:
            before = watch(False)
            runner = self.runner = _idle.pop() if _idle else _Runner()
            watch(before)
            runner.thread = self
        runner.go.release()
        if not runner.back.acquire(timeout=_PATIENCE):
            raise SimulationError(f"a thread of {self.timeline} has blocked for {_PATIENCE:g} s: {runner.where()}")

    def park(self) -> None:
        """Wait until the world resumes the thread. Only the thread itself calls this method.

        :raises Killed: the world ends the thread.
        """
        runner = self.runner
        assert runner is not None
        if not self.killed:
            runner.back.release()
            runner.go.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """End the thread: raise :class:`Killed` where the thread waits."""
        self.killed = True
        if self.runner is not None:
            self.resume()


class SimulatedEvent:
    """An event for threads of one process, like :class:`threading.Event`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._set = False
        self._waiting: dict[SimulatedThread, bool] = {}

    def is_set(self) -> bool:
        """See :class:`threading.Event`."""
        return self._set

    def set(self) -> None:
        """See :class:`threading.Event`. Waiting threads resume a moment later."""
        self._set = True
        waiting, self._waiting = self._waiting, {}
        for thread in waiting:
            self._timeline.soon(thread.resume)

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`threading.Event`. A wait on the loop's thread is refused, because it would block the loop."""
        thread: SimulatedThread | None = getattr(_here, "thread", None)
        if self._set:
            return True
        if thread is None:
            raise refuse("a wait that blocks the event loop")
        self._waiting[thread] = True
        if timeout is not None:
            self._timeline.later(max(0.0, timeout), self._expire, thread)
        thread.park()
        return self._set

    def _expire(self, thread: SimulatedThread) -> None:
        if self._waiting.pop(thread, False):
            thread.resume()


def started(timeline: Timeline, target: Callable[[], object]) -> None:
    """Start a thread of a process. The thread begins to run a moment later."""
    thread = SimulatedThread(timeline, target)
    _alive[thread] = None
    timeline.soon(thread.resume)


async def run_in_thread(timeline: Timeline, call: Callable[[], _T]) -> _T:
    """Make a blocking call in a thread of a process, and await its result.

    If the await is cancelled, the call goes on.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def target() -> None:
        result, error = None, None
        try:
            result = call()
        except Killed:
            raise
        except BaseException as raised:  # The awaiting task raises it.
            error = raised
        loop.call_soon_threadsafe(settle, result, error)

    started(timeline, target)
    found: _T = await done
    return found


def stay_in_thread() -> None:
    """Suspend the calling simulated thread until :func:`kill_all`. On a loop's thread, return at once."""
    thread: SimulatedThread | None = getattr(_here, "thread", None)
    if thread is not None:
        thread.park()


def kill_all(timeline: Timeline) -> None:
    """End the threads of a process: raise :class:`Killed` in each waiting thread."""
    for thread in [thread for thread in _alive if thread.timeline is timeline]:
        del _alive[thread]
        thread.kill()
