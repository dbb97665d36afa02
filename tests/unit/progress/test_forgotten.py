"""A forgotten ``await``: the warning about a work that no task awaits, and the error for one used as its result."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import operator
import warnings
from pathlib import Path

import anyio
import pytest
import torch
from concurrency import ranks, turns

import aiocomms
from aiocomms.errors import ArgumentTypeError, CommError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

HERE = __file__


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_DEBUG", "1")


@contextlib.contextmanager
def heard():
    """Yield a list that has the RuntimeWarnings of a block, and of the garbage collection after it, at its end."""
    gc.collect()
    said = []
    with warnings.catch_warnings(record=True) as all_said:
        warnings.simplefilter("always")
        yield said
        gc.collect()
    said += [warning for warning in all_said if warning.category is RuntimeWarning]


def line_of(text):
    """Return the number of the line of this file that ends with a comment."""
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


# ------------------------------------------------------------------------------------------------ never awaited


def test_work_of_a_lane_that_is_never_awaited_is_reported(run, debug):
    async def main():
        async with local_world(2) as (one, two):
            with heard() as said:
                one.lane("req-17").send(torch.ones(2), 1)  # forgotten on a lane
                with one.lane("req-18"):
                    one.all_reduce(torch.ones(1))  # forgotten within a lane
                await two.lane("req-17").recv(torch.zeros(2), 0)
                await two.lane("req-18").all_reduce(torch.ones(1))
                await turns()
            lines = {warning.lineno: str(warning.message) for warning in said}
            assert "send on 'world, lane req-17' (rank 0) was never" in lines[line_of("forgotten on a lane")]
            assert "all_reduce on 'world, lane req-18' (rank 0) was" in lines[line_of("forgotten within a lane")]
            assert len(said) == 2

    run(main)


def test_work_that_is_never_awaited_is_reported_with_its_line(run, debug):
    async def main():
        async with local_world(2) as (one, two):
            with heard() as said:
                one.send(torch.ones(2), 1)  # forgotten
                await two.recv(torch.zeros(2), 0)
                await turns()
            (warning,) = said
            assert (warning.filename, warning.lineno) == (HERE, line_of("forgotten"))
            assert str(warning.message).startswith("send on 'world' (rank 0) was never awaited: await it, or ")

    run(main)


def test_work_done_within_its_call_and_never_awaited_is_reported(run, debug):
    async def main():
        async with aiocomms.new_comm("local") as comm:
            with heard() as said:
                comm.all_reduce(torch.ones(2))  # at once
            assert [warning.lineno for warning in said] == [line_of("at once")]

    run(main)


def test_unmatched_recv_that_is_never_awaited_is_reported_at_close(run, debug):
    async def main():
        with heard() as said:
            async with local_world(2) as (one, _):
                one.recv(torch.zeros(2), 1)  # unmatched
                await one.aclose()
        assert [warning.lineno for warning in said] == [line_of("unmatched")]

    run(main)


def test_forgotten_work_is_not_reported_outside_debug_mode(run, monkeypatch):
    monkeypatch.delenv("AIOCOMMS_DEBUG", raising=False)

    async def main():
        async with aiocomms.new_comm("local") as comm:
            with heard() as said:
                comm.all_reduce(torch.ones(2))
                comm.all_reduce(torch.ones(2)).forget()
            assert said == []

    run(main)


@pytest.mark.parametrize("how", ["await", "wait", "result", "exception", "a callback", "blocking", "forget", "cancel"])
@pytest.mark.parametrize("pending", [False, True], ids=["done", "pending"])
def test_work_that_was_asked_for_is_not_reported(run, debug, how, pending):
    async def ask(work):
        if how == "await":
            await work
        elif how == "wait":
            await work.wait()
        elif how == "cancel":
            await work.cancel()
        elif how == "a callback":
            work.add_done_callback(lambda _: None)
        elif how == "blocking":
            work.wait_blocking()
        elif how == "forget":
            assert work.forget() is None
        else:
            with contextlib.suppress(asyncio.InvalidStateError):
                getattr(work, how)()

    async def main():
        async with local_world(2) as (one, two):
            with heard() as said:
                if not pending:
                    two.recv(torch.zeros(2), 0).forget()
                async with anyio.create_task_group() as tasks:
                    if how == "blocking" and pending:  # The send blocks this thread.
                        two.recv(torch.zeros(2), 0).forget()
                    tasks.start_soon(ask, one.send(torch.ones(2), 1))
                    await turns()
                    if pending and how != "blocking":
                        await two.recv(torch.zeros(2), 0)
                await turns()
            assert said == []

    run(main)


def test_work_awaited_by_asyncio_functions_is_not_reported(debug):
    async def main():
        async with local_world(2) as (one, two):
            with heard() as said:
                for way in (
                    lambda work: asyncio.gather(work),
                    lambda work: asyncio.wait_for(work, 20),
                    lambda work: asyncio.shield(work),
                    asyncio.create_task,
                    lambda work: asyncio.wait([asyncio.ensure_future(work)]),
                ):
                    pending = way(one.send(torch.ones(2), 1))
                    await two.recv(torch.zeros(2), 0)
                    await pending
                task = asyncio.create_task(one.recv(torch.ones(2), 1))
                task.cancel()  # The task is cancelled before its first step.
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert said == []

    asyncio.run(main())


@pytest.mark.parametrize("forget", [False, True])
def test_forgotten_failure_is_reported_once_and_a_lost_work_never(debug, forget):
    async def main():
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        with heard() as said:
            async with local_world(2) as (one, two):
                one.send(torch.ones(3), 1).forget()  # `forget()` drops the warning of a missing await.
                work = two.recv(torch.zeros(2), 0)
                if forget:
                    work.forget()
                del work
                await turns()
                two.recv(torch.zeros(2), 0)
                one.abort("enough")
                await turns()
        assert said == []
        assert len(told) == 1
        assert "no task awaited a work that failed: recv #0" in told[0]

    asyncio.run(main())


def test_op_refused_by_a_hook_is_not_reported(run, debug):
    async def main():
        async with aiocomms.new_comm("local") as comm:

            def refuse(op, seq):
                raise ValueError("no")

            hook = comm.register_pre_hook(refuse)
            with heard() as said, pytest.raises(ValueError, match="no"):
                comm.barrier()
            hook.remove()
            assert said == []

    run(main)


def test_internal_works_are_never_reported(run, debug):
    """Works that streams, windows, objects and splits start internally cause no warning."""

    async def each(comm):
        peer = 1 - comm.rank
        async with await comm.open_stream(peer, capacity=2) as stream:
            for _ in range(4):
                await stream.send(torch.ones(2))
                await stream.receive()
            await stream.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        async with await comm.new_window(torch.zeros(4)) as window:
            await window.put(torch.ones(2), peer)
            await window.flush()
        with pytest.raises(ZeroDivisionError):
            async with await comm.new_window(torch.zeros(4)):
                1 / 0  # noqa: B018
        assert await comm.all_gather_object("x" * 1000) == ["x" * 1000] * 2
        async with await comm.split([0, 1]) as child:
            await child.barrier()

    async def main():
        with heard() as said:
            async with local_world(2) as world:
                await ranks(world, each)
            await turns()
        assert [str(warning.message) for warning in said] == []

    run(main)


# ----------------------------------------------------------------------------------------- used as its result

T = torch.ones(2, 2)
MISUSES = [
    lambda work: work + 1,
    lambda work: 2 * work,
    lambda work: T + work,
    lambda work: -work,
    lambda work: work > 1,
    lambda work: work @ T,
    lambda work: work[0],
    lambda work: operator.setitem(work, 0, 1),
    lambda work: len(work),
    lambda work: list(work),
    lambda work: 1 in work,
    lambda work: float(work),
    lambda work: torch.add(work, 1),
    lambda work: torch.stack([T, work]),
    lambda work: torch.nn.functional.linear(T, work),
    lambda work: torch.nn.Linear(2, 2)(work),
    lambda work: torch.tensor(work),
    lambda work: T.copy_(work),
    lambda work: T[work],
]


@pytest.mark.parametrize("misuse", range(len(MISUSES)))
@pytest.mark.parametrize("mode", ["0", "1"])
def test_work_used_as_a_tensor_suggests_await(run, monkeypatch, mode, misuse):
    monkeypatch.setenv("AIOCOMMS_DEBUG", mode)

    async def main():
        async with aiocomms.new_comm("local") as comm:
            work = comm.all_reduce(torch.ones(2))
            named = r"<Work all_reduce #0 on 'world' \(rank 0\) done>.*: did you forget `await`\?"
            with pytest.raises(TypeError, match=named):
                MISUSES[misuse](work)
            await work

    run(main)


@pytest.mark.parametrize("name", ["shape", "dtype", "item", "tolist", "numel", "to", "T", "data", "keys"])
def test_attribute_of_the_result_on_a_work_suggests_await(run, name):
    async def main():
        async with aiocomms.new_comm("local") as comm:
            work = comm.all_reduce(torch.ones(2))
            with pytest.raises(
                AttributeError, match=rf"<Work all_reduce #0 .* no attribute '{name}': did you forget `a"
            ):
                getattr(work, name)
            assert not hasattr(work, name)
            assert name not in dir(work)
            assert await work is work.op.tensor

    run(main)


def test_work_supports_truth_equality_and_hashing(run):
    async def main():
        async with aiocomms.new_comm("local") as comm:
            one, two = comm.barrier(), comm.barrier()
            assert one  # "is there one?"
            assert one != two
            assert one in [two, one]
            assert {one: 1, two: 2}[two] == 2
            assert "result" in dir(one)
            with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
                getattr(one, "nonsense")  # noqa: B009
            await one
            await two

    run(main)


def test_work_or_coroutine_as_an_argument_suggests_await(run):
    async def main():
        async with local_world(2) as (one, _):
            work = one.recv(torch.zeros(1), 1)
            for call in (
                lambda: one.send(work, 1),
                lambda: one.send(torch.ones(1), work),
                lambda: one.all_gather(work, torch.ones(1)),
                lambda: one.send_object({"logits": work}, 1),
                lambda: aiocomms.get_comm(aiocomms.new_comm("local")),
            ):
                with pytest.raises(ArgumentTypeError, match="did you forget `await`"):
                    call()
            assert await work.cancel()

    run(main)


@pytest.mark.parametrize("name", ["rank", "size", "all_reduce", "aclose"])
def test_attribute_of_an_unopened_communicator_suggests_await(run, name):
    async def main():
        comm = aiocomms.new_comm("local")
        with pytest.raises(
            AttributeError, match=rf"new_comm\(\.\.\.\) has no attribute '{name}': did you forget `await`"
        ):
            getattr(comm, name)
        assert not hasattr(comm, "__len__")
        async with comm as opened:
            assert opened.rank == 0

    run(main)


# ---------------------------------------------------------------------------------- whose error it is, once


@pytest.mark.parametrize("transport", ["local", "c10d"])
@pytest.mark.parametrize("end", ["abort", "close", "deadline"])
def test_error_of_new_window_names_the_call(run, transport, end):
    async def main():
        async with local_world(2, transport) as (one, two), anyio.create_task_group() as tasks:
            caught = []

            async def opening():
                with pytest.raises(CommError) as error:
                    await one.new_window(torch.ones(2), timeout=0.05 if end == "deadline" else None)
                caught.append(error.value)

            tasks.start_soon(opening)
            await turns()
            if end == "abort":
                two.abort("enough")
            elif end == "close":
                await two.aclose()
        assert str(caught[0]).startswith("new_window #0 on 'world' (rank 0): ")
        assert caught[0].op == "new_window"
        assert "all_gather" not in str(caught[0])

    run(main)


def test_wrong_argument_of_new_window_names_the_call(run):
    async def main():
        async with local_world(2) as (one, two):
            odd = torch.frombuffer(bytearray(17), dtype=torch.int64, offset=1)
            for wrong in (3, None, torch.ones(2).to_sparse(), torch.ones(2, 2).T[:1], odd):
                with pytest.raises(CommError, match=r"^new_window on 'world' \(rank 0\): tensor "):
                    await one.new_window(wrong)
            windows = await ranks([one, two], lambda comm: comm.new_window(torch.ones(2)))
            await ranks(windows, lambda window: window.aclose())

    run(main)


def test_new_window_with_dtypes_that_differ_names_the_call(run):
    async def main():
        async with local_world(2) as world:

            async def each(comm):
                dtype = torch.int32 if comm.rank else torch.float32
                with pytest.raises(
                    CommError, match=rf"^new_window #0 on 'world' \(rank {comm.rank}\): a window has one"
                ):
                    await comm.new_window(torch.ones(2, dtype=dtype))

            await ranks(world, each)

    run(main)


OBJECTS = {
    "send_object": lambda comm, obj: comm.send_object(obj, 1),
    "broadcast_object": lambda comm, obj: comm.broadcast_object(obj, 0),
    "all_gather_object": lambda comm, obj: comm.all_gather_object(obj),
    "gather_object": lambda comm, obj: comm.gather_object(obj, 1),
    "scatter_object": lambda comm, obj: comm.scatter_object([1, obj], 0),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_wrong_object_argument_names_the_operation(run, name):
    async def main():
        async with local_world(2) as (one, _):
            for pickle in (False, True):
                with pytest.raises(CommError, match=rf"^{name} on 'world' \(rank 0\): obj "):
                    OBJECTS[name](one, object() if not pickle else 1 << 70)
            with pytest.raises(CommError, match=r"^scatter_object on 'world' \(rank 0\): objs is \[1\], wanted"):
                one.scatter_object([1], 0)

    run(main)
