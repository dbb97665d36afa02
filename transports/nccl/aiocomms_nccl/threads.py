"""The threads of one transport, for NCCL calls that block and cannot be interrupted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiocomms.lowlevel import clock


class Returned(NamedTuple):
    """The outcome of a call in a thread, which the loop's thread handles."""

    then: Callable[[Any], object]
    value: Any
    error: BaseException | None


class Threads:
    """The threads and the outcomes of their calls. If an NCCL call never returns, its thread stays."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """Start with no threads.

        :param wake: a function that wakes the loop. Any thread may call it.
        """
        self.returned: deque[Returned] = deque()
        """The outcomes, in the order in which the calls returned."""
        self._wake = wake
        self._threads: list[threading.Thread] = []

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run a blocking call in a thread, and store ``then`` and the outcome for the loop's thread."""

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
        """Add threads for which :meth:`join` also waits."""
        self._threads += threads

    def join(self, patience: float) -> None:
        """Wait at most ``patience`` seconds for all threads. This method blocks, off the loop."""
        ends = clock.now() + patience
        for thread in self._threads:
            thread.join(max(0.0, ends - clock.now()))
