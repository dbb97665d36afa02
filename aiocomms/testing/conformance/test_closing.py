"""Checks of close and abort: pending ops end, peers get the reason, later calls raise an error, and nothing leaks."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.core import core
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.errors import CommAbortedError, CommClosedError, CommError
from aiocomms.testing.conformance.case import Case, all_blocked, cancel_await, ranks
from aiocomms.testing.conformance.leaks import expect_no_more_than, resources

SHAPE = (6,)


def ones(comm: Communicator) -> torch.Tensor:
    return torch.ones(4, device=comm.device)


@contextlib.contextmanager
def no_grace() -> Iterator[None]:
    """Make the grace time of a close infinite. A close that waits for the end of this time would then hang."""
    core.CLOSE_GRACE = math.inf
    try:
        yield
    finally:
        core.CLOSE_GRACE = CLOSE_GRACE


def pend(comm: Communicator, peer: int, count: int = 3) -> list[Work[torch.Tensor]]:
    """Start receives that no message will match, or collectives that not all ranks will call."""
    if "p2p" in comm.transports:
        return [comm.recv(ones(comm), peer, tag) for tag in range(count)]
    return [comm.all_reduce(ones(comm)) for _ in range(count)]


@pytest.mark.fault(55)
@ranks(1, 2, more=(3, 7))
async def test_closed_communicator_refuses_operations(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    assert not other.closed
    await other.barrier()
    with no_grace():
        await other.aclose()
        await other.aclose()
    assert other.closed and not other.aborted and "closed" in repr(other)
    with pytest.raises(CommClosedError, match="all_reduce"):
        other.all_reduce(ones(comm))
    with pytest.raises(CommClosedError):
        await other.split([other.rank])
    other.abort("too late to matter")
    with pytest.raises(CommClosedError):
        other.barrier()
    await comm.barrier()


@pytest.mark.fault(55)
@pytest.mark.loops
@ranks(2)
async def test_concurrent_aclose_calls_all_return(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(other.aclose)
    assert other.closed


@pytest.mark.fault(55)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3)
async def test_close_waits_for_a_pending_collective(comm: Communicator, case: Case) -> None:
    """Rank 0 closes the communicator before the other ranks call the collective.

    The collective still completes on all ranks.
    """
    other = await case.open("other")
    slot = case.full(case.bits(torch.int32, SHAPE, comm.rank))
    outs = [case.empty(torch.int32, SHAPE) for _ in range(comm.size)]
    if comm.rank:
        await case.told("closing", 0)
    work = other.all_gather([out.tensor for out in outs], slot.tensor)
    if comm.rank == 0:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.aclose)
            await all_blocked()
            assert not work.done()
            with pytest.raises(CommClosedError):
                other.barrier()
            case.tell("closing")
    await work
    for r, out in enumerate(outs):
        out.expect(case.bits(torch.int32, SHAPE, r))
    await other.aclose()


@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("count", [3, 40_009])
async def test_close_delivers_sends_that_are_under_way(comm: Communicator, case: Case, count: int) -> None:
    case.need("p2p")
    other = await case.open("other")
    contents = [case.bits(torch.int32, (count,), i) for i in range(5)]
    if comm.rank == 0:
        for content in contents:
            other.send(content.to(comm.device), 1)
    else:
        for content in contents:
            slot = case.empty(torch.int32, (count,))
            await other.recv(slot.tensor, 0)
            slot.expect(content)
    await other.aclose()


@pytest.mark.memory
@ranks(2)
async def test_close_withdraws_receives(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    other = await case.open("other")
    slots = [case.empty(torch.int32, SHAPE) for _ in range(3)]
    if comm.rank == 0:
        await case.told("closed", 1)
        await other.aclose()
        return
    works = [other.recv(slot.tensor, 0, tag) for tag, slot in enumerate(slots)]
    objects = other.recv_object(0)
    with no_grace():
        await other.aclose()
    case.tell("closed")
    for work in (*works, objects):
        with pytest.raises(CommClosedError, match="closed"):
            await work
    for slot in slots:
        slot.expect_untouched()


@pytest.mark.fault(55)
@pytest.mark.memory
@ranks(2, 3, more=(7,))
@pytest.mark.parametrize("what", ["recv", "collective"])
async def test_op_that_needs_a_closed_rank_fails(comm: Communicator, case: Case, what: str) -> None:
    """An op that needs a closed rank fails, whether the op is called before the close or after the close."""
    if what == "recv":
        case.need("p2p")
    other = await case.open("other")
    if comm.rank == 0:
        await case.told("waiting")
        await other.aclose()
        return
    work = other.recv(ones(comm), 0, comm.rank) if what == "recv" else other.all_reduce(ones(comm))
    case.tell("waiting")
    with pytest.raises(CommAbortedError, match="closed by rank 0"):
        await work
    with pytest.raises(CommAbortedError, match="closed by rank 0"):
        await other.barrier()
    assert other.aborted
    await other.aclose()


@ranks(2, more=(3,))
async def test_collective_called_after_a_peer_closed_fails(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    if comm.rank == 0:
        await other.aclose()
        case.tell("closed")
        return
    await case.told("closed", 0)
    with pytest.raises(CommAbortedError, match="closed by rank 0"):
        await other.barrier()
    await other.aclose()


@pytest.mark.fault(43)
@pytest.mark.loops
@ranks(2)
async def test_cancelled_close_releases_everything(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    if comm.rank == 0:
        work = other.all_reduce(ones(comm))
        await cancel_await(other.aclose())
        assert other.closed
        with pytest.raises(CommError):
            await work
        await other.aclose()
        return
    with pytest.raises(CommAbortedError):
        await other.recv(ones(comm), 0) if "p2p" in comm.transports else await other.broadcast(ones(comm), 0)
    await other.aclose()


@pytest.mark.fault(45)
@pytest.mark.loops
@pytest.mark.clock
@ranks(2)
async def test_close_in_a_cancelled_scope_releases_everything(comm: Communicator, case: Case) -> None:
    """The check closes the communicator in a cancelled scope, which cancels each ``await`` of the close.

    Nevertheless, the close releases everything, and does not wait.
    """

    async def cycle(number: int) -> None:
        other = await case.open(f"cycle {number}")
        works = pend(other, 1 - comm.rank)
        with no_grace(), anyio.CancelScope() as scope:
            scope.cancel()
            await other.aclose()
        assert other.closed
        for work in works:
            with pytest.raises(CommError):
                await work
        case.opened.remove(other)

    await cycle(0)
    await case.meet("warm")
    before = resources()
    await cycle(1)
    await case.meet("closed")
    await expect_no_more_than(before)


@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3, more=(7,))
async def test_abort_fails_pending_works_on_all_ranks_with_the_first_reason(comm: Communicator, case: Case) -> None:
    """Pending works of all ranks fail with the reason of the first abort.

    The abort hooks are called once, and later calls fail at once.
    """
    heard: list[CommError] = []
    comm.register_abort_hook(heard.append)
    comm.register_abort_hook(heard.append).remove()
    works = pend(comm, (comm.rank + 1) % comm.size)
    await case.meet("pending")
    if comm.rank == comm.size - 1:
        comm.abort("the first reason")
        comm.abort("the second reason")
    for work in works:
        with pytest.raises(CommAbortedError, match="the first reason") as caught:
            await work
        assert caught.value.peer == comm.size - 1
        assert not isinstance(caught.value, (TimeoutError, OSError))
    with pytest.raises(CommAbortedError, match="the first reason"):
        comm.barrier()
    assert comm.aborted and not comm.closed and "lost: CommAbortedError" in repr(comm)
    assert len(heard) == 1 and "the first reason" in str(heard[0]), heard
    await comm.aclose()


@pytest.mark.fault(48)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_abort_from_another_thread_fails_pending_works(comm: Communicator, case: Case) -> None:
    works = pend(comm, 1 - comm.rank, 100)
    await case.meet("pending")
    if comm.rank == 0:
        thread = threading.Thread(target=comm.abort, args=(ValueError("from a thread"),))
        thread.start()
    for work in works:
        with pytest.raises(CommAbortedError, match="ValueError: from a thread"):
            await work
    if comm.rank == 0:
        thread.join()


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_abort_with_nothing_pending_reaches_the_peers(comm: Communicator, case: Case) -> None:
    heard, told = list[CommError](), anyio.Event()
    comm.register_abort_hook(heard.append)
    comm.register_abort_hook(lambda error: told.set())
    await case.meet("listening")
    if comm.rank == 0:
        comm.abort("out of the blue")
    await told.wait()
    assert comm.aborted and len(heard) == 1
    with pytest.raises(CommAbortedError, match="out of the blue"):
        comm.barrier()


@pytest.mark.fault(55)
@pytest.mark.loops
@ranks(2)
async def test_exception_in_the_context_aborts_the_communicator(comm: Communicator, case: Case) -> None:
    """An exception in the ``async with`` block aborts the communicator.

    Otherwise, peers could wait for operations that this rank never calls.
    """
    other = await case.open("other")
    if comm.rank == 0:
        await case.told("waiting", 1)
        with pytest.raises(KeyError):
            async with other:
                raise KeyError("the body")
        assert other.closed
        return
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(other)
        work = other.all_reduce(ones(comm))
        case.tell("waiting")
        with pytest.raises(CommAbortedError, match="KeyError"):
            await work


@pytest.mark.fault(47)
@ranks(2)
async def test_buffer_is_not_written_after_an_abort(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    slot = case.empty(torch.int32, (40_009,))
    work = comm.recv(slot.tensor, 1 - comm.rank)
    await case.meet("pending")
    comm.abort("both at once")
    with pytest.raises(CommAbortedError, match="both at once"):
        await work
    with pytest.raises(CommAbortedError):
        comm.send(ones(comm), 1 - comm.rank)
    await comm.aclose()
    slot.expect_untouched()


@ranks(2)
async def test_abort_leaves_other_communicators_usable(comm: Communicator, case: Case) -> None:
    other = await case.open("other")
    pending = other.all_reduce(ones(comm)) if comm.rank == 0 else None
    await comm.barrier()
    if comm.rank == 1:
        other.abort("this one only")
    if pending is not None:
        with pytest.raises(CommAbortedError):
            await pending
    tensor = ones(comm)
    await comm.all_reduce(tensor)
    assert (tensor == comm.size).all() and not comm.aborted
    await other.aclose()


@pytest.mark.core
@ranks(2)
async def test_hooks_run_around_each_op_and_a_raising_pre_hook_stops_it(comm: Communicator, case: Case) -> None:
    """A hook that raises before an op stops the op: the call sends nothing."""
    seen: list[tuple[str, int]] = []
    watching = comm.register_pre_hook(lambda op, seq: seen.append((op.name, seq)))
    work = comm.all_reduce(ones(comm))
    await work

    def refuse(op: object, seq: int) -> None:
        raise KeyError("not today")

    refusing = comm.register_pre_hook(refuse)
    if comm.rank == 0:
        with pytest.raises(KeyError, match="not today"):
            comm.all_reduce(ones(comm))
        with pytest.raises(KeyError, match="not today"):
            comm.barrier()
    refusing.remove()
    after = comm.barrier()
    await after
    watching.remove()
    await comm.barrier()
    assert after.seq > work.seq
    assert seen[0] == ("all_reduce", work.seq) and seen[-1] == ("barrier", after.seq)


@pytest.mark.fault(60)
@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2, more=(1,))
async def test_repeated_open_and_close_leaks_no_thread_or_descriptor(comm: Communicator, case: Case) -> None:
    """The numbers of threads and descriptors are not higher after the check than before the check."""

    async def cycle(number: int) -> None:
        other = await case.open(f"cycle {number}")
        await other.barrier()
        await other.aclose()
        case.opened.remove(other)

    await cycle(0)
    await case.meet("warm")
    before = resources()
    for number in range(1, 6):
        await cycle(number)
    await case.meet("closed")
    await expect_no_more_than(before)
