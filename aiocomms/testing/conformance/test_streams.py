"""Streams of tensors between two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
import torch

from aiocomms import ItemStream, TensorStream
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, CommAbortedError
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, all_blocked, cancel_await, ranks


async def opened(comm: Communicator, case: Case, capacity: int = 8, name: str = "") -> TensorStream:
    """Open a stream between two ranks."""
    case.need_any_order()
    return await comm.open_stream(1 - comm.rank, capacity, name)


async def finish(stream: TensorStream, case: Case) -> None:
    """Close both ends when both ranks have finished."""
    await case.meet(f"through with {stream.name}")
    await stream.aclose()


def number(comm: Communicator, value: int) -> torch.Tensor:
    return torch.tensor([value], device=comm.device)


@pytest.mark.memory
@ranks(2)
async def test_stream_carries_any_shape_and_dtype_both_ways(comm: Communicator, case: Case) -> None:
    stream = await opened(comm, case)
    shapes = [*data.SHAPES, (40_009,)]

    async def send() -> None:
        for dtype in data.ALL_DTYPES:
            for shape in shapes:
                given = case.full(case.bits(dtype, shape, comm.rank))
                await stream.send(given.tensor)
                given.expect_untouched()
                given.tensor.zero_()  # The tensor has been sent, so it may be changed.

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        for dtype in data.ALL_DTYPES:
            for shape in shapes:
                data.same_bits(await stream.receive(), case.bits(dtype, shape, 1 - comm.rank))
    await finish(stream, case)


@pytest.mark.loops
@ranks(2)
@pytest.mark.parametrize("capacity", [1, 2, 8])
async def test_stream_send_waits_until_the_receiver_has_room(comm: Communicator, case: Case, capacity: int) -> None:
    """A sender sends as many tensors as the other end can hold.

    When the receiver takes a tensor, the sender sends one more.
    """
    stream = await opened(comm, case, capacity)
    sent: list[int] = []

    async def send() -> None:
        for i in range(capacity + 3):
            await stream.send(number(comm, i))
            sent.append(i)
            case.tell(f"sent {i}")

    async with anyio.create_task_group() as tasks:
        if comm.rank == 0:
            tasks.start_soon(send)
        else:
            await case.told(f"sent {capacity - 1}", 0)
        await talk(comm)  # The messages give the sender time to send one too many.
        assert len(sent) == (0 if comm.rank else capacity), f"with a capacity of {capacity} it sent {len(sent)}"
        await case.meet("looked")
        if comm.rank == 1:
            for i in range(capacity + 3):
                assert (await stream.receive()).item() == i
    await finish(stream, case)


async def talk(comm: Communicator) -> None:
    """Exchange some messages."""
    for _ in range(5):
        sending = comm.send_object("ping", 1 - comm.rank)
        await comm.recv_object(1 - comm.rank)
        await sending


@pytest.mark.core
@ranks(2)
async def test_send_eof_ends_one_direction_after_all_items(comm: Communicator, case: Case) -> None:
    """One direction ends, and the other stays open. Tensors that were sent before the end still arrive."""
    stream = await opened(comm, case)
    if comm.rank == 0:
        for i in range(5):
            await stream.send(number(comm, i))
        await stream.send_eof()
        await stream.send_eof()
        with pytest.raises(anyio.ClosedResourceError):
            await stream.send(number(comm, 5))
        assert [t.item() async for t in stream] == [10, 11]
    else:
        assert [t.item() async for t in stream] == [0, 1, 2, 3, 4]
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        for i in (10, 11):
            await stream.send(number(comm, i))
        await stream.send_eof()
    await finish(stream, case)


@pytest.mark.core
@ranks(2)
async def test_closed_stream_raises_here_and_breaks_at_the_other_end(comm: Communicator, case: Case) -> None:
    """Sends, receives and ``send_eof`` on the closed end raise an error.

    On the other end, sends and receives raise an error after a while.

    Only ``send_eof`` ends a stream without an error at the other end.
    """
    stream = await opened(comm, case, 2)
    if comm.rank == 0:
        await stream.send(number(comm, 1))
        await stream.aclose()
        await stream.aclose()
        for call in (stream.receive, stream.send_eof):
            with pytest.raises(anyio.ClosedResourceError):
                await call()
        with pytest.raises(anyio.ClosedResourceError):
            await stream.send(number(comm, 2))
    else:
        assert (await stream.receive()).item() == 1
        with pytest.raises(anyio.BrokenResourceError):
            await stream.receive()
        with pytest.raises(anyio.BrokenResourceError):
            for _ in range(10):
                await stream.send(number(comm, 3))
    await finish(stream, case)


@dataclass
class Page:
    """An item of a stream."""

    number: int
    rows: torch.Tensor
    more: dict[str, Any]


def page(case: Case, rank: int, size: int) -> Page:
    """Return an item of a rank: a tensor of ``size`` rows, its transpose, and a tensor of float8."""
    rows = case.bits(torch.float32, (size, 3), "rows", rank, size)
    codes = case.bits(torch.float8_e5m2, (size,), rank)
    return Page(size, rows, {"turned": rows.T, "codes": codes, "text": "x" * size})


def same(got: Page, want: Page) -> None:
    """Check an item that has arrived."""
    data.same_bits(got.rows, want.rows)
    data.same_bits(got.more["turned"], want.rows.T.contiguous())
    data.same_bits(got.more["codes"], want.more["codes"])
    assert (got.number, got.more["text"]) == (want.number, want.more["text"])


@pytest.mark.core
@ranks(2)
async def test_stream_carries_mappings_and_dataclasses_both_ways(comm: Communicator, case: Case) -> None:
    """The mappings and dataclasses contain small and large tensors. Some of the tensors are not contiguous."""
    case.need("p2p")
    pages: ItemStream[Page] = await comm.open_stream(1 - comm.rank, 2, "pages", items=Page)
    mappings = await comm.open_stream(1 - comm.rank, 2, "mappings", items=dict[str, Any])
    sizes = (0, 1, 300, 40_009)

    async def send() -> None:
        for size in sizes:
            await pages.send(page(case, comm.rank, size))
            await mappings.send(vars(page(case, comm.rank, size)))
        await pages.send_eof()
        await mappings.send_eof()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        for size in sizes:
            want = page(case, 1 - comm.rank, size)
            same(await pages.receive(), want)
            same(Page(**await mappings.receive()), want)
    for stream in (pages, mappings):
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
    await case.meet("through")
    await pages.aclose()
    await mappings.aclose()


@pytest.mark.core
@ranks(2)
async def test_stream_send_waits_for_room_in_bytes(comm: Communicator, case: Case) -> None:
    """An item that is larger than the receiver's limit is sent alone."""
    case.need("p2p")
    stream = await comm.open_stream(1 - comm.rank, 100, "bytes", capacity_bytes=1000)
    sizes = (600, 400, 1, 5000, 1)
    sent: list[int] = []

    async def send() -> None:
        for size in sizes:
            await stream.send(torch.zeros(size, dtype=torch.uint8, device=comm.device))
            sent.append(size)
            case.tell(f"sent {len(sent)}")

    async with anyio.create_task_group() as tasks:
        if comm.rank == 0:
            tasks.start_soon(send)
        else:
            await case.told("sent 2", 0)
        await talk(comm)  # The messages give the sender time to send one too many.
        assert sent == ([] if comm.rank else [600, 400])
        await case.meet("looked")
        if comm.rank == 1:
            for size in sizes:
                assert (await stream.receive()).numel() == size
    await finish(stream, case)


