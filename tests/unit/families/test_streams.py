"""Streams of tensors between two ranks, on every loop."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import weakref
from dataclasses import dataclass, field
from types import MappingProxyType

import anyio
import forged
import pytest
import torch
from anyio.lowlevel import checkpoint
from concurrency import VIRTUAL, run_on, together, turns

from aiocomms import ops
from aiocomms.communicator.parcels import Parcel
from aiocomms.core import core
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommAbortedError, CommError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.ops import codec
from aiocomms.ops.checks import DTYPES
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.loops]


async def pair(one, two, **options):
    return await together(lambda: one.open_stream(1, **options), lambda: two.open_stream(0, **options))


def test_stream_carries_any_shape_and_dtype(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            given = [
                torch.randint(0, 2, shape).to(dtype)
                for dtype in sorted(DTYPES, key=str)
                for shape in ((), (0,), (3,), (2, 0, 4), (5, 1, 2))
            ]

            async def send():
                for tensor in given:
                    await there.send(tensor)
                await there.send_eof()

            async def receive():
                return [tensor async for tensor in here]

            _, got = await together(send, receive)
            assert len(got) == len(given)
            for a, b in zip(got, given, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert a.equal(b)
            assert there.peer == 1
            await together(there.aclose, here.aclose)

    run(main)


def test_several_streams_carry_both_directions_concurrently(run):
    async def main():
        async with local_world(2) as (one, two):
            a = await pair(one, two, name="a")
            b = await pair(one, two, name="b", capacity=1)

            async def send(stream, base):
                for i in range(30):
                    await stream.send(torch.full((i % 5,), base + i))

            async def receive(stream, base):
                for i in range(30):
                    assert (await stream.receive()).tolist() == [base + i] * (i % 5)

            calls = []
            for base, (there, here) in ((0, a), (1000, b)):
                for source, sink, offset in ((there, here, 0), (here, there, 500)):
                    calls.append(lambda s=source, n=base + offset: send(s, n))
                    calls.append(lambda s=sink, n=base + offset: receive(s, n))
            await together(*calls)

    run(main)


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_stream_send_waits_when_capacity_is_used_up(run, capacity):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=capacity)
            sent = []

            async def send():
                for i in range(3 * capacity):
                    await there.send(torch.tensor([i]))
                    sent.append(i)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                await turns(60)
                assert len(sent) == capacity  # The peer's program has taken no item, and its end holds no more.
                for i in range(3 * capacity):
                    assert (await here.receive()).item() == i

    run(main)


def test_send_eof_of_one_direction_leaves_the_other_open(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            await there.send(torch.ones(1))
            await there.send_eof()
            await there.send_eof()
            with pytest.raises(anyio.ClosedResourceError):
                await there.send(torch.ones(1))
            assert (await here.receive()).item() == 1
            for _ in range(2):
                with pytest.raises(anyio.EndOfStream):
                    await here.receive()
            await here.send(torch.full((2,), 2.0))
            assert (await there.receive()).tolist() == [2, 2]

    run(main)


def test_closed_end_refuses_calls_and_breaks_the_other_end(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=2)
            await here.aclose()
            await here.aclose()
            for call in (here.receive, lambda: here.send(torch.ones(1)), here.send_eof):
                with pytest.raises(anyio.ClosedResourceError):
                    await call()
            with pytest.raises(anyio.BrokenResourceError):
                await there.receive()
            await turns()  # The close travels as a message.
            with pytest.raises(anyio.BrokenResourceError):
                await there.send(torch.ones(1))
            await there.aclose()
            again = await pair(one, two)
            _, got = await together(lambda: again[0].send(torch.ones(3)), again[1].receive)
            assert got.tolist() == [1, 1, 1]

    run(main)


def test_pending_sends_to_a_closed_end_return(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=4)
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(there.send, torch.ones(100))
                tasks.start_soon(here.aclose)

    run(main)


@pytest.mark.virtual_time
@pytest.mark.fault(104)
def test_cancelled_stream_receives_and_sends_lose_no_item(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=1)
            with anyio.move_on_after(0.01):
                await here.receive()
            await there.send(torch.tensor([0]))
            with anyio.CancelScope() as scope:  # no credit is left
                scope.cancel()
                await there.send(torch.tensor([-1]))
            assert (await here.receive()).item() == 0
            await there.send(torch.tensor([1]))
            assert (await here.receive()).item() == 1

    run(main)


@pytest.mark.fault(104)
def test_cancelled_stream_send_keeps_its_tensor_until_delivery(run):
    """A cancelled send that waits behind it, without a credit, keeps no tensor."""

    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=1)
            held = []
            here._expect = lambda *args: held.append(args)  # A slow peer has not asked for the payload yet.
            kept = []
            for _ in range(2):
                item = torch.full((3,), 7.0)
                kept.append(weakref.ref(item))
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await there.send(item)
                assert scope.cancelled_caught
                del item
            await turns()
            gc.collect()
            assert [ref() is not None for ref in kept] == [True, False]
            del here._expect
            here._expect(*held.pop())
            assert (await here.receive()).tolist() == [7, 7, 7]
            await turns()
            gc.collect()
            assert kept[0]() is None

    run(main)


@pytest.mark.virtual_time
def test_cancelled_open_stream_breaks_the_other_end(run):
    async def main():
        async with local_world(2) as (one, two):
            with anyio.move_on_after(0.01):
                await one.open_stream(1)
            late = await two.open_stream(0)
            with pytest.raises(anyio.BrokenResourceError):
                await late.receive()
            there, here = await pair(one, two)
            _, got = await together(lambda: there.send(torch.ones(1)), here.receive)
            assert got.item() == 1

    run(main)


def test_stream_fails_when_its_communicator_ends(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            outcome = []

            async def receive():
                try:
                    await here.receive()
                except CommError as error:
                    outcome.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await turns()
                one.abort("enough")
            assert isinstance(outcome[0], CommAbortedError)
            with pytest.raises(CommAbortedError, match="enough"):
                await there.send(torch.ones(1))
            with pytest.raises(CommAbortedError, match="enough"):
                await one.open_stream(1)
            await there.aclose()
            await here.aclose()

    run(main)


def test_rank_that_closes_ends_only_its_own_streams(run):
    async def main():
        async with local_world(3) as (one, two, three):
            there, here = await pair(one, two)
            del there
            await one.aclose()
            with pytest.raises(CommAbortedError, match="closed by rank 0"):
                await here.receive()
            assert not two.aborted
            got = torch.zeros(1)
            await together(lambda: two.send(torch.ones(1), 2), lambda: three.recv(got, 1))
            assert got.item() == 1

    run(main)


def test_items_sent_before_close_are_received(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            for i in range(5):
                await there.send(torch.full((2,), i))
            await there.send_eof()
            await one.aclose()
            assert [int(tensor[0]) async for tensor in here] == list(range(5))
            with pytest.raises(CommAbortedError, match="closed by rank 0"):
                await here.send(torch.ones(1))

    run(main)


@pytest.mark.parametrize("capacities", [(1, 5), (3, 1)])
def test_many_senders_and_receivers_share_a_stream(run, capacities):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await together(
                lambda: one.open_stream(1, capacities[0]), lambda: two.open_stream(0, capacities[1])
            )
            got = []

            async def send(who):
                for i in range(20):
                    await there.send(torch.tensor([who, i]))

            async def receive():
                for _ in range(20):
                    tensor = await here.receive()
                    got.append(tensor.tolist())

            await together(*(lambda who=who: send(who) for who in range(3)), receive, receive, receive)
            for who in range(3):
                assert [i for sender, i in got if sender == who] == list(range(20))

    run(main)


@pytest.mark.parametrize("closes", ["this end", "the other end"])
def test_stream_close_wakes_pending_sends_and_receives(run, closes):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, capacity=1)
            await there.send(torch.ones(1))

            async def send():
                with pytest.raises(anyio.ClosedResourceError if closes == "this end" else anyio.BrokenResourceError):
                    await there.send(torch.ones(1))

            async def receive():
                with pytest.raises(anyio.ClosedResourceError if closes == "this end" else anyio.BrokenResourceError):
                    await there.receive()

            async def close():
                await turns()
                await (there if closes == "this end" else here).aclose()

            await together(send, receive, close)

    run(main)


@pytest.mark.parametrize("loop", [VIRTUAL, pytest.param("asyncio", marks=pytest.mark.real)])
@pytest.mark.parametrize("left", ["open", "closed after the peer has gone", "never opened"])
def test_unsent_stream_messages_at_close_report_no_failure(loop, left, monkeypatch):
    """The close does not wait for these messages either: with an endless grace it would hang."""
    monkeypatch.setattr(core, "CLOSE_GRACE", math.inf)

    async def main():
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        async with local_world(2) as (one, two):
            if left == "never opened":
                with anyio.move_on_after(0.01):
                    await one.open_stream(1)
            else:
                there, here = await pair(one, two)
                await there.send(torch.empty(0))
                if left == "closed after the peer has gone":
                    await two.aclose()
                    await there.aclose()
                await turns()
                del there, here
        gc.collect()
        assert said == []

    run_on(loop, main)


def test_wrong_arguments_of_open_stream_send_nothing():
    async def main():
        async with local_world(2) as (one, two):
            for options, error, name in (
                ({"peer": 0}, ArgumentError, "peer"),
                ({"peer": 2}, ArgumentError, "peer"),
                ({"peer": 1, "capacity": 0}, ArgumentError, "capacity"),
                ({"peer": 1, "capacity": True}, ArgumentTypeError, "capacity"),
                ({"peer": 1, "name": "n" * 101}, ArgumentError, "name"),
                ({"peer": 1, "name": "\ud800"}, ArgumentError, "name is .*wanted a str that UTF-8 can encode"),
                (
                    {"peer": 1, "name": 7},
                    ArgumentTypeError,
                    r"^open_stream \(rank 0\): name is 7 \(int\), wanted a str$",
                ),
            ):
                with pytest.raises(error, match=name):
                    await one.open_stream(**options)
            there, here = await pair(one, two)
            for item in (3, torch.ones(2, 2).T[0:1], torch.ones((1,) * 15), torch.ones(1).to_sparse()):
                with pytest.raises(ArgumentError, match=r"^item "):
                    await there.send(item)
            _, got = await together(lambda: there.send(torch.ones(2, 3)), here.receive)
            assert got.shape == (2, 3)

    anyio.run(main)


HEADERS = {
    "nonsense": b"\xff" * forged.STREAM_HEADER_BYTES,
    "dimensions": bytes(8) + b"\0\x0f" + bytes(118),
    "kind": b"\x07" + bytes(7) + codec.describe_tensor(torch.empty(2)),
    "size": bytes(8) + forged.tensor(forged.code_of(torch.float32), 1, 2**57),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_malformed_stream_header_breaks_only_the_stream(header):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            junk = header.ljust(forged.STREAM_HEADER_BYTES, b"\0")
            await forged.send(one, junk, 1, there._out_tag, ops.STREAM_DATA)  # A program is not told a stream's tag.
            with pytest.raises(ProtocolError):
                await here.receive()
            await checkpoint()
            assert not two.aborted

    anyio.run(main)


@dataclass
class Request:
    ids: torch.Tensor
    temperature: float
    stop: list[str]
    seen: int = field(default=0, init=False)


@dataclass(frozen=True)
class Reply:
    text: str


def test_stream_carries_dataclasses_and_mappings(run):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, items=Request)
            given = [Request(torch.arange(n), n / 10, ["."] * n) for n in (0, 1, 100_000)]

            async def send():
                for item in given:
                    await there.send(item)
                await there.send_eof()

            async def receive():
                return [item async for item in here]

            _, got = await together(send, receive)
            for item, wanted in zip(got, given, strict=True):
                assert type(item) is Request
                assert item.ids.equal(wanted.ids)
                assert (item.temperature, item.stop, item.seen) == (wanted.temperature, wanted.stop, 0)
            there, here = await pair(one, two, name="mappings", items=dict[str, object])
            page = {"page": torch.arange(40_000).view(200, 200).T, "text": "x" * 40_000, "id": 7}
            _, got = await together(lambda: there.send(MappingProxyType(page)), here.receive)
            assert got["page"].equal(page["page"])
            assert (got["text"], got["id"]) == (page["text"], 7)
            for item, text in (
                ([1], r"item is \[1\] \(list\), wanted a mapping"),
                ({1: torch.ones((1,) * 15)}, "tensor has 15 "),
            ):
                with pytest.raises(ArgumentError, match=f"^{text}"):
                    await there.send(item)
            there, here = await pair(one, two, name="frozen", items=Reply)
            _, got = await together(lambda: there.send(Reply("yes")), here.receive)
            assert got == Reply("yes")

    run(main)


@pytest.mark.virtual_time
@pytest.mark.parametrize("items", [torch.Tensor, dict], ids=["tensors", "mappings"])
def test_stream_send_waits_for_room_in_bytes(run, items):
    """A sender waits once the other end holds that many bytes; a larger item comes alone, and none overtakes it."""

    def item(count):
        return torch.zeros(count, dtype=torch.uint8) if items is torch.Tensor else {"bytes": bytes(count)}

    async def quiet():
        """Wait until all messages have come, which takes time in a simulation, and a few turns of other loops."""
        await (turns(60) if clock.simulation is None else anyio.sleep(1))

    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, items=items, capacity_bytes=1000)
            sent = []

            async def send(count):
                await there.send(item(count))
                sent.append(count)

            async with anyio.create_task_group() as tasks:
                for count in (400, 450, 5000, 10):
                    tasks.start_soon(send, count)
                    await quiet()
                assert sent == [400, 450]  # The 10 bytes have room, but wait behind the 5000.
                await here.receive()
                await quiet()
                assert sent == [400, 450]
                await here.receive()
                await quiet()
                assert sent == [400, 450, 5000]
                await here.receive()
                await here.receive()
            assert sent == [400, 450, 5000, 10]
            with anyio.move_on_after(0.01) as scope:
                await there.send(item(900))
                await there.send(item(900))
            assert scope.cancelled_caught
            await here.receive()
            await together(lambda: there.send(item(3000)), here.receive)  # The cancelled send has left the queue.

    run(main)


def test_item_of_another_type_is_refused(run):
    async def main():
        async with local_world(2) as (one, two):
            for items in (int, "dict", list, Request(torch.ones(1), 0, []), None):
                with pytest.raises(ArgumentTypeError, match=r"^open_stream .*items is .*wanted torch.Tensor, dict"):
                    await one.open_stream(1, items=items)
            for wrong in (0, -1, True, 1.5, 2**63):
                with pytest.raises(ArgumentError, match="capacity_bytes is"):
                    await one.open_stream(1, capacity_bytes=wrong)
            there, here = await pair(one, two, items=Request)
            for item, text in (
                (torch.ones(1), "item is a float32"),
                (Reply("no"), "item is Reply.*wanted a Request"),
                (Request(object(), 0, []), "item holds <object"),
                (Request(bytes(2**26), 0, []), "item takes .* bytes"),
            ):
                with pytest.raises(ArgumentError, match=text):
                    await there.send(item)
            _, got = await together(lambda: there.send(Request(torch.ones(1), 0, [])), here.receive)
            assert got.ids.item() == 1

    run(main)


def test_stream_ends_with_different_item_types_do_not_open():
    async def main():
        async with local_world(2) as (one, two):
            outcomes = []

            async def open_to(comm, peer, items):
                try:
                    await comm.open_stream(peer, items=items)
                except CommError as error:
                    outcomes.append(error.message)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(open_to, one, 1, Request)
                tasks.start_soon(open_to, two, 0, Reply)
            assert len(outcomes) == 2
            assert any(re.search(r"for Re\w+\(.*\), and this rank for Re\w+\(.*\)", message) for message in outcomes), (
                outcomes
            )

    anyio.run(main)


@pytest.mark.parametrize(
    "obj",
    [[1], {"ids": 1}, {"ids": 1, "temperature": 2, "stop": 3, "seen": 4}, {"temperature": 2, "ids": 1, "stop": 3}],
    ids=["a list", "too few", "too many", "another order"],
)
def test_malformed_item_breaks_only_the_stream(obj):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, items=Request)
            header = Parcel(obj, one.device, pickle=False).header
            await forged.send(one, header, 1, there._out_tag, ops.STREAM_DATA)
            with pytest.raises(ProtocolError, match=r"on stream '': .* came on a stream of Request\(ids, temper"):
                await here.receive()
            with pytest.raises(CommAbortedError, match="ended stream"):
                await there.receive()
            assert not two.aborted

    anyio.run(main)


@pytest.mark.parametrize("ends", ["send_eof", "aclose"])
def test_stream_close_without_eof_raises_broken_resource_error(run, ends):
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            await there.send(torch.ones(1))
            if ends == "send_eof":
                await there.send_eof()
            await there.aclose()
            assert (await here.receive()).item() == 1
            for _ in range(2):
                with pytest.raises(anyio.EndOfStream if ends == "send_eof" else anyio.BrokenResourceError):
                    await here.receive()

    run(main)
