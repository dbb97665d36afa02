"""Checks of receives from any rank and of probes that end without a message: withdrawal, deadline, close and abort."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    LaneAbortedError,
    MismatchError,
    WorkCancelledError,
)
from aiocomms.testing.conformance.case import Case, cancel_await, ranks
from aiocomms.testing.conformance.test_idle import expect_silence

SHAPE = (6,)
SHORT = 0.1
"""A short deadline, in seconds."""


def waiting(comm: Any, tag: int = 0) -> list[Work[Any]]:
    """Start ``recv_any``, ``recv_message`` and ``probe``, and return their works."""
    buffer = torch.zeros(SHAPE, dtype=torch.int32, device=comm.device)
    return [comm.recv_any(buffer, tag=tag), comm.recv_message(tag=tag), comm.probe(tag=tag)]


async def send_when_told(comm: Communicator, case: Case, note: str = "given up") -> None:
    await case.told(note, 0)
    await comm.send(case.bits(torch.int32, SHAPE, comm.rank).to(comm.device), 0)


async def expect_all(comm: Communicator, case: Case, note: str = "given up") -> None:
    """Do rank 0's part: let all other ranks send one message each, and check that rank 0 receives these messages."""
    case.tell(note)
    sources = []
    for _ in range(comm.size - 1):
        src, tensor = await comm.recv_message()
        case.full(case.bits(torch.int32, SHAPE, src)).expect(tensor.cpu())
        sources.append(src)
    assert sorted(sources) == list(range(1, comm.size))
    assert not comm.aborted


@pytest.mark.loops
@ranks(2, 3)
@pytest.mark.parametrize("how", ["cancel", "await"])
async def test_recv_any_cancelled_before_a_message_is_withdrawn(comm: Communicator, case: Case, how: str) -> None:
    case.need_arrivals()
    if comm.rank:
        await send_when_told(comm, case)
        return
    slot = case.empty(torch.int32, SHAPE)
    for work in (comm.recv_any(slot.tensor), *waiting(comm)):
        if how == "cancel":
            assert await work.cancel() is True
        else:
            await cancel_await(work)
        assert isinstance(work.exception(), WorkCancelledError)
    await expect_all(comm, case)
    slot.expect_untouched()


@ranks(2)
async def test_cancelling_the_second_of_three_recv_any_leaves_the_order_of_the_others(
    comm: Communicator, case: Case
) -> None:
    """The first and the third receive get the messages, in order, after the second receive was withdrawn."""
    case.need_arrivals()
    contents = [case.bits(torch.int32, SHAPE, i) for i in range(2)]
    if comm.rank:
        await case.told("withdrawn", 0)
        for content in contents:
            await comm.send(content.to(comm.device), 0)
        return
    slots = [case.empty(torch.int32, SHAPE) for _ in range(3)]
    works = [comm.recv_any(slot.tensor) for slot in slots]
    assert await works[1].cancel()
    case.tell("withdrawn")
    for i, content in ((0, contents[0]), (2, contents[1])):
        assert await works[i] == 1
        slots[i].expect(content)
    slots[1].expect_untouched()


@pytest.mark.memory
@ranks(3, more=(2, 7))
@pytest.mark.parametrize("count", [3, 40_009])
async def test_cancel_of_recv_any_that_races_with_messages_loses_none(
    comm: Communicator, case: Case, count: int
) -> None:
    """A withdrawn receive takes no message: each message is received once, whole, and in order."""
    case.need_arrivals()
    turns = 20
    if comm.rank:
        for turn in range(turns):
            await comm.send(case.bits(torch.int32, (count,), turn, comm.rank).to(comm.device), 0)
        return
    draw, received = random.Random(f"{case.seed}"), dict.fromkeys(range(1, comm.size), 0)
    while sum(received.values()) < turns * (comm.size - 1):
        slot = case.empty(torch.int32, (count,))
        work = comm.recv_any(slot.tensor)
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            await anyio.lowlevel.checkpoint()
        if draw.random() < 0.5 and await work.cancel():
            slot.expect_untouched()
            continue
        src = await work
        slot.expect(case.bits(torch.int32, (count,), received[src], src))
        received[src] += 1


@ranks(3)
async def test_recv_and_recv_any_that_race_get_one_message_each(comm: Communicator, case: Case) -> None:
    """Each message goes to one receive, and each receive gets one message."""
    case.need_arrivals()
    turns = 20
    if comm.rank:
        for turn in range(turns):
            await comm.send(case.bits(torch.int32, SHAPE, turn, comm.rank).to(comm.device), 0)
        return
    slots = [case.empty(torch.int32, SHAPE) for _ in range(2 * turns)]
    sources: list[int | None] = [None] * len(slots)

    async def from_one(i: int) -> None:
        await comm.recv(slots[i].tensor, 1)
        sources[i] = 1

    async def from_any(i: int) -> None:
        sources[i] = await comm.recv_any(slots[i].tensor)

    async with anyio.create_task_group() as tasks:
        for i in range(len(slots)):
            # The receives before these can take no more than the other half of rank 1's messages.
            named = turns // 2 <= i < turns
            tasks.start_soon(from_one if named else from_any, i)
    got = sorted((src, slot.tensor.tolist()) for src, slot in zip(sources, slots, strict=True) if src is not None)
    sent = [(src, case.bits(torch.int32, SHAPE, turn, src).tolist()) for src in (1, 2) for turn in range(turns)]
    assert got == sorted(sent)


