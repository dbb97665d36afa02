"""Receives from any rank, and probes: content, order, precedence, and messages that must not match."""

from __future__ import annotations

import functools
import unittest
from typing import Any

import anyio.to_thread
import pytest
import torch

from aiocomms import Message, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommError, MessageTruncatedError
from aiocomms.testing.conformance.case import Case, ranks

SHAPE = (6,)
SIZES = (0, 5, 40_009)
"""Numbers of elements of messages.

A transport may send the data of the two smaller messages at once, and the data of the largest message only after
the receive is posted.
"""
ROUNDS = 4


async def send_in_order(comm: Communicator, case: Case, dst: int = 0, tag: int = 0) -> None:
    """Send messages of all sizes from this rank, several times."""
    works = []
    for turn in range(ROUNDS):
        for size in SIZES:
            content = case.bits(torch.int32, (size + 1,), comm.rank, turn)
            works.append(comm.send(content.to(comm.device), dst, tag))
    case.tell("posted")
    for work in works:
        await work


def _given(tensor: Any, message: Message) -> Any:
    return tensor


def others(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3, more=(4, 7))
@pytest.mark.parametrize("early", ["send", "recv"])
async def test_recv_message_takes_each_message_once_in_the_order_of_its_source(
    comm: Communicator, case: Case, early: str
) -> None:
    """Each message arrives once and unchanged. Messages of one rank arrive in the order in which they were sent."""
    case.need_arrivals()
    if comm.rank:
        if early == "recv":
            await case.told("waits", 0)
        await send_in_order(comm, case)
        return
    turns = {rank: [(turn, size) for turn in range(ROUNDS) for size in SIZES] for rank in others(comm)}
    count = sum(map(len, turns.values()))
    if early == "send":
        await case.told("posted")
        works = [comm.recv_message() for _ in range(count)]
    else:
        works = [comm.recv_message() for _ in range(count)]
        case.tell("waits")
    for work in works:
        src, tensor = await work
        turn, size = turns[src].pop(0)
        case.full(case.bits(torch.int32, (size + 1,), src, turn)).expect(tensor.cpu())
    assert not any(turns.values())


@ranks(2, 3)
async def test_recv_any_writes_its_buffer_and_returns_the_source(comm: Communicator, case: Case) -> None:
    """The receive returns the rank of the sender, and writes only its own buffer."""
    case.need_arrivals()
    if comm.rank:
        content = case.bits(torch.float32, SHAPE, comm.rank).to(comm.device)
        for sending in [comm.send(content, 0, tag) for tag in (7, -7)]:
            await sending
        return
    for tag in (-7, 7):
        slots = [case.empty(torch.float32, SHAPE) for _ in others(comm)]
        works = [comm.recv_any(slot.tensor, tag=tag) for slot in slots]
        sources = [await work for work in works]
        assert sorted(sources) == others(comm)
        for src, slot in zip(sources, slots, strict=True):
            slot.expect(case.bits(torch.float32, SHAPE, src))


@ranks(3, more=(4, 7))
async def test_recv_any_from_named_ranks_leaves_messages_of_others(comm: Communicator, case: Case) -> None:
    """The receive leaves the messages of other ranks to other receives."""
    case.need_arrivals()
    if comm.rank:
        await comm.send(case.bits(torch.int16, SHAPE, comm.rank).to(comm.device), 0, 3)
        return
    last = comm.size - 1
    slots = [case.empty(torch.int16, SHAPE) for _ in range(comm.size)]
    assert await comm.recv_any(slots[last].tensor, [last], 3) == last
    rest: list[int] = []
    for _ in range(last - 1):
        message = await comm.probe(range(1, last), 3)
        assert await comm.recv_any(slots[message.src].tensor, message.src, 3) == message.src
        rest.append(message.src)
    assert sorted(rest) == list(range(1, last))
    for rank in others(comm):
        slots[rank].expect(case.bits(torch.int16, SHAPE, rank))


