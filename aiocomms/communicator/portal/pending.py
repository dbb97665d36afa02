"""The base class of a portal's works and calls, and the *bells* that wake the waiting threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import get_ident
from typing import Protocol

from aiocomms.arguments import wrong_type
from aiocomms.communicator.portal.door import Door
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle

LOOK = 1.0
"""The interval in seconds at which a waiting thread checks whether the event loop can still wake the thread."""

_ending: list[int] = []
"""The identifiers of the threads that have begun to shut down the interpreter; empty before the shutdown."""


def stand_still() -> None:
    """Record that this thread shuts down the interpreter.

    From now on all other waiting threads, which are daemon threads, stay blocked.
    """
    _ending.append(get_ident())


class EndBell(Protocol):
    """A bell that wakes a thread or calls a callback when a :class:`Pending` object completes."""

    def release(self) -> object:
        """Ring the bell. The owner of the bell calls this method once."""


class _Callback:
    """A bell that calls a function."""

    __slots__ = ("_call", "_report", "waits")

    def __init__(self, call: Callable[[], object], report: Callable[[str, BaseException], None], waits: bool) -> None:
        self._call, self._report, self.waits = call, report, waits

    def release(self) -> None:
        """See :class:`EndBell`. An exception of the function is only reported, so that the calling thread continues."""
        try:
            self._call()
        except Exception as error:
            self._report(f"the done callback {self._call!r} raised", error)


class Pending(Handle):
    """The base class of works and calls that complete on the event loop's thread while other threads wait."""

    __slots__ = ("_bells", "_door", "_over")

    def __init__(self, door: Door) -> None:
        self._door = door
        self._over = False
        self._bells: list[EndBell] = []  # Each waiting thread and each callback has a bell.

    def _block(self, patience: float | None) -> bool:
        """Block this thread until the object completes or ``patience`` ends. Return whether the object has completed.

        :param patience: the largest number of seconds to wait. None: no limit.
        """
        ends = None if patience is None else clock.now() + patience
        bell = clock.held_lock()
        try:
            self._bells.append(bell)  # A signal handler may raise as soon as the bell is there.
            if self._door.core.refusing:
                self._look()
            while not self._over:
                left = LOOK if ends is None else min(LOOK, ends - clock.now())
                if left <= 0:
                    break
                if not bell.acquire(timeout=left):
                    self._look()
        finally:
            if bell in self._bells:  # A bell that is still in the list has not rung.
                self._drop(bell)
        while _ending and get_ident() not in _ending:
            clock.event().wait()
        return self._over

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call ``call()`` once when the object completes, on the thread that completes the object.

        If the object has already completed, call ``call()`` immediately.

        Any thread may use this method. ``call`` must not block. If ``call`` raises an exception, the event loop reports
        the exception. The caller counts as a thread that waits for the object. So if another thread stops waiting for
        the object, the op is not withdrawn.

        :raises ArgumentTypeError: ``call`` cannot be called.
        """
        self._call_when_over(call, waits=True)

    def add_step(self, call: Callable[[], object]) -> None:
        """Call ``call()`` as :meth:`add_done_callback` does, but do not count the caller as a waiter."""
        self._call_when_over(call, waits=False)

    def _call_when_over(self, call: Callable[[], object], *, waits: bool) -> None:
        if not callable(call):
            raise wrong_type("call", call, "a function without arguments")
        bell = _Callback(call, self._door.core.driver.report, waits)
        self._bells.append(bell)
        if self._over:
            with contextlib.suppress(ValueError):  # The thread that ends the object makes the call at this moment.
                self._bells.remove(bell)
                bell.release()

    def _leave_alone(self) -> None:
        """Stop waiting. Withdraw the op if no other thread waits for it, and if the op can be withdrawn."""
        settled = clock.held_lock()
        self._door.put(self._left_alone, settled)
        settled.acquire(timeout=LOOK)  # A message that the other rank sends from now on is for the next receive.

    def _left_alone(self, settled: clock.HeldLock) -> None:
        if all(isinstance(bell, _Callback) and not bell.waits for bell in self._bells):
            self._withdraw()
        settled.release()

    def _withdraw(self) -> None:
        """Withdraw the op on the event loop's thread, if the op can be withdrawn."""
        raise NotImplementedError

    def _drop(self, bell: EndBell) -> None:
        with contextlib.suppress(ValueError):  # The bell rings at this moment.
            self._bells.remove(bell)

    def _ring(self) -> None:
        """Wake every waiting thread, because the object has completed."""
        self._over = True
        while self._bells:
            try:
                self._bells.pop().release()
            except IndexError:  # A thread has removed its own bell.
                break

    def _look(self) -> None:
        """Complete the object with an error on this thread if the event loop's thread cannot complete the object."""
        error = self._door.nobody() or self._overdue()
        if error is not None:
            self._fail(error)

    def _overdue(self) -> CommError | None:
        """Return the error of an overdue object whose event loop is blocked; None if the object is not overdue."""
        return None

    def _fail(self, error: BaseException) -> None:
        raise NotImplementedError
