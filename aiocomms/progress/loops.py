"""The event loops. This module hides the differences between asyncio (with or without uvloop) and trio.

anyio supports both, but an ``await`` through anyio costs several times the 2 µs that an op may take. So this module
suspends and wakes tasks with each loop's own primitives. Other code, which may be slower, uses anyio.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    import trio

logger: logging.Logger = logging.getLogger("aiocomms")

_CALLBACKS, _READER = "<TrioToken.run_sync_soon task>", "aiocomms reader of "
"""The names of trio's system tasks, which do not belong to the program."""


class Waiter(Protocol):
    """The object that represents a suspended task: an asyncio future, or an object with two methods of futures."""

    def done(self) -> bool:
        """Return whether the task was resumed or cancelled."""

    def set_result(self, result: None) -> None:
        """Resume the task. Call this method on the loop's thread."""


class Parkable(Protocol):
    """An object that a task can wait for.

    When the object is ready, the object sets the result of each waiter that is not done.
    """

    waiting: list[Waiter]
    """The waiters. A loop that suspends a task for this object appends a waiter."""

    def detach(self, waiter: Waiter) -> None:
        """Remove a waiter whose task was cancelled."""


class Loop(ABC):
    """One running event loop."""

    token: object
    """The object that identifies the loop."""

    @abstractmethod
    def park(self, what: Parkable) -> Generator[Any, Any, None]:
        """Suspend the current task until ``what`` sets the result of the task's waiter."""

    @abstractmethod
    def give_way(self) -> Generator[Any, Any, None]:
        """Suspend the current task for one turn of the loop."""

    @abstractmethod
    def call_soon(self, fn: Callable[..., object], *args: object) -> None:
        """Call ``fn`` on the loop's next turn."""

    @abstractmethod
    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """Call ``fn`` on the loop's thread, from any thread.

        If the loop has ended, return False, and do not call ``fn``.
        """

    @abstractmethod
    def spawn(self, fn: Callable[[], Coroutine[Any, Any, None]], context: Context) -> None:
        """Run an async function as a task in the given context."""

    @abstractmethod
    def watch(self, fd: int, fn: Callable[[], object]) -> None:
        """Call ``fn`` whenever the descriptor ``fd`` is readable."""

    @abstractmethod
    def unwatch(self, fd: int) -> None:
        """Stop watching the descriptor."""

    @abstractmethod
    def tasks_of(self, waiters: Collection[Waiter]) -> dict[Waiter, tuple[str, object]]:
        """Return, for each waiter that is still suspended, the name and the coroutine of its task.

        Any thread may call this method.
        """

    @abstractmethod
    def task(self) -> tuple[str, object] | None:
        """Return the name and the coroutine of the running task; None if a callback runs."""

    @abstractmethod
    def report(self, message: str, error: BaseException) -> None:
        """Report an error for which there is no caller that could handle it."""