@ranks(2)
@pytest.mark.parametrize("early", ["send", "probe"])
async def test_probe_describes_a_message_and_leaves_it(comm: Communicator, case: Case, early: str) -> None:
    case.need_arrivals()
    for size in SIZES:
        for dtype in (torch.uint8, torch.bfloat16):
            content = case.bits(dtype, (size,))
            note = f"{size} {dtype}"
            if comm.rank:
                if early == "probe":
                    await case.told(note, 0)
                sending = comm.send(content.to(comm.device), 0, -5)
                case.tell(note)
                await sending
                continue
            if early == "send":
                await case.told(note, 1)
            works = [comm.probe(tag=-5), comm.probe(1, -5)]
            case.tell(note)
            for work in works:
                assert await work == Message(1, -5, content.nbytes, dtype)
                assert (await work).numel == size
            again = comm.probe([1], -5)
            slot = case.empty(dtype, (size,))
            await comm.recv(slot.tensor, 1, -5)
            slot.expect(content)
            assert (await again).nbytes == content.nbytes


@pytest.mark.core
@ranks(2)
async def test_recv_message_asks_into_once_for_each_message(comm: Communicator, case: Case) -> None:
    """The receive calls the function ``into`` once for each message, when source and size are known."""
    case.need_arrivals()
    contents = [case.bits(torch.int64, (size,)) for size in SIZES]
    if comm.rank:
        for content in contents:
            await comm.send(content.to(comm.device), 0)
        return
    for content in contents:
        slot, asked = case.empty(torch.int64, tuple(content.shape)), list[Message]()

        def into(message: Message, slot: Any = slot, asked: list[Message] = asked) -> torch.Tensor:
            asked.append(message)
            tensor: torch.Tensor = slot.tensor
            return tensor

        assert await comm.recv_message(into=into) == (1, slot.tensor)
        assert asked == [(1, 0, content.nbytes, torch.int64)]
        slot.expect(content)


@pytest.mark.core
@ranks(2)
async def test_recv_message_whose_into_fails_leaves_the_message(comm: Communicator, case: Case) -> None:
    case.need_arrivals()
    content = case.bits(torch.int32, SHAPE)
    if comm.rank:
        await comm.send(content.to(comm.device), 0)
        return

    def fails(message: Message) -> torch.Tensor:
        raise KeyError(message.nbytes)

    with pytest.raises(CommError, match=r"into raised KeyError: 24; the message is still there") as caught:
        await comm.recv_message(into=fails)
    assert isinstance(caught.value.__cause__, KeyError)
    strided = torch.zeros(12, dtype=torch.int32, device=comm.device)[::2]
    for wrong, why in ((None, "the tensor that into gives is None"), (strided, "not contiguous|is not dense")):
        with pytest.raises(ArgumentError, match=why):
            await comm.recv_message(into=functools.partial(_given, wrong))
    src, tensor = await comm.recv_message()
    assert src == 1
    case.full(content).expect(tensor.cpu())
    assert not comm.aborted


@ranks(3)
@pytest.mark.parametrize("first", ["named", "any"])
async def test_recv_from_a_named_rank_precedes_recv_any(comm: Communicator, case: Case, first: str) -> None:
    """The receive from a named rank takes that rank's message, even if a receive from any rank was called first.

    The receive from any rank takes the next message.
    """
    case.need_arrivals()
    if comm.rank == 2:
        await case.told("named", 0)
    if comm.rank:
        await case.told("posted", 0)
        await comm.send(case.bits(torch.int32, SHAPE, comm.rank).to(comm.device), 0)
        return
    named, slot = case.empty(torch.int32, SHAPE), case.empty(torch.int32, SHAPE)
    early = comm.recv(named.tensor, 1) if first == "named" else None
    anyone = comm.recv_any(slot.tensor)
    work = early or comm.recv(named.tensor, 1)
    case.tell("posted")
    await work
    named.expect(case.bits(torch.int32, SHAPE, 1))
    assert not anyone.done()
    case.tell("named")
    assert await anyone == 2
    slot.expect(case.bits(torch.int32, SHAPE, 2))


