"""Events while another thread posts: between the moment the engine has the op and the moment the loop hears of it.

A thread is held there by what it calls of the core when its op is pending, just before or just after that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import anyio.to_thread
import pytest
import torch
from concurrency import run_on, turns
from processes import HANGS

import aiocomms
from aiocomms.communicator.portal import works
from aiocomms.errors import CommError, WorkCancelledError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

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
        """Stand still on the thread that posts."""
        self._amid.set()
        assert self._go.wait(HANGS)

    async def begin(self, posting: int = 1) -> None:
        self._thread.start()
        assert await anyio.to_thread.run_sync(self._amid.wait, HANGS)
        assert self.core.shortcuts is not None
        assert self.core.shortcuts.elsewhere(None) == posting

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


async def known_lane(comms: Sequence[aiocomms.Communicator]) -> tuple[Any, Any, Any]:
    """A lane on both ranks, and on the first one's portal, by which the loop has made the call that begins it."""
    mine, theirs = (comm.lane("one") for comm in comms)
    portal = comms[0].portal().lane("one")
    first = await anyio.to_thread.run_sync(portal.barrier)
    await theirs.barrier()
    await wait(first)
    return mine, theirs, portal


def test_recv_withdrawn_amid_its_post_leaves_its_message_for_the_next() -> None:
    """A deadline may withdraw it: the engine drops it, and the next one gets the message."""

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
            assert not [it for _, it, *_ in core.transports[0].shared.pending.values() if it is pending]  # type: ignore

    run_on("asyncio", main)


def test_abort_before_a_post_is_kept_reaches_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread hears of that, although nobody could be told then."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            post = Post(comms[0], comms[0].portal().barrier)

            class Slow(works._Listener):
                def __init__(self, of: Any) -> None:
                    post.stand()
                    super().__init__(of)

            monkeypatch.setattr(works, "_Listener", Slow)
            # The check of deadlines would end it a second later.
            monkeypatch.setattr(works.BlockingWork, "_overdue", lambda _: None)
            await post.begin()
            await comms[1].aclose()
            await comms[0]._core.over
            with pytest.raises(CommError, match="rank 1"):
                await wait(await post.go())

    run_on("asyncio", main)


def test_lane_close_waits_for_a_post() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            mine, theirs, portal = await known_lane(comms)
            closed = anyio.Event()

            async def close() -> None:
                await mine.aclose()
                closed.set()

            async with amid(comms[0], portal.barrier, kept=False) as post, anyio.create_task_group() as tasks:
                tasks.start_soon(close)
                await turns(100)
                assert not comms[0]._core.in_flight
                assert not closed.is_set()
                work = await post.go()
                await turns(100)
                assert not closed.is_set(), "it waits for what is in flight now"
                await theirs.barrier()
                await wait(work)
            assert closed.is_set()

    run_on("asyncio", main)


def test_recorder_counts_an_op_amid_its_post() -> None:
    """The call has a number among the collectives, and so those before it keep theirs."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            for _ in range(2):
                for work in [comm.all_reduce(torch.ones(1)) for comm in comms]:
                    await work
            with pytest.raises(CommError):
                comms[0].all_reduce(torch.ones(1), "xor")
            async with amid(comms[0], comms[0].portal().barrier, kept=False):
                snapshot = comms[0]._core.recorder.snapshot("for the test")
                assert [item.collective for item in snapshot.items()] == [1, 2]
                brief = snapshot.header.brief
                assert (brief.calls, brief.ended, brief.last) == (3, 2, "all_reduce #1")
            await comms[1].barrier()

    run_on("asyncio", main)


def test_op_done_within_its_post_calls_no_hook_after_close() -> None:
    """No hook is called on the thread, which would be the first one that hears of the op's end."""

    async def main() -> None:
        comm = await aiocomms.new_comm("ucx")
        portal, heard = comm.portal(), list[Any]()
        native: Any = comm._shortcuts
        post = Post(comm, portal.barrier)

        class Slow:
            def post(self, *args: Any) -> Any:
                work = native.post(*args)
                post.stand()
                return work

        comm._shortcuts = Slow()
        await post.begin(posting=0)
        comm.register_post_hook(heard.append)
        await comm.aclose()
        work = await post.go()
        await wait(work)
        await turns()
        assert not heard
        comm._shortcuts = native

    run_on("asyncio", main)


def test_mismatch_behind_an_op_amid_its_post_is_named_as_the_reason() -> None:
    """An end within the post is not heard before the post is left; the ranks disagree on what comes behind it."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            mine, theirs, portal = await known_lane(comms)
            async with amid(comms[0], lambda: portal.all_reduce(torch.ones(1)), kept=True) as post:
                await theirs.all_reduce(torch.ones(1))
                works = mine.barrier(), theirs.broadcast(torch.ones(3), 0)
                with pytest.raises(CommError, match=r"rank 0 calls barrier|calls barrier.*rank 1 calls broadcast"):
                    await works[0]
                with pytest.raises(CommError, match="barrier"):
                    await works[1]
                work = await post.go()
            with pytest.raises(CommError, match="barrier"):
                await wait(work)

    run_on("asyncio", main)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_signal_handler_that_raises_amid_a_post_withdraws_the_recv(error: type[BaseException]) -> None:
    """The call raises it; the receive is withdrawn, the next one gets the message, and nothing is taken for broken."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, core, untouched = comms[0].portal(), comms[0]._core, torch.zeros(1)
            keep = core.keep_elsewhere

            def interrupted(*_: Any) -> None:
                core.keep_elsewhere = keep  # type: ignore[method-assign]
                raise error

            core.keep_elsewhere = interrupted  # type: ignore[method-assign]
            with pytest.raises(error):
                await anyio.to_thread.run_sync(portal.recv, untouched, 1)
            received = comms[0].recv(torch.zeros(1), 1)
            await comms[1].send(torch.ones(1), 0)
            assert (await received).item() == 1
            assert untouched.item() == 0
            assert not core.in_flight

    run_on("asyncio", main)
