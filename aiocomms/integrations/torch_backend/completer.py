"""A pool of threads, which run functions after works have ended."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger: logging.Logger = logging.getLogger("aiocomms")


class Completer:
    """A pool of daemon threads that call submitted functions. If all threads are busy, :meth:`submit` starts a new one.

    So no function has to wait until another function returns. This rule prevents deadlocks. For example, one function
    of the program may wait for a work that a later function completes, or for a rank that never arrives.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._idle = 0
        self._under_way = 0
        self._own = threading.local()
        self._closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Call a function on a thread of the pool, and return at once. Thread-safe."""
        with self._changed:
            self._under_way += 1
            if self._idle:
                self._idle -= 1
                self._calls.put(call)
                return
        try:
            # The start of a threading.Thread would wait until the thread runs.
            _thread.start_new_thread(self._run, ([call],))
        except RuntimeError:  # The system can start no more threads.
            self._call(call)

    def drain(self) -> None:
        """Wait until all submitted functions have returned.

        If a submitted function calls ``drain``, the wait excludes this function.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= getattr(self._own, "depth", 0))

    def close(self) -> None:
        """End the threads. Each thread first finishes its current function."""
        with self._changed:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _run(self, first: list[Callable[[], object]]) -> None:
        call: Callable[[], object] | None = first.pop()
        while call is not None:
            self._call(call)
            call = None  # The thread keeps no tensor alive while it waits.
            with self._changed:
                if self._closed:
                    return
                self._idle += 1
            call = self._calls.get()

    def _call(self, call: Callable[[], object]) -> None:
        depth = getattr(self._own, "depth", 0)
        self._own.depth = depth + 1
        try:
            call()
        except Exception:
            logger.exception("%r raised", call)
        finally:
            self._own.depth = depth
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
