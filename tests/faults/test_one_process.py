"""Faults that the ranks of one process can have, too: the cases 14, 46, 59, 62 and 63 of the catalogue on `local`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import holdings, settled
from processes import exchange

from aiocomms.core import core
from aiocomms.errors import CommError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


@pytest.mark.real
@pytest.mark.fault(14, transport="local")
def test_slow_callback_is_reported_by_asyncio_debug_mode(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio's debug mode names the slow callback, and the ranks meet in a barrier afterwards."""

    def hog(_: object) -> None:
        time.sleep(0.15)

    async def main() -> None:
        async with local_world(2) as (one, two):
            work = one.recv(torch.zeros(1), 1)
            work.add_done_callback(hog)
            await two.send(torch.ones(1), 0)
            await asyncio.sleep(0)
            await asyncio.gather(one.barrier(), two.barrier())

    with caplog.at_level(logging.WARNING, "asyncio"):
        asyncio.run(main(), debug=True)
    assert any("hog" in text and "took" in text for text in caplog.messages), caplog.messages


@pytest.fixture
def _heeded() -> Iterator[None]:
    """Install the default handler of SIGINT: the background processes of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.fault(46, transport="local")
@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_during_an_await_closes_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the loop and closes what is open; the grace never ends, so a close that waits for it would hang."""
    monkeypatch.setattr(core, "CLOSE_GRACE", math.inf)
    kept: list[Any] = []

    def press() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def main() -> None:
        async with local_world(2) as (one, two):
            kept.extend([one, two, two.recv(torch.zeros(1), 0)])
            threading.Timer(0.05, press).start()
            await kept[2]

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    one, two, work = kept
    assert one.closed
    assert two.closed
    assert isinstance(work.exception(), CommError)


def descriptors() -> set[int]:
    """Return the open descriptors."""
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


@pytest.mark.real
@pytest.mark.fault(59, transport="local")
def test_local_world_without_descriptors_fails_and_leaks_nothing() -> None:
    """A world without descriptors does not open and leaves none behind, and it opens when there are some."""

    async def main(room: int) -> None:
        gc.collect()
        before = holdings()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 1 + room, hard))
        fill = []
        try:
            with contextlib.suppress(OSError):  # Counting is not enough: some open ones look as if they were not there.
                while True:
                    fill.append(os.dup(0))
            for _ in range(room):
                os.close(fill.pop())
            with pytest.raises((OSError, CommError, BaseExceptionGroup)):
                async with local_world(4):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for it in fill:
                os.close(it)
        await settled(before)  # threads that have failed to open one may still end
        async with local_world(4) as world:
            await asyncio.gather(*(comm.barrier() for comm in world))

    for room in range(3):
        asyncio.run(main(room))


@pytest.mark.fault(62, transport="local")
def test_local_ops_survive_constant_garbage_collection() -> None:
    async def main() -> None:
        async with local_world(2) as world:
            await asyncio.gather(*(exchange(comm, 5) for comm in world))

    gc.freeze()  # The collector need not look through torch's objects.
    old = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        asyncio.run(main())
    finally:
        gc.set_threshold(*old)
