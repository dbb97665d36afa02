"""The threads in which one transport runs blocking NCCL calls. Nothing can interrupt such a call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiocomms.lowlevel import clock


class Returned(NamedTuple):
    """The outcome of a call that ran in a thread. The loop's thread handles the outcome."""

    then: Callable[[Any], object]
    value: Any
    error: BaseException | None


class Threads:
    """The threads and the outcomes of their calls. If an NCCL call never returns, its thread never ends."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """Create an object without threads.

        :param wake: a function that wakes the loop. Any thread may call this function.
        """
        self.returned: deque[Returned] = deque()
        """The outcomes, in the order in which the calls returned."""
        self._wake = wake
        self._threads: list[threading.Thread] = []

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run ``call`` in a thread. After the call, append its outcome and ``then`` to :attr:`returned`."""

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
        """Add threads that the caller has started, so that :meth:`join` waits for them."""
        self._threads += threads

    def join(self, patience: float) -> None:
        """Wait at most ``patience`` seconds for all threads. This method blocks.

        Do not call this method in the loop's thread.
        """
        ends = clock.now() + patience
        for thread in self._threads:
            thread.join(max(0.0, ends - clock.now()))
