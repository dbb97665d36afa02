"""The refusal of calls that cannot be simulated, such as real threads, sockets, processes and sleeps."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Final

from aiocomms.errors import SimulationError
from aiocomms.testing.simulation.places import line, of_program

_SIGNAL: Final = "a signal to a process (here().world.kill(rank) ends a rank)"
_EVENTS: Final = {
    "_thread.start_new_thread": "a thread of the system",
    "_thread.start_joinable_thread": "a thread of the system",
    "os.fork": "another process",
    "os.forkpty": "another process",
    "os.kill": _SIGNAL,
    "os.killpg": _SIGNAL,
    "os.posix_spawn": "another process",
    "os.system": "another process",
    "socket.bind": "a socket",
    "socket.connect": "a socket",
    "socket.getaddrinfo": "the lookup of a host",
    "subprocess.Popen": "another process",
    "time.sleep": "a sleep that blocks",
}
"""The audit events (see :func:`sys.addaudithook`) that the simulation refuses, and their names in error messages."""

_Function = Callable[..., Any]

_here = threading.local()
"""The flag ``on`` of each thread. The flag is True while the thread runs a simulated program."""
_installed: list[bool] = []


def refuse(what: str) -> SimulationError:
    """Return the error for a call that cannot be simulated. The error names the program's line with the call."""
    return SimulationError(f"{what} cannot be simulated: {_line()}")


def watch(on: bool) -> bool:
    """Turn the refusal on or off for this thread. Return True if the refusal was on before."""
    if not _installed:
        sys.addaudithook(_audit)
        _installed.append(True)
    before = watched()
    _here.on = on
    return before


def watched() -> bool:
    """Return whether this thread runs a simulated program."""
    return bool(getattr(_here, "on", False))


@contextmanager
def calls_audited() -> Iterator[None]:
    """Within the context, also refuse the calls for which Python raises no audit event."""
    with ExitStack() as stack:
        for owner, name, replacement in _UNHEARD:
            function = getattr(owner, name)
            setattr(owner, name, replacement(function))
            stack.callback(setattr, owner, name, function)
        yield


def _heard(event: str) -> Callable[[_Function], _Function]:
    """Return a decorator that treats each call of a function as an audit event."""

    def replacement(function: _Function) -> _Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            _audit(event, args)
            return function(*args, **kwargs)

        return call

    return replacement


def _wait(function: _Function) -> _Function:
    def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if watched() and (timeout is None or timeout > 0):
            raise refuse("a blocking wait")
        notified: bool = function(condition, timeout)
        return notified

    return wait


def _signal(function: _Function) -> _Function:
    def call(number: int, handler: Any) -> Any:
        if not watched():
            return function(number, handler)
        before = signal.getsignal(number)
        if callable(handler) and handler != before:
            raise refuse("a signal handler")
        return before  # No signal reaches a simulated rank, so none needs to be ignored.

    return call


_UNHEARD_BEFORE_3_13: Final = (
    (time, "sleep", _heard("time.sleep")),
    (_thread, "start_new_thread", _heard("_thread.start_new_thread")),
    (threading, "_start_new_thread", _heard("_thread.start_new_thread")),
)
_UNHEARD: Final[tuple[tuple[Any, str, Callable[[_Function], _Function]], ...]] = (
    (signal, "signal", _signal),
    (threading.Condition, "wait", _wait),  # The waits of events, queues, semaphores and futures call it.
    *(_UNHEARD_BEFORE_3_13 if sys.version_info < (3, 13) else ()),
)
"""The replacements for functions for which Python raises no audit event."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and watched():
        raise refuse(_EVENTS[event])


def _line() -> str:
    """Return the innermost line of the program on the stack."""
    frame: FrameType | None = sys._getframe(1)
    inner = frame
    while frame is not None and not of_program(frame):
        frame = frame.f_back
    found = frame or inner
    assert found is not None
    return line(found)
