"""The threads of one transport, for calls in which NCCL blocks and which it does not give up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiocomms.lowlevel import clock


class Returned(NamedTuple):
    """The outcome of a call in a thread, for the loop's thread to act upon."""

    then: Callable[[Any], object]
    value: Any
    error: BaseException | None


class Threads:
    """Threads, which are left behind if NCCL does not return from a call, and the outcomes of their calls."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """Start none.

        :param wake: wakes the loop, from any thread.
        """
        self.returned: deque[Returned] = deque()
        """The outcomes, in the order in which the calls returned."""
        self._wake = wake
        self._threads: list[threading.Thread] = []

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run a blocking call in a thread, and have the loop's thread call ``then`` with the result."""

        def run() -> None:
            value: Any = None
            failure: BaseException | None = None
            try:
                value = call()
            except BaseException as error:  # the loop's thread handles it
                failure = error
            self.returned.append(Returned(then, value, failure))
            self._wake()

        thread = threading.Thread(target=run, name="aiocomms nccl forms a communicator", daemon=True)
        self._threads.append(thread)
        thread.start()

    def adopt(self, threads: Iterable[threading.Thread]) -> None:
        """Have :meth:`join` wait for these threads as well."""
        self._threads += threads

    def join(self, patience: float) -> None:
        """Wait for all threads, for ``patience`` seconds at most. Blocks, off the loop."""
        ends = clock.now() + patience
        for thread in self._threads:
            thread.join(max(0.0, ends - clock.now()))
