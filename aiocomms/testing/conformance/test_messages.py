"""Checks of messages between two ranks: content, tags, order of matching, wrong sizes, concurrent messages, batches."""

from __future__ import annotations

import random

import anyio
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, MessageTruncatedError, UnsupportedOperation
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks, refusable

HUGE = (1_250_003,)

TAGS = (0, 1, -1, 255, 256, 65_535, 65_536, 65_537, -65_536, 2**31 - 1, -(2**31), 2**30, -(2**30))
"""The tags of the checks.

A transport that drops the sign of a tag, or some of the tag's 32 bits, confuses two of these tags.
"""


def neighbours(comm: Communicator) -> tuple[int, int]:
    """Return the next and the previous rank in a ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.memory
@ranks(2, 3, more=(4, 7))
async def test_messages_of_all_sizes_arrive_bit_for_bit(comm: Communicator, case: Case) -> None:
    """Messages of all sizes go around a ring of ranks at the same time."""
    case.need_any_order()
    right, left = neighbours(comm)
    for dtype in data.ALL_DTYPES:
        works: list[Work[torch.Tensor]] = []
        slots = []
        try:
            for tag, shape in enumerate(data.SHAPES):
                slot, want = case.empty(dtype, shape), case.bits(dtype, shape, left)
                given = case.full(case.bits(dtype, shape, comm.rank))
                works += [comm.recv(slot.tensor, left, tag), comm.send(given.tensor, right, tag)]
                slots += [(slot, want), (given, given.tensor.cpu().clone())]
        except UnsupportedOperation as error:
            refusable(dtype, error)
            continue
        for work, (slot, want) in zip(works, slots, strict=True):
            assert await work is slot.tensor
            slot.expect(want)


@pytest.mark.memory
@ranks(2)
async def test_huge_messages_in_both_directions_complete_concurrently(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    peer = 1 - comm.rank
    for dtype in (torch.uint8, torch.float32):
        slot = case.empty(dtype, (HUGE[0] // dtype.itemsize,))
        shape = tuple(slot.tensor.shape)
        receiving = comm.recv(slot.tensor, peer)
        sending = comm.send(case.full(case.bits(dtype, shape, comm.rank)).tensor, peer)
        await receiving
        slot.expect(case.bits(dtype, shape, peer))
        await sending


@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
@pytest.mark.parametrize("shape", [(0,), (5,), (40_009,)], ids=str)
async def test_send_and_recv_match_whichever_is_posted_first(
    comm: Communicator, case: Case, early: str, shape: tuple[int, ...]
) -> None:
    case.need("p2p")
    content = case.bits(torch.int32, shape)
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    slot = case.full(content) if comm.rank == 0 else case.empty(torch.int32, shape)
    work = comm.send(slot.tensor, 1, 7) if comm.rank == 0 else comm.recv(slot.tensor, 0, 7)
    case.tell("posted")
    assert await work is slot.tensor
    slot.expect(content)


@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_messages_of_one_tag_arrive_in_order(comm: Communicator, case: Case, early: str) -> None:
    case.need("p2p")
    contents = [case.bits(torch.int16, ((3, 40_009, 0, 2048)[i % 4],), i) for i in range(40)]
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    sender = comm.rank == 0
    slots = [case.full(c) if sender else case.empty(c.dtype, tuple(c.shape)) for c in contents]
    works = [comm.send(slot.tensor, 1) if sender else comm.recv(slot.tensor, 0) for slot in slots]
    case.tell("posted")
    for work, slot, content in zip(works, slots, contents, strict=True):
        await work
        slot.expect(content)


@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_recv_matches_by_tag_in_any_posting_order(comm: Communicator, case: Case, early: str) -> None:
    """Receives match messages by tag, even if sends and receives are posted in different orders."""
    case.need_any_order()
    tags = list(TAGS)
    random.Random(f"{case.seed} {comm.rank}").shuffle(tags)
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    sender = comm.rank == 0
    slots = {
        tag: case.full(case.bits(torch.int64, (9,), tag)) if sender else case.empty(torch.int64, (9,)) for tag in tags
    }
    works = [comm.send(slots[t].tensor, 1, t) if sender else comm.recv(slots[t].tensor, 0, t) for t in tags]
    case.tell("posted")
    for work in works:
        await work
    for tag, slot in slots.items():
        slot.expect(case.bits(torch.int64, (9,), tag))


@ranks(3, more=(4, 7))
async def test_recv_matches_by_source_rank(comm: Communicator, case: Case) -> None:
    """Many senders use one tag. Each receive takes the message of the rank that the receive names."""
    case.need_any_order()
    if comm.rank:
        await comm.send(case.full(case.bits(torch.int32, (4,), comm.rank)).tensor, 0, 3)
        return
    slots = {r: case.empty(torch.int32, (4,)) for r in range(comm.size - 1, 0, -1)}
    works = [comm.recv(slot.tensor, r, 3) for r, slot in slots.items()]
    for work in works:
        await work
    for r, slot in slots.items():
        slot.expect(case.bits(torch.int32, (4,), r))


@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("count", [1, 100, 2049, 40_009])
async def test_tensor_may_be_overwritten_once_its_send_is_done(comm: Communicator, case: Case, count: int) -> None:
    """A program may change a tensor after its send is done, even before the receive is posted."""
    case.need("p2p")
    content = case.bits(torch.int32, (count,))
    if comm.rank == 0:
        tensor = content.to(comm.device, copy=True)
        work = comm.send(tensor, 1)
        if work.done():
            tensor.fill_(-1)
        case.tell("go")
        await work
        tensor.fill_(-2)
        return
    await case.told("go", 0)
    slot = case.empty(torch.int32, (count,))
    await comm.recv(slot.tensor, 0)
    slot.expect(content)


@pytest.mark.fault(28)
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (5, 0), (0, 5), (40_009, 9), (9, 40_009)], ids=str)
async def test_recv_of_another_size_fails_and_the_next_message_arrives(
    comm: Communicator, case: Case, early: str, sizes: tuple[int, int]
) -> None:
    """A receive fails if the message has another size than the receive's buffer.

    The receive's buffer then holds the part of the message that fits.

    The send succeeds, and the next message has the right content.
    """
    case.need("p2p")
    sent, room = sizes
    content, after = case.bits(torch.int32, (sent,)), case.bits(torch.int32, (6,))
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    if comm.rank == 0:
        works = [comm.send(content.to(comm.device), 1), comm.send(after.to(comm.device), 1)]
        case.tell("posted")
        for work in works:
            await work
        return
    slot, following = case.empty(torch.int32, (room,)), case.empty(torch.int32, (6,))
    works = [comm.recv(slot.tensor, 0), comm.recv(following.tensor, 0)]
    case.tell("posted")
    with pytest.raises(MessageTruncatedError) as caught:
        await works[0]
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("recv", 1, 0), vars(caught.value)
    expected = case.empty(torch.int32, (room,)).tensor.cpu()
    expected[: min(sizes)] = content[: min(sizes)]
    slot.expect(expected)
    await works[1]
    following.expect(after)
    assert not comm.aborted


@pytest.mark.memory
@ranks(2, 3)
async def test_hundreds_of_concurrent_messages_arrive(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    right, left = neighbours(comm)
    slots = [case.empty(torch.int32, (i % 50,)) for i in range(300)]
    works = [comm.recv(slot.tensor, left, i % 3) for i, slot in enumerate(slots)]
    works += [
        comm.send(case.bits(torch.int32, (i % 50,), i, comm.rank).to(comm.device), right, i % 3) for i in range(300)
    ]
    for work in works:
        await work
    for i, slot in enumerate(slots):
        slot.expect(case.bits(torch.int32, (i % 50,), i, left))


@pytest.mark.loops
@ranks(2, more=(3,))
async def test_concurrent_tasks_with_their_own_tags_stay_apart(comm: Communicator, case: Case) -> None:
    """Each task exchanges messages with its counterpart on the next rank."""
    case.need_any_order()
    right, left = neighbours(comm)

    async def play(tag: int) -> None:
        ball = torch.zeros(1 + tag, dtype=torch.int64, device=comm.device)
        for turn in range(10):
            sending = comm.send(torch.full_like(ball, 1000 * tag + turn), right, tag)
            await comm.recv(ball, left, tag)
            assert (ball == 1000 * tag + turn).all(), f"task {tag}, turn {turn}: got {ball}"
            await sending

    async with anyio.create_task_group() as tasks:
        for tag in range(12):
            tasks.start_soon(play, tag)


@ranks(2, 3)
async def test_messages_never_match_collectives_or_objects(comm: Communicator, case: Case) -> None:
    """Messages of tensors, of collectives and of objects never match each other, with any tag."""
    case.need_any_order()
    right, left = neighbours(comm)
    slots = {tag: case.empty(torch.uint8, (256,)) for tag in range(4)}
    receives = [comm.recv(slot.tensor, left, tag) for tag, slot in slots.items()]
    objects = [comm.recv_object(left, tag) for tag in range(4)]
    total = torch.full((256,), comm.rank, dtype=torch.uint8, device=comm.device)
    sums = [comm.all_reduce(total), comm.barrier()]
    for tag in range(4):
        comm.send_object(["object", comm.rank, tag], right, tag)
        comm.send(case.bits(torch.uint8, (256,), comm.rank, tag).to(comm.device), right, tag)
    for work in (*receives, *sums):
        await work
    for tag, slot in slots.items():
        slot.expect(case.bits(torch.uint8, (256,), left, tag))
        assert await objects[tag] == ["object", left, tag]
    assert (total == sum(range(comm.size))).all()


@ranks(2, 3, more=(7,))
async def test_batch_exchanges_tensors_with_every_rank(comm: Communicator, case: Case) -> None:
    """Every rank exchanges tensors with every other rank.

    The result of the batch is the list of the tensors, in the order in which the check added them.
    """
    case.need("p2p")
    others = [r for r in range(comm.size) if r != comm.rank]
    slots = {r: case.empty(torch.float32, (r + 2,)) for r in others}
    batch, tensors = comm.batch(), []
    for r in others:
        tensors += [case.bits(torch.float32, (comm.rank + 2,), comm.rank, r).to(comm.device), slots[r].tensor]
        batch.send(tensors[-2], r, 5).recv(tensors[-1], r, 5)
    result = await batch.issue()
    assert len(result) == len(tensors) and all(a is b for a, b in zip(result, tensors, strict=True))
    for r, slot in slots.items():
        slot.expect(case.bits(torch.float32, (r + 2,), r, comm.rank))


@pytest.mark.core
@ranks(2)
async def test_batch_that_is_empty_or_overlaps_is_refused(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    peer = 1 - comm.rank
    tensor = torch.zeros(4, device=comm.device)
    with pytest.raises(ArgumentError, match="batch is empty"):
        comm.batch().issue()
    with pytest.raises(ArgumentError, match="overlaps"):
        comm.batch().send(tensor, peer).recv(tensor, peer).issue()
    with pytest.raises(ArgumentError, match="dst is 5"):
        comm.batch().recv(tensor, peer).send(tensor, 5)
    batch = comm.batch().send(tensor[:2], peer).recv(tensor[2:], peer)
    await batch.issue()
    with pytest.raises(ArgumentError, match="batch is empty"):
        batch.issue()


@ranks(2)
async def test_batch_matches_single_sends_and_recvs(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    contents = [case.bits(torch.int32, (3,), i) for i in range(2)]
    slots = [case.empty(torch.int32, (3,)) for _ in contents]
    if comm.rank == 0:
        await comm.batch().send(contents[0].to(comm.device), 1, 1).recv(slots[1].tensor, 1, 2).issue()
        slots[1].expect(contents[1])
    else:
        receiving = comm.recv(slots[0].tensor, 0, 1)
        await comm.send(contents[1].to(comm.device), 0, 2)
        await receiving
        slots[0].expect(contents[0])
