"""The communicator itself: hooks, names, splitting, aborting and closing, on every loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import threading
import weakref
from unittest.mock import patch

import anyio
import anyio.to_thread
import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import in_threads, ranks, run_on, together, turns
from processes import all_let_go, held

import aiocomms
from aiocomms import ReduceOp, ops
from aiocomms.bootstrap import directory, meeting
from aiocomms.core import core
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    BufferBusyError,
    CommAbortedError,
    CommClosedError,
    CommError,
    MismatchError,
    StoreLostError,
    UnsupportedOperation,
)
from aiocomms.lowlevel import clock
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = pytest.mark.deterministic


async def outcome(work):
    """Return the result of a work, or its error."""
    try:
        return await work
    except CommError as error:
        return error


@contextlib.contextmanager
def on_signal(handler):
    """Let SIGUSR2 call a function in this thread."""
    before = signal.signal(signal.SIGUSR2, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


async def total(comm):
    return (await comm.all_reduce(torch.ones(1))).item()


# ----------------------------------------------------------------------------------------------------------- hooks


def test_hooks_see_every_op(run):
    async def main():
        async with local_world(2) as (one, two):
            seen = []
            before = one.register_pre_hook(lambda op, seq: seen.append(("pre", op.name, seq)))
            after = one.register_post_hook(lambda work: seen.append(("post", work.op.name, work.seq, work.done())))
            work = one.recv(torch.empty(2), 1)
            await two.send(torch.ones(2), 0)
            await work
            with pytest.raises(ArgumentError):
                one.send(torch.ones(2), 7)  # The op is not posted, so no hook sees it.
            before.remove()
            after.remove()
            after.remove()
            await ranks([one, two], total)
            assert seen == [("pre", "recv", 0), ("post", "recv", 0, True)]

    run(main)


def test_a_pre_hook_that_raises_stops_the_op(run):
    async def main():
        async with local_world(1) as (comm,):

            def refuse(op, seq):
                raise PermissionError("not now")

            hook = comm.register_pre_hook(refuse)
            tensor = torch.ones(2)
            with pytest.raises(PermissionError):
                comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(3.0))
            assert tensor.eq(1).all()
            hook.remove()
            await comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(3.0))
            assert tensor.eq(3).all()

    run(main)


class OddError(BaseException):
    """An exception that is no ``Exception``."""


@pytest.mark.fault(133)
@pytest.mark.parametrize("odd", [ValueError, OddError, asyncio.CancelledError, GeneratorExit])
def test_exception_of_a_post_or_abort_hook_is_reported_and_stops_nothing(odd):
    async def main():
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context["exception"])))
        async with local_world(2) as world:

            def broken(_):
                raise odd("broken hook")

            world[0].register_post_hook(broken)
            world[0].register_abort_hook(broken)
            assert await ranks(world, total) == [2, 2]
            world[1].abort("enough")
        assert said == ["broken hook"] * 2

    run_on("asyncio", main)


@pytest.mark.fault(133)
@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_hook_that_raises_exit_or_interrupt_ends_the_loop_after_the_call(ends):
    called = []

    def hook(work):
        called.append(work)
        raise ends("from a hook")

    async def main():
        async with local_world(2) as (one, two):
            one.register_post_hook(hook).remove()
            handle = one.register_post_hook(hook)
            one.register_post_hook(called.append)  # This hook is called all the same.
            works = [comm.all_reduce(torch.ones(1)) for comm in (one, two)]
            assert called == [works[0]] * 2
            handle.remove()
            called.append([(await work).item() for work in works])
            await turns()

    with pytest.raises(ends, match="from a hook"):
        run_on("asyncio", main)
    assert called[2] == [2.0, 2.0]


def test_abort_hooks_get_the_first_reason_once(run):
    async def main():
        async with local_world(3) as world:
            reasons = []
            for comm in world:
                comm.register_abort_hook(lambda error, rank=comm.rank: reasons.append((rank, str(error))))
            world[1].abort("first")
            world[1].abort("second")
            world[2].abort("third")
            await turns()
            assert sorted(rank for rank, _ in reasons) == [0, 1, 2]
            assert all("aborted by rank 1: first" in reason for _, reason in reasons)

    run(main)


def test_a_hook_registered_twice_is_called_twice_and_removed_one_by_one():
    async def main():
        async with local_world(1) as (comm,):
            seen = []
            first, second = (comm.register_post_hook(seen.append) for _ in range(2))
            await comm.barrier()
            assert len(seen) == 2
            first.remove()
            first.remove()
            await comm.barrier()
            assert len(seen) == 3
            second.remove()
            await comm.barrier()
            assert len(seen) == 3

    run_on("asyncio", main)


def test_hook_that_is_not_callable_is_refused():
    async def main():
        async with local_world(1) as (comm,):
            for register in (comm.register_pre_hook, comm.register_post_hook, comm.register_abort_hook):
                with pytest.raises(ArgumentTypeError, match=r"fn is 5 \(int\), wanted a function"):
                    register(5)
            await comm.barrier()

    run_on("asyncio", main)


def test_local_world_refuses_a_size_that_is_no_positive_int():
    async def main(size, error, text):
        with pytest.raises(error, match=text):
            async with local_world(size):
                pass

    run_on("asyncio", main, "2", ArgumentTypeError, r"size is '2' \(str\), wanted the number of ranks as an int")
    run_on("asyncio", main, 0, ArgumentError, "size is 0, wanted at least 1 rank")


def test_operator_undefined_for_a_dtype_names_the_supported_dtypes():
    async def main():
        async with local_world(1) as (comm,):
            with pytest.raises(
                UnsupportedOperation, match=r"op avg .* dtype torch.int32, wanted one of .*torch.float32"
            ):
                comm.all_reduce(torch.ones(1, dtype=torch.int32), ReduceOp.AVG)

    run_on("asyncio", main)


def test_wrong_arguments_of_reconfigure_name_reconfigure():
    async def main():
        async with local_world(2) as world:
            with pytest.raises(
                ArgumentError, match=r"^reconfigure on 'world' \(rank 0\): ranks is \[1\] and leaves out"
            ):
                await world[0].reconfigure([1])
            with pytest.raises(
                ArgumentError, match=r"^reconfigure on 'world' \(rank 1\): size is 1, wanted an int above"
            ):
                await world[1].reconfigure(size=1)

    run_on("asyncio", main)


def test_op_started_by_a_pre_hook_has_its_own_sequence_number(run):
    async def main():
        async with local_world(2) as world:

            async def each(comm):
                inner = []
                comm.register_pre_hook(
                    lambda op, seq: inner.append(comm.barrier()) if op.name == "all_reduce" else None
                )
                outer = comm.all_reduce(torch.ones(1))
                await inner[0]
                assert (await outer).item() == 2
                assert inner[0].seq != outer.seq

            await ranks(world, each)

    run(main)


def test_post_hook_runs_before_the_awaiters(run):
    async def main():
        async with local_world(2) as (one, two):
            order = []
            two.register_post_hook(lambda work: order.append("hook"))

            async def wait(work):
                await work
                order.append("awaiter")

            work = two.recv(torch.empty(1), 0)
            work.add_done_callback(lambda work: order.append("callback"))
            await together(lambda: wait(work), lambda: one.send(torch.ones(1), 1).wait())
            await turns()
            assert order[0] == "hook"
            assert sorted(order) == ["awaiter", "callback", "hook"]

    run(main)


@pytest.mark.parametrize("transport", ["local", "ucx"])
def test_post_hook_runs_in_the_context_of_the_call(run, transport):
    """The hook sees the caller's context for an op that ends within its call, a pending one, and a withdrawn one."""
    request = contextvars.ContextVar("request", default=None)

    async def main():
        async with local_world(2, transport) as (one, two):
            heard, works = [], []
            two.register_post_hook(lambda work: heard.append((work.op.name, request.get())))
            sent = [one.send(torch.ones(1), 1)]
            await turns()  # The message has arrived.

            async def call(name):
                request.set(name)
                await two.recv(torch.empty(1), 0, tag=5)

            def late(name, tag):
                request.set(name)
                works.append(two.recv(torch.empty(1), 0, tag=tag))

            contextvars.copy_context().run(late, "at once", 0)
            contextvars.copy_context().run(late, "pending", 1)
            contextvars.copy_context().run(late, "withdrawn", 2)
            request.set("another")
            sent.append(one.send(torch.ones(1), 1, tag=1))
            for work in (*works[:2], *sent):
                await work
            assert await works[2].cancel()
            assert heard == [("recv", "at once"), ("recv", "pending"), ("recv", "withdrawn")]
            await together(lambda: call("a task"), one.send(torch.ones(1), 1, tag=5).wait)
            assert heard[3:] == [("recv", "a task")]
            assert [work.context for work in works] == [None] * 3  # A context may hold much memory.

    run(main)


