"""Shortcuts: what a program sees of an op is the same whether native code has started it or Python."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import anyio
import hypothesis
import msgspec
import pytest
import torch
from concurrency import ranks, run_on
from hypothesis import strategies as st
from processes import HANGS

import aiocomms
from aiocomms import ReduceOp, ops
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.lane import Lane
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    LaneAbortedError,
    UnsupportedOperation,
)
from aiocomms.progress.inflight import LaneWork, StartedWork
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

engine = pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)
DOORS = ("native", "pure")


@contextmanager
def door(which: str) -> Iterator[None]:
    """Communicators that are made within have shortcuts, or have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIOCOMMS_PURE", str(int(which == "pure")))
        yield


@pytest.fixture(params=DOORS, autouse=True)
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """The door of the communicators of one test."""
    with door(request.param):
        yield request.param


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note the ops that Python starts."""
    started: list[str] = []

    def noting(issue: Any) -> Any:
        def note(self: Any, op: Any, *rest: Any, **named: Any) -> Any:
            started.append(op.name)
            return issue(self, op, *rest, **named)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for cls in (Communicator, Lane):
            patch.setattr(cls, "_issue", noting(cls._issue))
        yield started


@contextmanager
def place(comm: Communicator, where: str) -> Iterator[Any]:
    """Yield what an op is called on: the communicator, a lane, or the communicator while a lane is current."""
    lane = comm.lane("one")
    with lane if where == "current lane" else nullcontext():
        yield lane if where == "lane" else comm


WHERE = ("communicator", "lane", "current lane")


def plain(comm: Any) -> list[aiocomms.Work[Any]]:
    """Every op that has a shortcut, called plainly on both of two ranks."""
    peer, one, two = 1 - comm.rank, torch.ones(2), torch.ones(4)
    return [
        comm.all_reduce(torch.ones(2)),
        comm.all_reduce(torch.ones(2), ReduceOp.MAX),
        comm.all_reduce(tensor=torch.ones(2), op=ReduceOp.AVG),
        comm.barrier(),
        comm.broadcast(torch.ones(2), 1),
        comm.broadcast(torch.ones(2), root=0),
        comm.all_gather_single(two, one),
        comm.all_to_all_single(torch.ones(4), torch.ones(4)),
        comm.reduce_scatter_single(torch.ones(2), torch.ones(4)),
        comm.reduce_scatter_single(torch.ones(2), torch.ones(4), op=ReduceOp.PRODUCT),
        comm.send(torch.ones(2), peer),
        comm.recv(torch.ones(2), src=peer),
        comm.send(torch.ones(2), dst=peer, tag=5),
        comm.recv(torch.ones(2), peer, 5),
    ]


@pytest.mark.parametrize("where", WHERE)
def test_plain_ops_take_the_shortcut(run: Any, which: str, where: str) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            works = []
            with counted() as started:
                for comm in comms:
                    with place(comm, where) as at:
                        works.append(plain(at))
            names = [work.op.name for row in works for work in row]
            assert started == (names if which == "pure" else [])
            for row in works:
                for work in row:
                    await work
                assert [work.seq for work in row] == list(range(len(row)))
                assert [isinstance(work, LaneWork) for work in row] == [where != "communicator"] * len(row)

    run(main)


async def windows_of(comms: list[Communicator], size: int = 8) -> list[aiocomms.Window]:
    """A window of all ranks, as each has it."""
    found: list[aiocomms.Window] = [None] * len(comms)  # type: ignore[list-item]

    async def open_it(comm: Communicator) -> None:
        found[comm.rank] = await comm.new_window(torch.arange(float(size)))

    await ranks(comms, open_it)
    return found


def plain_on(window: aiocomms.Window, peer: int) -> list[aiocomms.Work[Any]]:
    """Every op on a window that has a shortcut, called plainly."""
    return [
        window.put(torch.ones(2), peer),
        window.put(torch.ones(2), dst=peer, offset=6),
        window.put(torch.empty(0), peer, 8),
        window.put_signal(torch.ones(1), peer, 6),
        window.put_signal(tensor=torch.ones(1), dst=peer),
        window.get(torch.ones(2), peer),
        window.get(tensor=torch.ones(2), src=peer, offset=3),
        window.signal(peer),
        window.signal(dst=peer),
        window.wait_signal(src=peer),
        *(window.wait_signal(peer) for _ in range(3)),
    ]


def test_plain_ops_on_windows_take_the_shortcut(run: Any, which: str) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            first = comms[0]._core.ledger.issued
            with counted() as started:
                works = [plain_on(windows[rank], 1 - rank) for rank in (0, 1)]
            names = [work.op.name for row in works for work in row]
            assert started == (names if which == "pure" else [])
            for row in works:
                for work in row:
                    await work
                assert [work.seq - first for work in row] == list(range(len(row)))
            expected = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0]
            assert [window.tensor.tolist() for window in windows] == [expected, expected]

    run(main)


def test_window_ops_within_a_lane_use_no_lane(which: str) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            start, started = comms[0]._start, []

            def note(op: Any, *rest: Any) -> Any:
                started.append(op)
                return start(op, *rest)

            comms[0]._start = note  # type: ignore[assignment]
            with comms[0].lane("mine"):
                works = plain_on(windows[0], 1)
                assert not any("lane" in repr(work) for work in works)
            assert started == ([] if which == "native" else [work.op for work in works])

    run_on("asyncio", main)


def test_windows_of_another_transport_have_no_shortcuts() -> None:
    async def main() -> None:
        for families in ("local", {"p2p": "ucx", "collectives": "ucx"}):
            async with local_world(2, families) as comms:
                windows = await windows_of(comms)
                assert [window._shortcuts for window in windows] == [None, None]

    run_on("asyncio", main)


def test_windows_of_a_communicator_subclass_have_no_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subclass may start ops in a way of its own, and does so for those of its windows."""

    class Noting(Communicator):
        def _issue(self, op: Any, *rest: Any) -> Any:
            noted.append(op.name)
            return super()._issue(op, *rest)

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            noted.clear()
            plain_on(windows[0], 1)
            assert noted == ["put"] * 3 + ["put_signal"] * 2 + ["get"] * 2 + ["signal"] * 2 + ["wait_signal"] * 4
            comms[0].abort("enough")

    noted: list[str] = []
    monkeypatch.setattr("aiocomms.testing.world.Communicator", Noting)
    run_on("asyncio", main)


