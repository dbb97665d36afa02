"""Two kinds of tests, told apart by a mark, and what raises in a deterministic one.

A *deterministic* test starts no process, opens no connection of a network, and waits for no clock. A *real* test may
do all of that. The closest mark counts: of the test, its class, its module. A check of the conformance suite is
deterministic on the transport ``local``, but for checks marked ``clock`` or ``network``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from aiocomms.lowlevel import clock
from gate.clock import stop_clock

DETERMINISTIC, REAL = KINDS = ("deterministic", "real")
SUITE = "aiocomms/testing/conformance/"
SIMULATIONS = "tests/simulation/"
"""Tests whose clocks and networks are simulated ones, and which the simulation itself keeps from any other."""

PROCESSES = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Audit events of Python that start a process."""
SOCKETS = {"socket.bind", "socket.connect"}
"""Audit events that concern an address. One of a network is a tuple; a Unix socket has a path, and is allowed."""

_kind = pytest.StashKey[str]()


class NotDeterministicError(AssertionError):
    """Raised where a deterministic test starts a process, waits for a clock, or connects."""


class Guard:
    """Whatever a deterministic test must not do raises while one runs, and fails it although somebody catches that."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        self._pid = os.getpid()

    def note(self, what: str) -> bool:
        """Note what a deterministic test does, if one runs in this process; return whether one does."""
        noted = self.active and os.getpid() == self._pid and clock.simulation is None
        if noted:
            self.seen.append(what)
        return noted

    def refuse(self, what: str) -> None:
        """Raise if a deterministic test runs in this process."""
        if self.note(what):
            raise NotDeterministicError(f"a deterministic test {what}: order it by events, or mark it 'real'")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Hear an audit event of Python (https://peps.python.org/pep-0578/)."""
        if not self.active:
            return
        if event in PROCESSES:
            self.refuse("starts a process")
        elif event in SOCKETS and isinstance(args[1], tuple):
            self.refuse(f"uses the network, by {event} of {args[1]}")


GUARD = Guard()
_WAKES_A_SLEEPER = asyncio.futures._set_result_unless_cancelled
_sleep = asyncio.sleep
sys.addaudithook(GUARD.audit)


def kind_of(item: pytest.Item) -> str:
    """Return the kind of a test; an empty text if it has no mark."""
    if item.nodeid.startswith(SUITE):
        place = item.callspec.params["case"] if hasattr(item, "callspec") else None
        # A check without a place on the transports and numbers of ranks that were asked for is skipped.
        local = getattr(place, "transport", "local") == "local" and not getattr(place, "processes", False)
        needs = [name for name in ("clock", "network") if item.get_closest_marker(name)]
        return DETERMINISTIC if local and not needs else REAL
    return next((mark.name for mark in item.iter_markers() if mark.name in KINDS), "")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marks."""
    for line in (
        "deterministic: starts no process, uses no network and waits for no clock; never run again",
        "real: needs processes, sockets, a clock or the kernel; where it fails it is run again, alone",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Find out the kind of every test, and refuse tests that have none."""
    for item in items:
        item.stash[_kind] = kind_of(item)
    if missing := sorted({item.nodeid.split("[")[0] for item in items if not item.stash[_kind]}):
        listed = "\n  ".join(missing)
        raise pytest.UsageError(
            f"{len(missing)} tests have neither the mark 'deterministic' nor 'real'. Write 'pytestmark = "
            f"pytest.mark.deterministic' into their modules, or mark them one by one:\n  {listed}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """Have the report say the kind, wherever it is read."""
    report = yield
    report.kind = item.stash[_kind]
    return report


@pytest.fixture(autouse=True)
def _guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a deterministic test neither sleep, nor start a process, nor wait for a deadline, nor connect."""
    if request.node.stash[_kind] != DETERMINISTIC:
        yield
        return
    simulated = any(request.node.get_closest_marker(name) for name in ("simulated", "virtual_time"))
    if not simulated and not request.node.nodeid.startswith(SIMULATIONS):
        _refuse_clocks_and_processes(monkeypatch)
        stop_clock(monkeypatch)
    GUARD.seen.clear()
    GUARD.active = True
    try:
        yield
    finally:
        GUARD.active = False
    if GUARD.seen:
        pytest.fail(f"a deterministic test {', and '.join(dict.fromkeys(GUARD.seen))}: {request.node.nodeid}")


@pytest.fixture(autouse=True)
def _leaves_modes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves inference mode on: the tests behind it, in the same process, would run in it."""
    yield
    if torch.is_inference_mode_enabled():
        pytest.fail(f"a test has left torch's inference mode on: {request.node.nodeid}")


def _refuse_clocks_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `time.sleep` and a new process raise; note sleeps and timers of tasks.

    The library's own pauses are allowed: how often it looks depends on the machine, and what comes of it does not. So
    are those of simulated programs, which wait in virtual time.
    """
    import anyio._backends._asyncio as anyio_backend

    def watched(owner: Any, name: str, watch: Callable[[Any], object]) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            watch(args)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    async def sleep(delay: float, *result: Any) -> Any:
        counts = delay > 0 and clock.simulation is None and not _for_the_library()
        value = await _sleep(delay, *result)
        if counts:  # one that is cancelled waits for no clock
            GUARD.note("sleeps")
        return value

    def sleeps(_: object) -> None:
        if not _for_the_library():
            GUARD.refuse("sleeps")

    def goes_off(args: Sequence[Any]) -> None:
        callback = args[0]._callback
        if clock.simulation is not None:
            return
        if callback is not _WAKES_A_SLEEPER and not str(getattr(callback, "__module__", "")).startswith("aiocomms"):
            GUARD.note("waits for a timer of its event loop")

    for module in (asyncio, anyio_backend):
        monkeypatch.setattr(module, "sleep", sleep)
    watched(time, "sleep", sleeps)
    # A fork server forks where no audit event is heard.
    watched(BaseProcess, "start", lambda _: GUARD.refuse("starts a process"))
    watched(asyncio.TimerHandle, "_run", goes_off)


def _for_the_library() -> bool:
    """Return whether the caller of a sleep is a module of the library, and neither a test nor a check."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("gate.", "asyncio", "anyio")):
        frame = frame.f_back
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.startswith("aiocomms") and not name.startswith("aiocomms.testing.conformance.test_")
