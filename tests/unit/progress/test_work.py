"""Work: the awaitable handle of an op, compared with asyncio.Future."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import anyio.to_thread
import pytest
import torch
from concurrency import LOOPS, VIRTUAL, in_threads, ranks, run_on, together, turns
from torch.distributed import HashStore

import aiocomms
from aiocomms import ops
from aiocomms.errors import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MessageTruncatedError,
    UnsupportedOperation,
    WorkCancelledError,
)
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.loops]

CANCELLED = object()


class Follower:
    """A task that awaits a work, and keeps its outcome."""

    def __init__(self, tasks, work):
        self.outcome = None
        self.scope = anyio.CancelScope()
        tasks.start_soon(self._follow, work)

    async def _follow(self, work):
        with self.scope:
            try:
                self.outcome = await work
            except CommError as error:
                self.outcome = error
        if self.scope.cancelled_caught:
            self.outcome = CANCELLED


class Reports:
    """The messages that a loop's exception handler and the log have got."""

    def __init__(self, loop, caplog):
        self._caplog = caplog
        self._said = []
        if loop != "trio":
            asyncio.get_running_loop().set_exception_handler(lambda _, context: self._said.append(context["message"]))

    def __iter__(self):
        gc.collect()
        yield from self._said
        yield from (record.getMessage() for record in self._caplog.records)


async def failed(world):
    """Return a receive that fails while no task awaits it, and its send, which succeeds."""
    send = world[0].send(torch.ones(3), 1)
    return world[1].recv(torch.zeros(2), 0), send


# ------------------------------------------------------------------------------------------------------- awaiting


def test_await_returns_the_result(run):
    async def main():
        async with local_world(2) as world:
            x, y = torch.ones(3), torch.zeros(3)
            send = world[0].send(x, 1)
            recv = world[1].recv(y, 0)
            assert await send is x
            assert await recv is y
            assert torch.equal(x, y)

    run(main)


def test_await_of_a_completed_work_does_not_suspend(run):
    async def main():
        async with local_world(1) as (comm,):
            work = comm.all_reduce(torch.ones(1))
            assert work.done()
            with pytest.raises(StopIteration) as stop:
                work.__await__().send(None)
            assert stop.value.value is work.op.tensor
            assert await work is await work

    run(main)


def test_many_awaiters_get_the_result(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[1].recv(torch.zeros(1), 0)
            followers = [Follower(tasks, work) for _ in range(5)]
            await turns()
            assert [f.outcome for f in followers] == [None] * 5
            await world[0].send(torch.ones(1), 1)
            await turns()
            assert all(f.outcome is work.op.tensor for f in followers)

    run(main)


def test_every_awaiter_gets_the_failure(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[1].recv(torch.zeros(2), 0)
            followers = [Follower(tasks, work) for _ in range(3)]
            await turns()
            await world[0].send(torch.ones(3), 1)
            await turns()
            assert all(isinstance(f.outcome, MessageTruncatedError) for f in followers)

    run(main)


def test_traceback_of_a_failure_does_not_grow_with_each_await(run):
    async def main():
        async with local_world(2) as world:
            work, _ = await failed(world)
            lengths = []
            for _ in range(3):
                with pytest.raises(MessageTruncatedError) as caught:
                    await work
                lengths.append(len(caught.traceback))
            assert len(set(lengths)) == 1

    run(main)


@pytest.mark.parametrize("loop", [VIRTUAL, pytest.param("asyncio", marks=pytest.mark.real)])
def test_work_is_an_awaitable_for_asyncio(run):
    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)
            waits = [asyncio.ensure_future(work), asyncio.create_task(asyncio.wait_for(work, 10))]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waits[0]), 0.001)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await work
            await world[0].send(torch.ones(1), 1)
            results = await asyncio.gather(work, *waits)
            assert results == [work.op.tensor] * 3

    run(main)


# ------------------------------------------------------------------------------------- as asyncio.Future


def test_pending_work_raises_invalid_state_for_its_result(run):
    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)
            assert not work.done()
            for ask in (work.result, work.exception):
                with pytest.raises(asyncio.InvalidStateError, match=r"recv #0 on 'world' \(rank 1\) pending"):
                    ask()
            assert await work.cancel()

    run(main)