def test_window_methods_keep_their_signature_and_docstring() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            (window,) = await windows_of([comm])
            assert isinstance(window, aiocomms.Window)
            assert type(window).__name__ == "Window"
            assert type(window).__doc__ == aiocomms.Window.__doc__
            for name in ("put", "put_signal", "get", "signal", "wait_signal", "flush"):
                method = getattr(window, name)
                assert inspect.signature(method) == inspect.signature(getattr(aiocomms.Window, name).__get__(window))
                assert method.__doc__ == getattr(aiocomms.Window, name).__doc__
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'dst'"):
                window.signal()  # type: ignore[call-arg]

    run_on("asyncio", main)


def test_closed_window_refuses_ops_and_records_nothing() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            await windows[0].signal(0)
            closing = windows[0]._start_closing()  # the other rank has not closed: the engine still has the window
            issued = comms[0]._core.ledger.issued
            for call in (
                lambda: windows[0].put(torch.ones(2), 1),
                lambda: windows[0].get(torch.ones(2), 1),
                lambda: windows[0].signal(1),
                lambda: windows[0].wait_signal(0),
            ):
                with pytest.raises(CommClosedError, match="the window is closed"):
                    call()
            assert comms[0]._core.ledger.issued == issued
            await windows[1].aclose()
            await closing

    run_on("asyncio", main)