# ---------------------------------------------------------------------------------------------------------- groups


def test_get_comm_finds_the_communicator_of_its_task(run):
    async def main():
        async with local_world(3) as world:
            with pytest.raises(ArgumentError, match="'world', and this process has 3 communicators of that name"):
                aiocomms.get_comm()

            async def each(comm):
                directory.enter(comm)

                async def inherits():
                    for name in (None, "", "world", comm):
                        assert aiocomms.get_comm(name) is comm

                await together(inherits)
                child = await comm.split([0, 1, 2], "tp")
                assert aiocomms.get_comm("tp") is child
                assert aiocomms.get_comm() is comm
                await comm.barrier()
                await child.aclose()
                await comm.barrier()
                with pytest.raises(ArgumentError, match="no open communicator has that name; open ones: 'world'"):
                    aiocomms.get_comm("tp")

            await ranks(world, each)
            with pytest.raises(ArgumentError, match="3 communicators"):
                aiocomms.get_comm()
        with pytest.raises(ArgumentError, match="open ones: none"):
            aiocomms.get_comm()
        with pytest.raises(ArgumentTypeError, match=r"group is 7 \(int\), wanted a Communicator or its name"):
            aiocomms.get_comm(7)

    run(main)


def test_closed_communicator_is_not_kept_alive_by_its_name(run):
    async def main():
        comm = await aiocomms.new_comm()
        ref = weakref.ref(comm)
        await comm.aclose()
        del comm
        await turns()
        gc.collect()
        assert ref() is None

    run(main)


