"""Watches of an event loop: audit events show calls that may wait, and a clock shows callbacks that take long.

Tests use :func:`watched`: whether something is called that may wait is the same on a busy machine. Benchmarks use
:class:`Callbacks`. Neither is loaded with anything that a program under watch loads itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

BLOCKING = frozenset(
    {
        *("import", "open", "ctypes.dlopen", "time.sleep"),
        *("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"),
        *("os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "glob.glob"),
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"),
        *("fcntl.flock", "fcntl.lockf", "tempfile.mkstemp", "tempfile.mkdtemp"),
    }
)
"""The audit events of calls that may wait, for a disk, a network, or another process."""
WAITS = "a wait for another thread"
SHORT = frozenset({"Thread.start", "run_in_thread"})
"""The calls that wait for a thread to begin, as of the first deadline, or to end when it has nothing left to do."""
_IN_MEMORY = ("/proc/", "/sys/", "/dev/")
"""The folders whose files are the kernel's, which has no disk to wait for."""
_DEPTH = 12


class Held(NamedTuple):
    """One call that may have held the loop."""

    event: str
    what: str
    stack: tuple[str, ...]
    """The calls that have led to it, the innermost first."""

    def __str__(self) -> str:
        return f"{self.event} {self.what}\n    " + "\n    ".join(self.stack)


_sinks: dict[int, list[Held]] = {}
"""The records by the watched thread."""


def stack_of(frame: Any, depth: int = _DEPTH) -> tuple[str, ...]:
    """Return who has called, without the machinery of imports and of asyncio."""
    found: list[str] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if "importlib" not in code.co_filename and "/asyncio/" not in code.co_filename:
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(found)


def _note(event: str, what: str) -> None:
    sink = _sinks.get(threading.get_ident())
    if sink is not None:
        sink.append(Held(event, what, stack_of(sys._getframe(2))))


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event in BLOCKING and threading.get_ident() in _sinks and not _is_harmless(event, args):
        _note(event, str(args[0])[:200] if args else "")


def _is_harmless(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        return str(args[0]).startswith(_IN_MEMORY)
    if event == "ctypes.dlopen":
        return args[0] is None  # the program itself, which is loaded already
    return event == "socket.connect" and args[0].gettimeout() == 0.0


class _Hook:
    """The audit hook of this process, which cannot be taken back."""

    is_there = False


@contextlib.contextmanager
def watched() -> Iterator[list[Held]]:
    """Note what this thread calls that may wait, within the context; also waits for events and threads of Python."""
    if not _Hook.is_there:
        sys.addaudithook(_hear)
        _Hook.is_there = True
    me, held = threading.get_ident(), list[Held]()
    before = threading.Condition.wait, threading.Thread.join

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_qualname not in SHORT and sys._getframe(2).f_code.co_qualname not in SHORT:
                _note(WAITS, call.__qualname__)
            return call(self, *args, **kwargs)

        return wait

    threading.Condition.wait = noting(before[0])  # type: ignore[method-assign]
    threading.Thread.join = noting(before[1])  # type: ignore[method-assign]
    _sinks[me] = held
    try:
        yield held
    finally:
        del _sinks[me]
        threading.Condition.wait, threading.Thread.join = before  # type: ignore[method-assign]


class Long(NamedTuple):
    """One callback that has taken long."""

    seconds: float
    cpu: float
    """The seconds of these that the loop's thread has computed."""
    callback: str
    stack: tuple[str, ...]
    """The calls it was in when a second thread looked; empty if it was over by then."""


class Callbacks:
    """The callbacks of this thread's loop of asyncio that take longer than a limit, with what they were in."""

    def __init__(self, limit: float = 0.005) -> None:
        self.limit = limit
        self.found: list[Long] = []
        self.worst = 0.0
        self._since: float | None = None
        self._seen: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        import asyncio

        self._handle: Any = asyncio.events.Handle
        self._run = run = self._handle._run
        self._thread, self._over = threading.get_ident(), threading.Event()

        def timed(handle: Any) -> None:
            if threading.get_ident() != self._thread:
                return run(handle)
            what, cpu = handle._callback, time.thread_time()
            began = self._since = time.perf_counter()
            try:
                run(handle)
            finally:
                took, self._since = time.perf_counter() - began, None
                self._note(took, time.thread_time() - cpu, what)

        self._handle._run = timed
        threading.Thread(target=self._look, name="looks at the loop", daemon=True).start()
        return self

    def _note(self, took: float, cpu: float, what: object) -> None:
        seen, self._seen = self._seen, ()
        self.worst = max(self.worst, took)
        if took > self.limit:
            self.found.append(Long(took, cpu, repr(what)[:200], seen))

    def _look(self) -> None:
        while not self._over.wait(self.limit / 5):
            since = self._since
            if since is not None and not self._seen and time.perf_counter() - since > self.limit:
                self._seen = stack_of(sys._current_frames().get(self._thread))

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._handle._run = self._run