def test_op_on_a_window_unknown_to_the_engine_is_refused_by_python() -> None:
    """The engine refuses before anything has happened, and Python tries again: it decides what the program is told."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            transport = comms[0]._core.transports[0]
            issued, rows = comms[0]._core.ledger.issued, len(comms[0]._core.recorder.ring)
            transport.engine.close_window(transport.group, windows[0]._info.handle.number)  # type: ignore[attr-defined]
            with pytest.raises(CommError), counted() as started:
                windows[0].put(torch.ones(2), 1)
            assert started == ["put"]
            assert comms[0]._core.ledger.issued == issued + 1
            assert len(comms[0]._core.recorder.ring) == rows + 1
            assert comms[0].aborted

    run_on("asyncio", main)


def test_aborted_communicator_refuses_ops_on_its_windows() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            comms[0].abort("enough")
            with pytest.raises(CommAbortedError, match="enough"):
                windows[0].put(torch.ones(2), 1)
            with pytest.raises(CommAbortedError, match="enough"):
                windows[0].signal(1)

    run_on("asyncio", main)


def test_withdrawn_wait_signal_leaves_the_signal_for_the_next() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            windows = await windows_of(comms)
            late = windows[0].wait_signal(1)
            assert not late.done()
            assert await late.cancel()
            await windows[1].signal(0)
            await windows[0].wait_signal(1)
            pending = windows[0].wait_signal(1)
            await windows[1].signal(0)
            assert await pending is None
            items = comms[0]._core.recorder.snapshot("").items()
            waits = [(item.state, item.args) for item in items if item.name == "wait_signal"]
            assert waits == [("failed", {"src": 1}), ("done", {"src": 1}), ("done", {"src": 1})]

    run_on("asyncio", main)


def test_finalizer_that_closes_the_window_amid_a_put_is_survived() -> None:
    """Making the record of an op may collect garbage, whose finalizers may do anything."""

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            (window,) = await windows_of([comm])
            ran: list[object] = []
            me = threading.get_ident()

            def collect(phase: str, info: object) -> None:
                # Garbage is collected on whichever thread allocates, and another thread may not close the window.
                if phase == "start" and not ran and threading.get_ident() == me:
                    ran.append(window._start_closing())

            gc.callbacks.append(collect)
            before = gc.get_threshold()
            gc.set_threshold(1)
            refused = False
            try:
                for _ in range(2000):
                    try:
                        window.put(torch.ones(2), 0)
                    except CommClosedError:
                        refused = True
                        break
            finally:
                gc.set_threshold(*before)
                gc.callbacks.remove(collect)
            assert ran
            assert refused
            await ran[0]  # type: ignore[misc]

    run_on("asyncio", main)


def test_window_and_its_shortcuts_are_freed() -> None:
    async def main() -> list[weakref.ref[Any]]:
        async with aiocomms.new_comm("ucx") as comm:
            (window,) = await windows_of([comm])
            window.loop = window  # type: ignore[attr-defined]  # the collector's to find
            await window.put(torch.ones(2), 0)
            await window.aclose()
            gone = weakref.ref(window)
            tensor = weakref.ref(window.tensor)
            del window
            gc.collect()
            assert gone() is None
            return [tensor, weakref.ref(comm._core)]

    left = run_on("asyncio", main)
    gc.collect()
    assert [ref() for ref in left] == [None, None]


UNCOMMON = {
    "a hint": lambda comm: comm.all_reduce(torch.ones(2), hints={}),
    "a deadline": lambda comm: comm.barrier(timeout=5),
    "an operator by name": lambda comm: comm.all_reduce(torch.ones(2), "sum"),
    "an operator with a factor": lambda comm: comm.all_reduce(torch.ones(2), ReduceOp.PREMUL_SUM(2.0)),
    "a parameter": lambda comm: comm.broadcast(torch.nn.Parameter(torch.ones(2), requires_grad=False), 0),
    "another op": lambda comm: comm.reduce(torch.ones(2), 0),
}


@pytest.mark.parametrize("call", UNCOMMON.values(), ids=UNCOMMON)
def test_op_that_is_not_plain_takes_the_python_path(call: Any) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            with counted() as started:
                works = [call(comm) for comm in comms]
            assert len(started) == 2
            for work in works:
                await work

    run_on("asyncio", main)


def test_communicator_without_all_ucx_families_has_no_shortcuts(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    async def shortcuts(transport: Any) -> list[object]:
        async with local_world(2, transport) as comms:
            return [comm._shortcuts for comm in comms]

    assert all(it is None for it in run_on("asyncio", shortcuts, "local"))
    assert all(it is None for it in run_on("asyncio", shortcuts, {"p2p": "ucx", "collectives": "local"}))
    for families in ({"collectives": "ucx"}, {"p2p": "ucx"}, {"p2p": "ucx", "rma": "ucx"}):
        assert all(it is None for it in run_on("asyncio", shortcuts, families))
    for carrying in ("ucx", {"p2p": "ucx", "collectives": "ucx"}):
        assert all((it is None) == (which == "pure") for it in run_on("asyncio", shortcuts, carrying))
    monkeypatch.setenv("AIOCOMMS_DEBUG", "1")
    assert all(it is None for it in run_on("asyncio", shortcuts, "ucx"))


def test_transport_subclass_with_its_own_post_has_no_shortcuts(install: Any) -> None:
    from aiocomms_ucx import UcxTransport

    posted: list[str] = []

    class Posting(UcxTransport):
        def post(self, op: Any, work: Any) -> float | None:
            posted.append(op.name)
            return super().post(op, work)

    async def main() -> None:
        async with local_world(2, "posting") as comms:
            await ranks(comms, lambda comm: comm.barrier())

    install(posting=Posting)
    run_on("asyncio", main)
    assert posted[-2:] == ["barrier", "barrier"]  # behind the messages that prove the way while it forms


def test_op_that_no_transport_carries_is_refused() -> None:
    async def main() -> None:
        async with local_world(2, {"collectives": "ucx"}) as comms:
            for call in (lambda: comms[0].send(torch.ones(1), 1), lambda: comms[0].recv(torch.ones(1), 1)):
                with pytest.raises(UnsupportedOperation):
                    call()
            await ranks(comms, lambda comm: comm.barrier())

    run_on("asyncio", main)


def test_transport_subclass_that_carries_less_has_no_shortcuts(install: Any) -> None:
    from aiocomms_ucx import UcxTransport

    class Lacking(UcxTransport):
        capabilities = msgspec.structs.replace(
            UcxTransport.capabilities, ops=UcxTransport.capabilities.ops - {ops.AllReduce}
        )

    async def main() -> None:
        async with local_world(2, "lacking") as comms:
            tensors = [torch.ones(1) for _ in comms]
            await ranks(comms, lambda comm: comm.all_reduce(tensors[comm.rank]))
            assert [tensor.item() for tensor in tensors] == [2, 2]
            # The all_reduce goes by messages.
            assert [comm._core.by_family["p2p"].call_count.value for comm in comms] == [0, 0]

    install(lacking=Lacking)
    run_on("asyncio", main)


def test_methods_without_a_shortcut_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with local_world(1, "ucx") as (comm,):
            monkeypatch.setattr(Communicator, "all_gather", lambda self, *_: "replaced")
            assert comm.all_gather([], torch.ones(1)) == "replaced"

    run_on("asyncio", main)


def test_communicator_methods_keep_their_signature_and_docstring(which: str) -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            assert isinstance(comm, Communicator)
            assert type(comm).__name__ == "Communicator"
            for name in ("all_reduce", "barrier", "send", "abort"):
                method = getattr(comm, name)
                assert inspect.signature(method) == inspect.signature(getattr(Communicator, name).__get__(comm))
                assert method.__doc__ == getattr(Communicator, name).__doc__
                assert method.__name__ == name
            assert repr(comm.barrier) == f"<bound method {Communicator.barrier.__qualname__} of {comm!r}>"
            tensor = torch.ones(2)
            assert await type(comm).all_reduce(comm, tensor) is tensor
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'tensor'"):
                comm.all_reduce()  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="multiple values for argument 'tensor'"):
                comm.all_reduce(tensor, tensor=tensor)  # type: ignore[misc]

    run_on("asyncio", main)


# -------------------------------------------------------------------------------------------------- a work that is done


def test_work_done_within_its_call_is_a_started_work(run: Any, loop: str) -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            tensor = torch.ones(2)
            work = comm.all_reduce(tensor)
            assert isinstance(work, aiocomms.Work)
            assert isinstance(work, StartedWork)
            assert repr(work) == "<Work all_reduce #0 on 'world' (rank 0) done>"
            assert work.done()
            assert [await work, await work, work.result(), work.wait_blocking()] == [tensor] * 4
            assert work.exception() is None
            assert not await work.cancel()
            assert await work.wait() is None
            heard: list[object] = []
            work.add_done_callback(heard.append)
            assert not heard
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert heard == [work]
            with pytest.raises(CommError, match="wait_stream"):
                work.wait_stream()
            with pytest.raises(AttributeError, match="did you forget `await`"):
                work.shape  # type: ignore[attr-defined]  # noqa: B018
            with pytest.raises(TypeError, match="did you forget `await`"):
                work + 1  # type: ignore[operator]
            with pytest.raises((TypeError, pickle.PicklingError)):
                pickle.dumps(work)
            gone = weakref.ref(work)
            heard.clear()
            del work
            gc.collect()
            assert gone() is None
            assert await comm.barrier() is None

    run(main)


def test_started_work_is_a_coroutine_for_asyncio() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            tensor = torch.ones(2)
            assert await asyncio.create_task(comm.all_reduce(tensor)) is tensor  # type: ignore[arg-type]
            assert await asyncio.wait_for(comm.all_reduce(tensor), HANGS) is tensor
            assert await asyncio.gather(comm.all_reduce(tensor), comm.barrier()) == [tensor, None]
            task = asyncio.create_task(comm.barrier())  # type: ignore[arg-type]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run_on("asyncio", main)


def test_await_of_a_done_work_ends_at_its_first_step() -> None:
    """A done work steps as a generator that ends at its first step."""

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            tensor = torch.ones(2)
            work = comm.all_reduce(tensor)
            for step in (next, lambda steps: steps.send(None)):
                steps = work.__await__()
                assert iter(steps) is steps
                with pytest.raises(StopIteration) as ended:
                    step(steps)
                assert ended.value.value is tensor
                with pytest.raises(StopIteration) as ended:
                    step(steps)
                assert ended.value.value is None

    run_on("asyncio", main)


# ----------------------------------------------------------------------------------------------------- uncommon events


def test_hooks_registered_between_ops_see_the_next_op() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            one, two = comms

            async def call() -> None:
                await ranks(comms, lambda comm: comm.all_reduce(torch.ones(2)))

            await call()
            asked: list[tuple[str, int]] = []
            told: list[tuple[str, int]] = []
            before = one.register_pre_hook(lambda op, seq: asked.append((op.name, seq)))
            await call()
            after = two.register_post_hook(lambda work: told.append((work.op.name, work.seq)))
            await call()
            before.remove()
            await call()
            after.remove()
            await call()
            assert asked == [("all_reduce", 1), ("all_reduce", 2)]
            assert told == [("all_reduce", 2), ("all_reduce", 3)]

    run_on("asyncio", main)


def test_post_hooks_see_ops_that_shortcuts_start(which: str) -> None:
    """The hooks hear what the Python path tells them, and ops stay native."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            told: dict[int, list[tuple[str, bool]]] = {0: [], 1: []}
            by_python: list[str] = []
            before = time.monotonic()

            def heard(work: Any) -> None:
                now = time.monotonic()
                told[work._owner.rank].append((work.op.name, before <= work.called <= now))

            hooks = [comm.register_post_hook(heard) for comm in comms]

            def start(comm: Communicator, work: Any, *args: Any) -> Any:
                by_python.append(work.op.name)
                return type(comm._core).start(comm._core, work, *args)

            for comm in comms:
                comm._core.start = functools.partial(start, comm)  # type: ignore[method-assign]

            async def call(comm: Any) -> None:
                await comm.all_reduce(torch.ones(2))
                await comm.barrier()
                if comm.rank == 0:
                    await comm.send(torch.ones(2), 1)
                else:
                    await comm.recv(torch.ones(2), 0)

            await ranks(comms, call)
            for hook in hooks:
                hook.remove()
            await ranks(comms, lambda comm: comm.barrier())
            native = which == "native" and hasattr(engine, "Shortcuts")
            all_of_them = sorted([*2 * ["all_reduce", "barrier", "barrier"], "recv", "send"])
            assert sorted(by_python) == ([] if native else all_of_them)
            assert told[0] == [("all_reduce", True), ("barrier", True), ("send", True)]
            assert told[1] == [("all_reduce", True), ("barrier", True), ("recv", True)]

    run_on("asyncio", main)