def test_cancelled_close_closes_each_transport(install):
    install(spare=type("Spare", (LocalTransport,), {}))

    async def main():
        comm = await aiocomms.new_comm({"p2p": "local", "collectives": "spare"})
        closing, closed = asyncio.Event(), []

        async def aclose(self):
            closed.append(type(self).__name__)
            closing.set()
            await asyncio.sleep(3600 if len(closed) == 1 else 0)

        with patch.object(LocalTransport, "aclose", aclose):
            close = asyncio.ensure_future(comm.aclose())
            await closing.wait()
            close.cancel()
            with pytest.raises(asyncio.CancelledError):
                await close
        assert sorted(closed) == ["LocalTransport", "Spare"]

    asyncio.run(main())


def test_names_of_closed_communicators_are_forgotten(run):
    async def main():
        async with aiocomms.new_comm() as world:
            for i in range(5):
                async with aiocomms.new_comm(name=f"job {i}"):
                    pass
            assert directory._mine.get().keys() == {"world", "job 4"}
            assert aiocomms.get_comm() is world

    run(main)


def test_cancelled_reconfigure_leaves_no_rank_waiting(run):
    async def main():
        async with local_world(2) as (one, two):
            one.abort("enough")
            closing, scope = anyio.Event(), anyio.CancelScope()

            async def aclose():
                closing.set()
                await anyio.sleep_forever()

            async def give_up():
                with scope:
                    await two.reconfigure()

            with patch.object(two, "aclose", aclose):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(give_up)
                    new = await one.reconfigure()
                    await closing.wait()
                    scope.cancel()
            with pytest.raises(CommAbortedError, match="aborted by rank 1: Cancelled"):
                await new.barrier(timeout=5)
            await new.aclose()

    run(main)


