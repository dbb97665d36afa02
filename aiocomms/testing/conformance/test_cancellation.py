"""Cancellation of an await, and withdrawal of a receive. An operation happens completely, or not at all.

The checks determine the order in which the ranks act. A rank that must act second waits until the first rank has
posted a note.
"""

from __future__ import annotations

import asyncio
import gc
import random
import unittest

import anyio
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import WorkCancelledError
from aiocomms.testing.conformance.case import Case, all_blocked, cancel_await, ranks, wait_for
from aiocomms.testing.conformance.data import Slot

SHAPE = (6,)


def incoming(comm: Communicator, case: Case, tag: int = 0) -> tuple[Slot, Work[torch.Tensor]]:
    """Post the receive of rank 1, before rank 0 sends the message."""
    slot = case.empty(torch.int32, SHAPE)
    return slot, comm.recv(slot.tensor, 0, tag)


async def send_when_told(comm: Communicator, case: Case, note: str = "cancelled", tag: int = 0) -> None:
    """Do the part of rank 0: wait until rank 1 has posted ``note``, and then send the message."""
    await case.told(note, 1)
    await comm.send(case.bits(torch.int32, SHAPE).to(comm.device), 1, tag)


async def expect_in_next(comm: Communicator, case: Case, withdrawn: Slot, tag: int = 0) -> None:
    """Do the part of rank 1.

    Check that the next receive gets the message, and that the withdrawn receive's buffer is unchanged.
    """
    case.tell("cancelled")
    slot, work = incoming(comm, case, tag)
    await work
    slot.expect(case.bits(torch.int32, SHAPE))
    withdrawn.expect_untouched()


