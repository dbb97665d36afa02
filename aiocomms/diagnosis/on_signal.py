"""The signal handler that writes flight recorders to files. This module imports no other module of aiocomms."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

_handled: dict[int, Callable[[int, Any], None]] = {}
_listeners: list[Callable[[str], object]] = []


def listen(call: Callable[[str], object]) -> None:
    """Register a function. When a handled signal arrives, its handler calls the function with the signal's name."""
    _listeners.append(call)


def dump_on_signal(signum: int = signal.SIGUSR1) -> None:
    """Install a signal handler that writes all flight recorders to files, and then calls the previous handler.

    The handler runs on the main thread, even while that thread's event loop is blocked in Python code or waits in a
    system call.

    :param signum: the number of the signal.
    :raises ValueError: the current thread is not the main thread.
    """
    before = signal.getsignal(signum)
    if before is _handled.get(signum):
        return

    def handle(number: int, frame: Any) -> None:
        for call in _listeners:
            call(signal.Signals(number).name)
        if callable(before):
            before(number, frame)

    signal.signal(signum, handle)
    _handled[signum] = handle


def dump_if_asked() -> bool:
    """Install the handler if the environment requests a handler and no handler is installed.

    :returns: False if no handler was installed because the current thread is not the main thread.
    """
    if os.environ.get("AIOCOMMS_RECORDER_SIGNAL", "0") not in ("", "0") and not _handled:
        try:
            dump_on_signal()
        except ValueError:
            return False
    return True
