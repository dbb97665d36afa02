"""What the tests of the core share."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
from processes import Run, runner

_records = tempfile.TemporaryDirectory(prefix="aiocomms-tests")
os.environ["AIOCOMMS_RECORDER_DIR"] = _records.name  # where each communicator that is lost leaves a file

gc.collect()
gc.freeze()  # what torch and hypothesis bring need not be looked through whenever a test collects its garbage

LOOPS = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_on(loop: str, main: Main, *args: Any) -> Any:
    """Run an async function in a new loop; a test that hangs fails."""

    async def bounded() -> Any:
        with anyio.fail_after(30):
            return await main(*args)

    return anyio.run(bounded, **LOOPS[loop])


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run async functions concurrently and return their results in order."""
    results: list[Any] = [None] * len(calls)

    async def one(i: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[i] = await call()

    async with anyio.create_task_group() as tasks:
        for i, call in enumerate(calls):
            tasks.start_soon(one, i, call)
    return results


async def ranks(world: list[Any], each: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    """Run ``each(comm)`` for all ranks of a world concurrently and return the results in rank order."""
    return await together(*(lambda comm=comm: each(comm) for comm in world))


async def turns(n: int = 10) -> None:
    """Let the loop come round some times."""
    for _ in range(n):
        await anyio.lowlevel.checkpoint()


def in_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Run functions, each in a thread of its own, and return their results, or raise the first error."""
    results: list[Any] = [None] * len(targets)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            results[i] = targets[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), name=f"rank {i}") for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    """The name of an event loop."""
    return request.param


@pytest.fixture
def run(loop: str) -> Callable[..., Any]:
    """Run an async function in each of the loops."""

    def runner(main: Main, *args: Any) -> Any:
        try:
            return run_on(loop, main, *args)
        finally:
            gc.collect()  # what was dropped and never asked for is reported in the test that dropped it

    return runner


@pytest.fixture(name="ranks")
def _processes(tmp_path: Path, transport: str) -> Iterator[Run]:
    """Run an async function in a process for each rank; a module that asks for it has a fixture ``transport``."""
    with runner(transport, tmp_path) as run:
        yield run


@pytest.fixture
def notice(record_property: Callable[[str, object], None]) -> Callable[[Sequence[float], float], None]:
    """``notice(seconds, bound)``: how long after a fault it was noticed, for the table of ``make faults``."""

    def within(seconds: Sequence[float], bound: float) -> None:
        record_property("notice", max(seconds))
        assert max(seconds) < bound, seconds

    return within


class Entry:
    """An entry point of a transport that no distribution brings."""

    def __init__(self, name: str, cls: object) -> None:
        self.name = name
        self.value = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__name__', cls)}"
        self._cls = cls

    def load(self) -> object:
        if isinstance(self._cls, Exception):
            raise self._cls
        return self._cls


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install transports for one test: ``install(name=cls)``; an exception stands for a module that raises it."""
    from aiocomms.bootstrap import registry

    def add(**classes: object) -> None:
        known = {**registry.entries(), **{name: Entry(name, cls) for name, cls in classes.items()}}
        monkeypatch.setattr(registry, "entries", lambda: known)

    return add
