"""Portals: order and context of calls, and threads that wait while the loop is blocked or ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from concurrency import together, turns
from processes import HANGS
from torch.distributed import HashStore

import aiocomms
from aiocomms.communicator.portal import pending
from aiocomms.errors import ArgumentError, CommAbortedError, CommClosedError, CommError, CommTimeoutError
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.loops]

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where")


class Thread(threading.Thread):
    """A thread that keeps the result or the error of its call."""

    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self.outcome = target, None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except BaseException as error:
            self.outcome = error

    def end(self) -> Any:
        self.join(HANGS)
        assert not self.is_alive(), "the thread hangs"
        return self.outcome


@pytest.fixture
def impatient(monkeypatch):
    """Let waiting threads check the loop every 10 ms."""
    monkeypatch.setattr(pending, "LOOK", 0.01)


async def in_thread(call: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(call)


def test_portal_of_a_communicator_is_always_the_same(run):
    async def main() -> None:
        async with local_world(2) as (one, two):
            assert one.portal() is one.portal() is await in_thread(one.portal) is not two.portal()

    run(main)


def test_portal_calls_start_in_order_and_in_their_threads_context(run):
    async def main() -> None:
        async with aiocomms.new_comm("local") as comm:
            portal, seen = comm.portal(), []
            comm.register_pre_hook(lambda op, seq: seen.append((seq, op.tensor.item(), WHERE.get("loop"))))

            def call(name: str, numbers: range) -> list[Any]:
                WHERE.set(name)
                return [portal.all_reduce(torch.tensor(i)) for i in numbers]

            threads = [Thread(lambda n=n: call(f"thread {n}", range(100 * n, 100 * n + 100))) for n in range(3)]
            outcomes = [thread.end() for thread in threads]  # The loop does not run meanwhile.
            assert not seen
            for outcome in outcomes:
                await in_thread(outcome[-1].wait)
            assert [seq for seq, _, _ in seen] == list(range(300))
            assert all(where == f"thread {number // 100}" for _, number, where in seen)
            for n in range(3):
                assert [i for _, i, _ in seen if i // 100 == n] == list(range(100 * n, 100 * n + 100))

    run(main)


def test_portal_call_on_the_loops_thread_is_refused(run):
    async def main() -> None:
        async with local_world(2) as (one, _):
            portal = one.portal()
            for call in (portal.barrier, lambda: portal.split([0]), portal.close):
                with pytest.raises(RuntimeError, match="on 'world' was called on the loop's own thread"):
                    call()
            work = await in_thread(lambda: portal.recv(torch.zeros(1), 1))
            for ask in (work.wait, work.cancel):
                with pytest.raises(RuntimeError, match="wait for recv on 'world' was called on the loop's own thread"):
                    ask()
            assert await in_thread(work.cancel)

    run(main)


@pytest.mark.parametrize("how", ["healthy", "lost"])
def test_portal_close_after_the_communicator_ended_returns(run, how):
    async def main() -> None:
        async with local_world(2) as (one, two):
            portal, come, closed = one.portal(), threading.Semaphore(0), threading.Event()
            other = Thread(lambda: two.portal().open_stream(0))
            stream = await in_thread(lambda: portal.open_stream(1))
            await in_thread(other.end)
            if how == "lost":
                one.abort("enough")

            def closed_meanwhile(what: str) -> None:
                come.release()
                assert closed.wait(HANGS)

            portal._door.elsewhere = closed_meanwhile
            threads = [Thread(portal.close), Thread(stream.close)]
            for _ in threads:
                assert await in_thread(lambda: come.acquire(timeout=HANGS))
            await one.aclose()
            closed.set()
            assert [thread.end() for thread in threads] == [None, None]
            assert await in_thread(portal.close) is None

    run(main)


@pytest.mark.parametrize("how", ["healthy", "lost"])
def test_portal_close_raises_the_transports_error(run, monkeypatch, how):
    async def main() -> None:
        async with local_world(2) as (one, _):
            (transport,) = set(one._core.transports)
            close = transport.aclose

            async def broken() -> None:
                await close()
                raise OSError("the cable is cut")

            monkeypatch.setattr(transport, "aclose", broken)
            if how == "lost":
                one.abort("enough")
            with pytest.raises(CommError, match="the cable is cut"):
                await in_thread(one.portal().close)
            assert one.closed

    run(main)


def test_portal_wait_with_a_wrong_timeout_is_refused(run):
    async def main() -> None:
        async with local_world(2) as (one, _):
            work = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
            for wrong in (-1, float("nan"), "soon"):
                with pytest.raises(ArgumentError, match="timeout is"):
                    await in_thread(lambda wrong=wrong: work.wait(wrong))
            await in_thread(work.cancel)

    run(main)


def test_portal_wait_raises_what_a_pre_hook_raised(run):
    async def main() -> None:
        async with aiocomms.new_comm("local") as comm:

            def refuse(op: Any, seq: int) -> None:
                raise KeyError("no")

            hook = comm.register_pre_hook(refuse)
            with pytest.raises(KeyError, match="no"):
                await in_thread(lambda: comm.portal().barrier().wait())
            hook.remove()
            assert await in_thread(lambda: comm.portal().barrier().wait()) is None

    run(main)


def test_portal_op_uses_the_current_cuda_stream_of_its_thread(run, monkeypatch):
    entered: list[object] = []

    @contextlib.contextmanager
    def stream(given: object) -> Iterator[None]:
        entered.append(given)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{threading.current_thread().name} on {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)

    async def main() -> None:
        async with aiocomms.new_comm("local") as comm:
            comm.register_pre_hook(lambda op, seq: entered.append(seq))
            comm.device = torch.device("cuda:0")
            thread = Thread(lambda: comm.portal().barrier().wait())
            assert await in_thread(thread.end) is None
            assert entered == [f"{thread.name} on cuda:0", 0, "left"]

    run(main)


def test_portal_wait_returns_after_the_post_hooks(run):
    async def main() -> None:
        async with local_world(2) as (one, two):
            heard: list[object] = []
            one.register_post_hook(heard.append)
            thread = Thread(lambda: [one.portal().recv(torch.zeros(1), 1).wait(), len(heard)][1])
            await two.send(torch.ones(1), 0)
            assert await in_thread(thread.end) == 1

    run(main)


def test_portal_failure_that_is_never_retrieved_is_reported_once(run, caplog):
    async def main() -> None:
        reports: list[str] = []
        if aiocomms_loop := _asyncio_loop():
            aiocomms_loop.set_exception_handler(lambda loop, context: reports.append(context["message"]))
        async with local_world(2) as (one, two):
            for asked in (True, False):
                works: list[Any] = []  # A worker thread of anyio would keep a returned work for a moment.
                await in_thread(lambda works=works: works.append(one.portal().recv(torch.zeros(1), 1)))
                await two.send(torch.ones(9), 0)
                if asked:
                    with pytest.raises(aiocomms.errors.MessageTruncatedError):
                        await in_thread(works[0].wait)
                works.clear()
                await anyio.wait_all_tasks_blocked()
                gc.collect()
                reports += [record.getMessage() for record in caplog.records]
                caplog.clear()
                assert len(reports) == (not asked), reports
        assert "no task awaited a work that failed: recv" in reports[0]

    run(main)


@pytest.mark.parametrize("over", [False, True])
def test_exception_of_a_done_callback_is_reported_and_harms_nothing(run, caplog, over):
    async def main() -> None:
        reports: list[str] = []
        if loop := _asyncio_loop():
            loop.set_exception_handler(lambda loop, context: reports.append(context["message"]))
        async with local_world(2) as (one, two):
            work = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
            if not over:
                work.add_done_callback(lambda work: None)
            await two.send(torch.ones(1), 0)
            if over:
                await in_thread(work.wait)
                work.add_done_callback(lambda work: None)
            assert (await in_thread(work.wait)).item() == 1.0
            assert not one.aborted
            reports += [record.getMessage() for record in caplog.records]
            assert len(reports) == 1
            assert "the done callback <function" in reports[0]

    run(main)


def test_done_callback_that_cannot_be_called_is_refused(run):
    async def main() -> None:
        async with local_world(2) as (one, _):
            work = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
            for add in (work.add_done_callback, work.add_step):
                with pytest.raises(ArgumentError, match=r"call is 5 \(int\), wanted a function without arguments"):
                    add(5)
            assert await in_thread(work.cancel)

    run(main)


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def test_threads_waiting_on_a_portal_are_released_when_the_loop_ends(run):
    """A communicator that was left open is closed with its loop, and waiting threads get an error."""
    threads: list[Thread] = []

    async def main() -> None:
        store = HashStore()
        one, _ = await together(*(lambda r=r: _open(store=store, rank=r, size=2) for r in range(2)))
        waiting = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
        threads.append(Thread(waiting.wait))
        threads.append(Thread(lambda: one.portal().open_stream(1)))
        portals.append(one.portal())

    portals: list[Any] = []
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031 - the threads drop their references here
        run(main)
        for thread in threads:
            assert isinstance(thread.end(), (CommClosedError, CommAbortedError)), thread.outcome
    with pytest.raises(CommClosedError):
        portals[0].barrier()
    portals[0].close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_portal_wait_raises_when_the_loop_is_closed_by_hand(impatient):
    """A loop closed by hand wakes no thread; each waiting thread finds out by itself, and gets CommClosedError."""
    loop = asyncio.new_event_loop()
    comm = loop.run_until_complete(_open())
    portal = comm.portal()
    begun = Thread(portal.barrier).end()
    waiting = [Thread(begun.wait), Thread(lambda: portal.split([0]))]
    loop.close()
    for thread in waiting:
        assert isinstance(thread.end(), CommClosedError)
        assert "the event loop of the communicator has ended" in str(thread.end())
    late = Thread(lambda: portal.barrier().wait()).end()
    assert isinstance(late, CommClosedError)
    assert "barrier on 'world' (rank 0): the event loop of the communicator has ended" in str(late)
    assert Thread(portal.close).end() is None
    comm._released()
    comm._leaving.finish()


def test_thread_that_ends_the_interpreter_does_not_stand_still(run, monkeypatch):
    """The thread that runs the last finalizers goes on. Without this rule, a finalizer that waits would hang."""
    monkeypatch.setattr(pending, "_ending", [])

    async def main() -> None:
        async with local_world(1) as (one,):
            thread = Thread(lambda: [pending.stand_still(), one.portal().all_reduce(torch.ones(1)).wait().item()])
            assert await in_thread(thread.end) == [None, 1.0]

    run(main)


async def _open(**place: Any) -> aiocomms.Communicator:
    return await aiocomms.new_comm("local", **place)


def test_portal_call_times_out_when_the_loop_is_stuck(run, impatient):
    """A call that has not started by its deadline never starts; a late collective also aborts the communicator."""

    async def main() -> None:
        async with local_world(2) as (one, _):
            portal = one.portal()
            late = Thread(lambda: portal.recv(torch.zeros(1), 1, timeout=0.02).wait()).end()
            assert isinstance(late, CommTimeoutError)
            assert "event loop" in late.message
            assert late.op == "recv"
            assert not one.aborted
            late = Thread(lambda: portal.barrier(timeout=0.02).wait()).end()
            assert isinstance(late, CommTimeoutError)
            assert late.op == "barrier"
            assert one.aborted
            await anyio.wait_all_tasks_blocked()
            assert one._core.ledger.issued == 0
            with pytest.raises(CommAbortedError):
                one.barrier()

    run(main)


def test_portal_call_that_has_not_begun_when_it_times_out_never_begins(run, impatient):
    """A blocked loop does not hold up the timeout of a call, and no item arrives at a call that is over."""

    async def main() -> None:
        async with local_world(2) as (one, two):
            other = Thread(lambda: two.portal().open_stream(0))
            stream = await in_thread(lambda: one.portal().open_stream(1))
            for call in (stream.receive, one.portal().lost):
                outcome = Thread(lambda call=call: call(timeout=0.02)).end()
                assert type(outcome) is TimeoutError, outcome
            await in_thread(lambda: other.end().send(torch.ones(1)))
            assert (await in_thread(stream.receive)).item() == 1.0

    run(main)


def test_portal_wait_raises_the_abort_when_the_loop_is_stuck(run, impatient):
    async def main() -> None:
        async with local_world(2) as (one, two):
            begun = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
            two.abort("for the test")
            outcome = Thread(begun.wait).end()
            assert isinstance(outcome, CommAbortedError)
            assert "for the test" in outcome.message

    run(main)


def test_several_threads_may_wait_for_one_portal_work(run):
    async def main() -> None:
        async with local_world(2) as (one, two):
            work = await in_thread(lambda: one.portal().recv(torch.zeros(1), 1))
            threads = [Thread(work.wait) for _ in range(8)]
            await two.send(torch.ones(1), 0)
            assert all([await in_thread(thread.end) is work.op.tensor for thread in threads])

    run(main)


def test_wait_blocking_on_the_loops_thread_runs_portal_calls(run):
    async def main() -> None:
        async with local_world(2) as (one, two):
            thread = Thread(lambda: one.portal().send(torch.ones(1), 1).wait())
            tensor = torch.zeros(1)
            two.recv(tensor, 0).wait_blocking(HANGS)
            assert tensor.item() == 1
            await in_thread(thread.end)

    run(main)


def test_portal_stream_receive_that_times_out_loses_no_item(run):
    async def main() -> None:
        async with local_world(2) as (one, two):

            def body(comm: aiocomms.Communicator) -> None:
                with comm.portal().open_stream(1 - comm.rank) as stream:
                    if comm.rank:
                        with pytest.raises(TimeoutError):
                            stream.receive(timeout=0.01)
                        comm.portal().barrier().wait()
                        assert stream.receive().item() == 3
                    else:
                        comm.portal().barrier().wait()
                        stream.send(torch.tensor([3]))
                    comm.portal().barrier().wait()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(in_thread, lambda: body(one))
                tasks.start_soon(in_thread, lambda: body(two))
            with pytest.raises(TimeoutError):
                await in_thread(lambda: one.portal().open_stream(1, name="nobody", timeout=0.01))

    run(main)


@pytest.mark.parametrize("waits", [True, False])
def test_interrupted_portal_recv_is_withdrawn_unless_a_callback_waits(run, waits):
    async def main() -> None:
        async with local_world(2) as (one, two):
            called, threads, tensor = threading.Event(), [], torch.zeros(1)
            work = await in_thread(lambda: two.portal().recv(tensor, 0))
            (work.add_done_callback if waits else work.add_step)(called.set)

            def wait() -> None:
                threads.append(threading.get_ident())
                work.wait()

            waiter = Thread(wait)
            while len(work._bells) == 1:
                await turns()
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[0]), interrupt)
            assert isinstance(await in_thread(waiter.end), KeyboardInterrupt)
            assert work.done() != waits
            sent = one.send(torch.ones(1), 1)
            if not waits:
                assert (await two.recv(torch.zeros(1), 0)).item() == 1.0
            await sent
            await in_thread(called.wait)
            assert bool(tensor) == waits

    run(main)


class Interrupting(list[Any]):
    """A list that raises KeyboardInterrupt after each append."""

    def append(self, item: Any) -> None:
        super().append(item)
        raise KeyboardInterrupt


def test_interrupt_at_the_start_of_a_portal_wait_withdraws_the_recv(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with local_world(2) as (_, two):
            work = await in_thread(lambda: two.portal().recv(torch.zeros(1), 0))
            work._bells = Interrupting()
            assert isinstance(await in_thread(Thread(work.wait).end), KeyboardInterrupt)
            assert work.done()

    run(main)