class AsyncioLoop(Loop):
    """An asyncio loop or a uvloop loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        from asyncio import all_tasks, current_task, get_running_loop

        self.token: asyncio.AbstractEventLoop = loop
        self._loop = loop
        self._running = get_running_loop
        self._all_tasks = all_tasks
        self._current_task = current_task
        self._tasks: set[asyncio.Task[None]] = set()

    def park(self, what: Parkable) -> Generator[Any, Any, None]:
        """See :meth:`Loop.park`."""
        if self._running() is not self._loop:
            raise RuntimeError(
                f"{what!r} belongs to another event loop than the one it was awaited in; "
                "its own thread may await it, any other has work.wait_blocking()"
            )
        future = self._loop.create_future()
        what.waiting.append(future)
        try:
            yield from future
        except BaseException:
            what.detach(future)
            raise

    def give_way(self) -> Generator[Any, Any, None]:
        """See :meth:`Loop.give_way`."""
        yield  # An asyncio task that yields None resumes in the next turn.

    def call_soon(self, fn: Callable[..., object], *args: object) -> None:
        """See :meth:`Loop.call_soon`."""
        self._loop.call_soon(fn, *args)

    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """See :meth:`Loop.call_threadsafe`."""
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def spawn(self, fn: Callable[[], Coroutine[Any, Any, None]], context: Context) -> None:
        """See :meth:`Loop.spawn`."""
        task = self._loop.create_task(fn(), context=context)
        self._tasks.add(task)  # The loop itself keeps no strong reference to its tasks.
        task.add_done_callback(self._tasks.discard)

    def watch(self, fd: int, fn: Callable[[], object]) -> None:
        """See :meth:`Loop.watch`."""
        self._loop.add_reader(fd, fn)

    def unwatch(self, fd: int) -> None:
        """See :meth:`Loop.unwatch`."""
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def tasks_of(self, waiters: Collection[Waiter]) -> dict[Waiter, tuple[str, object]]:
        """See :meth:`Loop.tasks_of`.

        An asyncio task has a reference to its future, but the future has no reference to the task.
        """
        if not waiters:
            return {}
        found = {getattr(task, "_fut_waiter", None): task for task in self._all_tasks(self._loop)}
        return {w: (found[w].get_name(), found[w].get_coro()) for w in waiters if w in found}

    def task(self) -> tuple[str, object] | None:
        """See :meth:`Loop.task`."""
        task = self._current_task(self._loop)
        return None if task is None else (task.get_name(), task.get_coro())

    def report(self, message: str, error: BaseException) -> None:
        """See :meth:`Loop.report`."""
        self._loop.call_exception_handler({"message": message, "exception": error})


class _TrioTask:
    """A suspended trio task with the methods of a :class:`Waiter`."""

    __slots__ = ("_resume", "_resumed", "task")

    def __init__(self, task: trio.lowlevel.Task, resume: Callable[[trio.lowlevel.Task], None]) -> None:
        self.task = task
        self._resume = resume
        self._resumed = False

    def done(self) -> bool:
        """See :meth:`Waiter.done`. The waiter of a cancelled task has already been detached."""
        return self._resumed

    def set_result(self, _: None) -> None:
        """See :meth:`Waiter.set_result`."""
        self._resume(self.task)
        self._resumed = True


class TrioLoop(Loop):
    """A trio run."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        import trio

        self._trio = trio
        self.token: trio.lowlevel.TrioToken = token
        self._token = token
        self._readers: dict[int, trio.CancelScope] = {}

    def park(self, what: Parkable) -> Generator[Any, Any, None]:
        """See :meth:`Loop.park`."""
        lowlevel = self._trio.lowlevel
        if lowlevel.current_trio_token() is not self._token:
            raise RuntimeError(
                f"{what!r} belongs to another trio run than the one it was awaited in; "
                "its own thread may await it, any other has work.wait_blocking()"
            )
        waiter = _TrioTask(lowlevel.current_task(), lowlevel.reschedule)
        succeeded: trio.lowlevel.Abort = lowlevel.Abort.SUCCEEDED

        def abort(_: object) -> trio.lowlevel.Abort:
            what.detach(waiter)
            return succeeded

        what.waiting.append(waiter)
        yield from lowlevel.wait_task_rescheduled(abort).__await__()

    def give_way(self) -> Generator[Any, Any, None]:
        """See :meth:`Loop.give_way`."""
        yield from self._trio.lowlevel.cancel_shielded_checkpoint().__await__()

    def call_soon(self, fn: Callable[..., object], *args: object) -> None:
        """See :meth:`Loop.call_soon`."""
        self.call_threadsafe(fn, *args)

    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """See :meth:`Loop.call_threadsafe`."""
        try:
            self._token.run_sync_soon(self._guarded, fn, *args)
        except self._trio.RunFinishedError:
            return False
        return True

    def spawn(self, fn: Callable[[], Coroutine[Any, Any, None]], context: Context) -> None:
        """See :meth:`Loop.spawn`."""
        self._trio.lowlevel.spawn_system_task(fn, context=context)

    def watch(self, fd: int, fn: Callable[[], object]) -> None:
        """See :meth:`Loop.watch`."""
        scope = self._readers[fd] = self._trio.CancelScope()
        self._trio.lowlevel.spawn_system_task(self._reader, fd, fn, scope, name=f"{_READER}{fd}")

    def unwatch(self, fd: int) -> None:
        """See :meth:`Loop.unwatch`."""
        scope = self._readers.pop(fd, None)
        if scope is not None:
            try:
                scope.cancel()
            except RuntimeError:
                pass  # The trio run is over, and its tasks have ended.

    def tasks_of(self, waiters: Collection[Any]) -> dict[Waiter, tuple[str, object]]:
        """See :meth:`Loop.tasks_of`."""
        return {w: (w.task.name, w.task.coro) for w in waiters if isinstance(w, _TrioTask)}

    def task(self) -> tuple[str, object] | None:
        """See :meth:`Loop.task`. Callbacks run in trio's own task or in a reader task."""
        try:
            task = self._trio.lowlevel.current_task()
        except RuntimeError:
            return None
        return None if task.name.startswith((_CALLBACKS, _READER)) else (task.name, task.coro)

    def report(self, message: str, error: BaseException) -> None:
        """See :meth:`Loop.report`."""
        logger.error(message, exc_info=error)

    async def _reader(self, fd: int, fn: Callable[[], object], scope: trio.CancelScope) -> None:
        with scope:
            # The loop checks the scope before the first turn, too: the descriptor may already be closed.
            while not scope.cancel_called:
                await self._trio.lowlevel.wait_readable(fd)
                # The scope is cancelled if unwatch() was called in the turn in which fd became readable.
                if not scope.cancel_called:
                    self._guarded(fn)

    def _guarded(self, fn: Callable[..., object], *args: object) -> None:
        try:
            fn(*args)
        except Exception as error:  # The exception would end the whole trio run.
            self.report(f"{fn!r} raised", error)


def running_loop() -> Loop:
    """Return the loop that runs the caller.

    :raises RuntimeError: no loop runs.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return TrioLoop(trio.lowlevel.current_trio_token())
    import asyncio

    try:
        return AsyncioLoop(asyncio.get_running_loop())
    except RuntimeError:
        raise RuntimeError(
            "aiocomms needs a running event loop (asyncio, uvloop or trio): call it in a coroutine"
        ) from None
