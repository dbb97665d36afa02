"""A simulated process: its clock, its loop, its threads, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from anyio._backends._asyncio import _task_states

from aiocomms.errors import ArgumentTypeError, SimulationError
from aiocomms.progress import deadlines
from aiocomms.testing.simulation.clockwork import Clockwork, Occurrence, Timeline
from aiocomms.testing.simulation.loop import SimulatedLoop, SimulatedTask
from aiocomms.testing.simulation.places import in_program, waits_at
from aiocomms.testing.simulation.threads import Killed, kill_all, started

_T = TypeVar("_T")
_MOST_WAITS = 20
"""The largest number of waits that are interrupted in the ``finally`` blocks of one task when a history ends."""


class SimulatedWatchdog(deadlines.Watchdog):
    """The watchdog of a process. Its thread runs only when a deadline has passed."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._owners: dict[deadlines.Watched, None] = {}
        self.wakes_at = float("inf")

    def register(self, who: deadlines.Watched) -> None:
        """See :meth:`Watchdog.register`."""
        self._owners[who] = None

    def unregister(self, who: deadlines.Watched) -> None:
        """See :meth:`Watchdog.unregister`."""
        self._owners.pop(who, None)

    @property
    def leaving(self) -> list[Any]:
        """The list of threads that are ending.

        The list is always empty, because a thread of this watchdog ends as soon as it has checked the deadlines.
        """
        return []

    def wake_by(self, deadline: float) -> None:
        """See :meth:`Watchdog.wake_by`."""
        if deadline < self.wakes_at and self._owners:
            self.wakes_at = deadline
            self._timeline.at(deadline + deadlines.GRACE, self.wake, deadline)

    def wake(self, deadline: float) -> None:
        """Check which deadlines have passed. Do nothing if ``deadline`` is no longer the next deadline."""
        if deadline != self.wakes_at:  # An earlier deadline has come since.
            return
        now = self._timeline.now()
        if all(who.calm(now) for who in self._owners):
            self._timeline.clockwork.only_looks = all(who.due() == float("inf") for who in self._owners)
            self._look()  # No deadline has passed, so no thread is needed. Most calls are of this kind.
        else:
            started(self._timeline, self._look)

    def _look(self) -> None:
        self.wakes_at = float("inf")
        for who in list(self._owners):
            self.wake_by(who.expire(self._timeline.now()))


