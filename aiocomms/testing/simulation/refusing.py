"""The refusal of calls that cannot be simulated, such as real threads, sockets, processes and sleeps."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Iterator
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
"""The refused events of :func:`sys.addaudithook`, and their names in errors."""

_here = threading.local()
"""The flag of each thread: ``on`` is True while the thread runs a simulated program."""
_installed: list[bool] = []


def refuse(what: str) -> SimulationError:
    """Return the error for a call that cannot be simulated. The error names the program's line with the call."""
    return SimulationError(f"{what} cannot be simulated: {_line()}")


def watch(on: bool) -> bool:
    """Turn the refusal on or off for this thread, and return its previous state."""
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
    """Audit sleeps and thread starts. Python itself audits sleeps since 3.13 and thread starts since 3.12."""
    with ExitStack() as stack:
        for owner, name, event in _UNHEARD if sys.version_info < (3, 13) else ():
            stack.enter_context(_heard(owner, name, event))
        yield


_UNHEARD: Final = (
    (time, "sleep", "time.sleep"),
    (_thread, "start_new_thread", "_thread.start_new_thread"),
    (threading, "_start_new_thread", "_thread.start_new_thread"),
)


@contextmanager
def _heard(owner: Any, name: str, event: str) -> Iterator[None]:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        _audit(event, args)
        return function(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


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
