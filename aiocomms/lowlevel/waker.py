"""A wake-up call for an event loop, from any thread."""

from __future__ import annotations

import os
import threading


class Waker:
    """A file descriptor that becomes readable when some thread calls :meth:`wake`.

    What there is to do travels beside it (a ``deque`` is enough); the descriptor only says "look". Calls between two
    :meth:`clear` write once, so a burst of completions costs one system call.
    """

    __slots__ = ("_fd", "_lock", "_set")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False
        # Under the lock, "set" and "readable" are one. Reentrant, because a signal handler may wake what it interrupts.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """The descriptor to wait on; -1 once closed."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable. Any thread may call it, also after :meth:`close`."""
        with self._lock:
            if not self._set and self._fd >= 0:
                self._set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable. Call it before looking for what there is to do, never after."""
        if self._set:
            with self._lock:
                if self._set and self._fd >= 0:
                    os.eventfd_read(self._fd)
                    self._set = False  # last, for a signal handler may wake in between: never set and unreadable

    def close(self) -> None:
        """Close the descriptor. Twice is once."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
