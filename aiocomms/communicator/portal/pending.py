"""The base class of all that a thread waits for through a portal, and the bell that wakes the thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from aiocomms.communicator.portal.door import Door
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle

LOOK = 1.0
"""Seconds after which a waiting thread looks again whether a bell can still ring."""

_still: list[bool] = []
"""A list that is not empty once the interpreter ends."""


def stand_still() -> None:
    """Silence the threads that wait as the interpreter ends: they are daemons, and hear no more."""
    _still.append(True)


class EndBell(Protocol):
    """A bell, which tells a thread or a callback that something has ended."""

    def release(self) -> object:
        """Tell; once."""


class _Callback:
    """A bell that rings by a call."""

    __slots__ = ("_call", "waits")

    def __init__(self, call: Callable[[], object], waits: bool) -> None:
        self._call, self.waits = call, waits

    def release(self) -> object:
        """See :class:`EndBell`."""
        return self._call()


class Pending(Handle):
    """Something that threads wait for, and that ends on the loop's thread."""

    __slots__ = ("_bells", "_door", "_over")

    def __init__(self, door: Door) -> None:
        self._door = door
        self._over = False
        self._bells: list[EndBell] = []  # one for each waiting thread, and for each callback

    def _block(self, patience: float | None) -> bool:
        """Block this thread until it has ended, and return whether it has.

        :param patience: seconds; None: as long as it takes.
        """
        ends = None if patience is None else clock.now() + patience
        bell = clock.held_lock()
        try:
            self._bells.append(bell)  # a signal handler may raise as soon as it is there
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
        while _still:
            clock.event().wait()
        return self._over

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called once when it has ended: on the thread that ends it, the loop's, or here and now.

        Any thread. It must neither block nor raise. The caller counts as waiting, as a thread does that blocks.
        """
        self._call_when_over(_Callback(call, waits=True))

    def add_step(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called as :meth:`add_done_callback` does, without counting as a wait."""
        self._call_when_over(_Callback(call, waits=False))

    def _call_when_over(self, bell: _Callback) -> None:
        self._bells.append(bell)
        if self._over:
            with contextlib.suppress(ValueError):  # The thread that ends it makes the call at this moment.
                self._bells.remove(bell)
                bell.release()

    def _leave_alone(self) -> None:
        """Withdraw what can be withdrawn, unless another thread waits for it: this one has stopped waiting."""
        settled = clock.held_lock()
        self._door.put(self._left_alone, settled)
        settled.acquire(timeout=LOOK)  # A message that the other rank sends from now on is for the next receive.

    def _left_alone(self, settled: clock.HeldLock) -> None:
        if all(isinstance(bell, _Callback) and not bell.waits for bell in self._bells):
            self._withdraw()
        settled.release()

    def _withdraw(self) -> None:
        """Withdraw it, on the loop's thread, if that is possible."""
        raise NotImplementedError

    def _drop(self, bell: EndBell) -> None:
        with contextlib.suppress(ValueError):  # The bell rings at this moment.
            self._bells.remove(bell)

    def _ring(self) -> None:
        """Let every waiting thread go on: it has ended."""
        self._over = True
        while self._bells:
            try:
                self._bells.pop().release()
            except IndexError:  # A thread has taken its own bell away.
                break

    def _look(self) -> None:
        """End it here if no other thread will."""
        error = self._door.nobody() or self._overdue()
        if error is not None:
            self._fail(error)

    def _overdue(self) -> CommError | None:
        """Return the error with which it ends while the loop stands still; None: it goes on."""
        return None

    def _fail(self, error: BaseException) -> None:
        raise NotImplementedError