def test_second_reconfigure_at_once_is_refused(run):
    async def main():
        async with local_world(2) as (one, two):
            one.abort("enough")
            new, *tried = await together(two.reconfigure, *2 * [lambda: outcome(one.reconfigure())])
            (refused,) = (result for result in tried if isinstance(result, CommError))
            assert str(refused).startswith("reconfigure on 'world' (rank 0): another task reconfigures")
            tried.remove(refused)
            assert await ranks([new, *tried], total) == [2, 2]
            await together(*(comm.aclose for comm in [new, *tried]))

    run(main)


@pytest.mark.parametrize("lost", [False, True])
def test_reconfigure_of_a_closed_communicator_is_refused(lost):
    async def main():
        async with local_world(1) as (comm,):
            if lost:
                comm.abort("enough")
            await comm.aclose()
            with pytest.raises(CommClosedError, match=r"^reconfigure on 'world' \(rank 0\): .* closed on this rank"):
                await comm.reconfigure()

    run_on("asyncio", main)


def test_slow_store_without_a_substitute_is_not_given_up(run, monkeypatch):
    monkeypatch.setattr(meeting, "PROBE", 0.0)  # A busy machine makes every probe late.

    async def main():
        async with local_world(2) as world:
            world[0].abort("enough")
            again = await together(*(comm.reconfigure for comm in world))
            await together(*(comm.barrier for comm in again))
            await together(*(comm.aclose for comm in again))

    run(main)


# ----------------------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_split_into_even_and_odd_ranks_forms_two_communicators(run, size):
    async def main():
        async with local_world(size) as world:

            async def each(comm):
                mine = [r for r in range(size) if r % 2 == comm.rank % 2]
                child = await comm.split(mine)
                assert (child.rank, child.size) == (mine.index(comm.rank), len(mine))
                assert child.name == "world/1"
                got = await child.all_reduce(torch.tensor([comm.rank]))
                assert got.item() == sum(mine)
                await child.aclose()
                assert await total(comm) == size

            await ranks(world, each)

    run(main)


def test_split_takes_order_name_and_members(run):
    async def main():
        async with local_world(4) as world:

            async def each(comm):
                child = await comm.split([3, 1, 0] if comm.rank != 2 else [], name="tp")
                if comm.rank == 2:
                    assert child is None
                    return
                async with child:
                    assert child.rank == [3, 1, 0].index(comm.rank)
                    assert aiocomms.get_comm("tp") is child  # Each task finds its own communicator.
                    out = torch.empty(3, dtype=torch.int64)
                    await child.all_gather_single(out, torch.tensor([comm.rank]))
                    assert out.tolist() == [3, 1, 0]
                    grandchild = await child.split([child.rank])
                    assert grandchild.size == 1
                    await grandchild.aclose()

            await ranks(world, each)
            with pytest.raises(ArgumentError, match="no open communicator"):
                aiocomms.get_comm("tp")

    run(main)


