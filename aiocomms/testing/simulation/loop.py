"""The event loop of a simulated process, which is an asyncio loop in virtual time and without file descriptors.

Callbacks run in the order of their registration, as asyncio promises. The seed decides when the callbacks of timers,
messages and threads reach the loop. So the seed also decides the order in which the processes run.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.refusing import refuse
from aiocomms.testing.simulation.threads import run_in_thread

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_MOST_CALLBACKS = 10_000
"""The largest number of callbacks that run at one moment of virtual time.

The limit ensures that virtual time passes even if a task polls with ``sleep(0)``.
"""
_REFUSED = (
    *("add_reader", "add_signal_handler", "add_writer", "connect_accepted_socket", "connect_read_pipe"),
    *(
        "close",
        "connect_write_pipe",
        "create_connection",
        "create_datagram_endpoint",
        "create_server",
        "create_unix_connection",
    ),
    *("create_unix_server", "getaddrinfo", "getnameinfo", "sendfile", "sock_accept", "sock_connect", "sock_recv"),
    *("sock_recv_into", "sock_recvfrom", "sock_sendall", "sock_sendfile", "sock_sendto", "start_tls"),
    *("run_forever", "run_until_complete", "set_task_factory", "stop", "subprocess_exec", "subprocess_shell"),
)


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self.number = number  # asyncio keeps the task in a set at once.
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. The simulated world calls :meth:`turn`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ready: deque[asyncio.Handle] = deque()
        self._coming: deque[asyncio.Handle] = deque()
        """The callbacks that :meth:`call_soon_threadsafe` has accepted and that have not reached the loop."""
        self._numbers = itertools.count(1)
        self._made: list[weakref.ref[SimulatedTask]] = []
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    def __repr__(self) -> str:
        return f"<SimulatedLoop of {self._timeline}>"

    # -------------------------------------------------------------------------------------------- calls of the world

    def turn(self) -> None:
        """Run the ready callbacks until none is left."""
        ready = self._ready
        for _ in range(_MOST_CALLBACKS):
            if not ready or self._timeline.over:
                return
            handle = ready.popleft()
            if handle.cancelled():
                continue
            try:
                handle._run()
            except SystemExit as error:  # Uncaught, the exit would end the simulation too.
                self._timeline.report({"message": "it was called", "exception": error})
        self._timeline.soon(lambda: None)

    def enter(self) -> None:
        """Make this loop the running loop of this thread."""
        _set_running_loop(self)

    def tasks(self) -> list[SimulatedTask]:
        """Return the tasks that have not ended, in the order in which they were created."""
        return list(self.each_task())

    def each_task(self) -> Iterator[SimulatedTask]:
        """Yield the tasks that have not ended. Also yield tasks that are created during the iteration."""
        return (task for made in self._made if (task := made()) is not None and not task.done())

    def report_unseen(self) -> None:
        """Report the errors that no code has retrieved from their tasks.

        Asyncio itself reports such an error when the garbage collector frees the task.
        """
        for task in filter(None, [made() for made in self._made]):
            if task.done() and task._log_traceback:
                task._log_traceback = False
                context = {"message": "Task exception was never retrieved", "exception": task.exception(), "task": task}
                self.call_exception_handler(context)

    # ----------------------------------------------------------------------------------------------- calls of asyncio

    def time(self) -> float:
        """Return the time of the process's clock."""
        return self._timeline.now()

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See :class:`asyncio.AbstractEventLoop`."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See :class:`asyncio.AbstractEventLoop`. The callback reaches the loop a moment later."""
        handle = asyncio.Handle(callback, args, self, context)
        self._coming.append(handle)
        self._timeline.soon(lambda: self._ready.append(self._coming.popleft()))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See :class:`asyncio.AbstractEventLoop`."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See :class:`asyncio.AbstractEventLoop`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timeline.at(when, self.fire, timer)
        return timer

    def fire(self, timer: asyncio.TimerHandle) -> None:
        """Make a timer's callback ready, if the timer was not cancelled."""
        if not timer.cancelled():
            self._ready.append(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing, because :meth:`fire` ignores a cancelled timer."""

    def create_future(self) -> asyncio.Future[Any]:
        """See :class:`asyncio.AbstractEventLoop`."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[_T]:
        """See :class:`asyncio.AbstractEventLoop`."""
        number = next(self._numbers)
        given = f"Task-{number}" if name is None else str(name)
        task = SimulatedTask(coro, number=number, loop=self, name=given, context=context)
        self._made.append(weakref.ref(task))
        return task

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """See :class:`asyncio.AbstractEventLoop`. The call is made in a simulated thread."""
        return self.create_task(run_in_thread(self._timeline, lambda: func(*args)))

    def get_task_factory(self) -> None:
        """Return None, because programs cannot replace the task factory. Each task is a :class:`SimulatedTask`."""

    def get_debug(self) -> bool:
        """See :class:`asyncio.AbstractEventLoop`."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing."""

    def is_running(self) -> bool:
        """See :class:`asyncio.AbstractEventLoop`."""
        return not self._timeline.over

    def is_closed(self) -> bool:
        """See :class:`asyncio.AbstractEventLoop`."""
        return self._timeline.over

    def get_exception_handler(self) -> Any:
        """See :class:`asyncio.AbstractEventLoop`."""
        return self._handler

    def set_exception_handler(self, handler: Any) -> None:
        """See :class:`asyncio.AbstractEventLoop`."""
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See :class:`asyncio.AbstractEventLoop`."""
        if self._handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._handler(self, context)
        except Exception as error:
            told = "it was raised by the loop's exception handler"
            self.default_exception_handler({"message": told, "exception": error})

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Record the error, so that this history (this simulated run) fails."""
        self._timeline.report(context)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing, because asynchronous generators end when the history (the simulated run) ends."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing, because the default executor of this loop has no threads."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: SimulatedLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise refuse(f"loop.{name}()")

    method.__doc__ = "Refuse what cannot be simulated."
    return method


for _name in _REFUSED:
    setattr(SimulatedLoop, _name, _refused(_name))
