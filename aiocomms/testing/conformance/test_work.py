"""Checks of ``Work``, the handle of an operation: awaits by many tasks, queries, callbacks, and blocking waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import unittest
import weakref
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommClosedError, CommError, UnsupportedOperation
from aiocomms.testing.conformance.case import Case, all_blocked, ranks
from aiocomms.testing.conformance.data import Slot
from aiocomms.transport import Transport

SHAPE = (6,)
LARGE = 2**18
"""A large number of elements. A transport may send a large tensor in another way than a small one."""


def ones(comm: Communicator) -> torch.Tensor:
    return torch.ones(4, device=comm.device)


def late(comm: Communicator, case: Case) -> tuple[Slot, Work[torch.Tensor]]:
    """Start a broadcast on rank 1.

    The broadcast stays pending until rank 1 sends the note ``"go"``. Rank 0 calls the broadcast when it gets the note.
    """
    assert comm.rank == 1
    slot = case.empty(torch.int32, SHAPE)
    return slot, comm.broadcast(slot.tensor, 0)


async def serve(comm: Communicator, case: Case) -> None:
    """Call the broadcast of :func:`late` on rank 0, when rank 1 has sent the note."""
    await case.told("go", 1)
    await comm.broadcast(case.full(case.bits(torch.int32, SHAPE)).tensor, 0)


@pytest.mark.fault(51)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_work_is_pending_until_its_op_completes(comm: Communicator, case: Case) -> None:
    if comm.rank == 0:
        await serve(comm, case)
        return
    slot, work = late(comm, case)
    assert not work.done()
    for ask in (work.result, work.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()
    assert "broadcast" in repr(work) and "pending" in repr(work)
    case.tell("go")
    assert await work is slot.tensor
    assert work.done() and work.result() is slot.tensor and work.exception() is None
    assert await work is slot.tensor
    assert "done" in repr(work)


@pytest.mark.fault(51)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_many_awaiters_get_the_same_result(comm: Communicator, case: Case) -> None:
    if comm.rank == 0:
        await serve(comm, case)
        return
    slot, work = late(comm, case)
    got: list[object] = []

    async def wait() -> None:
        got.append(await work)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(wait)
        await all_blocked()
        case.tell("go")
    assert len(got) == 20 and all(tensor is slot.tensor for tensor in got)


@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_done_callback_runs_once_on_the_loop_after_the_op(comm: Communicator, case: Case) -> None:
    """Each callback is called once, on the loop's thread, after the end of the op.

    Some callbacks are added before the end of the op, and others after the end.
    """
    if comm.rank == 0:
        await serve(comm, case)
        return
    _, work = late(comm, case)
    called: list[tuple[str, bool, int]] = []
    everything = anyio.Event()

    def note(name: str) -> Callable[[Work[object]], None]:
        def callback(done: Work[object]) -> None:
            assert done is work
            called.append((name, work.done(), threading.get_ident()))
            if len(called) == 4:
                everything.set()

        return callback

    work.add_done_callback(note("first"))
    work.add_done_callback(note("second"))
    case.tell("go")
    await work
    work.add_done_callback(note("third"))
    work.add_done_callback(note("fourth"))
    assert not any(name in ("third", "fourth") for name, _, _ in called)  # These callbacks are called on a later turn.
    await everything.wait()
    await all_blocked()
    assert [name for name, _, _ in called] == ["first", "second", "third", "fourth"]
    assert all(done and thread == threading.get_ident() for _, done, thread in called)


@pytest.mark.fault(63)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_done_callback_that_raises_is_reported_and_affects_no_other(comm: Communicator, case: Case) -> None:
    """The error of a callback is reported, and does not affect the other callbacks or the tasks that await the work."""
    if comm.rank == 0:
        await serve(comm, case)
        return
    slot, work = late(comm, case)
    called = anyio.Event()

    def fail(_: object) -> None:
        raise KeyError("callback")

    work.add_done_callback(fail)
    work.add_done_callback(lambda _: called.set())
    case.tell("go")
    assert await work is slot.tensor
    await called.wait()
    assert len(case.reports) == 1 and "callback" in case.reports[0], case.reports
    case.reports.clear()


@pytest.mark.fault(63)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_done_callback_may_start_operations(comm: Communicator, case: Case) -> None:
    content = [case.bits(torch.int32, SHAPE, i) for i in range(3)]
    slots = [case.full(c) if comm.rank == 0 else case.empty(torch.int32, SHAPE) for c in content]
    finished = anyio.Event()

    def go_on(number: int) -> None:
        if number == len(slots):
            finished.set()
        else:
            comm.broadcast(slots[number].tensor, 0).add_done_callback(lambda _: go_on(number + 1))

    go_on(0)
    await finished.wait()
    for slot, c in zip(slots, content, strict=True):
        slot.expect(c)


@pytest.mark.fault(63)
@pytest.mark.core
@ranks(2)
async def test_done_callback_may_close_the_communicator(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    closed = anyio.Event()

    async def close() -> None:
        await other.aclose()
        closed.set()

    async with anyio.create_task_group() as tasks:
        other.barrier().add_done_callback(lambda _: tasks.start_soon(close))
        await closed.wait()
    assert other.closed and not other.aborted
    await comm.barrier()


@pytest.mark.fault(50)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_failure_that_is_never_retrieved_is_reported_once(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await comm.send(torch.ones(9, device=comm.device), 1)
        await comm.send(ones(comm), 1, 1)
        return
    comm.recv(ones(comm), 0)
    await comm.recv(ones(comm), 0, 1)
    await all_blocked()
    gc.collect()
    assert len(case.reports) == 1 and "no task awaited a work that failed: recv" in case.reports[0]
    case.reports.clear()


@pytest.mark.core
@ranks(2)
async def test_each_awaiter_of_a_failed_work_gets_its_own_traceback(comm: Communicator, case: Case) -> None:
    if comm.rank == 0:
        await case.told("called", 1)
        comm.abort("for the test")
        return
    work = comm.all_reduce(ones(comm))
    case.tell("called")
    errors = []
    for _ in range(3):
        with pytest.raises(CommAbortedError, match="for the test") as caught:
            await work
        errors.append(caught.value)
    assert all((e.op, e.seq, e.comm, e.rank) == ("all_reduce", work.seq, comm.name, 1) for e in errors)
    assert isinstance(work.exception(), CommAbortedError)
    await work.wait()


@pytest.mark.fault(51)
@pytest.mark.core
@ranks(2)
async def test_completed_work_keeps_its_result_after_close(comm: Communicator, case: Case) -> None:
    """The result of a done work does not change when the communicator is closed."""
    other = await case.open("other")
    slot = case.full(case.bits(torch.int32, SHAPE)) if comm.rank == 0 else case.empty(torch.int32, SHAPE)
    work = other.broadcast(slot.tensor, 0)
    await work
    await other.aclose()
    assert await work is slot.tensor
    with pytest.raises(CommClosedError):
        await other.broadcast(slot.tensor, 0)


@pytest.mark.fault(52)
@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_wait_blocking_on_another_thread_returns_the_result(comm: Communicator, case: Case) -> None:
    if comm.rank == 0:
        await serve(comm, case)
        return
    slot, work = late(comm, case)
    with pytest.raises(TimeoutError, match="it goes on"):
        await anyio.to_thread.run_sync(work.wait_blocking, 0.01)
    case.tell("go")
    assert await anyio.to_thread.run_sync(work.wait_blocking, case.place.deadline) is slot.tensor
    slot.expect(case.bits(torch.int32, SHAPE))


@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_wait_blocking_on_the_loops_thread_makes_progress(comm: Communicator, case: Case) -> None:
    """A call of ``wait_blocking`` blocks the loop's thread, so this call itself advances the transport."""
    case.need_processes()
    if comm.rank == 0:
        await serve(comm, case)
        return
    slot, work = late(comm, case)
    with pytest.raises(TimeoutError, match="it goes on"):
        work.wait_blocking(0.01)
    case.tell("go")
    assert work.wait_blocking(case.place.deadline) is slot.tensor
    slot.expect(case.bits(torch.int32, SHAPE))