@pytest.mark.parametrize(
    ("members", "error", "text"),
    [
        ([1], ArgumentError, "leaves out this rank"),
        ([0, 0], ArgumentError, "each rank once"),
        ([0, 2], ArgumentError, r"ranks\[1\]"),
        ([0, True], ArgumentTypeError, r"ranks\[1\]"),
        ("01", ArgumentTypeError, "wanted a list"),
        (None, ArgumentTypeError, "wanted a list"),
    ],
)
def test_split_refuses_bad_members_before_anything_is_sent(members, error, text):
    async def main():
        async with local_world(2) as world:
            with pytest.raises(error, match=text):
                await world[0].split(members)
            children = await ranks(world, lambda comm: comm.split([0, 1]))
            assert await ranks(children, total) == [2, 2]
            await ranks(children, lambda comm: comm.aclose())

    run_on("asyncio", main)


@pytest.mark.parametrize("name", ["", "x" * 201, 5, b"tp", "\ud800"], ids=repr)
def test_split_refuses_a_bad_name_before_anything_is_sent(name):
    async def main():
        async with local_world(2) as world:
            with pytest.raises(ArgumentError, match="name "):
                await world[0].split([0, 1], name)
            children = await ranks(world, lambda comm: comm.split([0, 1]))
            assert [child.name for child in children] == ["world/1"] * 2
            await ranks(children, lambda comm: comm.aclose())

    run_on("asyncio", main)


def test_split_that_is_refused_leaves_the_communicator_usable():
    """The call comes on another thread, a hook prevents it, or this rank has begun to close the communicator."""

    def refuse(op, seq):
        raise PermissionError("not now")

    async def main():
        async with local_world(2) as world:
            one, two = world
            with pytest.raises(RuntimeError, match="split on 'world' was called on another thread"):
                await anyio.to_thread.run_sync(anyio.run, one.split, [0, 1])
            hook = one.register_pre_hook(refuse)
            with pytest.raises(PermissionError):
                await one.split([0, 1])
            hook.remove()
            children = await ranks(world, lambda comm: comm.split([0, 1]))
            assert [child.name for child in children] == ["world/1"] * 2
            await ranks(children, lambda comm: comm.aclose())
            one.send(torch.ones(1), 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.aclose)
                await turns()
                with pytest.raises(CommClosedError, match="split on 'world'"):
                    await one.split([0, 1])
                await two.recv(torch.empty(1), 0)

    run_on("asyncio", main)


def test_split_that_loses_its_store_names_itself_and_leaves_the_communicator_usable(install):
    class Storeless(LocalTransport):
        async def split(self, rendezvous, ranks, options):
            raise StoreLostError("the store is gone", comm=rendezvous.name, rank=rendezvous.rank)

    install(storeless=Storeless)

    async def main():
        async with local_world(2, "storeless") as world:
            errors = await ranks(world, lambda comm: outcome(comm.split([1, 0])))
            assert [str(error) for error in errors] == [
                f"split on 'world' (rank {r}): the store is gone" for r in (0, 1)
            ]
            assert await ranks(world, total) == [2, 2]

    run_on("asyncio", main)


def test_split_into_groups_that_disagree_raises_mismatch_error(run):
    async def main():
        async with local_world(3) as world:
            results = await ranks(world, lambda comm: outcome(comm.split([[0, 1], [0, 1, 2], [2]][comm.rank])))
            assert all(isinstance(error, (MismatchError, CommAbortedError)) for error in results)
            assert any(isinstance(error, MismatchError) for error in results)

    run(main)


def test_split_whose_members_give_other_names_raises_mismatch_error(run):
    async def main():
        async with local_world(2) as world:
            results = await ranks(world, lambda comm: outcome(comm.split([0, 1], ["one", "other"][comm.rank])))
            assert {type(error) for error in results} <= {MismatchError, CommAbortedError}
            assert "wanted one name of a group" in str(results)

    run(main)


# ------------------------------------------------------------------------------------------------------------ abort


