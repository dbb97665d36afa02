"""Messages of a rank to itself, which follow the rules for messages to other ranks, on every transport."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    LaneAbortedError,
    MessageTruncatedError,
    MismatchError,
    WorkCancelledError,
)
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_messages import TAGS, neighbours

pytestmark: pytest.MarkDecorator = pytest.mark.core

SHAPE = (6,)
SHORT = 0.1
"""A short deadline for ops that must time out, in seconds."""
LARGE = 40_009
"""The number of elements of a tensor that no transport sends before the matching receive."""


def can(comm: Communicator, case: Case) -> bool:
    """Return whether a rank may send to itself. If not, check that sends and receives of this kind raise an error."""
    case.need("p2p")
    if comm.device.type == "cpu":
        return True
    for call in (comm.send, comm.recv):
        with pytest.raises(ArgumentError, match=f"is {comm.rank}, this rank itself; wanted another rank"):
            call(torch.zeros(1, device=comm.device), comm.rank)
    return False


@ranks(1, 2, more=(3,))
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_self_send_and_recv_match_whichever_is_posted_first(comm: Communicator, case: Case, early: str) -> None:
    """A program may change the sent tensor after the send is done. The message changes only the receive's buffer."""
    if not can(comm, case):
        return
    for dtype in data.ALL_DTYPES:
        for shape in data.SHAPES:
            content = case.bits(dtype, shape)
            given, slot = case.full(content), case.empty(dtype, shape)
            if early == "send":
                sending = comm.send(given.tensor, comm.rank, 7)
                assert not sending.done()
                receiving = comm.recv(slot.tensor, comm.rank, 7)
            else:
                receiving = comm.recv(slot.tensor, comm.rank, 7)
                sending = comm.send(given.tensor, comm.rank, 7)
            assert await sending is given.tensor
            given.expect(content)
            given.tensor.zero_()
            assert await receiving is slot.tensor
            slot.expect(content)


@ranks(2, more=(1,))
async def test_self_recv_matches_by_tag_in_order(comm: Communicator, case: Case) -> None:
    if not can(comm, case):
        return
    sent = [(tag, case.bits(torch.int16, (3,), tag, turn)) for turn in range(3) for tag in TAGS]
    sends = [comm.send(content.clone(), comm.rank, tag) for tag, content in sent]
    wanted = random.Random(f"{case.seed} {comm.rank}").sample(TAGS, len(TAGS))
    for turn in range(3):
        for tag in wanted:
            slot = case.empty(torch.int16, (3,))
            await comm.recv(slot.tensor, comm.rank, tag)
            slot.expect(case.bits(torch.int16, (3,), tag, turn))
    for work in sends:
        await work


@ranks(1, 3, more=(2,))
async def test_self_send_matches_no_recv_from_another_rank_or_lane(comm: Communicator, case: Case) -> None:
    """Messages of this rank, of other ranks, of a lane and of objects do not mix, although all use the same tag."""
    if not can(comm, case):
        return
    right, left = neighbours(comm)
    peers = [comm.rank, left] if comm.size > 1 else [comm.rank]
    lane = comm.lane("one")
    slots = {(own, src): case.empty(torch.int32, SHAPE) for own in (False, True) for src in peers}
    works: list[Work[Any]] = [(lane if own else comm).recv(slot.tensor, src, 5) for (own, src), slot in slots.items()]
    objects = [comm.recv_object(src, 5) for src in peers]
    for dst in {comm.rank, right}:
        for own in (True, False):
            content = case.bits(torch.int32, SHAPE, own, comm.rank)
            works.append((lane if own else comm).send(content.clone(), dst, 5))
        works.append(comm.send_object(["from", comm.rank], dst, 5))
    await comm.barrier()
    for work in works:
        await work
    for (own, src), slot in slots.items():
        slot.expect(case.bits(torch.int32, SHAPE, own, src))
    assert [await work for work in objects] == [["from", src] for src in peers]


@ranks(2, more=(1,))
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_object_sent_to_self_arrives_as_a_copy(comm: Communicator, case: Case, early: str) -> None:
    """The received object is a copy, with memory of its own."""
    if not can(comm, case):
        return
    weights = case.numbers(torch.float32, (300, 300)).clone()
    expected = weights.t().clone()
    # These weights are not contiguous.
    given = {"weights": weights.t(), "text": "x" * 40_000, "data": bytes(70_000), "n": 3}
    if early == "send":
        sending, receiving = comm.send_object(given, comm.rank, 1), comm.recv_object(comm.rank, 1)
    else:
        receiving, sending = comm.recv_object(comm.rank, 1), comm.send_object(given, comm.rank, 1)
    await sending
    got = await receiving
    weights.zero_()
    assert torch.equal(got.pop("weights"), expected)
    assert got == {name: value for name, value in given.items() if name != "weights"}