@pytest.mark.loops
@pytest.mark.core
@ranks(2)
async def test_stream_close_wakes_pending_sends_and_receives(comm: Communicator, case: Case) -> None:
    stream = await opened(comm, case, 1)
    ended: list[type[BaseException]] = []

    async def wait() -> None:
        try:
            await stream.receive()
        except anyio.ClosedResourceError as error:
            ended.append(type(error))

    if comm.rank == 0:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await all_blocked()
            await stream.aclose()
        assert ended == [anyio.ClosedResourceError]
    await finish(stream, case)


@pytest.mark.loops
@ranks(2)
async def test_cancelled_stream_receive_loses_no_item(comm: Communicator, case: Case) -> None:
    stream = await opened(comm, case)
    if comm.rank == 0:
        await case.told("cancelled", 1)
        for i in range(50):
            await stream.send(number(comm, i))
    else:
        await cancel_await(stream.receive())
        case.tell("cancelled")
        got: list[object] = []
        while len(got) < 50:
            with anyio.move_on_after(0 if len(got) % 3 else None):
                got.append((await stream.receive()).item())
        assert got == list(range(50))
    await finish(stream, case)


@pytest.mark.loops
@ranks(2)
async def test_cancelled_stream_send_delivers_a_whole_item_or_none(comm: Communicator, case: Case) -> None:
    stream = await opened(comm, case, 1)
    if comm.rank == 0:
        await stream.send(number(comm, 0))
        await cancel_await(stream.send(torch.full((1000,), 1, device=comm.device)))  # the other end has no room
        case.tell("cancelled")
        for i in (2, 3, 4):
            await stream.send(number(comm, i))
    else:
        await case.told("cancelled", 0)
        assert [(await stream.receive()).tolist() for _ in range(4)] == [[0], [2], [3], [4]]
    await finish(stream, case)


