"""The driver of an event loop. It polls transports for a few turns of the loop, then waits for file descriptors.

One driver serves all communicators of one event loop. Without pending ops, the driver schedules nothing. With pending
ops, the loop's own selector waits for the descriptors of the transports. The driver uses no timer, because asyncio's
timers sleep in whole milliseconds.
"""

from __future__ import annotations

import functools
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator
from contextvars import Context
from typing import Any, Final, Protocol

import msgspec

from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.waker import Waker
from aiocomms.ops.modes import dispatch_modes, in_inference_mode, set_aside
from aiocomms.progress.guard import broken, guarded
from aiocomms.progress.loops import Loop, Parkable, Waiter, running_loop
from aiocomms.transport import Capabilities

_DRIVER: Final = "driver"
TURN: Final = 0.002
"""The longest time in seconds without a turn of the event loop, if all ops of the tasks complete within their calls."""
_local = threading.local()


def _drivers() -> dict[str, Any]:
    """Return the dictionary that contains the driver of the current loop.

    Each thread, and each simulated process, has its own dictionary.
    """
    return _local.__dict__ if clock.simulation is None else clock.state()


class Served(Protocol):
    """The attributes and methods of a transport that a driver uses."""

    capabilities: Capabilities

    def progress(self) -> bool | None:
        """Advance pending ops without blocking. Return whether any op completed.

        If the result is None, the caller must not call this method again before the descriptor is readable.
        """

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when :meth:`progress` has something to do."""

    def on_failure(self, error: CommError) -> None:
        """Record that :meth:`progress` has raised an error. The driver does not call :meth:`progress` again."""


class Waited(Protocol):
    """An object that synchronous code can wait for."""

    def done(self) -> bool:
        """Return whether the object has ended."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn`` on the event loop's thread when the object has ended."""


class _Source:
    """The transports that share a descriptor. A call of one transport's ``progress`` advances all these transports."""

    __slots__ = ("fd", "transports")

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.transports: list[Served] = []