@ranks(3, more=(1, 2))
async def test_batch_to_all_ranks_includes_this_rank(comm: Communicator, case: Case) -> None:
    """A batch can contain the messages to this rank as well as the messages to all other ranks."""
    if not can(comm, case):
        return
    slots = [case.empty(torch.float32, (r + 2,)) for r in range(comm.size)]
    batch = comm.batch()
    for r in range(comm.size):
        batch.send(case.bits(torch.float32, (comm.rank + 2,), comm.rank, r), r, 5).recv(slots[r].tensor, r, 5)
    await batch.issue()
    for r, slot in enumerate(slots):
        slot.expect(case.bits(torch.float32, (r + 2,), r, comm.rank))


@ranks(2, more=(1,))
@pytest.mark.parametrize("early", ["send", "recv"])
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (5, 0), (0, 5), (LARGE, 9)], ids=str)
async def test_self_recv_of_another_size_fails_and_the_next_message_arrives(
    comm: Communicator, case: Case, early: str, sizes: tuple[int, int]
) -> None:
    """The receive fails, and the buffer of the receive contains the part of the message that fits.

    The send succeeds, and the next message is right.
    """
    if not can(comm, case):
        return
    content, after = case.bits(torch.int32, sizes[:1]), case.bits(torch.int32, SHAPE)
    slot, following = case.empty(torch.int32, sizes[1:]), case.empty(torch.int32, SHAPE)
    if early == "recv":
        receiving, second = comm.recv(slot.tensor, comm.rank), comm.recv(following.tensor, comm.rank)
    sends = [comm.send(tensor.clone(), comm.rank) for tensor in (content, after)]
    if early == "send":
        receiving, second = comm.recv(slot.tensor, comm.rank), comm.recv(following.tensor, comm.rank)
    for work in (*sends, second):
        await work
    with pytest.raises(MessageTruncatedError) as caught:
        await receiving
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("recv", comm.rank, comm.rank)
    expected = case.empty(torch.int32, sizes[1:]).tensor
    expected[: min(sizes)] = content[: min(sizes)]
    slot.expect(expected)
    following.expect(after)
    await comm.barrier()


@ranks(2, more=(1,))
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_self_recv_of_another_dtype_loses_the_communicator(comm: Communicator, case: Case, early: str) -> None:
    """The communicator is lost, as after any receive whose dtype differs from the message's dtype."""
    if not can(comm, case):
        return
    if comm.rank:
        with pytest.raises(MismatchError, match="float32"):
            raise await comm.lost()
        return
    slot, other = case.empty(torch.int32, SHAPE), torch.ones(SHAPE)
    if early == "send":
        comm.send(other, 0)
    receiving = comm.recv(slot.tensor, 0)
    if early == "recv":
        comm.send(other, 0)
    with pytest.raises(MismatchError, match="float32"):
        await receiving
    slot.expect_untouched()
    assert comm.aborted


@pytest.mark.clock
@ranks(2, more=(1,))
async def test_self_recv_is_withdrawn_by_cancel_task_or_deadline(comm: Communicator, case: Case) -> None:
    """A receive withdrawn by ``cancel``, by its task's cancellation or at its deadline never takes a message."""
    if not can(comm, case):
        return
    slots = [case.empty(torch.int32, SHAPE) for _ in range(3)]
    first = comm.recv(slots[0].tensor, comm.rank)
    assert await first.cancel()
    with pytest.raises(WorkCancelledError):
        await first
    with anyio.CancelScope() as scope:
        scope.cancel()
        await comm.recv(slots[1].tensor, comm.rank)
    with pytest.raises(CommTimeoutError) as caught:
        await comm.recv(slots[2].tensor, comm.rank, timeout=SHORT)
    assert (caught.value.op, caught.value.peer) == ("recv", comm.rank)
    with pytest.raises(CommTimeoutError):
        await comm.recv_object(comm.rank, timeout=SHORT)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await comm.recv_object(comm.rank)
    await comm.batch().send(torch.ones(SHAPE), comm.rank).recv(torch.ones(SHAPE), comm.rank).issue()
    for slot in slots:
        slot.expect_untouched()
    await comm.barrier()


