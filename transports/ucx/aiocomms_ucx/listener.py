"""A thread that receives the notes of other ranks, even while the event loop is busy.

A note is data that the core of aiocomms sends from one rank to another.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

NAME: Final = "aiocomms ucx hears notes"
_log = logging.getLogger("aiocomms")


class Listener:
    """A thread that calls a method after each write to an eventfd.

    The thread holds only a weak reference to the method's object, and ends when the object is deleted. Between writes,
    the thread sleeps.
    """

    def __init__(self, fd: int, hear: Callable[[], object]) -> None:
        """Start the thread.

        :param fd: the eventfd, which this method duplicates.
        :param hear: the bound method that the thread calls.
        :raises RuntimeError: no thread can be started.
        :raises OSError: the process has no free descriptor.
        """
        self._fd = os.dup(fd)
        self._lock = threading.RLock()  # Under the lock, the descriptor is open if the thread has not ended.
        self._ended = False
        self._hear = weakref.WeakMethod(hear, lambda _: self.end())
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._ended = True
            os.close(self._fd)
            raise

    def end(self) -> None:
        """Request the end of the thread. The thread then closes its descriptor. A second call does nothing."""
        with self._lock:
            if not self._ended:
                self._ended = True
                os.eventfd_write(self._fd, 1)

    def join(self) -> None:
        """End the thread, and wait for its end."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            os.eventfd_read(self._fd)
            hear = self._hear()
            if hear is None:
                break
            try:
                hear()
            except Exception:  # A bad note must not stop the notes of other ranks.
                _log.exception("a note of another rank could not be read")
            del hear
        with self._lock:
            self._ended = True
            os.close(self._fd)
