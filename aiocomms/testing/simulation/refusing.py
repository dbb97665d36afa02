"""The refusal of what cannot be simulated: real threads, sockets, processes and sleeps, with the line that did it."""

from __future__ import annotations

import _thread
import sys
import threading
from types import FrameType
from typing import Any, Final

from aiocomms.errors import SimulationError
from aiocomms.testing.simulation.places import line, of_program

_EVENTS: Final = {
    "_thread.start_new_thread": "a thread of the system",
    "_thread.start_joinable_thread": "a thread of the system",
    "os.fork": "another process",
    "os.forkpty": "another process",
    "os.posix_spawn": "another process",
    "os.system": "another process",
    "socket.bind": "a socket",
    "socket.connect": "a socket",
    "socket.getaddrinfo": "the lookup of a host",
    "subprocess.Popen": "another process",
    "time.sleep": "a sleep that blocks",
}
"""The events of :func:`sys.addaudithook` that are refused, and the words for them."""

_here = threading.local()
"""Whether this thread runs a simulated program."""
_installed: list[bool] = []


def refuse(what: str) -> SimulationError:
    """Return the error for something that cannot be simulated, with the line of the program that did it."""
    return SimulationError(f"{what} cannot be simulated: {_line()}")


def watch(on: bool) -> bool:
    """Refuse what cannot be simulated on this thread from now on, or do not; return what was so before."""
    if not _installed:
        sys.addaudithook(_audit)
        if sys.version_info < (3, 12):  # It has no audit event for the start of a thread.
            _thread.start_new_thread = threading._start_new_thread = _start  # type: ignore[attr-defined]
        _installed.append(True)
    before = watched()
    _here.on = on
    return before


def watched() -> bool:
    """Return whether this thread runs a simulated program."""
    return bool(getattr(_here, "on", False))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and watched():
        raise refuse(_EVENTS[event])


_start_new_thread = _thread.start_new_thread


def _start(*args: Any) -> int:
    """Start a thread of the system, or refuse it."""
    _audit("_thread.start_new_thread", args)
    return _start_new_thread(*args)


def _line() -> str:
    """Return the innermost line of the program on the stack."""
    frame: FrameType | None = sys._getframe(1)
    inner = frame
    while frame is not None and not of_program(frame):
        frame = frame.f_back
    found = frame or inner
    assert found is not None
    return line(found)