@ranks(2, more=(1,))
async def test_cancelled_awaiter_leaves_self_send_and_batch_pending(comm: Communicator, case: Case) -> None:
    """The cancellation does not withdraw a send or a batch."""
    if not can(comm, case):
        return
    slots = [case.empty(torch.int32, SHAPE) for _ in range(2)]
    content = case.bits(torch.int32, SHAPE)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await comm.batch().recv(slots[0].tensor, comm.rank).issue()
    await comm.send(content.clone(), comm.rank)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await comm.send(content.clone(), comm.rank)
    await comm.recv(slots[1].tensor, comm.rank)
    for slot in slots:
        slot.expect(content)


@pytest.mark.clock
@ranks(2, more=(1,))
async def test_self_send_past_its_deadline_loses_the_communicator(comm: Communicator, case: Case) -> None:
    """The late send ends the communicator. The error names the rank for which the send has waited."""
    if not can(comm, case):
        return
    if comm.rank:
        with pytest.raises(CommTimeoutError, match="rank 0 timed out"):
            raise await comm.lost()
        return
    with pytest.raises(CommTimeoutError, match="waiting for rank 0"):
        await comm.send(torch.ones(SHAPE), 0, timeout=SHORT)


@ranks(2, more=(1,))
async def test_abort_fails_pending_self_messages(comm: Communicator, case: Case) -> None:
    if not can(comm, case):
        return
    works: list[Work[Any]] = [comm.send(torch.ones(LARGE), comm.rank), comm.recv(torch.ones(3), comm.rank, 1)]
    works += [comm.send_object("nobody", comm.rank), comm.recv_object(comm.rank, 1)]
    await case.meet("called")
    if comm.rank == 0:
        comm.abort("enough")
    for work in works:
        with pytest.raises(CommAbortedError, match="enough"):
            await work


@ranks(2, more=(1,))
async def test_close_ends_unmatched_self_messages_at_once(comm: Communicator, case: Case) -> None:
    """An unmatched op ends immediately, because no rank is left that could match the op."""
    if not can(comm, case):
        return
    other = await case.open("other")
    slot = case.empty(torch.int32, SHAPE)
    works: list[Work[Any]] = [other.send(torch.ones(LARGE), comm.rank), other.recv(slot.tensor, comm.rank, 1)]
    works += [other.send_object("nobody", comm.rank), other.recv_object(comm.rank, 1)]
    works += [other.batch().send(torch.ones(3), comm.rank, 2).issue()]
    await other.aclose()
    for work in works:  # The close has waited for some of these works. Their errors do not mention that.
        with pytest.raises(CommClosedError, match=r"closed.*(had not received the message|the op was withdrawn)"):
            await work
    slot.expect_untouched()


@ranks(2, more=(1, 3))
async def test_lane_abort_ends_pending_self_messages(comm: Communicator, case: Case) -> None:
    """The pending ops of the lane end, and no message of the lane remains."""
    if not can(comm, case):
        return
    lane = comm.lane("failing")
    slot = case.empty(torch.int32, SHAPE)
    works: list[Work[Any]] = [lane.send(torch.ones(LARGE), comm.rank), lane.recv(slot.tensor, comm.rank, 1)]
    works += [lane.send_object("nobody", comm.rank), lane.recv_object(comm.rank, 1)]
    works += [lane.batch().send(torch.ones(3), comm.rank, 2).recv(torch.ones(3), comm.rank, 3).issue()]
    await case.meet("called")
    if comm.rank == 0:
        lane.abort("a bad request")
    for work in works:
        with pytest.raises(LaneAbortedError, match="a bad request"):
            await work
    slot.expect_untouched()
    await comm.lane("another").barrier()
    await comm.barrier()
    assert not comm.aborted


@ranks(2, more=(1,))
async def test_portal_exchanges_messages_with_self(comm: Communicator, case: Case) -> None:
    if not can(comm, case):
        return
    content, slot = case.bits(torch.int32, SHAPE), case.empty(torch.int32, SHAPE)

    def exchange() -> None:
        portal = comm.portal()
        receiving = portal.recv(slot.tensor, comm.rank)
        portal.send(content.clone(), comm.rank).wait()
        receiving.wait()

    await anyio.to_thread.run_sync(exchange)
    slot.expect(content)


@ranks(2, more=(1,))
async def test_open_stream_to_self_is_refused(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    with pytest.raises(ArgumentError, match=f"peer is {comm.rank}, this rank itself"):
        await comm.open_stream(comm.rank)