def test_completed_work_has_a_result_and_no_exception(run):
    async def main():
        async with local_world(2) as world:
            send, recv = world[0].send(torch.ones(1), 1), world[1].recv(torch.zeros(1), 0)
            for work in (send, recv):
                assert work.done()
                assert work.exception() is None
                assert work.result() is work.op.tensor

    run(main)


def test_failed_work_has_an_exception_that_result_raises(run):
    async def main():
        async with local_world(2) as world:
            work, _ = await failed(world)
            error = work.exception()
            assert isinstance(error, MessageTruncatedError)
            assert (error.comm, error.op, error.seq, error.rank, error.peer) == ("world", "recv", 0, 1, 0)
            for _ in range(2):
                with pytest.raises(MessageTruncatedError) as caught:
                    work.result()
                assert caught.value is error

    run(main)


def test_done_callbacks_run_on_a_later_turn_in_order(run):
    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)
            called = []
            work.add_done_callback(lambda w: called.append((1, w)))
            work.add_done_callback(lambda w: called.append((2, w)))
            await turns()
            assert called == []
            await world[0].send(torch.ones(1), 1)
            assert called == []
            await turns()
            work.add_done_callback(lambda w: called.append((3, w)))
            assert called == [(1, work), (2, work)]
            await turns()
            assert called == [(1, work), (2, work), (3, work)]

    run(main)


def test_done_callback_that_raises_is_reported_and_stops_no_other(run, loop, caplog):
    async def main():
        async with local_world(2) as world:
            reports = Reports(loop, caplog)
            work = world[1].recv(torch.zeros(1), 0)
            called = []
            for callback in (lambda w: 1 / 0, called.append):
                work.add_done_callback(callback)
            await world[0].send(torch.ones(1), 1)
            await turns()
            assert called == [work]
            (report,) = reports
            assert "lambda" in report
            assert await work is work.op.tensor

    run(main)


# ------------------------------------------------------------------------------------------------------- cancelling