@pytest.mark.clock
@ranks(3)
async def test_recv_any_past_its_deadline_fails_alone(comm: Communicator, case: Case) -> None:
    case.need_arrivals()
    if comm.rank:
        await send_when_told(comm, case)
        return
    calls: list[Callable[[], Work[Any]]] = [
        lambda: comm.probe(timeout=SHORT),
        lambda: comm.recv_message(timeout=SHORT),
        lambda: comm.recv_any(torch.zeros(SHAPE, device=comm.device), [1, 2], timeout=SHORT),
    ]
    for call in calls:
        with pytest.raises(
            CommTimeoutError, match=r"nothing matched .* before its deadline; it was withdrawn"
        ) as caught:
            await call()
        assert caught.value.late == (1, 2)
    await expect_all(comm, case)


@ranks(3)
async def test_recv_any_fails_only_if_all_its_sources_have_closed(comm: Communicator, case: Case) -> None:
    """An op continues while one of its sources is open. If all sources have closed, this op and later ops fail."""
    case.need_arrivals()
    other = await case.open("other")
    await other.barrier()
    if comm.rank == 0:
        from_first, from_both, probe = other.recv_message(1), other.recv_message(), other.probe([1, 2])
        case.tell("waits")
        with pytest.raises(CommAbortedError, match="closed by rank 1") as caught:
            await from_first
        assert caught.value.peer == 1
        with pytest.raises(CommAbortedError, match="closed by rank 1"):
            await other.probe(1)
        assert not from_both.done() and not probe.done()
        case.tell("heard")
        src, tensor = await from_both
        assert src == 2
        case.full(case.bits(torch.int32, SHAPE)).expect(tensor.cpu())
        with pytest.raises(CommAbortedError, match="closed by rank 2"):
            await probe
        with pytest.raises(CommAbortedError, match="closed by rank"):
            await other.recv_message()
        assert not other.aborted
    elif comm.rank == 1:
        await case.told("waits", 0)
    else:
        await case.told("heard", 0)
        await other.send(case.bits(torch.int32, SHAPE).to(comm.device), 0)
    await other.aclose()


@ranks(2)
async def test_recv_any_gets_a_message_sent_before_the_source_closed(comm: Communicator, case: Case) -> None:
    case.need_arrivals()
    other = await case.open("other")
    await other.barrier()
    if comm.rank:
        await other.send(case.bits(torch.int32, SHAPE).to(comm.device), 0)
    else:
        assert await other.probe() == (1, 0, 24, torch.int32)
        src, tensor = await other.recv_message()
        assert src == 1
        case.full(case.bits(torch.int32, SHAPE)).expect(tensor.cpu())
    await other.aclose()


@ranks(2, 3)
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_recv_any_fails_when_its_communicator_closes_or_aborts(comm: Communicator, case: Case, end: str) -> None:
    case.need_arrivals()
    other = await case.open("other")
    works = waiting(other)
    await case.meet("waits")
    if end == "close":
        await other.aclose()
        for work in works:
            with pytest.raises((CommClosedError, CommAbortedError), match="closed"):
                await work
    else:
        if comm.rank == 0:
            other.abort("enough")
        for work in works:
            with pytest.raises(CommAbortedError, match="aborted by rank 0: enough"):
                await work
        await other.aclose()
    with pytest.raises((CommClosedError, CommAbortedError)):
        other.probe()


@ranks(2)
async def test_recv_any_fails_when_its_lane_ends_and_other_lanes_go_on(comm: Communicator, case: Case) -> None:
    """The receives and probes of an aborted or closed lane fail.

    Receives of other lanes and of the communicator stay pending.
    """
    case.need_arrivals()
    lane, beside = comm.lane("given up"), comm.lane("goes on")
    works, left = waiting(lane), comm.lane("closed").recv_message()
    going_on = [beside.recv_message(), comm.recv_message()]
    await case.meet("waits")
    await comm.lane("closed").aclose()
    with pytest.raises(CommClosedError, match="the lane was closed"):
        await left
    if comm.rank == 0:
        lane.abort("enough")
    for work in works:
        with pytest.raises(LaneAbortedError, match="enough"):
            await work
    with pytest.raises(LaneAbortedError):
        lane.probe()
    content = case.bits(torch.int32, SHAPE)
    sends = [view.send(content.to(comm.device), 1 - comm.rank) for view in (beside, comm)]
    for work in (*going_on, *sends):
        await work
    assert not comm.aborted


@ranks(2)
async def test_recv_any_of_another_dtype_loses_the_communicator(comm: Communicator, case: Case) -> None:
    """The error is a :class:`MismatchError`, as for a receive that names its source."""
    case.need_arrivals()
    other = await case.open("other")
    if comm.rank == 0:
        with pytest.raises(MismatchError, match=r"int32.*float32|float32.*int32"):
            await other.recv_any(torch.zeros(6, device=comm.device))
        case.tell("told")
    else:
        sending = other.send(case.bits(torch.int32, SHAPE).to(comm.device), 0)
        await case.told("told", 0)
        await sending.wait()
        with pytest.raises(MismatchError):
            raise await other.lost()
    await other.aclose()


@pytest.mark.loops
@pytest.mark.clock
@ranks(2, more=(3,))
async def test_pending_recv_any_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    case.need_arrivals()
    works = waiting(comm)
    await expect_silence(case, "with receives from any rank")
    for work in works:
        assert await work.cancel()
    await expect_silence(case, "when they are withdrawn")
