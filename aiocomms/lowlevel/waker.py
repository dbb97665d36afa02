"""The wake-up call of an event loop for other threads, and the inbox of calls that they leave for it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Waker:
    """A file descriptor that becomes readable when some thread calls :meth:`wake`.

    The tasks themselves are kept elsewhere (a ``deque`` is enough); the descriptor only says "look". Calls between two
    :meth:`clear` write once, so a burst of completions costs one system call.
    """

    __slots__ = ("_fd", "_lock", "_set")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False
        # Under the lock, "set" and "readable" are one. Reentrant, because a signal handler may wake what it interrupts.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable. Any thread may call it, also after :meth:`close`."""
        with self._lock:
            if not self._set and self._fd >= 0:
                self._set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable. Call this before looking for tasks, never after."""
        if self._set:
            with self._lock:
                if self._set and self._fd >= 0:
                    try:
                        os.eventfd_read(self._fd)
                    except BlockingIOError:  # A signal handler has raised within a wake.
                        pass
                    # This comes last, for a signal handler may wake in between: the waker is never set and unreadable.
                    self._set = False

    def close(self) -> None:
        """Close the descriptor. Twice is once."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Inbox:
    """Calls to be made on the loop's thread, in the order in which they were put."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.fileno: Callable[[], int] = self._waker.fileno
        self.close: Callable[[], None] = self._waker.close

    def put(self, call: Callable[..., object], *args: Any) -> None:
        """Have ``call(*args)`` called on the loop's thread. Any thread may call this."""
        self._calls.append((call, args))
        self._waker.wake()

    def drain(self) -> bool:
        """Make the calls. Returns whether there were any."""
        self._waker.clear()
        calls = self._calls
        any_done = bool(calls)
        while calls:
            call, args = calls.popleft()
            call(*args)
        return any_done
