"""The thread with an event loop on which a synchronous program opens communicators and endpoints."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from aiocomms.communicator.portal import pending
from aiocomms.communicator.portal.door import Door
from aiocomms.errors import CommError, SimulationError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.ending import at_end

_P = ParamSpec("_P")
_Opened = TypeVar("_Opened")
_Blocking = TypeVar("_Blocking")


class LoopThread:
    """A thread that runs an event loop for as long as communicators or endpoints use the thread."""

    def __init__(self) -> None:
        if clock.simulation is not None:
            raise SimulationError(
                "the loop thread of aiocomms.blocking cannot be simulated: simulate an async program whose threads, of "
                "asyncio.to_thread, use comm.portal()"
            )
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:  # The process has no free descriptor.
            raise CommError(f"no event loop can be opened: {error}") from error
        self._stop = asyncio.Event()
        self._users = 0
        self._lock = threading.RLock()  # A finalizer or signal handler may close what it interrupts.
        self._thread = threading.Thread(target=self._run, name="aiocomms blocking", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise CommError(f"no thread can be started: {error}") from error

    def open(self, opening: Awaitable[_Opened]) -> _Opened:
        """Await ``opening`` on the loop, and return its result: the opened object."""

        async def main() -> _Opened:
            return await opening

        future = asyncio.run_coroutine_threadsafe(main(), self._loop)
        # The wait has pauses, because a signal as it begins, or to another thread, does not end it.
        while not concurrent.futures.wait([future], pending.LOOK).done:
            pass
        opened = future.result()
        # This call runs before the transport's own, which is registered by now.
        at_end(functools.partial(_end, weakref.ref(self)))
        return opened

    def enter(self) -> None:
        """Count one more communicator or endpoint as a user of the thread."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Subtract one from the number of the thread's users. End the thread if no user is left."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.stop()

    @property
    def alive(self) -> bool:
        """True while the thread runs. In a forked child the value is False, because a fork does not copy the thread."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop, and wait until the thread has ended. Idempotent.

        The end of the loop closes all open objects.
        """
        if self.alive and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # The loop has ended just now.
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class Use:
    """One user of a loop thread: a communicator or an endpoint. Without users, the loop thread ends."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread: LoopThread | None = thread
        """The loop thread; None after :meth:`leave`."""
        self._lock = threading.RLock()  # A signal handler may close what it interrupts.
        thread.enter()

    @contextlib.contextmanager
    def ending(self, door: Door) -> Iterator[None]:
        """Stop using the thread after the ``with`` body. The body closes the communicator or endpoint.

        A second caller waits until the first caller's body has ended.

        :param door: the queue of calls to the communicator or endpoint that the body closes; see :class:`Door`.
        :raises RuntimeError: the caller runs on the event loop's thread.
        """
        # A forked child may lack the thread that would give the lock back.
        if self.thread is None or not self.thread.alive:
            yield
            return
        door.elsewhere("close")
        with self._lock:
            try:
                yield
            finally:
                self.leave()

    def leave(self) -> None:
        """Stop using the thread. Idempotent."""
        with self._lock:
            thread, self.thread = self.thread, None
        if thread is not None:
            thread.leave()


def blocking(
    open_: Callable[_P, Awaitable[_Opened]], wrap: Callable[[_Opened, LoopThread], _Blocking], described: str
) -> Callable[_P, _Blocking]:
    """Return a function that starts a thread with an event loop, and opens an object on that loop.

    :param open_: the function that opens the object. The loop awaits the result of this function.
    :param wrap: the function that makes the blocking object from the opened object.
    :param described: the beginning of the returned function's docstring.
    """

    @functools.wraps(open_)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Blocking:
        # The call is made here, so that this thread raises errors about the arguments.
        opening = open_(*args, **kwargs)
        thread = LoopThread()
        try:
            return wrap(thread.open(opening), thread)
        except BaseException:
            thread.stop()
            raise

    name: Any = getattr(open_, "__name__")  # noqa: B009 - A callable has no name, as far as types know.
    call.__doc__ = f"{described}\n\nArguments and errors are those of :func:`aiocomms.{name}`."
    return call


def _end(thread: weakref.ref[LoopThread]) -> None:
    """Close all objects that the program has not closed. The interpreter calls this function at its exit."""
    left = thread()
    if left is not None:
        pending.stand_still()
        left.stop()
