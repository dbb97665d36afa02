"""The watchdog, a thread that acts on the deadlines of pending ops, also while the event loop is busy.

One thread per process sleeps until the earliest deadline. Most ops complete long before theirs, so that the only cost
of an op is an insertion into a queue. The thread is told only of a deadline that is earlier than the one for which it
sleeps.
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
"""Seconds by which the thread wakes after a deadline, so that it never wakes before the deadline has passed."""


_LATER = 1.0
"""Seconds after which deadlines are looked at again that could not be looked at."""
_log = logging.getLogger("aiocomms")


class Watched(Protocol):
    """An object whose deadlines are watched."""

    def expire(self, now: float) -> float:
        """Act on the deadlines that have passed. It is called on the watchdog's thread.

        :param now: the time, by the monotonic clock.
        :returns: the earliest deadline that is left, or infinity if there is none.
        """

    def due(self) -> float:
        """Return the earliest deadline, or infinity if there is none."""

    def calm(self, now: float) -> bool:
        """Return whether no deadline has passed and no rank is silent: :meth:`expire` would ask for signs of life only.

        :param now: the time, by the monotonic clock.
        """


class Watchdog:
    """The thread that sleeps until the earliest deadline of all registered objects, and tells them to act."""

    wakes_at: float

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Start afresh. In a forked child the thread is gone, and the lock may be held by a thread that is gone too."""
        self.wakes_at = float("inf")
        """The time at which the thread wakes next. An op with an earlier deadline calls :meth:`wake_by`."""
        # Reentrant: a finalizer that runs under the lock may post or close. It is taken as it is and not through the
        # condition, in whose methods the exception of a signal handler would leave it taken for good.
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
        """Watch an object's deadlines no more; idempotent. With the last one the thread ends: see :attr:`leaving`."""
        with self._lock:
            self._watched.discard(who)
            thread = None if self._watched else self._thread
            if thread is not None:
                self._thread, self.wakes_at = None, float("inf")
                self._leaving.append(thread)
                self._changed.notify_all()

    @property
    def leaving(self) -> list[threading.Thread]:
        """The threads that are to end, and have not. They may be telling an object that its deadline has passed."""
        with self._lock:
            self._changed.notify_all()  # A signal handler may have raised between the end and the notice of it.
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            return list(self._leaving)

    def wake_by(self, deadline: float) -> None:
        """Make sure that the thread wakes when ``deadline`` has passed.

        :raises RuntimeError: no thread can be started.
        """
        with self._lock:
            # No object may be left: the last one may have been unregistered while the thread called its expire.
            if deadline < self.wakes_at and self._watched:
                if self._thread is None or not self._thread.is_alive():
                    self._start_thread()
                self._changed.notify_all()
                # This comes last: if a signal handler raises before, the next op tells the thread again.
                self.wakes_at = deadline

    def _start_thread(self) -> None:
        """Start it. If that raises, a thread that runs all the same ends at once, and the next deadline tries again."""
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
                if self._thread is me:  # The thread ends by an exception: the next deadline starts another one.
                    self._thread, self.wakes_at = None, float("inf")

    def _expire_all(self) -> None:
        """Tell all objects to act on their deadlines.

        This is a function of its own so that it keeps no reference to them: the thread may sleep for long afterwards.
        """
        with self._lock:
            watched = copied(self._watched)
        # The lock is not held here: a communicator may be closed, and so unregistered, because of its deadline.
        for who in watched:
            try:
                earliest = who.expire(clock.now())
            except BaseException:  # the deadlines of all others are watched on
                _log.exception("the deadlines of %r cannot be watched; they are looked at again in %g s", who, _LATER)
                earliest = clock.now() + _LATER
            self.wake_by(earliest)


watchdog: Watchdog = Watchdog()
"""The watchdog of the process. It has a thread only while ops with deadlines are pending, or were until recently."""

SIMULATED = "watchdog"
"""The name of a simulated process's watchdog in its state."""


def current() -> Watchdog:
    """Return the watchdog of this process; in a simulation, of the simulated one."""
    found: Watchdog = clock.state().get(SIMULATED, watchdog)
    return found
