"""The end of a communicator if a transport is broken, a finalizer interferes, or something happens during a close."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from aiocomms_c10d import C10dTransport
from aiocomms_local import LocalTransport
from aiocomms_ucx import UcxTransport
from concurrency import ranks, turns
from disturbances import Litter
from inside import transport_of
from processes import HANGS

from aiocomms import ops
from aiocomms.errors import CommAbortedError, CommClosedError, CommError, CommTimeoutError
from aiocomms.progress.deadlines import watchdog
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = pytest.mark.deterministic

BASES = {"local": LocalTransport, "c10d": C10dTransport, "ucx": UcxTransport}


class BrokenError(RuntimeError):
    """The error of a transport that has a defect."""


def breaking(base: type[Any], method: str) -> type[Any]:
    """Return a transport class whose method raises on the rank where ``breaks`` is set."""

    def raising(self: Any, *args: Any) -> Any:
        if self.breaks:
            raise BrokenError(method)
        return getattr(base, method)(self, *args)

    raising.__name__ = method
    return type(f"Broken{base.__name__}", (base,), {"breaks": False, method: raising})


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> type[Any]:
    """Return a transport class to break."""
    return BASES[request.param]


async def failure_of(work: Any) -> CommError:
    with pytest.raises(CommError) as caught:
        await work
    return caught.value


def other(base: type[Any]) -> str:
    """Return the name of a transport that carries the rest beside the broken one."""
    return "c10d" if base is LocalTransport else "local"


# ------------------------------------------------------------------------------------ 71: the thread of the deadlines


@pytest.fixture
def collecting() -> Iterator[None]:
    """Collect garbage at nearly every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.mark.real
@pytest.mark.fault(71)
def test_watchdog_survives_finalizers_on_its_thread(run: Callable[..., Any], collecting: None) -> None:
    """The watchdog copies the pending works while works come and go, and goes on whatever runs in between."""

    async def main() -> None:
        async with local_world(2) as (one, _):
            works = [one.recv(torch.zeros(1), 1, tag=tag, timeout=20) for tag in range(2000)]
            for _ in range(5):
                late = one.recv(torch.zeros(1), 1, tag=5000, timeout=0.01)  # The thread looks at all works then.
                while not late.done():
                    Litter()
                    assert await works.pop().cancel()
                    works.append(one.recv(torch.zeros(1), 1, tag=6000, timeout=20))
                    await turns(1)
                assert isinstance(await failure_of(late), CommTimeoutError)

    run(main)


@pytest.mark.fault(71)
@pytest.mark.parametrize("what", [BrokenError("expire"), SystemExit()], ids=repr)
def test_exception_in_one_expiry_leaves_other_deadlines_watched(
    run: Callable[..., Any], caplog: Any, what: BaseException
) -> None:
    """An exception on the watchdog thread ends neither the thread nor the other deadlines."""

    class Sick:
        def expire(self, now: float) -> float:
            raise what

    async def main() -> None:
        sick = Sick()
        watchdog.register(sick)
        try:
            async with local_world(2) as (one, _):
                for _ in range(3):
                    assert isinstance(await failure_of(one.recv(torch.zeros(1), 1, timeout=0.01)), CommTimeoutError)
        finally:
            watchdog.unregister(sick)

    run(main)
    assert any("cannot be watched" in record.getMessage() for record in caplog.records)


@pytest.mark.fault(71)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_watchdog_thread_is_started_again(run: Callable[..., Any]) -> None:
    """An end of the watchdog thread, by a defect of this library, leaves no deadline unwatched."""

    def end(self: object) -> None:
        raise SystemExit

    async def main() -> None:
        async with local_world(2) as (one, _):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(watchdog), "_expire_all", end)  # No callee can end the thread any more.
                watchdog.wake_by(0.0)
                for thread in threading.enumerate():
                    if thread.name == "aiocomms deadlines":
                        await anyio.to_thread.run_sync(thread.join)
            assert isinstance(await failure_of(one.recv(torch.zeros(1), 1, timeout=0.01)), CommTimeoutError)

    run(main)


# ------------------------------------------------------------------------- 72: what a transport must not raise


@pytest.mark.fault(72)
@pytest.mark.parametrize("method", ["waiting_for", "progress", "try_cancel", "last_heard"])
def test_transport_method_that_raises_loses_only_its_communicator(
    run: Callable[..., Any], install: Callable[..., None], base: type[Any], method: str, caplog: Any
) -> None:
    install(broken=breaking(base, method))

    async def main() -> None:
        async with local_world(2, "broken", name="broken") as (one, two), local_world(2) as healthy:
            await ranks([one, two], lambda comm: comm.barrier())
            transport = transport_of(one)
            transport.breaks = True
            work = one.all_reduce(torch.ones(3), timeout=0.05 if method == "waiting_for" else 20)
            if method == "try_cancel":
                assert not await one.recv(torch.zeros(1), 1, tag=3).cancel() or one.aborted
            elif method == "progress":
                driver = one._core.driver
                driver._progress(driver._sources[transport])
            elif method == "last_heard":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(one._core.in_flight.heartbeat, "_transports", [transport])
                    patch.setattr(one._core.in_flight.heartbeat, "_silent", [{}])
                    one._core.in_flight.expire(time.monotonic())
            error = await failure_of(work)
            assert f"the transport {type(transport).__name__} is broken: {method}() raised" in str(error)
            assert one.aborted
            transport.breaks = False
            await ranks(healthy, lambda comm: comm.barrier())
            with pytest.raises(CommAbortedError, match="is broken"):
                await two.recv(torch.zeros(1), 0)

    run(main)
    assert any(f"{method}() raised" in record.getMessage() for record in caplog.records) or method == "progress"