@pytest.mark.fault(48, transport="local")
def test_abort_fails_pending_works_on_all_ranks(run):
    async def main():
        async with local_world(3) as world:
            works = [comm.recv(torch.empty(1), (comm.rank + 1) % 3, tag) for comm in world for tag in range(300)]
            works += [world[0].all_reduce(torch.ones(1)), world[1].all_reduce(torch.ones(1))]
            async with anyio.create_task_group() as tasks:
                results = []

                async def wait(work):
                    results.append(await outcome(work))

                for work in works:
                    tasks.start_soon(wait, work)
                await turns()
                world[2].abort(ValueError("bad batch"))
            assert len(results) == len(works)
            assert {type(error) for error in results} == {CommAbortedError}
            assert all("aborted by rank 2: ValueError: bad batch" in str(error) for error in results)
            assert all(comm.aborted and not comm.closed for comm in world)
            with pytest.raises(CommAbortedError, match="bad batch"):
                world[0].send(torch.ones(1), 1)

    run(main)


@pytest.mark.fault(48, transport="local")
def test_completion_after_an_abort_is_replaced_by_the_reason(run):
    """All works end together, with the reason of the abort, and the hook runs before any task goes on."""

    async def main():
        async with local_world(2) as (_, two):
            heard = []
            two.register_abort_hook(heard.append)
            works = [two.recv(torch.empty(1), 0, tag) for tag in range(3)]
            two.abort("the reason")
            works[1].fail(CommAbortedError("rank 0 has gone meanwhile", peer=0))
            assert not works[1].done()
            for work in reversed(works):
                error = await outcome(work)
                assert isinstance(error, CommAbortedError)
                assert "the reason" in str(error)
                assert len(heard) == 1

    run(main)


@pytest.mark.fault(48, transport="local")
def test_abort_from_another_thread_fails_pending_works(run):
    async def main():
        async with local_world(2) as (one, two):
            works = [two.recv(torch.empty(1), 0, tag) for tag in range(1000)]
            threading.Thread(target=one.abort, args=("from a thread",)).start()
            for work in works:
                error = await outcome(work)
                assert isinstance(error, CommAbortedError)

    run(main)


@pytest.mark.fault(48, transport="local")
def test_abort_from_a_signal_handler_fails_pending_works():
    async def main():
        async with local_world(2) as (one, two):
            works = [two.recv(torch.empty(1), 0, tag) for tag in range(1000)]
            with on_signal(lambda: one.abort("by a signal")):
                os.kill(os.getpid(), signal.SIGUSR2)
                for work in works:
                    assert "by a signal" in str(await outcome(work))

    run_on("asyncio", main)


def test_abort_from_a_signal_handler_wakes_a_sleeping_loop(run):
    async def main():
        async with local_world(2) as (one, two):
            work = two.recv(torch.empty(1), 0)
            with on_signal(lambda: one.abort("by a signal")):
                threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
                assert "by a signal" in str(await outcome(work))

    run(main)  # The test hangs if the loop sleeps on.


