"""The deadlines of pending ops, watched off the loop.

A deadline must pass in time when the loop is busy too, so one thread per process sleeps until the earliest one. Most
ops complete long before, so nothing is done per op but an insertion into a queue: the thread learns of an earlier
deadline than the one it sleeps for, and of nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")

_GRACE = 0.001
"""Seconds after a deadline at which it is looked at, so that one that is due is never looked at too early."""


_LATER = 1.0
"""Seconds after which deadlines are looked at again that could not be looked at."""
_log = logging.getLogger("aiocomms")


def copied(source: Iterable[T]) -> list[T]:
    """Copy a container that another thread, or a finalizer that runs amid the copy, may be changing."""
    while True:
        try:
            return list(source)
        except RuntimeError:  # it changed meanwhile
            continue


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
        # Reentrant: a finalizer that runs under the lock may post or close.
        self._changed = threading.Condition(threading.RLock())
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
                if self._thread is None or not self._thread.is_alive():
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
        try:
            while True:
                with self._changed:
                    while self._thread is me and (left := self.wakes_at + _GRACE - time.monotonic()) > 0:
                        self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    if self._thread is not me:
                        return
                    self.wakes_at = float("inf")
                self._look()
        finally:
            with self._changed:
                if self._thread is me:  # it ends by an exception: the next deadline starts another thread
                    self._thread, self.wakes_at = None, float("inf")

    def _look(self) -> None:
        """Act on what has passed. On return nothing of it is kept: the thread may sleep long before it looks again."""
        with self._changed:
            watched = copied(self._watched)
        # Outside the lock: a communicator that expires may well be closed by that.
        for who in watched:
            try:
                earliest = who.expire(time.monotonic())
            except BaseException:  # the deadlines of all others are watched on
                _log.exception("the deadlines of %r cannot be watched; they are looked at again in %g s", who, _LATER)
                earliest = time.monotonic() + _LATER
            self.wake_by(earliest)


watchdog = Watchdog()
"""The process's watchdog; it has a thread only while ops with deadlines are pending or have recently been."""