@ranks(1)
async def test_wait_stream_without_a_device_stream_is_refused(comm: Communicator, case: Case) -> None:
    family = "collectives" if "collectives" in comm.transports else "p2p"
    if case.carrier(family).wait_stream is not Transport.wait_stream:
        raise unittest.SkipTest("there is one")
    work = comm.all_reduce(ones(comm))
    with pytest.raises(UnsupportedOperation, match="await the work"):
        work.wait_stream()
    await work


@pytest.mark.core
@ranks(2, more=(1,))
async def test_work_has_its_op_name_and_sequence_number(comm: Communicator, case: Case) -> None:
    first = comm.all_reduce(ones(comm), hints={"unknown to every transport": 1})
    second = comm.barrier()
    assert second.seq == first.seq + 1
    assert (first.op.name, second.op.name) == ("all_reduce", "barrier")
    await second
    await first


@pytest.mark.fault(52)
@pytest.mark.core
@ranks(2)
async def test_operation_called_on_another_thread_is_refused(comm: Communicator, case: Case) -> None:
    with pytest.raises(RuntimeError, match="thread"):
        await anyio.to_thread.run_sync(lambda: comm.all_reduce(ones(comm)))
    await comm.barrier()


@ranks(2, more=(3,))
async def test_hooks_run_once_for_each_operation(comm: Communicator, case: Case) -> None:
    """The hooks are called once before and once after each operation."""
    case.need_any_order()
    before: list[int] = []
    after: list[int] = []
    hooks = [
        comm.register_pre_hook(lambda op, seq: before.append(seq)),
        comm.register_post_hook(lambda work: after.append(work.seq)),
    ]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    works: list[Work[object]] = []
    for i in range(40):
        works += [comm.recv(ones(comm), left, i), comm.send(ones(comm), right, i), comm.all_reduce(ones(comm))]
        works += [comm.send_object(i, right, i), comm.recv_object(left, i), comm.barrier()]
    for work in works:
        await work
    for hook in hooks:
        hook.remove()
        hook.remove()
    await comm.barrier()
    assert before == sorted(after) == [work.seq for work in works]


