"""The handler of a signal that the user has asked for, and the calls it makes. It loads no other module of ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

_handled: dict[int, Callable[[int, Any], None]] = {}
_listeners: list[Callable[[str], object]] = []


def listen(call: Callable[[str], object]) -> None:
    """Call a function, with the signal's name, whenever one of the signals comes."""
    _listeners.append(call)


def dump_on_signal(signum: int = signal.SIGUSR1) -> None:
    """Write every communicator's flight recorder whenever the process gets a signal; then do what was done before.

    The handler runs on the main thread, also while its event loop is blocked in Python code or waits in a system call.

    :param signum: the signal.
    :raises ValueError: this is not the main thread.
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
    """Install the handler if the environment asks for one and there is none.

    :returns: False: this is not the main thread, which alone can do it.
    """
    if os.environ.get("AIOCOMMS_RECORDER_SIGNAL", "0") not in ("", "0") and not _handled:
        try:
            dump_on_signal()
        except ValueError:
            return False
    return True
