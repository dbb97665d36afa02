"""The threads of simulated processes: threads of the system of which one runs at a time, when the world says so.

Code that blocks keeps its stack while it waits, so it need not be written for a simulation. A thread goes on until it
waits for a :class:`SimulatedEvent`; then the world goes on. Both hand a lock to each other, which takes some 10 µs.
"""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiocomms.errors import SimulationError
from aiocomms.testing.simulation.refusing import refuse, watch

if TYPE_CHECKING:
    from aiocomms.testing.simulation.process import Process

_here = threading.local()
"""The simulated thread that runs on this thread of the system."""


_PATIENCE: Final = 60.0
"""Seconds, in reality, for which a simulated thread may run until it waits or ends."""


def _taken() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


class Killed(BaseException):
    """The process of a thread has died, or the history is over: the thread ends where it waits."""


class _Runner:
    """A thread of the system that runs one simulated thread after another."""

    def __init__(self) -> None:
        self.go, self.back = _taken(), _taken()
        self.thread: SimulatedThread | None = None
        threading.Thread(target=self._run, name="aiocomms simulated thread", daemon=True).start()

    def where(self) -> str:
        """Return the line where the thread is."""
        frame = sys._current_frames().get(self._ident)
        return "it has ended" if frame is None else traceback.format_stack(frame, limit=1)[0].strip()

    def _run(self) -> None:
        self._ident = threading.get_ident()
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
                thread.process.report({"message": "a thread has raised", "exception": error})
            finally:
                watch(False)
                _here.thread = self.thread = None
                thread.runner = None
                thread.process.threads.pop(thread, None)
                del thread
                _idle.append(self)
                self.back.release()


_idle: Final[list[_Runner]] = []


class SimulatedThread:
    """One thread of a process."""

    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self.process = process
        self.target = target
        self.runner: _Runner | None = None
        self.killed = False

    def resume(self) -> None:
        """Let it run until it waits or ends. The world calls this."""
        runner = self.runner
        if runner is None:
            before = watch(False)
            runner = self.runner = _idle.pop() if _idle else _Runner()
            watch(before)
            runner.thread = self
        runner.go.release()
        if not runner.back.acquire(timeout=_PATIENCE):
            raise SimulationError(f"a thread of {self.process} has blocked for {_PATIENCE:g} s: {runner.where()}")

    def park(self) -> None:
        """Wait until the world lets it go on. The thread itself calls this.

        :raises Killed: it is to end.
        """
        runner = self.runner
        assert runner is not None
        if not self.killed:
            runner.back.release()
            runner.go.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """End it where it waits."""
        self.killed = True
        if self.runner is not None:
            self.resume()


class SimulatedEvent:
    """An event for threads of one process, as :class:`threading.Event` is."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._set = False
        self._waiting: dict[SimulatedThread, bool] = {}

    def is_set(self) -> bool:
        """See :class:`threading.Event`."""
        return self._set

    def set(self) -> None:
        """See :class:`threading.Event`. Those that wait go on a moment later."""
        self._set = True
        waiting, self._waiting = self._waiting, {}
        for thread in waiting:
            self._process.later(self._process.world.a_moment(), thread.resume)

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`threading.Event`. On the loop's thread it is refused, for there it would block the loop."""
        thread: SimulatedThread | None = getattr(_here, "thread", None)
        if self._set:
            return True
        if thread is None:
            raise refuse("a wait that blocks the event loop")
        self._waiting[thread] = True
        if timeout is not None:
            self._process.later(max(0.0, timeout), self._expire, thread)
        thread.park()
        return self._set

    def _expire(self, thread: SimulatedThread) -> None:
        if self._waiting.pop(thread, False):
            thread.resume()


def started(process: Process, target: Callable[[], object]) -> SimulatedThread:
    """Start a thread of a process, which runs a moment later."""
    thread = SimulatedThread(process, target)
    process.threads[thread] = None
    process.later(process.world.a_moment(), thread.resume)
    return thread