def test_pre_hook_that_raises_stops_the_op() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.barrier()

            def refuse(op: object, seq: int) -> None:
                raise RuntimeError("no")

            hook = comm.register_pre_hook(refuse)
            with pytest.raises(RuntimeError, match=r"^no$"):
                comm.barrier()
            hook.remove()
            await comm.barrier()
            assert comm._core.ledger.issued == 3

    run_on("asyncio", main)


def test_abort_in_a_signal_handler_refuses_the_next_op() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.barrier()
            before = signal.signal(signal.SIGUSR1, lambda *_: comm.abort("by a handler"))
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                with pytest.raises(CommAbortedError, match="by a handler"):
                    comm.barrier()
            finally:
                signal.signal(signal.SIGUSR1, before)

    run_on("asyncio", main)


def test_op_on_another_thread_is_refused() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.barrier()
            raised: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    comm.barrier()
                except RuntimeError as error:
                    raised.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert "barrier" in str(raised[0])
            assert comm._core.ledger.issued == 1
            await comm.barrier()

    run_on("asyncio", main)


def test_ops_within_a_lane_block_use_that_lane() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:

            async def work(comm: Communicator) -> None:
                await comm.all_reduce(torch.ones(2))
                with comm.lane("mine"):
                    held = comm.all_reduce(torch.ones(2))
                    assert "lane mine" in repr(held)
                    await held
                assert "lane" not in repr(comm.barrier())

            await ranks(comms, work)
            assert [comm._core.ledger.calls for comm in comms] == [2, 2]

    run_on("asyncio", main)


