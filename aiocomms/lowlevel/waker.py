"""The waker, by which a thread wakes an event loop, and the inbox, by which a thread passes calls to the loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Waker:
    """A file descriptor that becomes readable when some thread calls :meth:`wake`.

    The descriptor carries no data. The calling thread first stores its data elsewhere, such as in a ``deque``. The
    event loop then checks the ``deque`` for new data. After a call of :meth:`clear`, only the first call of
    :meth:`wake` writes, so many completions cost one system call.
    """

    __slots__ = ("_fd", "_lock", "_set")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False
        # Under the lock, "set" means "readable". The lock is reentrant, because a signal handler may call wake() while
        # its thread holds the lock.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 after the waker is closed."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable. Any thread may call this method, even after :meth:`close`."""
        with self._lock:
            if not self._set and self._fd >= 0:
                self._set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable.

        Call this method before you check for data. If you call this method after the check, a wake-up between the check
        and the call can be lost.
        """
        if self._set:
            with self._lock:
                if self._set and self._fd >= 0:
                    try:
                        os.eventfd_read(self._fd)
                    except BlockingIOError:  # A signal handler raised an error within wake().
                        pass
                    # This comes last, because a signal handler may call wake() in between. So the waker is never set
                    # while it is unreadable.
                    self._set = False

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Inbox:
    """A queue of calls for the event loop's thread. That thread makes the calls in the order of :meth:`put`."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.fileno: Callable[[], int] = self._waker.fileno
        self.close: Callable[[], None] = self._waker.close

    def put(self, call: Callable[..., object], *args: Any) -> None:
        """Make the event loop's thread call ``call(*args)``. Any thread may call this method."""
        self._calls.append((call, args))
        self._waker.wake()

    def drain(self) -> bool:
        """Make all calls that are in the inbox. Return whether the inbox contained a call."""
        self._waker.clear()
        calls = self._calls
        any_done = bool(calls)
        while calls:
            call, args = calls.popleft()
            call(*args)
        return any_done
