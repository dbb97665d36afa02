"""The *door*: the queue of calls from other threads to the event loop of a communicator or an endpoint."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from aiocomms.cuda import CallerMarks
from aiocomms.errors import CommClosedError, CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.waker import Waker
from aiocomms.progress.driver import LoopDriver
from aiocomms.transport import Capabilities


class DoorOwner(Protocol):
    """The communicator's core or the endpoint that owns a :class:`Door`, and the event loop that serves the door."""

    name: str
    driver: LoopDriver
    thread: int
    """The thread of the owner's event loop."""

    @property
    def marks(self) -> CallerMarks | None:
        """The object that marks positions in the callers' CUDA streams, or None if no transport uses CUDA streams."""

    @property
    def rank(self) -> int | None:
        """This process's rank, or None if the owner is an endpoint, which has no rank."""

    @property
    def refusing(self) -> bool:
        """True after the owner has been lost or closed.

        While the value is True, a thread that begins to wait for its call first checks whether the call can still end.
        """

    @property
    def closed(self) -> bool:
        """True after the owner has been closed."""

    def refusal(self) -> CommError | None:
        """Return the error for new calls if the owner is lost or closed. Return None if calls may start."""

    def worded(self, error: CommError, /) -> CommError:
        """See :attr:`aiocomms.progress.work.Owner.worded`."""

    def lose(self, error: CommError) -> None:
        """Mark the owner's communicator or connections as lost, because the door has failed."""


class _LoopBell:
    """The waker of a simulated loop.

    A simulated loop does not wait for file descriptors, so :meth:`wake` schedules a call on the loop.
    """

    def __init__(self, driver: LoopDriver, call: Callable[[], object]) -> None:
        self._driver, self._call = driver, call
        self._rung = False

    def fileno(self) -> None:
        """See :class:`aiocomms.progress.driver.Served`."""

    def wake(self) -> None:
        """See :meth:`Waker.wake`."""
        if not self._rung:
            self._rung = True
            self._driver.call_threadsafe(self._call)

    def clear(self) -> None:
        """See :meth:`Waker.clear`."""
        self._rung = False

    def close(self) -> None:
        """See :meth:`Waker.close`."""
        self._rung = True


class Door:
    """A queue of calls from other threads.

    The loop's driver polls the queue, as it polls transports, until :meth:`close`.
    """

    capabilities: Capabilities = Capabilities(frozenset())

    def __init__(self, core: DoorOwner) -> None:
        self.core = core
        self._process = os.getpid()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waker = Waker() if clock.simulation is None else _LoopBell(core.driver, self.progress)
        self._serving = False
        self.closed: bool = False
        if get_ident() == core.thread:
            self._attach()
        else:
            core.driver.call_threadsafe(self._attach)

    def put(self, call: Callable[..., object], *args: Any) -> None:
        """Queue a call for the loop's thread, behind all earlier calls. Any thread may use this method.

        After the door has been closed, the calling thread runs all queued calls itself.
        """
        self._calls.append((call, args))
        if not self.closed:
            self._waker.wake()
        if self.closed:
            self.progress()

    @property
    def idle(self) -> bool:
        """True if the queue is empty and no call is running.

        The property looks at the queue first, because a call leaves the queue before the call runs.
        """
        return not self._calls and not self._serving

    def elsewhere(self, what: str) -> None:
        """Refuse a blocking call on the loop's own thread.

        In a forked child, this method returns. The call then fails with the error of a closed communicator.

        :raises RuntimeError: the caller is on the loop's own thread.
        """
        if get_ident() == self.core.thread and os.getpid() == self._process:
            raise RuntimeError(
                f"{what} on '{self.core.name}' was called on the loop's own thread, which would wait for itself; "
                "on that thread, await the method of the Communicator itself"
            )

    def nobody(self) -> CommError | None:
        """Wake the loop, in case an earlier wake-up was lost.

        :returns: the error for new calls if the loop can run no more calls; otherwise None.
        """
        if os.getpid() != self._process:
            return self.refusal()
        return None if self.core.driver.call_threadsafe(self.progress) else self.refusal()

    def refusal(self) -> CommError:
        """Return the error for a call after the owner has been lost or closed, or after the loop has ended."""
        error = self.core.refusal() or CommClosedError("the event loop of the communicator has ended")
        return self.core.worded(error.about(comm=self.core.name, rank=self.core.rank))

    # ---------------------------------------------------------------------------------------- on the loop's thread

    def _attach(self) -> None:
        if self.core.closed:
            self.close()
        elif not self.closed:
            self.core.driver.attach(self)

    def fileno(self) -> int | None:
        """See :class:`aiocomms.progress.driver.Served`."""
        return self._waker.fileno()

    def progress(self) -> bool | None:
        """Run the calls that are queued now. Later calls wait for the loop's next iteration, so other tasks can run."""
        if not self.closed:
            self._waker.clear()
        calls, before = self._calls, self._serving
        self._serving = True
        try:
            for _ in range(len(calls)):
                try:
                    call, args = calls.popleft()
                except IndexError:  # Several threads make the calls once the door is closed.
                    break
                call(*args)
        finally:
            self._serving = before
            if calls and not self.closed:
                self._waker.wake()
        return True

    def on_failure(self, error: CommError) -> None:
        """See :class:`aiocomms.progress.driver.Served`."""
        self.core.lose(error)

    def disown(self) -> None:
        """Mark the door as closed in a forked child, without using the waker.

        The child has only the thread that forked. Another thread may have held the waker's lock at the fork.
        """
        self.closed = True

    def close(self) -> None:
        """Refuse queued and later calls, because the owner is closed."""
        self.closed = True
        self.core.driver.detach(self)
        self.progress()
        self._waker.close()