def test_nested_lane_blocks_of_two_communicators_stay_apart() -> None:
    """Blocks of two communicators and of two lanes lie within each other."""

    async def main() -> None:
        async with aiocomms.new_comm("ucx", name="a") as a, aiocomms.new_comm("ucx", name="b") as b:
            with b.lane("of b"), a.lane("outer"), b.lane("inner"):
                assert "'a, lane outer'" in repr(a.barrier())
                assert "'b, lane inner'" in repr(b.barrier())
                with a.lane("nearest"):
                    assert "'a, lane nearest'" in repr(a.barrier())
                assert "'a, lane outer'" in repr(a.barrier())
            assert "'a'" in repr(a.barrier())
            assert "'b'" in repr(b.barrier())

    run_on("asyncio", main)


@pytest.mark.parametrize("call", [lambda lane, it: lane.all_reduce(it), lambda lane, it: lane.recv(it, 1)])
def test_closed_or_aborted_lane_refuses_ops(call: Any) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            lanes = [comm.lane("one") for comm in comms]
            await asyncio.gather(*(lane.all_reduce(torch.ones(2)) for lane in lanes))
            closed = comms[0].lane("one")
            await asyncio.gather(closed.barrier(), lanes[1].barrier())
            await closed.aclose()
            with pytest.raises(CommClosedError, match="the lane was closed"):
                call(closed, torch.ones(2))
            lanes[0].abort("for a test")
            with pytest.raises(LaneAbortedError, match="for a test"):
                call(lanes[0], torch.ones(2))
            ledgers = [comm._core.ledger for comm in comms]
            assert [(it.issued, it.laned, it.calls) for it in ledgers] == [(2, 2, 0)] * 2
            await ranks(comms, lambda comm: comm.lane("another").barrier())

    run_on("asyncio", main)


