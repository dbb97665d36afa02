"""The watchdog: a thread that acts on the deadlines of pending ops, even while the event loop is busy.

One thread per process sleeps until the earliest deadline. Most ops complete long before their deadlines, so an op costs
only an insertion into a queue. The thread wakes before that deadline only if a new op has an earlier deadline.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import copied

GRACE = 0.001
"""The time in seconds from a deadline to the wake-up of the thread.

This delay ensures that the deadline has passed when the thread wakes.
"""


_LATER = 1.0
"""The time in seconds until the watchdog checks an object again, if the check of its deadlines has raised an error."""
_log = logging.getLogger("aiocomms")


class Watched(Protocol):
    """An object whose deadlines the watchdog checks."""

    def expire(self, now: float) -> float:
        """Act on the deadlines that have passed. The watchdog calls this method on its thread.

        :param now: the current time of the monotonic clock, in seconds.
        :returns: the earliest remaining deadline, or infinity if there is none.
        """

    def due(self) -> float:
        """Return the earliest deadline, or infinity if there is none."""

    def calm(self, now: float) -> bool:
        """Return whether no deadline has passed and no rank is silent.

        If the result is True, a call of :meth:`expire` would only ask the other ranks whether they are alive.

        :param now: the current time of the monotonic clock, in seconds.
        """


class Watchdog:
    """The thread that sleeps until the earliest deadline of all registered objects, and then calls ``expire``."""

    wakes_at: float

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Reset the watchdog to its initial state, without objects or threads. A forked child must call this method.

        The child has no copy of the watchdog's thread, and a thread of the parent may have held the lock during the
        fork.
        """
        self.wakes_at = float("inf")
        """The time of the thread's next wake-up. The start of an op with an earlier deadline calls :meth:`wake_by`."""
        # The lock is reentrant: a finalizer that runs under it may post or close. The code takes the lock itself, not
        # the condition: an exception of a signal handler in the condition's methods would leave the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._leaving: list[threading.Thread] = []

    def register(self, who: Watched) -> None:
        """Watch an object's deadlines."""
        with self._lock:
            self._watched.add(who)

    def unregister(self, who: Watched) -> None:
        """Stop watching an object's deadlines. Idempotent.

        The thread ends when no object is left; see :attr:`leaving`.
        """
        with self._lock:
            self._watched.discard(who)
            thread = None if self._watched else self._thread
            if thread is not None:
                self._thread, self.wakes_at = None, float("inf")
                self._leaving.append(thread)
                self._changed.notify_all()

    @property
    def leaving(self) -> list[threading.Thread]:
        """The earlier threads of the watchdog that have been told to end and have not ended yet.

        Such a thread may still be executing the method ``expire`` of an object.
        """
        with self._lock:
            # A signal handler may have raised before the thread was notified.
            self._changed.notify_all()
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            return list(self._leaving)

    def wake_by(self, deadline: float) -> None:
        """Make sure that the thread wakes no later than shortly after ``deadline``.

        :raises RuntimeError: the system cannot start a thread.
        """
        with self._lock:
            # The set may be empty: the last object may have been unregistered while the thread called its expire.
            if deadline < self.wakes_at and self._watched:
                if self._thread is None or not self._thread.is_alive():
                    self._start_thread()
                self._changed.notify_all()
                # This assignment comes last: if a signal handler raises before it, the next op notifies the thread.
                self.wakes_at = deadline

    def _start_thread(self) -> None:
        """Start the thread.

        If the start raises an error, the next deadline starts a new thread. If the thread of the failed start runs
        nevertheless, it ends by itself.
        """
        thread = threading.Thread(target=self._run, name="aiocomms deadlines", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while True:
                with self._lock:
                    while self._thread is me and (left := self.wakes_at + GRACE - clock.now()) > 0:
                        self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    if self._thread is not me:
                        return
                    self.wakes_at = float("inf")
                self._expire_all()
        finally:
            with self._lock:
                if self._thread is me:  # An exception ends the thread, and the next deadline starts another one.
                    self._thread, self.wakes_at = None, float("inf")

    def _expire_all(self) -> None:
        """Call the method ``expire`` of all objects.

        This code is a separate function, so that the thread has no reference to the objects while it sleeps.
        """
        with self._lock:
            watched = copied(self._watched)
        # The lock is free here: a passed deadline may close a communicator, which unregisters it.
        for who in watched:
            try:
                earliest = who.expire(clock.now())
            except BaseException:  # The thread goes on with the other objects.
                _log.exception("the deadlines of %r cannot be watched; they are looked at again in %g s", who, _LATER)
                earliest = clock.now() + _LATER
            self.wake_by(earliest)


watchdog: Watchdog = Watchdog()
"""The watchdog of the process. Its thread runs from the first deadline until the last object is unregistered."""

SIMULATED = "watchdog"
"""The key of the watchdog in the state of a simulated process."""


def current() -> Watchdog:
    """Return the watchdog of this process, or of the simulated process in a simulation."""
    found: Watchdog = clock.state().get(SIMULATED, watchdog)
    return found