@pytest.mark.fault(72)
def test_transport_abort_that_raises_leaves_other_transports_informed(
    run: Callable[..., Any], install: Callable[..., None], base: type[Any], caplog: Any
) -> None:
    install(broken=breaking(base, "abort"))

    async def main() -> None:
        async with local_world(2, {"p2p": "broken", "collectives": other(base)}) as (one, two):
            work = two.all_reduce(torch.ones(3))
            transport_of(one).breaks = True
            one.abort("enough")
            assert "enough" in str(await failure_of(work))  # The transport of the collectives carried the abort.
            one.abort("once more")
            transport_of(one).breaks = False
            with pytest.raises(CommAbortedError, match="enough"):
                one.barrier()

    run(main)
    assert any("abort() raised BrokenError" in record.getMessage() for record in caplog.records)


@pytest.mark.fault(72)
def test_transport_close_that_raises_releases_the_rest(
    run: Callable[..., Any], install: Callable[..., None], base: type[Any]
) -> None:
    class Unclosable(base):  # type: ignore[misc,valid-type]
        async def aclose(self) -> None:
            await super().aclose()
            raise BrokenError("aclose")

    install(broken=Unclosable)

    async def main() -> None:
        world = local_world(2, {"p2p": "broken", "collectives": other(base)})
        comms = await world.__aenter__()

        async def close(comm: Any) -> None:
            with pytest.raises(CommError, match=r"the transport Unclosable is broken: aclose\(\) raised BrokenError"):
                await comm.aclose()
            await comm.aclose()
            assert comm.closed

        await ranks(comms, close)
        await world.__aexit__(None, None, None)

    run(main)


# ------------------------------------------------------------------------------- 73: a step of which a part was posted


def flaky(base: type[Any]) -> type[Any]:
    """Return a transport class that carries only sends and receives, and raises at the post number ``breaks_at``."""

    class Flaky(base):  # type: ignore[misc,valid-type]
        capabilities = Capabilities(
            ops=frozenset({ops.Send, ops.Recv}), in_process=base.capabilities.in_process, spin=base.capabilities.spin
        )
        posted = 0
        breaks_at = 0

        def post(self, op: Any, work: Any) -> Any:
            self.posted += 1
            if self.posted == self.breaks_at:
                raise BrokenError("post")
            return super().post(op, work)

    return Flaky


@pytest.mark.fault(73)
@pytest.mark.parametrize("part", [1, 2])
def test_post_that_raises_fails_its_op_or_loses_the_communicator(
    run: Callable[..., Any], install: Callable[..., None], base: type[Any], part: int
) -> None:
    """A failed first post has sent nothing, and the communicator goes on. A failed second one ends the communicator."""
    install(flaky=flaky(base))

    async def main() -> None:
        async with local_world(2, "flaky") as (one, two):
            await ranks([one, two], lambda comm: comm.barrier())
            transport = transport_of(one)
            transport.breaks_at = transport.posted + part
            tensors = [torch.full((3,), 10.0), torch.full((3,), 100.0)]
            names = r"the transport \w+ is broken: post\(\) raised BrokenError"
            if part == 1:
                with pytest.raises(CommError, match=names) as caught:
                    one.all_reduce(tensors[0])
                assert isinstance(caught.value.__cause__, BrokenError)
                results = await ranks([one, two], lambda comm: comm.all_reduce(tensors[comm.rank]))
                assert all((result == 110).all() for result in results)
                return
            error = await failure_of(one.all_reduce(tensors[0]))
            assert re.search(rf"^all_reduce #\d+ on 'world' \(rank 0\): the operation failed .*: {names}", str(error))
            with pytest.raises(CommAbortedError, match="the operation failed on this rank"):
                one.all_reduce(tensors[0])
            with contextlib.suppress(CommAbortedError):
                # The part that was sent may be all that this rank waits for.
                assert (await two.all_reduce(tensors[1]) == 110).all()
            with pytest.raises(CommAbortedError, match="the operation failed on this rank"):
                await two.barrier()

    run(main)


# ---------------------------------------------------------------------------------------- 74: what happens amid a close


@pytest.mark.fault(74)
@pytest.mark.parametrize("what", ["a peer aborts", "this rank aborts", "a deadline passes"])
@pytest.mark.parametrize("transport", BASES)
def test_pending_op_of_a_closing_communicator_fails_with_the_event(
    run: Callable[..., Any], transport: str, what: str
) -> None:
    """The pending op fails with the event, and not with the close, which would have waited for the op."""

    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            work = one.all_reduce(torch.ones(3))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.aclose)
                await turns()
                with pytest.raises(CommClosedError):
                    one.barrier()
                assert not work.done()
                if what == "a peer aborts":
                    two.abort("enough")
                elif what == "this rank aborts":
                    one.abort("enough")
                else:  # The watchdog thread does this once the deadlines have passed.
                    await anyio.to_thread.run_sync(one._core.in_flight.expire, time.monotonic() + HANGS)
                error = await failure_of(work)
            assert one.closed
            if what == "a deadline passes":
                assert isinstance(error, CommTimeoutError)
                assert "its deadline passed" in str(error)
            else:
                assert isinstance(error, CommAbortedError)
                assert "enough" in str(error)

    run(main)