def test_lane_abort_fails_its_pending_ops() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            await ranks(comms, lambda comm: comm.lane("one").barrier())
            lane, other = (comm.lane("one") for comm in comms)
            large = torch.ones(1 << 20)
            works = [lane.recv(torch.ones(2), 1), lane.send(large, 1), *(lane.barrier() for _ in range(2))]
            assert not any(work.done() for work in works)
            lane.abort("for a test")
            for work in works:
                with pytest.raises(LaneAbortedError, match="for a test"):
                    await work
            with pytest.raises(LaneAbortedError, match="for a test"):
                await other.recv(torch.ones(2), 0, 5)
            assert not any(comm._core.in_flight for comm in comms)
            await ranks(comms, lambda comm: comm.lane("another").barrier())

    run_on("asyncio", main)


def test_pending_recv_of_a_lane_can_be_withdrawn_and_matches_in_order() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            await ranks(comms, lambda comm: comm.lane("one").barrier())
            one, two = (comm.lane("one") for comm in comms)
            untouched, first, second = torch.zeros(2), torch.zeros(2), torch.zeros(2)
            withdrawn, *held = (one.recv(it, 1, -7) for it in (untouched, first, second))
            assert await withdrawn.cancel()
            await two.send(torch.ones(2), 0, -7)
            await comms[1].send(torch.full((2,), 3.0), 0, -7)  # not of the lane
            await two.send(torch.full((2,), 2.0), 0, -7)
            assert [await work for work in held] == [first, second]
            assert [it[0].item() for it in (untouched, first, second)] == [0, 1, 2]
            assert (await comms[0].recv(first, 1, -7))[0].item() == 3
            late = one.recv(first, 1, timeout=0.05)
            assert one.timeout is None or one.timeout > 1
            with pytest.raises(CommTimeoutError, match="nothing matched"):
                await late
            one.set_timeout(0.05)
            with pytest.raises(CommTimeoutError, match="nothing matched"):
                await one.recv(first, 1)
            assert not comms[0].aborted

    run_on("asyncio", main)


def test_full_recorder_ring_keeps_the_last_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOMMS_RECORDER", "4")

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            for i in range(11):
                await (comm.broadcast(torch.ones(2), 0) if i % 3 else comm.all_reduce(torch.ones(2)))
                with pytest.raises(ArgumentError):
                    comm.all_reduce(torch.eye(3).t()[:2])
            items = comm._core.recorder.snapshot("asked for").items()
            assert [(item.seq, item.collective, item.state) for item in items] == [
                (seq, seq + 1, "done") for seq in range(7, 11)
            ]
            assert [item.args for item in items] == [{"root": 0}, {"root": 0}, {}, {"root": 0}]
            assert all(item.finished for item in items)

    run_on("asyncio", main)


