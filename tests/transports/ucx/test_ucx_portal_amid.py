"""What may happen while another thread is amid a post: between the engine's having the op and the loop's hearing of it.

A thread is held there by what it calls of the core when its op is pending, just before or just after that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import anyio.to_thread
import pytest
import torch
from concurrency import run_on, turns
from processes import HANGS

import aiocomms
from aiocomms.errors import WorkCancelledError
from aiocomms.lowlevel import in_use
from aiocomms.testing import local_world

pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOMMS_PURE", "0")


class Post:
    """One call on another thread, which is amid its post until it is let go of."""

    def __init__(self, comm: aiocomms.Communicator, call: Callable[[], Any]) -> None:
        self.core = comm._core
        self._amid, self._go = threading.Event(), threading.Event()
        self._returned: Future[Any] = Future()
        self._thread = threading.Thread(target=self._main, args=(call,), daemon=True)

    def _main(self, call: Callable[[], Any]) -> None:
        try:
            self._returned.set_result(call())
        except BaseException as error:
            self._returned.set_exception(error)

    def stand(self) -> None:
        """On the thread that posts."""
        self._amid.set()
        assert self._go.wait(HANGS)

    async def begin(self) -> None:
        self._thread.start()
        assert await anyio.to_thread.run_sync(self._amid.wait, HANGS)
        assert self.core.shortcuts is not None
        assert self.core.shortcuts.posting == 1

    async def go(self) -> Any:
        """Let it go on, and return what its call returns."""
        self._go.set()
        return await anyio.to_thread.run_sync(self._returned.result, HANGS)


@contextlib.asynccontextmanager
async def amid(comm: aiocomms.Communicator, call: Callable[[], Any], *, kept: bool) -> AsyncIterator[Post]:
    """Hold a thread amid the post of its call.

    :param kept: once its op is in flight; else before.
    """
    core, post = comm._core, Post(comm, call)
    keep = core.keep_elsewhere

    def slow(*args: Any) -> None:
        if kept:
            keep(*args)
        post.stand()
        if not kept:
            keep(*args)

    core.keep_elsewhere = slow  # type: ignore[method-assign]
    try:
        await post.begin()
        core.keep_elsewhere = keep  # type: ignore[method-assign]
        yield post
    finally:
        await post.go()


async def wait(work: Any) -> Any:
    return await anyio.to_thread.run_sync(work.wait)


def test_a_receive_is_withdrawn() -> None:
    """By its deadline, say: the engine lets go of it, and the next one gets the message."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, core, untouched = comms[0].portal(), comms[0]._core, torch.zeros(1)
            async with amid(comms[0], lambda: portal.recv(untouched, 1), kept=True) as post:
                (pending,) = core.in_flight
                assert pending._withdraw()
                assert not core.in_flight
                await turns()
                work = await post.go()
            with pytest.raises(WorkCancelledError):
                await wait(work)
            for i in range(20):
                received = comms[0].recv(torch.zeros(1), 1)
                await comms[1].send(torch.full((1,), float(i)), 0)
                assert (await received).item() == i
            assert untouched.item() == 0
            assert not [it for _, it, _ in core.transports[0].shared.pending.values() if it is pending]  # type: ignore

    run_on("asyncio", main)


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads get the interpreter's lock as soon as they want it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_its_memory_is_in_use(kind: str, eager: None) -> None:
    """From the moment on at which the engine has it: nobody may move it, such as to share it as a window."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, shortcuts, caught = comms[0].portal(), comms[0]._core.shortcuts, False
            assert shortcuts is not None
            while not caught:  # the thread may have been amid its post before this one could look
                arena, works = torch.zeros(8), list[Any]()
                call = portal.all_reduce if kind == "collective" else lambda tensor: portal.recv(tensor, 1)
                thread = threading.Thread(target=lambda c=call, a=arena, w=works: w.append(c(a[:4])))
                thread.start()
                while not works and not (caught := shortcuts.posting == 1):
                    pass
                assert in_use(arena.untyped_storage())
                theirs = comms[1].all_reduce(torch.ones(4)) if kind == "collective" else comms[1].send(torch.ones(4), 0)
                await anyio.to_thread.run_sync(thread.join, HANGS)
                assert (await wait(works[0])).tolist() == [1.0] * 4
                await theirs
                assert arena.tolist() == [1.0] * 4 + [0.0] * 4
                await turns()
                assert not in_use(arena.untyped_storage())

    run_on("asyncio", main)
