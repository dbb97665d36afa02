"""The thread with an event loop that opens something for a synchronous program, and runs for as long as it is used."""

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
    """A thread that runs an event loop for as long as communicators or endpoints use it."""

    def __init__(self) -> None:
        if clock.simulation is not None:
            raise SimulationError(
                "a loop in a thread of its own cannot be simulated: simulate an async program whose threads, of "
                "asyncio.to_thread, use comm.portal()"
            )
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:  # there is no descriptor for it
            raise CommError(f"no event loop can be opened: {error}") from error
        self._stop = asyncio.Event()
        self._users = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="aiocomms blocking", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise CommError(f"no thread can be started: {error}") from error

    def open(self, opening: Awaitable[_Opened]) -> _Opened:
        """Await what opens something, and return that."""

        async def main() -> _Opened:
            return await opening

        future = asyncio.run_coroutine_threadsafe(main(), self._loop)
        # A signal that comes as the wait begins, or to another thread, does not end the wait: it has pauses.
        while not concurrent.futures.wait([future], pending.LOOK).done:
            pass
        opened = future.result()
        # This end comes before the transport's own, which is known by now.
        at_end(functools.partial(_end, weakref.ref(self)))
        return opened

    def enter(self) -> None:
        """One more communicator or endpoint uses it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One less; with the last one it ends."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.stop()

    @property
    def alive(self) -> bool:
        """True while it runs; in a forked child it does not."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop with all that is still open, and wait for that; twice is once."""
        if self.alive and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # The loop has ended just now.
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class Use:
    """The use that one communicator or endpoint makes of a thread, until it is closed."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread: LoopThread | None = thread
        """The thread; None once it has been left."""
        self._lock = threading.RLock()  # a signal handler may close what it interrupts
        thread.enter()

    @contextlib.contextmanager
    def ending(self, door: Door) -> Iterator[None]:
        """Leave the thread after the body, which closes what uses it: a second caller waits for the first.

        :param door: of what is closed.
        :raises RuntimeError: this is the loop's own thread.
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
        """Leave the thread; twice is once."""
        with self._lock:
            thread, self.thread = self.thread, None
        if thread is not None:
            thread.leave()


def blocking(
    open_: Callable[_P, Awaitable[_Opened]], wrap: Callable[[_Opened, LoopThread], _Blocking], described: str
) -> Callable[_P, _Blocking]:
    """Return the function that starts a thread for a loop, and has it open something.

    :param open_: opens it, in a loop.
    :param wrap: what is returned, made of that.
    :param described: the beginning of the function's docstring.
    """

    @functools.wraps(open_)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Blocking:
        # The call is made here, for this thread says what is wrong with the arguments.
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
    """Close, as the interpreter ends, what the program has left open."""
    left = thread()
    if left is not None:
        pending.stand_still()
        left.stop()