def test_op_that_the_engine_refuses_raises_comm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was closed behind the communicator's back: nothing of a shortcut's attempt is left."""

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.barrier()
            comm._core.transports[0].shared.engine.close(False, 0.0)  # type: ignore[attr-defined]
            with pytest.raises(CommError, match="the engine is closed"):
                comm.barrier()
            assert (comm._core.ledger.issued, comm._core.ledger.calls) == (2, 1)
            assert [item.seq for item in comm._core.recorder.snapshot("").items()] == [0]
            assert comm.aborted

    run_on("asyncio", main)


def test_lane_op_that_the_engine_refuses_raises_comm_error() -> None:
    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            lane = comm.lane("one")
            await lane.barrier()
            comm._core.transports[0].shared.engine.close(False, 0.0)  # type: ignore[attr-defined]
            with counted() as started, pytest.raises(CommError, match="the engine is closed"):
                lane.barrier()
            assert started == ["barrier"]
            assert (comm._core.ledger.issued, comm._core.ledger.laned, comm._core.ledger.calls) == (2, 2, 0)
            assert [lane for _, lane in comm._core.recorder.lanes] == ["one"] * 2
            assert [item.seq for item in comm._core.recorder.snapshot("").items()] == [0]

    run_on("asyncio", main)


def test_closed_communicator_is_freed() -> None:
    async def main() -> weakref.ref[object]:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.all_reduce(torch.ones(2))
            with comm.lane("one"):
                await comm.all_reduce(torch.ones(2))
            work = comm.broadcast(torch.ones(2), 0)
        await work
        return weakref.ref(comm._core)

    gone = run_on("asyncio", main)
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------------ op by op alike


def _tensors(rank: int = 0) -> dict[str, Any]:
    floats, complex_ones = torch.arange(16.0), torch.ones(4, dtype=torch.complex64)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.uint16)
    return {str(dtype): torch.ones(4).to(dtype) for dtype in dtypes} | {
        "two": torch.ones(2),
        "four": torch.arange(4.0),
        "square": torch.arange(4.0).view(2, 2),
        "three": torch.ones(3),
        "three more": torch.ones(3),
        "eight": torch.arange(8.0),
        "empty": torch.empty(0),
        "of no dimension": torch.tensor(2.0),
        "matrix": floats.view(4, 4),
        "column": floats.view(4, 4)[:, 1],
        "own half": floats[:8].view(2, 4)[rank],
        "other half": floats[:8].view(2, 4)[1 - rank],
        "overlapping": floats[2:6],
        "both halves": floats[:8],
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "tracked": torch.ones(4, requires_grad=True),
        "subclass": torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})),
        "conjugate": complex_ones.conj(),
        "negative": complex_ones.conj().imag,
        "freed": freed,
        "meta": torch.ones(4, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "no tensor": [1.0],
        "None": None,
    }


NAMES = sorted(_tensors())
TENSOR = st.sampled_from(NAMES)
PLAIN = st.sampled_from(["two", "four", "eight", "own half", "other half", "both halves", "empty"])
OPERATORS = {**{op: getattr(ReduceOp, op) for op in ("SUM", "MAX", "BAND", "AVG")}, "named": "sum", "wrong": 7}
OPERATORS["factor"] = ReduceOp.PREMUL_SUM(2.0)
RANK = st.sampled_from([0, 0, 1, 1, 2, -1, True, 1.0, None])
TAG = st.sampled_from([0, 1, -(2**31), 2**31, True, "a"])
OFFSET = st.sampled_from([0, 4, 6, 7, 8, -1, 2**58, 2**63, 2**70, True, 1.0])
EXTRA = st.sampled_from([{}, {}, {}, {"hints": {"x": 1}}, {"hints": 3}, {"timeout": 20}, {"timeout": 0}])
A_TENSOR = TENSOR | PLAIN


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
    """Draw a place to call, a method's name and its arguments; tensors and operators by what they are called here."""
    name = draw(st.sampled_from(sorted(ARGUMENTS)))
    given = {argument: draw(strategy) for argument, strategy in ARGUMENTS[name].items()}
    for optional in ("op", "tag", "offset"):
        if optional in given and draw(st.booleans()):
            del given[optional]
    by_position = draw(st.integers(0, len(given)))
    positional = tuple(given.values())[:by_position]
    where = draw(st.sampled_from(WHERE))
    return where, name, positional, dict(list(given.items())[by_position:]) | draw(EXTRA)


ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "all_reduce": {"tensor": A_TENSOR, "op": st.sampled_from(sorted(OPERATORS))},
    "all_gather_single": {"output": A_TENSOR, "input": A_TENSOR},
    "all_to_all_single": {"output": A_TENSOR, "input": A_TENSOR},
    "barrier": {},
    "broadcast": {"tensor": A_TENSOR, "root": RANK},
    "reduce_scatter_single": {"output": A_TENSOR, "input": A_TENSOR, "op": st.sampled_from(sorted(OPERATORS))},
    "exchange": {"tensor": A_TENSOR, "into": A_TENSOR, "tag": TAG},
    "put": {"tensor": A_TENSOR, "dst": RANK, "offset": OFFSET},
    "get": {"tensor": A_TENSOR, "src": RANK, "offset": OFFSET},
    "notice": {"of": RANK},
}