def test_cancelled_awaiter_leaves_the_others_waiting(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[0].send(torch.ones(1), 1)
            first, second = Follower(tasks, work), Follower(tasks, work)
            await turns()
            first.scope.cancel()
            await turns()
            assert first.outcome is CANCELLED
            assert not work.done()
            assert (await world[1].recv(torch.zeros(1), 0)).item() == 1
            await turns()
            assert second.outcome is work.op.tensor
            assert await work is work.op.tensor

    run(main)


def test_send_and_collective_survive_their_last_awaiter(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            works = [world[0].send(torch.ones(1), 1), world[0].all_reduce(torch.ones(2))]
            followers = [Follower(tasks, work) for work in works]
            await turns()
            for follower in followers:
                follower.scope.cancel()
            await turns()
            assert not any(work.done() for work in works)
            theirs = [world[1].recv(torch.zeros(1), 0), world[1].all_reduce(torch.ones(2))]
            for work in (*works, *theirs):
                await work
            assert works[1].result().tolist() == [2, 2]

    run(main)


def test_recv_is_withdrawn_with_its_last_awaiter(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[1].recv(torch.zeros(1), 0)
            followers = [Follower(tasks, work) for _ in range(2)]
            await turns()
            followers[0].scope.cancel()
            await turns()
            assert not work.done()
            followers[1].scope.cancel()
            await turns()
            assert isinstance(work.exception(), WorkCancelledError)
            send = world[0].send(torch.ones(1), 1)
            await turns()
            assert not send.done()
            assert (await world[1].recv(torch.zeros(1), 0)).item() == 1
            assert work.op.tensor.item() == 0

    run(main)


def test_recv_that_was_never_awaited_is_not_withdrawn(run):
    async def main():
        async with local_world(2) as world:
            y = torch.zeros(1)
            world[1].recv(y, 0)
            gc.collect()
            await turns()
            await world[0].send(torch.ones(1), 1)
            assert y.item() == 1

    run(main)


@pytest.mark.parametrize("first", ["the message comes", "the await is cancelled"])
def test_recv_completed_and_cancelled_in_one_turn_loses_no_message(run, first):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[1].recv(torch.zeros(1), 0)
            follower = Follower(tasks, work)
            await turns()
            if first == "the message comes":
                send = world[0].send(torch.ones(1), 1)
                follower.scope.cancel()
            else:
                follower.scope.cancel()
                send = world[0].send(torch.ones(1), 1)
            await turns()
            assert follower.outcome in (CANCELLED, work.op.tensor)
            if isinstance(work.exception(), WorkCancelledError):
                assert not send.done()
                assert (await world[1].recv(torch.zeros(1), 0)).item() == 1
            else:
                assert work.result().item() == 1
            await send

    run(main)


def test_asyncio_task_cancel_withdraws_its_recv():
    async def main():
        async with local_world(2) as world:

            async def wait(work):
                return await work

            for early in (True, False):
                work = world[1].recv(torch.zeros(1), 0)
                task = asyncio.create_task(wait(work))
                await turns()
                if early:
                    await world[0].send(torch.ones(1), 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert work.done()
                assert (work.exception() is None) == early

    asyncio.run(main())


def test_cancel_withdraws_an_unmatched_recv(run):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            work = world[1].recv(torch.zeros(1), 0)
            follower = Follower(tasks, work)
            await turns()
            assert await work.cancel() is True
            assert await work.cancel() is True
            await turns()
            assert isinstance(follower.outcome, WorkCancelledError)
            assert not isinstance(follower.outcome, asyncio.CancelledError)
            with pytest.raises(WorkCancelledError, match="its buffer is untouched"):
                await work

    run(main)


def test_cancel_of_a_send_waits_for_its_completion(run):
    async def main():
        async with local_world(2) as world:
            work = world[0].send(torch.ones(1), 1)
            answers = await together(work.cancel, lambda: world[1].recv(torch.zeros(1), 0).wait())
            assert answers[0] is False
            assert await work.cancel() is False
            assert await work is work.op.tensor

    run(main)


def test_cancel_of_a_failed_work_returns_false(run):
    async def main():
        async with local_world(2) as world:
            work, _ = await failed(world)
            assert await work.cancel() is False
            await work.wait()
            assert work.exception()

    run(main)


@pytest.mark.virtual_time
def test_cancelled_cancel_leaves_the_work_pending(run):
    async def main():
        async with local_world(2) as world:
            work = world[0].send(torch.ones(1), 1)
            with anyio.move_on_after(0.001) as scope:
                await work.cancel()
            assert scope.cancelled_caught
            assert not work.done()
            await world[1].recv(torch.zeros(1), 0)
            assert await work is work.op.tensor

    run(main)


# --------------------------------------------------------------------------------------- other loops and threads


@pytest.mark.fault(52)
@pytest.mark.parametrize("elsewhere", LOOPS)
def test_await_in_another_loop_is_refused(run, loop, elsewhere):
    alike = (loop == "trio") == (elsewhere == "trio")  # Other pairs of loops raise their own error.

    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)

            async def wait():
                await work

            def other():
                with pytest.raises(RuntimeError, match="wait_blocking" if alike else None):
                    run_on(elsewhere, wait)
                return True

            assert in_threads(other) == [True]
            await world[0].send(torch.ones(1), 1)
            assert (await work).item() == 1

    run(main)


def duo(loop, main, **options):
    """Run ``main(comm)`` on two ranks, each in a loop and thread of its own."""
    store = HashStore()

    async def rank(r):
        place = {"store": store, "rank": r, "size": 2, "timeout": 20, **options}
        async with aiocomms.new_comm("local", **place) as comm:
            return await main(comm)

    return in_threads(*(lambda r=r: run_on(loop, rank, r) for r in range(2)))


def test_wait_blocking_on_the_loops_thread_returns_the_result(loop):
    waits = threading.Event()

    async def main(comm):
        if comm.rank == 0:
            work = comm.recv(torch.zeros(1), 1)
            waits.set()
            return work.wait_blocking(10).item()
        await anyio.to_thread.run_sync(waits.wait, 10)
        return (await comm.send(torch.ones(1), 0)).item()

    assert duo(loop, main) == [1, 1]


def test_wait_blocking_on_another_thread_returns_the_result(run):
    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)

            async def send():
                await turns()
                return await world[0].send(torch.ones(1), 1)

            results = await together(lambda: anyio.to_thread.run_sync(work.wait_blocking, 20), send)
            assert results[0] is work.op.tensor
            assert work.wait_blocking() is work.op.tensor

    run(main)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_wait_blocking_that_times_out_leaves_the_op_pending(run, where):
    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0)
            with pytest.raises(TimeoutError, match=r"not done within 0\.01 s; it goes on") as caught:
                in_threads(lambda: work.wait_blocking(0.01)) if where == "elsewhere" else work.wait_blocking(0.01)
            assert not isinstance(caught.value, CommError)
            await world[0].send(torch.ones(1), 1)
            assert (await work).item() == 1

    run(main)


def test_wait_blocking_raises_the_error_of_the_op(run):
    async def main():
        async with local_world(2) as world:
            work, _ = await failed(world)
            with pytest.raises(MessageTruncatedError):
                work.wait_blocking(0)

    run(main)


@pytest.mark.real
@pytest.mark.parametrize("ends", ["its deadline", "an abort on another thread", "an abort of the peer"])
def test_wait_blocking_raises_when_the_op_is_late_or_aborted(loop, ends):
    ended = threading.Event()

    async def main(comm):
        if comm.rank == 1:
            if ends == "an abort of the peer":
                comm.abort("enough")
            assert await anyio.to_thread.run_sync(ended.wait, 10)
            return
        if ends == "an abort on another thread":
            threading.Timer(0.05, comm.abort, ("enough",)).start()
        timeout = 0.05 if ends == "its deadline" else 20
        with pytest.raises(CommTimeoutError if ends == "its deadline" else CommAbortedError):
            comm.all_reduce(torch.zeros(1), timeout=timeout).wait_blocking(5)
        assert comm.aborted
        ended.set()

    duo(loop, main)


# --------------------------------------------------------------------------------------- failures nobody asks for


@pytest.mark.fault(50)
def test_failure_that_is_never_retrieved_is_reported_once(run, loop, caplog):
    async def main():
        async with local_world(2) as world:
            reports = Reports(loop, caplog)
            works = await failed(world)
            assert list(reports) == []
            del works
            (report,) = reports
            assert "no task awaited a work that failed: recv #0 on 'world' (rank 1)" in report

    run(main)


@pytest.mark.parametrize("how", ["await", "result", "exception", "wait_blocking", "an awaiter", "a callback"])
def test_failure_that_was_retrieved_is_not_reported(run, loop, caplog, how):
    async def main():
        async with local_world(2) as world, anyio.create_task_group() as tasks:
            reports = Reports(loop, caplog)
            if how in ("an awaiter", "a callback"):
                work = world[1].recv(torch.zeros(2), 0)
                if how == "an awaiter":
                    Follower(tasks, work)
                else:
                    work.add_done_callback(lambda work: None)
                await turns()
                await world[0].send(torch.ones(3), 1)
            else:
                work, _ = await failed(world)
                try:
                    await work if how == "await" else getattr(work, how)()
                except MessageTruncatedError:
                    pass
            await turns()
            del work
            assert list(reports) == []

    run(main)


def test_aborted_or_withdrawn_work_is_not_reported(run, loop, caplog):
    async def main():
        async with local_world(2) as world:
            reports = Reports(loop, caplog)
            assert await world[1].recv(torch.zeros(1), 0).cancel()
            for comm in world:
                comm.recv(torch.zeros(1), 1 - comm.rank)
                comm.all_reduce(torch.zeros(1)) if comm.rank else None
            world[0].abort("enough")
            await turns()
            assert list(reports) == []

    run(main)


# --------------------------------------------------------------------------------------------- for transports


def test_second_completion_by_a_transport_raises_runtime_error(run):
    async def main():
        async with local_world(2) as world:
            send, recv = world[0].send(torch.ones(1), 1), world[1].recv(torch.zeros(1), 0)
            for again in (send.complete, lambda: recv.fail(CommError("no"))):
                with pytest.raises(RuntimeError, match=r"the transport completed <Work .* twice"):
                    again()
            assert await send is send.op.tensor

    run(main)


def test_completion_of_an_aborted_work_is_ignored(run):
    async def main():
        async with local_world(2) as world:
            work = world[0].send(torch.ones(1), 1)
            world[0].abort("enough")
            await work.wait()
            assert isinstance(work.exception(), CommAbortedError)
            work.complete()
            work.fail(CommError("no"))
            assert isinstance(work.exception(), CommAbortedError)

    run(main)


# ------------------------------------------------------------------------------------------- what it keeps and says


@pytest.mark.fault(38, 49, transport="local")
def test_unreferenced_work_completes_and_keeps_its_tensors_until_then(run):
    async def main():
        async with local_world(2) as world:
            tensors = [torch.full((3,), 7.0), torch.zeros(3), torch.ones(2)]
            refs = [weakref.ref(tensor) for tensor in tensors]
            world[0].send(tensors[0], 1)
            world[1].recv(tensors[1], 0, tag=5)
            world[0].all_reduce(tensors[2])
            tensors.clear()
            gc.collect()
            await turns()
            assert all(ref() is not None for ref in refs)
            out = torch.zeros(3)
            await ranks(world[1:], lambda comm: comm.recv(out, 0).wait())
            await world[0].send(torch.ones(3), 1, tag=5)
            await world[1].all_reduce(torch.ones(2))
            assert out.tolist() == [7, 7, 7]
            await turns()
            gc.collect()
            assert all(ref() is None for ref in refs)

    run(main)


@pytest.mark.fault(49, 77, transport="local")
@pytest.mark.parametrize("move", [lambda tensor: tensor.untyped_storage().resize_(4096), torch.Tensor.share_memory_])
def test_storage_moved_during_an_op_is_an_error(run, move):
    async def main():
        async with local_world(2) as (one, two):
            tensor = torch.zeros(3)
            work = two.recv(tensor, 0)
            move(tensor)
            await one.send(torch.ones(3), 1)
            with pytest.raises(CommError, match=r"recv #0 .* the storage of a tensor was resized while the op had it"):
                await work
            works = [two.recv(tensor, 0), one.send(torch.ones(3), 1)]  # Later ops of the tensor work.
            await works[0]
            assert tensor.tolist() == [1, 1, 1]

    run(main)


@pytest.mark.fault(49, 77, 132, transport="local")
def test_storage_freed_during_a_collective_is_an_error(run):
    async def main():
        async with local_world(2) as comms:
            tensor = torch.zeros(3)
            work = comms[1].all_reduce(tensor)
            tensor.untyped_storage().resize_(0)
            other = comms[0].all_reduce(torch.ones(3))
            for each in (work, other):
                with pytest.raises(CommError, match="the storage of a tensor of rank 1 was resized"):
                    await each

    run(main)


@pytest.mark.fault(49, transport="local")
def test_memory_of_an_op_stays_alive_when_its_tensor_is_reset(run):
    async def main():
        async with local_world(2) as (one, two):
            given, lists = torch.zeros(3), [torch.zeros(3) for _ in range(2)]
            works = [two.recv(given, 0), two.all_gather(lists, torch.zeros(3))]
            memory = [weakref.ref(tensor.untyped_storage()) for tensor in (given, *lists)]
            for tensor in (given, *lists):
                tensor.set_(torch.zeros(3))
            gc.collect()
            assert all(ref() is not None for ref in memory)
            await one.send(torch.ones(3), 1)
            await one.all_gather([torch.zeros(3) for _ in range(2)], torch.ones(3))
            for work in works:
                await work
            del work, works
            await turns()
            gc.collect()
            assert all(ref() is None for ref in memory)

    run(main)


def test_work_shows_op_and_state_in_attributes_and_repr(run):
    async def main():
        async with local_world(2) as world:
            x = torch.ones(1)
            work = world[0].send(x, 1, tag=3)
            assert (type(work.op), work.op.tensor, work.op.dst, work.op.tag, work.seq) == (ops.Send, x, 1, 3, 0)
            assert repr(work) == "<Work send #0 on 'world' (rank 0) pending>"
            short = world[1].recv(torch.zeros(0), 0, tag=3)
            assert repr(work) == "<Work send #0 on 'world' (rank 0) done>"
            assert repr(short).startswith("<Work recv #0 on 'world' (rank 1) failed MessageTruncatedError(")
            assert short.exception()
            assert world[0].send(x, 1).seq == 1
            await world[1].recv(torch.zeros(1), 0)

    run(main)


def test_wait_stream_on_the_cpu_is_refused(run):
    async def main():
        async with local_world(1) as (comm,):
            with pytest.raises(UnsupportedOperation, match="await the work instead") as caught:
                comm.barrier().wait_stream()
            assert caught.value.op == "barrier"

    run(main)
