"""The inbox: calls that other threads hand to the loop's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from aiocomms.lowlevel import Waker


class Inbox:
    """Calls to be made on the loop's thread, in the order in which they were put."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.fileno = self._waker.fileno
        self.close = self._waker.close

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