@pytest.mark.core
@ranks(2, more=(3,))
async def test_post_hook_learns_start_and_outcome_of_each_operation(comm: Communicator, case: Case) -> None:
    """The post-hooks are called once for each operation, even if a pre-hook has stopped the operation."""
    told: list[tuple[int, str, bool]] = []
    before = time.monotonic()

    def ended(work: Work[object]) -> None:
        assert work.called is not None
        in_time = before <= work.called <= time.monotonic()
        told.append((work.seq, "" if work.error is None else work.error.message, in_time and work.done()))

    def refuse(op: object, seq: int) -> None:
        raise CommError("not now")

    after = comm.register_post_hook(ended)
    work = comm.barrier()
    await work
    hook = comm.register_pre_hook(refuse)
    with pytest.raises(CommError, match="not now"):
        comm.barrier()
    hook.remove()
    await comm.barrier()
    after.remove()
    first = work.seq
    assert told == [(first, "", True), (first + 1, "not now", True), (first + 2, "", True)]
    later = comm.barrier()
    await later
    assert later.called is None


# -------------------------------------------------------------------------------- memory that a program moves


@pytest.mark.fault(49, 77, 132)
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("count", [3, LARGE])
async def test_storage_moved_during_an_op_is_an_error(comm: Communicator, case: Case, count: int) -> None:
    """The op fails if its tensor's storage moves during the op. If torch refuses to move the storage, the op succeeds.

    In both cases, no other memory is written.
    """
    case.need("p2p")
    if comm.device.type != "cpu" or not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise unittest.SkipTest("the memory is a GPU's, or this torch has no way to keep it")
    if comm.rank == 0:
        for note in ("shared", "resized"):
            await case.told(note, 1)
            await comm.send(torch.ones(count), 1)
        return
    tensor = torch.zeros(count)
    work = comm.recv(tensor, 0)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    others = [torch.zeros(count) for _ in range(4)]  # One of these tensors may lie where the tensor was.
    case.tell("shared")
    with pytest.raises(CommError, match="the storage of a tensor was resized"):
        await work
    assert not any(other.any() for other in others)
    tensor = torch.zeros(count)
    work = comm.recv(tensor, 0)
    try:
        tensor.untyped_storage().resize_(0)
    except RuntimeError:
        case.tell("resized")
        await work
        assert tensor.eq(1).all()
    else:
        case.tell("resized")
        with pytest.raises(CommError):
            await work


@ranks(2)
async def test_tensors_of_ended_ops_are_freed(comm: Communicator, case: Case) -> None:
    """A transport may keep a tensor until a few later operations have ended."""
    case.need("collectives")
    tensors: list[weakref.ref[torch.Tensor]] = []
    for _ in range(8):
        tensor = torch.ones(4, device=comm.device)
        parts = [torch.ones(4, device=comm.device) for _ in range(comm.size)]
        tensors += [weakref.ref(one) for one in (tensor, *parts)]
        await comm.all_reduce(tensor)
        await comm.broadcast(tensor, 0)
        await comm.all_gather(parts, tensor)
        if "p2p" in comm.transports:
            sent = comm.send(tensor, 1 - comm.rank)
            await comm.recv(parts[0], 1 - comm.rank)
            await sent
    del tensor, parts
    gc.collect()
    assert sum(tensor() is not None for tensor in tensors) < len(tensors) / 2