@ranks(2)
async def test_recv_any_and_probe_match_in_call_order(comm: Communicator, case: Case) -> None:
    """A probe reports a message only if no earlier receive takes the message."""
    case.need_arrivals()
    if comm.rank:
        await case.told("posted", 0)
        for turn in range(3):
            await comm.send(case.bits(torch.int32, SHAPE, turn).to(comm.device), 0)
        return
    slots = [case.empty(torch.int32, SHAPE) for _ in range(2)]
    works: list[Work[Any]] = [comm.recv_any(slot.tensor) for slot in slots]
    probe, last = comm.probe(), comm.recv_message()
    case.tell("posted")
    for turn, (work, slot) in enumerate(zip(works, slots, strict=True)):
        assert await work == 1
        slot.expect(case.bits(torch.int32, SHAPE, turn))
    assert (await probe).nbytes == 24
    case.full(case.bits(torch.int32, SHAPE, 2)).expect((await last).tensor.cpu())


@ranks(3, more=(7,))
async def test_recv_any_takes_messages_of_all_ranks_in_turn(comm: Communicator, case: Case) -> None:
    """The receives take messages of all ranks in turn while many messages of one rank wait."""
    case.need_arrivals()
    count = 2 * comm.size
    if comm.rank:
        works = [comm.send(torch.full((2,), comm.rank, device=comm.device), 0) for _ in range(count)]
        case.tell("posted")
        for work in works:
            await work
        return
    await case.told("posted")
    for rank in others(comm):
        await comm.probe(rank)  # the first message of each has come
    buffer = torch.zeros(2, device=comm.device, dtype=torch.int64)
    first = [await comm.recv_any(buffer) for _ in others(comm)]
    assert sorted(first) == others(comm)
    for _ in range((count - 1) * (comm.size - 1)):
        await comm.recv_any(buffer)


@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (0, 5), (40_009, 9)], ids=str)
async def test_recv_any_of_another_size_fails_and_the_next_message_arrives(
    comm: Communicator, case: Case, early: str, sizes: tuple[int, int]
) -> None:
    """The receive fails like a receive that names its source, and the next message arrives."""
    case.need_arrivals()
    sent, room = sizes
    content, after = case.bits(torch.int32, (sent,)), case.bits(torch.int32, SHAPE)
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    if comm.rank == 0:
        works: list[Work[Any]] = [comm.send(content.to(comm.device), 1), comm.send(after.to(comm.device), 1)]
        case.tell("posted")
        for work in works:
            await work
        return
    slot, following = case.empty(torch.int32, (room,)), case.empty(torch.int32, SHAPE)
    works = [comm.recv_any(slot.tensor), comm.recv_any(following.tensor)]
    case.tell("posted")
    with pytest.raises(MessageTruncatedError) as caught:
        await works[0]
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("recv_any", 1, 0), vars(caught.value)
    assert await works[1] == 0
    following.expect(after)
    assert not comm.aborted


@ranks(2)
async def test_recv_any_matches_no_object_and_no_message_of_another_lane(comm: Communicator, case: Case) -> None:
    """A receive from any rank takes only messages of its own lane, and never an object."""
    case.need_arrivals()
    views: list[Any] = [comm, comm.lane("a"), comm.lane(7)]
    if comm.rank:
        await case.told("posted", 0)
        sending = comm.send_object("object", 0, 5)
        for i, view in enumerate(views):
            await view.send(case.bits(torch.int32, SHAPE, i).to(comm.device), 0, 5)
        await sending
        return
    probes = [view.probe(tag=5) for view in views]
    works = [view.recv_message(tag=5) for view in views]
    case.tell("posted")
    for i, (probe, work) in enumerate(zip(probes, works, strict=True)):
        assert await probe == (1, 5, 24, torch.int32)
        case.full(case.bits(torch.int32, SHAPE, i)).expect((await work).tensor.cpu())
    assert await comm.recv_object(1, 5) == "object"