@pytest.mark.core
@ranks(2)
async def test_streams_match_by_name_and_order_of_opening(comm: Communicator, case: Case) -> None:
    """Streams match by name. Streams of the same name match in the order in which they are opened."""
    streams = [await opened(comm, case, 4, name) for name in ("a", "b", "a", "")]
    for turn in range(3):
        for i in reversed(range(4)):
            await streams[i].send(number(comm, 100 * comm.rank + 10 * i + turn))
    for i, stream in enumerate(streams):
        assert [(await stream.receive()).item() for _ in range(3)] == [
            100 * (1 - comm.rank) + 10 * i + turn for turn in range(3)
        ]
    await case.meet("through")
    for stream in streams:
        await stream.aclose()


@pytest.mark.core
@ranks(3, more=(4,))
async def test_streams_between_all_ranks_open_concurrently(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    peers = [r for r in range(comm.size) if r != comm.rank]
    streams: dict[int, TensorStream] = {}

    async def open_to(peer: int) -> None:
        streams[peer] = await comm.open_stream(peer)

    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(open_to, peer)
    for peer in peers:
        await streams[peer].send(number(comm, 10 * comm.rank + peer))
    for peer in peers:
        assert (await streams[peer].receive()).item() == 10 * peer + comm.rank
    await case.meet("through")
    for stream in streams.values():
        await stream.aclose()


@ranks(2)
async def test_abort_ends_both_directions_of_a_stream(comm: Communicator, case: Case) -> None:
    stream = await opened(comm, case, 1)
    await stream.send(number(comm, 1))
    await case.meet("opened")
    if comm.rank == 0:
        comm.abort("for the test")
    with pytest.raises(CommAbortedError, match="for the test"):
        while True:
            await stream.receive()
    with pytest.raises(CommAbortedError):
        await stream.send(number(comm, 2))
    await stream.aclose()


@pytest.mark.core
@ranks(2)
async def test_wrong_arguments_of_a_stream_are_refused(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    peer = 1 - comm.rank
    for arguments, text in (
        ((comm.rank,), "peer"), ((5,), "peer is 5"), ((True,), "peer is True"), ((peer, 0), "capacity is 0"),
        ((peer, True), "capacity is True"), ((peer, 2.0), "capacity is 2.0"), ((peer, 1, 3), "name is 3"),
        ((peer, 1, "n" * 101), "name is"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            await comm.open_stream(*arguments)
    stream = await opened(comm, case)
    for item in (None, [1.0], torch.ones(4, device=comm.device)[::2], torch.empty(2, device="meta")):
        with pytest.raises(ArgumentError, match="item"):
            await stream.send(item)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dimensions"):
        await stream.send(torch.ones((1,) * 15, device=comm.device))
    await stream.send(number(comm, comm.rank))
    assert (await stream.receive()).item() == peer
    await finish(stream, case)
