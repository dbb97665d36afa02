"""Threads that call what is to be done when works have ended."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger("aiocomms")


class Completer:
    """Calls things on threads of its own, of which it has as many as are busy.

    They are daemons, and none waits for another: what they call is the program's, and may wait for a work whose future
    is completed by a call that comes later, or for a rank that never comes.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Have something called; on any thread, which it does not keep."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._calls.put(call)
                return
        try:
            _thread.start_new_thread(self._run, ([call],))  # threading's would wait until it runs
        except RuntimeError:  # there can be no more threads
            self._call(call)

    def close(self) -> None:
        """End the threads, each after what it calls."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _run(self, first: list[Callable[[], object]]) -> None:
        call: Callable[[], object] | None = first.pop()
        while call is not None:
            self._call(call)
            call = None  # a thread that waits keeps no tensor alive
            with self._lock:
                if self._closed:
                    return
                self._idle += 1
            call = self._calls.get()

    @staticmethod
    def _call(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            logger.exception("%r raised", call)