@pytest.mark.core
@ranks(1, 2)
async def test_recv_any_and_probe_match_messages_of_this_rank(comm: Communicator, case: Case) -> None:
    """A receive from any rank also takes messages that this rank sends to itself, if tensors are on the CPU."""
    case.need_arrivals()
    if comm.device.type != "cpu":
        raise unittest.SkipTest("a rank sends itself nothing there")
    slot, content = case.empty(torch.int32, SHAPE), case.bits(torch.int32, SHAPE)
    waiting, probe = comm.recv_any(slot.tensor, tag=1), comm.probe(comm.rank, 2)
    assert not waiting.done() and not probe.done()
    sent = [comm.send(content.clone(), comm.rank, 1), comm.send(content.clone(), comm.rank, 2)]
    assert waiting.done() and await waiting == comm.rank
    slot.expect(content)
    assert await probe == (comm.rank, 2, 24, torch.int32)
    assert not sent[1].done()
    assert comm.probe(tag=2).done()
    assert (await comm.recv_message(tag=2)).src == comm.rank
    for work in sent:
        await work


@pytest.mark.core
@ranks(3)
async def test_wrong_src_or_tag_is_refused_before_anything_is_sent(comm: Communicator, case: Case) -> None:
    """The error names the argument, the given value and the wanted value. The call sends nothing."""
    case.need_arrivals()
    tensor = torch.zeros(2, device=comm.device)
    for src, why in (
        (3, "src is 3, wanted a rank of this communicator: 0 <= src < 3"),
        ([0, -1], r"src\[1\] is -1, wanted a rank"),
        ([1, 1], r"src is \[1, 1\], wanted each rank once"),
        ([], r"src is \[\], wanted at least one rank"),
    ):
        for call in (functools.partial(comm.recv_any, tensor), comm.recv_message, comm.probe):
            with pytest.raises(ArgumentError, match=why):
                call(src)
    for wrong in ("1", 1.0, True, {1}):
        with pytest.raises(ArgumentTypeError, match=r"src is .*, wanted a rank as an int, a list of ranks, or None"):
            comm.probe(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"src\[0\] is '1'"):
        comm.recv_any(tensor, ["1", 2])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match=r"tag is None \(NoneType\), wanted an int"):
        comm.probe(tag=None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tag is 2147483648, wanted a 32-bit"):
        comm.recv_message(tag=2**31)
    with pytest.raises(ArgumentTypeError, match=r"into is 3 \(int\), wanted a function"):
        comm.recv_message(into=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tensor"):
        comm.recv_any(tensor.expand(2, 2))
    await comm.barrier()


@pytest.mark.core
@ranks(2)
async def test_recv_any_on_a_thread_writes_into_an_array(comm: Communicator, case: Case) -> None:
    case.need_arrivals()
    numpy = pytest.importorskip("numpy")
    if comm.device.type != "cpu":
        raise unittest.SkipTest("an array of NumPy is on the CPU")
    content = case.bits(torch.int32, SHAPE)
    if comm.rank:
        for _ in range(5):
            await comm.send(content.clone(), 0)
        return
    array = numpy.zeros(SHAPE, dtype=numpy.int32)
    assert await comm.recv_any(array) == 1
    assert array.tolist() == content.tolist()

    def on_a_thread() -> None:
        portal = comm.portal()
        into = numpy.zeros(SHAPE, dtype=numpy.int32)
        assert portal.probe().wait() == (1, 0, 24, torch.int32)
        assert portal.recv_any(into).wait() == 1
        assert into.tolist() == content.tolist()
        assert portal.recv_any(torch.zeros(SHAPE, dtype=torch.int32), numpy.int64(1)).wait() == 1
        assert portal.recv_message().wait().tensor.tolist() == content.tolist()

    await anyio.to_thread.run_sync(on_a_thread)
    assert (await comm.recv_message([numpy.int64(1)])).src == 1