class Process(Timeline):
    """One process of a rank. A restarted rank has a new process."""

    def __init__(self, clockwork: Clockwork, rank: int, restarts: int) -> None:
        """Set up the process; :meth:`begin` starts its program.

        :param restarts: how often the rank has been started before.
        """
        super().__init__(clockwork, rank, restarts)
        self.loop = SimulatedLoop(self)  # type: ignore[abstract]  # The rest is refused.
        self.state: dict[str, Any] = {deadlines.SIMULATED: SimulatedWatchdog(self)}
        self.main: asyncio.Task[Any] | None = None
        self.exited = False
        """True if the program has called ``sys.exit``."""
        self.ended = float("inf")
        """The world's time at which the process ended; infinity if the process has not ended."""

    def begin(self, program: Callable[[], Awaitable[Any]], left: Callable[[Process], object]) -> None:
        """Start the program on the loop of the process.

        :param left: a function that is called when the program and its tasks have ended.
        """
        self.main = self.loop.create_task(_awaited(program), name="main")
        self.main.add_done_callback(lambda _: self.loop.create_task(self._leave(left), name="end"))

    async def _leave(self, left: Callable[[Process], object]) -> None:
        """End as :func:`asyncio.run` does: cancel the other tasks, and wait for them."""
        mine = asyncio.current_task()
        others: list[SimulatedTask] = [task for task in self.loop.tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in others:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.report({"message": "it was raised while its task was cancelled", "exception": error, "task": task})
        if self.main is not None and not self.main.cancelled():
            self.main.exception()  # The history raises this error.
        self.loop.report_unseen()
        if names := self.left_open():
            opened = ", ".join(map(repr, names))
            error = SimulationError(f"{self} has left {opened} open: use 'async with', or await its aclose()")
            self.report({"message": "it was not closed", "exception": error})
        begun = [generator for ref in self.generators if (generator := ref()) is not None]
        await asyncio.gather(*[generator.aclose() for generator in begun], return_exceptions=True)
        left(self)

    def report(self, context: dict[str, Any]) -> None:
        """Record an error that cannot be raised to a caller. A ``SystemExit`` ends the program."""
        error = context.get("exception")
        if not isinstance(error, SystemExit):
            super().report(context)
        elif not self.exited:
            self.exited = True
            if self.main is not None:
                self.main.cancel()
            if error.code not in (None, 0):
                failure = SimulationError(f"the program of {self} has called sys.exit({error.code!r})")
                failure.__cause__ = error
                super().report({**context, "exception": failure})

    def end(self) -> None:
        """Record that the process has ended."""
        self.over, self.ended = True, self.clockwork.time

    def left_open(self) -> list[str]:
        """Return the names of the process's communicators that are neither closed nor lost."""
        opened: dict[str, list[Any]] = self.state.get("communicators", {})
        return [name for name, comms in opened.items() if not all(comm.aborted for comm in comms)]

    def waiting(self) -> str:
        """Describe the waiting tasks and the lines at which they wait.

        The library's tasks appear only if no other task waits.
        """
        tasks = self.loop.tasks()
        own = [task for task in tasks if in_program(task.get_coro())]
        words = [f"task {task.get_name()!r} waits at {waits_at(task.get_coro())}" for task in own or tasks]
        return f"{self}: {'; '.join(words) or 'no task of it waits'}"

    def idle(self, coming: Occurrence) -> bool:
        """Return True if no task waits for a scheduled call."""
        if self.over:
            return True
        if coming.call != self._punctually:
            return False
        _, call, args = coming.args
        if call == self.loop.fire:
            return bool(args[0].cancelled())
        return bool(call == self.state[deadlines.SIMULATED].wake)

    @property
    def error(self) -> BaseException | None:
        """The error that the program raised, or else the first error that was reported; None if there is no error.

        An error is reported if no caller could catch it.
        """
        main = None if self.exited else self.main
        if main is not None and main.cancelled():
            return SimulationError(f"the program of {self} has cancelled itself")
        if main is not None and main.done() and main.exception() is not None:
            return main.exception()
        if self.unraised:
            context = self.unraised[0]
            return context.get("exception") or SimulationError(f"{self}: {context.get('message')}")
        return None

    def notes(self, error: BaseException) -> Iterator[str]:
        """Yield a note for each error that was reported because no caller could catch the error.

        :param error: the error of the history.
        """
        if not self.over:
            self.loop.report_unseen()
        for context in self.unraised:
            raised, task = context.get("exception"), context.get("task") or context.get("future")
            named = f", of task {task.get_name()!r}" if isinstance(task, asyncio.Task) else ""
            what = "it" if raised is error else f"an error of {self}{'' if raised is None else f', {raised!r}'}"
            yield f"nothing has caught {what}: {context.get('message')}{named}"

    @property
    def result(self) -> Any:
        """The result of the program; None if the process has died or has called ``sys.exit``."""
        return None if self.dead or self.exited or self.main is None else self.main.result()

    def disown(self) -> None:
        """Detach the communicators from the program.

        The program's ``finally`` blocks then have no effect on other processes.
        """
        kill_all(self)
        for comms in self.state.get("communicators", {}).values():
            for comm in list(comms):
                comm._disown()

    def dispose(self) -> None:
        """End the tasks and threads of the process when the history is over.

        The program's ``finally`` blocks run, but have no effect on other processes.
        """
        self.over = True
        self.disown()
        for task in self.loop.each_task():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # The ``finally`` blocks must run in their task: anyio leaves a scope only in the task that entered it.
            asyncio.tasks._enter_task(self.loop, task)
            _end(task.get_coro())
            asyncio.tasks._leave_task(self.loop, task)
            _task_states.pop(task, None)  # A scope that was not left keeps its task, and the task keeps the process.
        kill_all(self)  # The ``finally`` blocks may have started threads.


def _end(coroutine: Any) -> None:
    """End a coroutine by an error at each place where the coroutine or one of its ``finally`` blocks waits.

    The coroutine's ``close`` method would not end ``finally`` blocks that wait. The garbage collector would report
    these blocks.
    """
    for _ in range(_MOST_WAITS):
        try:
            coroutine.throw(Killed())
        except BaseException:
            return


async def _awaited(program: Callable[[], Awaitable[_T]]) -> _T:
    given = program()
    if not isinstance(given, Awaitable):
        raise ArgumentTypeError(f"program returned {given!r}, wanted an awaitable: write 'async def'")
    return await given