def test_abort_from_a_signal_handler_between_any_two_instructions_succeeds(run):
    """A signal may interrupt an op while it holds locks that an abort takes, too."""

    async def main(delay):
        async with local_world(2) as (one, two):
            works = []
            with on_signal(lambda: one.abort("by a signal")):
                threading.Timer(delay, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
                with contextlib.suppress(CommAbortedError):
                    while True:
                        works.append(two.recv(torch.empty(1), 0, len(works)))
                        works.append(two.all_reduce(torch.ones(1)))
                        works.append(one.send(torch.ones(1), 1, -1))
            for work in works:
                assert isinstance(await outcome(work), CommAbortedError)
            assert not one._core.in_flight
            assert not two._core.in_flight

    for i in range(15):
        run(main, 0.0003 * i)


def test_abort_on_another_thread_ends_works_before_a_later_close(run):
    async def main():
        async with local_world(2) as (one, _):
            reasons = []
            one.register_abort_hook(reasons.append)
            work = one.all_reduce(torch.ones(1))
            in_threads(lambda: one.abort("enough"))
            await one.aclose()
            assert isinstance(work.exception(), CommAbortedError)
            await turns()
            assert [str(reason) for reason in reasons] == ["aborted by rank 0: enough"]

    run(main)


def test_abort_leaves_other_communicators_usable(run):
    async def main():
        async with local_world(2) as world, local_world(2, name="other") as other:
            world[0].abort("enough")
            assert await ranks(other, total) == [2, 2]

    run(main)


def test_calls_on_another_thread_are_refused():
    async def main():
        async with local_world(1) as (comm,):
            with pytest.raises(RuntimeError, match="another thread"):
                await anyio.to_thread.run_sync(comm.barrier)

    run_on("asyncio", main)


def test_cancel_aclose_and_reconfigure_on_another_thread_are_refused():
    async def main():
        async with local_world(2) as (one, two):
            waiting = one.recv(torch.empty(1), 1)
            for call in (waiting.cancel, one.aclose, one.reconfigure):
                with pytest.raises(RuntimeError, match=rf"{call.__name__} .* another thread .*threadsafe"):
                    await anyio.to_thread.run_sync(anyio.run, call)
            two.send(torch.ones(1), 0)
            assert await waiting == 1  # No message was lost.

    run_on("asyncio", main)


# ------------------------------------------------------------------------------------------------------------ close


def test_close_withdraws_recvs_and_waits_for_other_ops(run):
    async def main():
        async with local_world(2) as (one, two):
            waiting = one.recv(torch.empty(1), 1)
            sending = one.send(torch.ones(1), 1, 5)
            got = torch.zeros(1)

            async def late():
                await turns()
                await two.recv(got, 0, 5)

            await together(one.aclose, late)
            assert isinstance(await outcome(waiting), CommClosedError)
            assert (await sending).item() == got.item() == 1
            with pytest.raises(CommClosedError):
                one.barrier()
            assert one.closed
            assert not one.aborted

    run(main)


@pytest.mark.virtual_time
@pytest.mark.parametrize("send", ["send", "send_object"])
def test_ranks_close_at_once_although_neither_receives_what_the_other_sends(run, send):
    async def main():
        async with local_world(2) as (one, two):
            works = [getattr(comm, send)(torch.ones(1), 1 - comm.rank) for comm in (one, two)]
            start = clock.now()
            await together(one.aclose, two.aclose)
            assert clock.now() - start < core.CLOSE_GRACE
            for work in works:
                assert isinstance(await outcome(work), CommAbortedError)

    run(main)


@pytest.mark.virtual_time
def test_close_gives_up_ops_that_outlast_the_grace_period(run, monkeypatch):
    monkeypatch.setattr(core, "CLOSE_GRACE", 0.05)

    async def main():
        async with local_world(2) as (one, two):
            work = one.all_reduce(torch.ones(1))
            await one.aclose()
            assert isinstance(await outcome(work), CommClosedError)
            await turns()
            error = await outcome(two.all_reduce(torch.ones(1))) if not two.aborted else two._core.life.failure.error
            assert isinstance(error, CommAbortedError)
            assert "closed by rank 0" in str(error)

    run(main)


def test_repeated_and_concurrent_close_returns(run):
    async def main():
        async with local_world(2) as world:
            await together(*(comm.aclose for comm in world for _ in range(3)))
            await world[0].aclose()

    run(main)


def test_communicator_closes_although_its_transport_fails_to_close(run, install):
    class Sick(LocalTransport):
        async def aclose(self):
            await super().aclose()
            raise ValueError("sick")

    install(sick=Sick)

    async def main():
        comm = await aiocomms.new_comm("sick", rank=0, size=1)

        async def again():
            await turns()
            await comm.aclose()

        with pytest.raises(CommError, match=r"the transport Sick is broken: aclose\(\) raised ValueError: sick"):
            await comm.aclose()
        await again()
        with pytest.raises(ArgumentError, match="no open communicator"):
            aiocomms.get_comm()

    run(main)


def test_cancelled_close_releases_everything(run):
    async def main():
        async with local_world(2) as (one, two):
            work = one.all_reduce(torch.ones(1))
            with anyio.CancelScope() as scope:
                scope.cancel()
                await one.aclose()
            assert one.closed
            assert isinstance(await outcome(work), CommClosedError)
            del two

    run(main)
    before = held()  # uvloop keeps a pipe from its first run on.
    run(main)
    all_let_go(before)


def test_exception_in_the_context_aborts_the_other_ranks(run):
    async def main():
        async with local_world(2) as (one, two):
            work = two.all_reduce(torch.ones(1))
            with pytest.raises(KeyError):
                async with one:
                    raise KeyError("lost")
            error = await outcome(work)
            assert isinstance(error, CommAbortedError)
            assert "aborted by rank 0: KeyError: 'lost'" in str(error)

    run(main)


def test_ops_that_need_a_closed_rank_fail_and_others_go_on(run):
    async def main():
        async with local_world(3) as (one, two, three):
            waiting = two.recv(torch.empty(1), 0)
            await one.aclose()
            for work in (waiting, two.recv(torch.empty(1), 0), two.send(torch.ones(1), 0)):
                error = await outcome(work)
                assert isinstance(error, CommAbortedError)
                assert error.peer == 0
            assert not two.aborted
            got = torch.zeros(1)
            await together(lambda: two.send(torch.ones(1), 2), lambda: three.recv(got, 1))
            for comm in (two, three):
                with pytest.raises(CommAbortedError, match="closed by rank 0"):
                    await comm.all_reduce(torch.ones(1))
            assert two.aborted
            assert three.aborted

    run(main)


@pytest.mark.fault(60, transport="local")
def test_many_successive_communicators_leak_nothing():
    async def main():
        for _ in range(300):
            async with aiocomms.new_comm() as comm:
                await comm.all_reduce(torch.ones(1))

    run_on("asyncio", main)
    before = held()
    run_on("asyncio", main)
    all_let_go(before)


# ------------------------------------------------------------------------------------------------------------ debug


def test_debug_mode_refuses_busy_buffers(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_DEBUG", "1")

    async def main():
        async with local_world(2) as (one, two):
            buffer = torch.zeros(8)
            work = one.recv(buffer[:4], 1)
            for call in (
                lambda: one.recv(buffer[3:5], 1, 1),
                lambda: one.send(buffer[0:1], 1),
                lambda: one.all_reduce(buffer),
            ):
                with pytest.raises(BufferBusyError, match=r"recv #0"):
                    call()
            other = one.recv(buffer[4:], 1, 1)
            sends = [two.send(torch.ones(4), 0), two.send(torch.full((4,), 2.0), 0, 1)]
            await work
            await other
            assert buffer.tolist() == [1] * 4 + [2] * 4
            for send in sends:
                await send
            reading = [one.send(buffer, 1, tag) for tag in range(2)]  # Several sends may share a buffer.
            for tag in range(2):
                await two.recv(torch.empty(8), 0, tag)
            for send in reading:
                await send

    run_on("asyncio", main)


class NoWindows(LocalTransport):
    """A transport that carries collectives alone."""

    capabilities = Capabilities(ops=frozenset({ops.AllReduce, ops.Barrier}), in_process=True)


def test_op_that_no_transport_carries_is_refused_by_name(install):
    install(poor=NoWindows)

    async def main():
        async with local_world(2, "poor") as world:
            assert world[0].transports == {"collectives": "poor"}
            for call in (
                lambda comm: comm.send(torch.ones(1), 1 - comm.rank),
                lambda comm: comm.broadcast(torch.ones(1), 0),
                lambda comm: comm.send_object(1, 1 - comm.rank),
            ):
                with pytest.raises(UnsupportedOperation, match="no transport of this communicator carries it"):
                    call(world[0])
            assert await ranks(world, total) == [2, 2]

    run_on("asyncio", main)
