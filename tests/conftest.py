"""The fixtures that tests share."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch  # noqa: F401
from concurrency import LOOPS, VIRTUAL, Main, run_on
from inside import Entry
from processes import HANGS, PATIENCE, Run, runner
from simulated import simulated_runner

_GATE = ("options", "kinds", "sample", "leaks", "ledger", "retry", "schedule", "budget")
pytest_plugins = [f"gate.{name}" for name in _GATE]

_records = tempfile.TemporaryDirectory(prefix="aiocomms-tests")
os.environ["AIOCOMMS_RECORDER_DIR"] = _records.name  # each lost communicator writes a file here
os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process of a test would want all processors

# Hypothesis accepts slow examples and slow strategies on any machine. The gate draws the same examples each time, and
# `make search` draws new ones.
SEARCH = os.environ.get("AIOCOMMS_SEARCH") == "1"
_patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("gate", derandomize=True, **_patient)
hypothesis.settings.register_profile("search", print_blob=True, **_patient)
hypothesis.settings.load_profile("search" if SEARCH else "gate")


def pytest_collection_finish() -> None:
    """Freeze the objects of torch, hypothesis and the tests, so that garbage collections in tests skip them.

    A collection took 0.2 s, and some thousand collections took half the time of `make unit`.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> Iterator[None]:
    """Freeze the objects that each module has loaded: a collection took 0.3 s after ``torch.compile``."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Wait for threads that tests have left behind, such as one in which gloo connects for 120 s.

    Before Python 3.14 a daemon thread that comes back from C++ while the interpreter ends makes it end by SIGABRT.
    """
    ends = time.monotonic() + HANGS
    for thread in threading.enumerate():
        if thread.name == "aiocomms blocking call":
            thread.join(max(0.0, ends - time.monotonic()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``loops`` on every event loop, and others that have a loop on asyncio.

    The loops differ only in how a task waits and wakes, so other tests need one loop. ``make search`` runs all tests on
    all loops.

    A test marked ``virtual_time`` waits for the clock: it runs in virtual time first, where it is deterministic.
    """
    if metafunc.definition.get_closest_marker("virtual_time"):
        loops = [VIRTUAL, *(pytest.param(name, marks=pytest.mark.real) for name in LOOPS)]
        metafunc.parametrize("loop", loops, scope="function")
        return
    own = any("loop" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "loop" in metafunc.fixturenames and not own:
        everywhere = SEARCH or any(mark.name == "loops" for mark in metafunc.definition.iter_markers())
        metafunc.parametrize("loop", list(LOOPS) if everywhere else ["asyncio"], scope="function")


@pytest.fixture
def run(loop: str) -> Callable[..., Any]:
    """Run an async function on the loop of the test."""

    def runner(main: Main, *args: Any) -> Any:
        try:
            return run_on(loop, main, *args)
        finally:
            gc.collect()  # errors that no task has retrieved are reported in this test

    return runner


@pytest.fixture(name="ranks")
def _processes(tmp_path: Path, transport: str) -> Iterator[Run]:
    """Run an async function in a process for each rank; a module that asks for it has a fixture ``transport``.

    On ``net`` the ranks are processes of a simulation.
    """
    with simulated_runner(tmp_path) if transport == "net" else runner(transport, tmp_path) as run:
        yield run


@pytest.fixture
def notice(record_property: Callable[[str, object], None]) -> Callable[[Sequence[float]], None]:
    """Return ``notice(seconds)``, which records the seconds from a fault to its detection for ``make faults``.

    No test limits these seconds, because they depend on the machine. A test excludes every other way to detect the
    fault instead.
    """
    return lambda seconds: record_property("notice", max(seconds))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let late works wait for the reports of all ranks, and for the file, for as long as a busy machine takes."""
    from aiocomms.core import postmortem

    for seconds in ("PATIENCE", "LONGER", "WRITING"):
        monkeypatch.setattr(postmortem, seconds, PATIENCE)


@pytest.fixture
def modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``pytester`` restore ``sys.modules`` without emptying it first.

    Another thread may import meanwhile. It would import ``_io`` anew, whose errors no earlier module catches.
    """

    def restore(snapshot: Any) -> None:
        saved, preserve = snapshot._SysModulesSnapshot__saved, snapshot._SysModulesSnapshot__preserve
        saved |= {name: module for name, module in list(sys.modules.items()) if preserve and preserve(name)}
        for name in sys.modules.keys() - saved.keys():
            sys.modules.pop(name, None)
        sys.modules.update(saved)

    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", restore)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install transports for one test: ``install(name=cls)``; an exception stands for a module that raises it."""
    from aiocomms.bootstrap import registry

    def add(**classes: object) -> None:
        known = {**registry.entries(), **{name: Entry(name, cls) for name, cls in classes.items()}}
        monkeypatch.setattr(registry, "entries", lambda: known)

    return add