class LoopDriver:
    """The driver of one event loop, which calls the transports' ``progress`` so that the pending ops complete."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.thread: int = threading.get_ident()
        self.park: Callable[[Parkable], Generator[Any, Any, None]] = loop.park
        self.call_soon: Callable[..., None] = loop.call_soon
        self.report: Callable[[str, BaseException], None] = loop.report
        self.watch: Callable[[int, Callable[[], object]], None] = loop.watch
        self.unwatch: Callable[[int], None] = loop.unwatch
        self.tasks_of: Callable[[Collection[Waiter]], dict[Waiter, tuple[str, object]]] = loop.tasks_of
        self.task: Callable[[], tuple[str, object] | None] = loop.task
        self.spawn: Callable[[Callable[[], Coroutine[Any, Any, None]], Context], None] = loop.spawn
        self._sources: dict[Served, _Source] = {}
        self._watched: dict[int, _Source] = {}
        self._turns: dict[_Source, int] = {}  # The number of turns for which each source is still polled.
        self._scheduled = False
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()  # The calls from other threads.
        self._blocked: Waker | None = None  # The waker of the loop's thread while it waits in block().
        self.give_way: Callable[[], Generator[Any, Any, None]] = loop.give_way
        self._had_turn = 0.0  # The time of the last turn that overdue() has requested and the loop has had.
        self._asked: float | None = None  # The time of the pending request.

    @classmethod
    def current(cls) -> LoopDriver:
        """Return the driver of the running loop.

        :raises RuntimeError: no loop is running.
        """
        loop = running_loop()
        here = _drivers()
        driver: LoopDriver | None = here.get(_DRIVER)
        if driver is None or driver._loop.token is not loop.token:
            driver = here[_DRIVER] = cls(loop)
        return driver

    def attach(self, transport: Served) -> None:
        """Serve a transport from now on. If several transports share a descriptor, the driver polls them together."""
        fd = guarded(None, transport.fileno)
        source = None if fd is None else self._watched.get(fd)
        if source is None:
            source = _Source(fd)
            if fd is not None:
                self._watched[fd] = source
                self._loop.watch(fd, functools.partial(self._ready, source))
        source.transports.append(transport)
        self._sources[transport] = source

    def detach(self, transport: Served) -> None:
        """Stop serving a transport. Idempotent."""
        source = self._sources.pop(transport, None)
        if source is None:
            return
        source.transports.remove(transport)
        if not source.transports:
            self._turns.pop(source, None)
            if source.fd is not None:
                del self._watched[source.fd]
                self._loop.unwatch(source.fd)
        if not self._sources and (here := _drivers()).get(_DRIVER) is self:
            del here[_DRIVER]

    def poll_soon(self, transport: Served) -> None:
        """Poll a transport that has a pending op, during the next ``capabilities.spin`` turns of the event loop."""
        spin = transport.capabilities.spin
        source = self._sources.get(transport)
        if spin and source is not None:
            self._poll(source, spin)

    def _poll(self, source: _Source, spin: int) -> None:
        self._turns[source] = spin
        if not self._scheduled:
            self._scheduled = True
            self.call_soon(self._turn)

    def overdue(self) -> bool:
        """Return True if the event loop has had no turn for too long.

        If every op is already done when its call returns, the tasks never suspend, so the event loop gets no turn.
        """
        now = clock.now()
        if self._asked is None:
            if now - self._had_turn > TURN:
                self._asked = now
                self.call_soon(self._has_turn)
            return False
        return now - self._asked > TURN

    def _has_turn(self) -> None:
        self._asked, self._had_turn = None, clock.now()

    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """Call ``fn`` on the loop's thread, also while :meth:`block` runs on that thread.

        Any thread or signal handler may call this method.

        :returns: False if the loop has ended. Then ``fn`` is not called.
        """
        self._calls.append((fn, args))
        blocked = self._blocked
        if blocked is not None:
            blocked.wake()
        return self._loop.call_threadsafe(self._call)

    def _call(self) -> None:
        """Make the calls in the queue.

        The queue is empty if :meth:`block` has made the calls. The queue has several calls if a signal handler has
        interrupted this method.
        """
        for _ in range(len(self._calls)):
            fn, args = self._calls.popleft()
            if dispatch_modes() or in_inference_mode():
                with set_aside():
                    fn(*args)
            else:
                fn(*args)

    def block(self, work: Waited, timeout: float | None) -> None:
        """Wait in synchronous code until a work has ended.

        :param timeout: the longest wait in seconds; None: no limit.
        :raises TimeoutError: the work was not done within ``timeout``.
        """
        deadline = None if timeout is None else clock.now() + timeout
        if threading.get_ident() == self.thread:
            self._block_here(work, deadline)
        else:
            done = clock.event()
            self.call_threadsafe(work.add_done_callback, lambda _: done.set())
            done.wait(timeout)
        if not work.done():
            raise TimeoutError(f"{work!r} was not done within {timeout} s; it goes on")

    def _block_here(self, work: Waited, deadline: float | None) -> None:
        poller = select.poll()
        waker = self._blocked = Waker()
        for fd in (waker.fileno(), *self._watched):
            poller.register(fd, select.POLLIN)
        try:
            while not work.done():
                waker.clear()
                while self._calls:
                    self._call()
                moved = False
                for source in dict.fromkeys(self._sources.values()):
                    # The driver polls here as often as on the loop before it waits for the descriptor.
                    turns = max(1, _spin(source))
                    while turns and (did := self._progress(source)) is False and not work.done():
                        turns -= 1
                    moved = moved or did is True
                left = None if deadline is None else deadline - clock.now()
                if work.done() or (left is not None and left <= 0):
                    return
                if not moved:  # After one event the next is near, and may make no descriptor readable.
                    poller.poll(None if left is None else left * 1000)
        finally:
            self._blocked = None
            waker.close()

    def _ready(self, source: _Source) -> None:
        if self._progress(source) and (spin := _spin(source)):
            self._poll(source, spin)  # After one event the next is near.

    def _turn(self) -> None:
        turns = self._turns
        try:
            for source in list(turns):
                moved = self._progress(source)
                if moved:
                    turns[source] = _spin(source)
                elif moved is not None and turns.get(source, 0) > 1:
                    turns[source] -= 1
                else:
                    turns.pop(source, None)
        finally:  # This also runs if a signal handler raises.
            self._scheduled = bool(turns)
            if turns:
                self.call_soon(self._turn)

    def _progress(self, source: _Source) -> bool | None:
        transports = source.transports
        if not transports:  # The progress of an earlier source has detached them.
            return None
        try:
            if dispatch_modes() or in_inference_mode():
                with set_aside():
                    return transports[0].progress()
            return transports[0].progress()
        except Exception as error:
            for transport in list(transports):
                self.detach(transport)  # The descriptor may stay readable.
                failure = broken(transport, "progress", error)
                self.report(failure.message, error)
                transport.on_failure(failure)
            return False


def _spin(source: _Source) -> int:
    """Return the number of loop turns for which a source is polled; 0 if no transport of the source is left."""
    return source.transports[0].capabilities.spin if source.transports else 0


class Waiters(msgspec.Struct, eq=False):
    """The suspended tasks that wait for one object. The loop adds each task that it suspends for this object."""

    of: object
    """The object that the tasks wait for. The texts of errors and reports show this object."""
    on_empty: Callable[[], object] | None = None
    """The function to call when the last waiting task was cancelled."""
    waiting: list[Waiter] = []
    """See :class:`aiocomms.progress.loops.Parkable`."""

    def __repr__(self) -> str:
        return repr(self.of)

    def detach(self, waiter: Waiter) -> None:
        """See :class:`aiocomms.progress.loops.Parkable`."""
        if waiter in self.waiting:
            self.waiting.remove(waiter)
            if not self.waiting and self.on_empty is not None:
                self.on_empty()

    def wake(self) -> None:
        """Wake every task.

        If an exception of a signal handler interrupts this method, the next call wakes the remaining tasks.
        """
        waiting = self.waiting
        while waiting:
            waiter = waiting[0]
            if not waiter.done():  # A waiter is done if its task was cancelled in this turn.
                waiter.set_result(None)
            del waiting[0]


class Promise:
    """An event that happens once. Tasks of one loop await the event, and code on the loop's thread sets the event."""

    __slots__ = ("_driver", "_set", "_waiters")

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver
        self._set = False
        self._waiters = Waiters(self)

    @property
    def is_set(self) -> bool:
        """True if the event has happened."""
        return self._set

    @property
    def waiters(self) -> list[Waiter]:
        """The suspended tasks that await the event."""
        return list(self._waiters.waiting)

    def set(self) -> None:
        """Wake all tasks that wait for the event."""
        self._set = True
        self._waiters.wake()

    def __await__(self) -> Generator[Any, Any, None]:
        if not self._set:
            yield from self._driver.park(self._waiters)


class Bell:
    """An event that can happen several times.

    Each time the event happens, all waiting tasks wake. Each task then checks again whether its own condition is true.
    """

    __slots__ = ("_driver", "_waiters", "ring")

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver
        self._waiters = Waiters(self)
        self.ring: Callable[[], None] = self._waiters.wake

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._driver.park(self._waiters)