class Door:
    """A world of two ranks with or without shortcuts, in a loop of its own, and what it tells of a call."""

    def __init__(self, runner: asyncio.Runner, which: str, stack: ExitStack) -> None:
        self._runner = runner
        with door(which):
            world = local_world(2, "ucx")
            self.comms = runner.run(world.__aenter__())
        stack.callback(lambda: runner.run(world.__aexit__(None, None, None)))
        self.windows = dict(zip(self.comms, runner.run(windows_of(self.comms)), strict=True))
        assert (self.comms[0]._shortcuts is None) == (which == "pure")

    def call(self, where: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """Both ranks make a call, with tensors of their own; everything that can be seen of it."""
        return self._runner.run(self._call(where, name, args, named))

    async def _call(self, where: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        seen: list[Any] = []
        works: list[tuple[Any, dict[str, Any]]] = []
        for comm in self.comms:
            tensors = _tensors(comm.rank)
            known = {**tensors, **OPERATORS}
            real = [known.get(it, it) if isinstance(it, str) else it for it in args]
            words = {k: known.get(it, it) if isinstance(it, str) else it for k, it in named.items()}
            with place(comm, where) as at:  # no error may leave the lane: it would give the lane up
                try:
                    for it in await _start(at, self.windows[comm], name, real, words):
                        if isinstance(it, Exception):
                            seen.append((type(it), str(it)))
                        else:
                            works.append((it, tensors))
                except (CommError, TypeError) as error:
                    seen.append((type(error), str(error)))
        for work, tensors in works:
            known_as = {id(tensor): called for called, tensor in tensors.items()}
            async with asyncio.timeout(HANGS):
                try:
                    result = await work
                    seen.append((known_as.get(id(result)), None if result is None else result.tolist()))
                except CommError as error:
                    seen.append((type(error), str(error)))
            seen += [repr(work), work.seq, work.hints, isinstance(work, LaneWork), type(work.op), work.done()]
        for comm in self.comms:
            core = comm._core
            items = core.recorder.snapshot("").items()
            seen += [core.ledger.issued, core.ledger.laned, core.ledger.calls]
            seen += [comm.aborted, self.windows[comm].tensor.tolist()]
            seen += [
                (item.name, item.seq, item.state, item.args, item.collective, item.error, item.lane) for item in items
            ]
        return seen


async def _start(at: Any, window: aiocomms.Window, name: str, args: list[Any], named: dict[str, Any]) -> list[Any]:
    if name in ("put", "get"):
        return [getattr(window, name)(*args, **named)]
    if name == "notice":
        return _notice(at, window, *args, **named)
    if name != "exchange":
        return [getattr(at, name)(*args, **named)]
    given = dict(zip(("tensor", "into", "tag"), args, strict=False)) | named
    tensor, into = given.pop("tensor"), given.pop("into")
    if type(tensor) is type(into) is torch.Tensor and (tensor.numel(), tensor.dtype) != (into.numel(), into.dtype):
        # A size that does not fit is the transport's error, on both ranks.
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
    receive = at.recv(into, 1 - at.rank, **given)
    try:
        return [receive, at.send(tensor, 1 - at.rank, **given)]
    except CommError:
        assert await receive.cancel()  # the next message would be its otherwise
        raise


def _notice(at: Any, window: aiocomms.Window, of: Any, **more: Any) -> list[Any]:
    """A signal and the wait that it ends: to and from this rank if ``of`` is 0, the other one if it is 1."""
    rank = at.rank ^ of if type(of) is int and of in (0, 1) else of
    told: list[Any] = []
    for call in (window.signal, window.wait_signal):
        try:
            told.append(call(rank, **more))
        except (CommError, TypeError) as error:
            told.append(error)
    return told


@pytest.fixture(scope="module")
def both() -> Iterator[list[Door]]:
    """The same world twice."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        yield [Door(runner, which, stack) for which in DOORS]


@pytest.mark.parametrize("which", ["native"], indirect=True)  # the native run has both doors
@hypothesis.given(calls())
@hypothesis.settings(
    max_examples=300,
    derandomize=True,
    # The fixture of the door is asked for once.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.example(("communicator", "all_reduce", ("four", "SUM"), {}))
@hypothesis.example(("lane", "all_reduce", ("four", "SUM"), {}))
@hypothesis.example(("lane", "exchange", ("four", "two", -(2**31)), {}))
@hypothesis.example(("lane", "all_gather_single", ("both halves", "own half"), {}))
@hypothesis.example(("current lane", "all_gather_single", ("both halves", "overlapping"), {}))
@hypothesis.example(("communicator", "all_to_all_single", ("eight", "four"), {}))
@hypothesis.example(("communicator", "all_to_all_single", ("four", "square"), {}))
@hypothesis.example(("communicator", "all_to_all_single", ("three", "three more"), {}))
@hypothesis.example(("lane", "all_to_all_single", ("both halves", "four"), {}))
@hypothesis.example(("current lane", "all_to_all_single", ("both halves", "own half"), {}))
@hypothesis.example(("communicator", "reduce_scatter_single", ("own half", "both halves", "MAX"), {}))
@hypothesis.example(("lane", "reduce_scatter_single", ("four", "eight"), {"op": "AVG"}))
@hypothesis.example(("current lane", "broadcast", ("four",), {"root": 1}))
@hypothesis.example(("communicator", "exchange", ("four", "two", 1), {}))
@hypothesis.example(("lane", "exchange", ("four", "other half"), {"tag": 2**31}))
@hypothesis.example(("current lane", "put", ("four", 1, 4), {}))
@hypothesis.example(("communicator", "put", ("four", 0, 5), {}))
@hypothesis.example(("communicator", "put", ("own half",), {"dst": 0}))
@hypothesis.example(("communicator", "put", ("torch.float64", 1, 0), {}))
@hypothesis.example(("communicator", "put", ("four", 1, 2**58), {}))
@hypothesis.example(("communicator", "put", ("empty", 1, 8), {}))
@hypothesis.example(("communicator", "get", ("two", 1, 6), {}))
@hypothesis.example(("communicator", "get", ("tracked", 1, 0), {}))
@hypothesis.example(("communicator", "notice", (1,), {}))
@hypothesis.example(("communicator", "notice", (0,), {}))
@hypothesis.example(("communicator", "notice", (2,), {}))
def test_native_and_pure_shortcuts_behave_alike(
    both: list[Door], call: tuple[str, str, tuple[Any, ...], dict[str, Any]]
) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch warns of prototypes
        native, pure = (one.call(*call) for one in both)
    assert native == pure
