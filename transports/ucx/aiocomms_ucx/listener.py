"""A thread that waits for notes of other ranks to this one's core, because the loop may be busy when they come."""

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
    """A thread that calls a method whenever an eventfd was written to.

    It does not keep the method's object alive, and ends with it. Meanwhile it sleeps in the kernel, and costs nothing.
    """

    def __init__(self, fd: int, hear: Callable[[], object]) -> None:
        """Start the thread.

        :param fd: the eventfd, which is duplicated.
        :param hear: a bound method.
        :raises RuntimeError: no thread can be started.
        :raises OSError: there is no descriptor left.
        """
        self._fd = os.dup(fd)
        self._lock = threading.RLock()  # The descriptor is open while the lock is held and the thread has not ended.
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
        """Let the thread end. Idempotent: the descriptor is closed afterwards."""
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
            except Exception:  # The note of one rank keeps none of the others' from being heard.
                _log.exception("what another rank has said was not understood")
            del hear
        with self._lock:
            self._ended = True
            os.close(self._fd)