@pytest.mark.fault(37, 43)
@ranks(2)
async def test_cancelled_recv_leaves_its_message_for_the_next(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await send_when_told(comm, case, tag=-5)
        return
    slot, work = incoming(comm, case, tag=-5)
    assert await work.cancel() is True
    assert work.done() and await work.cancel() is True
    with pytest.raises(WorkCancelledError):
        await work
    assert isinstance(work.exception(), WorkCancelledError)
    await expect_in_next(comm, case, slot, tag=-5)


@pytest.mark.fault(37)
@pytest.mark.loops
@ranks(2)
async def test_cancelling_the_only_awaiter_withdraws_a_recv(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await send_when_told(comm, case)
        return
    slot, work = incoming(comm, case)
    await cancel_await(work)
    assert isinstance(work.exception(), WorkCancelledError)
    await expect_in_next(comm, case, slot)


@pytest.mark.fault(42)
@pytest.mark.loops
@ranks(2)
@pytest.mark.parametrize("seconds", [0, pytest.param(0.01, marks=pytest.mark.clock)])
async def test_expired_cancel_scope_withdraws_a_recv(comm: Communicator, case: Case, seconds: float) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await send_when_told(comm, case)
        return
    slot = case.empty(torch.int32, SHAPE)
    with anyio.move_on_after(seconds) as scope:
        await comm.recv(slot.tensor, 0)
    assert scope.cancelled_caught
    await expect_in_next(comm, case, slot)


@pytest.mark.fault(42)
@pytest.mark.loops
@pytest.mark.clock
@ranks(2)
async def test_asyncio_timeout_withdraws_a_recv(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if case.place.loop == "trio":
        raise unittest.SkipTest("asyncio's own timeout")
    if comm.rank == 0:
        await send_when_told(comm, case)
        return
    slot, work = incoming(comm, case)
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.01):
            await work
    assert type(caught.value) is TimeoutError
    await expect_in_next(comm, case, slot)


@pytest.mark.fault(43)
@pytest.mark.loops
@ranks(2)
async def test_cancelling_one_awaiter_leaves_the_others_waiting(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await send_when_told(comm, case)
        return
    slot, work = incoming(comm, case)
    scopes, outcomes = [anyio.CancelScope() for _ in range(3)], [list[object]() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for scope, outcome in zip(scopes, outcomes, strict=True):
            tasks.start_soon(wait_for, work, scope, outcome)
        await all_blocked()
        scopes[1].cancel()
        await all_blocked()
        assert scopes[1].cancelled_caught and not work.done()
        case.tell("cancelled")
    assert outcomes == [[slot.tensor], [], [slot.tensor]]
    slot.expect(case.bits(torch.int32, SHAPE))


@ranks(2)
async def test_cancelling_the_second_of_three_recvs_leaves_the_order_of_the_others(
    comm: Communicator, case: Case
) -> None:
    """The first and the third receive get the messages, in the order of the sends."""
    case.need("p2p")
    contents = [case.bits(torch.int32, SHAPE, i) for i in range(3)]
    if comm.rank == 0:
        await case.told("cancelled", 1)
        for content in contents:
            await comm.send(content.to(comm.device), 1)
        return
    receives = [incoming(comm, case) for _ in range(3)]
    assert await receives[1][1].cancel()
    case.tell("cancelled")
    slot, work = incoming(comm, case)
    for (given, its_work), content in zip([receives[0], receives[2], (slot, work)], contents, strict=True):
        await its_work
        given.expect(content)
    receives[1][0].expect_untouched()


@ranks(2)
async def test_cancel_of_a_completed_recv_returns_false(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        case.tell("cancelled")
        await comm.send(case.bits(torch.int32, SHAPE).to(comm.device), 1)
        return
    slot, work = incoming(comm, case)
    await work
    assert await work.cancel() is False
    assert await work is slot.tensor
    slot.expect(case.bits(torch.int32, SHAPE))


@pytest.mark.fault(38)
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("count", [3, 40_009])
async def test_cancel_of_recv_that_races_with_its_message_loses_none(
    comm: Communicator, case: Case, count: int
) -> None:
    """The next receive gets the message if ``cancel`` returns True.

    The cancelled receive gets the message if ``cancel`` returns False.
    """
    case.need("p2p")
    draw = random.Random(f"{case.seed}")
    for turn in range(30):
        content, delay = case.bits(torch.int32, (count,), turn), draw.choice([0, 0, 1, 2, 5])
        if comm.rank == 0:
            await case.told(f"posted {turn}", 1)
            await comm.send(content.to(comm.device), 1)
            continue
        slot = case.empty(torch.int32, (count,))
        work = comm.recv(slot.tensor, 0)
        case.tell(f"posted {turn}")
        for _ in range(delay):
            await anyio.lowlevel.checkpoint()
        if await work.cancel():
            slot.expect_untouched()
            second = case.empty(torch.int32, (count,))
            await comm.recv(second.tensor, 0)
            second.expect(content)
            slot.expect_untouched()
        else:
            assert await work is slot.tensor
            slot.expect(content)


@pytest.mark.fault(42)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_awaiter_cancelled_as_the_recv_completes_loses_no_message(comm: Communicator, case: Case) -> None:
    """The awaiter is cancelled after the end of the op, but before the awaiter resumes. The message is not lost."""
    case.need("p2p")
    contents = [case.bits(torch.int32, SHAPE, i) for i in range(2)]
    if comm.rank == 0:
        await case.told("waiting", 1)
        for content in contents:
            await comm.send(content.to(comm.device), 1)
        return
    slot, work = incoming(comm, case)
    scope, outcome = anyio.CancelScope(), list[object]()
    hook = comm.register_post_hook(lambda done: scope.cancel() if done is work else None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for, work, scope, outcome)
        await all_blocked()
        case.tell("waiting")
    hook.remove()
    assert work.done() and work.result() is slot.tensor
    assert outcome in ([], [slot.tensor])
    slot.expect(contents[0])
    after, work = incoming(comm, case)
    await work
    after.expect(contents[1])


@pytest.mark.fault(39)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("count", [3, 40_009])
async def test_cancelled_send_delivers_the_whole_message(comm: Communicator, case: Case, count: int) -> None:
    """The await of a send is cancelled, and the sent tensor is dropped. Nevertheless the whole message arrives."""
    case.need("p2p")
    contents = [case.bits(torch.int32, (count,), i) for i in range(3)]
    if comm.rank == 1:
        await case.told("cancelled", 0)
        for content in contents:
            slot = case.empty(torch.int32, (count,))
            await comm.recv(slot.tensor, 0)
            slot.expect(content)
        return
    for content in contents[:2]:
        with anyio.move_on_after(0):
            await comm.send(content.clone().to(comm.device), 1)
    gc.collect()
    # One of these tensors may reuse the dropped tensor's memory.
    [torch.full((count,), -1, dtype=torch.int32) for _ in range(4)]
    work = comm.send(contents[2].to(comm.device), 1)
    case.tell("cancelled")
    assert await work.cancel() is False
    assert work.exception() is None


@pytest.mark.fault(40)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3, more=(7,))
async def test_cancelled_collective_completes_on_all_ranks(comm: Communicator, case: Case) -> None:
    """One rank's await is cancelled before the other ranks call the collective.

    This collective and the next collective complete on all ranks.
    """
    for victim in range(comm.size):
        content = case.numbers(torch.int64, SHAPE, victim, comm.rank)
        want = sum(case.numbers(torch.int64, SHAPE, victim, r) for r in range(comm.size))
        slot = case.full(content)
        if comm.rank == victim:
            work = comm.all_reduce(slot.tensor)
            await cancel_await(work)
            assert not work.done()
            case.tell(f"cancelled {victim}")
            await work
        else:
            await case.told(f"cancelled {victim}", victim)
            await comm.all_reduce(slot.tensor)
        slot.expect(torch.as_tensor(want))
    await comm.barrier()


@ranks(2, more=(3,))
async def test_cancel_of_a_collective_waits_for_its_completion(comm: Communicator, case: Case) -> None:
    content = case.bits(torch.int32, SHAPE)
    slot = case.empty(torch.int32, SHAPE) if comm.rank == 0 else case.full(content)
    if comm.rank:
        await case.told("called", 0)
    work = comm.broadcast(slot.tensor, 1)
    case.tell("called")
    if comm.rank == 0:
        assert await work.cancel() is False
        assert work.result() is slot.tensor
    await work
    slot.expect(content)


@pytest.mark.fault(44)
@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_failing_sibling_task_withdraws_a_recv(comm: Communicator, case: Case) -> None:
    """The task group ends at once with the error of the sibling task, and the communicator stays usable."""
    case.need("p2p")
    if comm.rank == 0:
        await send_when_told(comm, case)
        return
    slot, work = incoming(comm, case)

    async def fail() -> None:
        await all_blocked()
        raise KeyError("sibling")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for, work, anyio.CancelScope(), [])
            tasks.start_soon(fail)
    assert caught.group_contains(KeyError)
    await expect_in_next(comm, case, slot)


@ranks(2)
async def test_batch_whose_awaiter_is_cancelled_completes(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    peer = 1 - comm.rank
    slot = case.empty(torch.int32, SHAPE)
    if comm.rank:
        await case.told("cancelled", 0)
    work = (
        comm.batch()
        .send(case.bits(torch.int32, SHAPE, comm.rank).to(comm.device), peer)
        .recv(slot.tensor, peer)
        .issue()
    )
    if comm.rank == 0:
        await cancel_await(work)
        case.tell("cancelled")
    await work
    slot.expect(case.bits(torch.int32, SHAPE, peer))


@pytest.mark.fault(41)
@pytest.mark.loops
@ranks(2)
async def test_cancelling_200_recvs_leaves_the_next_message_intact(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 1:
        slots = [incoming(comm, case) for _ in range(200)]
        for i, (_, work) in enumerate(slots):
            if i % 2:
                assert await work.cancel()
            else:
                await cancel_await(work)
        await expect_in_next(comm, case, slots[-1][0])
        for slot, _ in slots:
            slot.expect_untouched()
    else:
        await send_when_told(comm, case)
    await comm.barrier()


@pytest.mark.fault(41)
@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3)
async def test_random_cancellation_on_all_ranks_loses_no_data(comm: Communicator, case: Case) -> None:
    """Awaits of a collective and of an exchange are cancelled at random points.

    No data is lost, and later operations have right results.
    """
    case.need_any_order()
    draw = random.Random(f"{case.seed} {comm.rank}")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(40):
        content, count = case.numbers(torch.int64, SHAPE, turn, comm.rank), (3, 40_009)[turn % 8 == 0]
        total = case.full(content)
        mine, incoming_bits = (case.bits(torch.int32, (count,), turn, r) for r in (comm.rank, left))
        got = case.empty(torch.int32, (count,))
        works = [comm.all_reduce(total.tensor), comm.send(mine.to(comm.device, copy=True), right)]
        receiving = comm.recv(got.tensor, left)
        async with anyio.create_task_group() as tasks:
            for work in (*works, receiving):
                scope = anyio.CancelScope()
                tasks.start_soon(wait_for, work, scope, [])
                tasks.start_soon(cancel_later, scope, draw.choice([0, 0, 1, 2, 5]))
        if isinstance(receiving.exception() if receiving.done() else None, WorkCancelledError):
            got.expect_untouched()
            got = case.empty(torch.int32, (count,))
            receiving = comm.recv(got.tensor, left)
        for work in (*works, receiving):
            await work
        got.expect(incoming_bits)
        total.expect(sum((case.numbers(torch.int64, SHAPE, turn, r) for r in range(comm.size)), torch.tensor(0)))


async def cancel_later(scope: anyio.CancelScope, turns: int) -> None:
    """Cancel a scope after some iterations of the event loop."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()
