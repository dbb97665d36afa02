"""The deadlines of pending ops, watched off the loop.

A deadline must pass in time when the loop is busy too, so one thread per process sleeps until the earliest one. Most
ops complete long before, so nothing is done per op but an insertion into a queue: the thread learns of an earlier
deadline than the one it sleeps for, and of nothing else.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

_GRACE = 0.001
"""Seconds after a deadline at which it is looked at, so that one that is due is never looked at too early."""


class Watched(Protocol):
    """Whose deadlines are watched."""

    def expire(self, now: float) -> float:
        """Act on the deadlines that have passed; called on the watchdog's thread.

        :param now: ``time.monotonic()``.
        :returns: the earliest deadline that is left, or infinity.
        """


class Watchdog:
    """Sleeps until the earliest deadline of all that register."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Begin anew; in a forked child, where the thread is gone and the lock may be held by nobody."""
        self.wakes_at = float("inf")
        """When the thread will look next; an op with an earlier deadline calls :meth:`wake_by`."""
        self._changed = threading.Condition(threading.Lock())
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def register(self, who: Watched) -> None:
        """Start to watch."""
        with self._changed:
            self._watched.add(who)

    def unregister(self, who: Watched) -> None:
        """Cease to watch; with nobody left to watch the thread ends. Twice is once."""
        with self._changed:
            self._watched.discard(who)
            thread = None if self._watched else self._thread
            if thread is not None:
                self._thread, self.wakes_at = None, float("inf")
                self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wake_by(self, deadline: float) -> None:
        """See to it that the thread looks when ``deadline`` passes.

        :raises RuntimeError: no thread can be started.
        """
        with self._changed:
            # Nobody is there: the last one unregistered while the thread asked it for its deadlines.
            if deadline < self.wakes_at and self._watched:
                if self._thread is None:
                    self._begin()
                self.wakes_at = deadline
                self._changed.notify_all()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="aiocomms deadlines", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # the next deadline tries again
            raise

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is me and (left := self.wakes_at + _GRACE - time.monotonic()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                if self._thread is not me:
                    return
                self.wakes_at = float("inf")
            self._look()

    def _look(self) -> None:
        """Act on what has passed. On return nothing of it is kept: the thread may sleep long before it looks again."""
        with self._changed:
            watched = list(self._watched)
        # Outside the lock: a communicator that expires may well be closed by that.
        for who in watched:
            self.wake_by(who.expire(time.monotonic()))


watchdog = Watchdog()
"""The process's watchdog; it has a thread only while ops with deadlines are pending or have recently been."""
