"""Objects as messages, on every loop."""

from __future__ import annotations

import gc
import threading
import weakref

import anyio
import forged
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms import ops
from aiocomms.communicator import parcels
from aiocomms.core import core
from aiocomms.cuda import crossing
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    BufferBusyError,
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    ProtocolError,
    WorkCancelledError,
)
from aiocomms.ops import apart, codec
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

SMALL = {"id": 7, "shape": (2, 3), "dtype": torch.float16, "data": torch.arange(4)}
LARGE = {"text": "x" * 5000, "tensor": torch.arange(1000.0)}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


@pytest.mark.parametrize("obj", [None, SMALL, LARGE, b"", [], "é" * 300], ids=["none", "small", "large", "b", "l", "s"])
def test_object_arrives_equal(run, obj):
    async def main():
        async with local_world(2) as (one, two):
            got = await together(lambda: one.send_object(obj, 1, 5), lambda: two.recv_object(0, 5))
            assert got[0] is None
            assert equal(got[1], obj)

    run(main)


def test_objects_match_by_tag_in_order(run):
    async def main():
        async with local_world(2) as (one, two):
            sends = [one.send_object([tag, i, "x" * 400 * i], 1, tag) for i in range(3) for tag in (1, -1)]
            receives = {tag: [two.recv_object(0, tag) for _ in range(3)] for tag in (-1, 1)}
            for tag, works in receives.items():
                for i, work in enumerate(works):
                    assert (await work)[:2] == [tag, i]
            for work in sends:
                await work

    run(main)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_object_collectives_deliver_to_every_rank(run, size):
    async def main():
        async with local_world(size) as world:

            async def each(comm):
                mine = {"rank": comm.rank, "big": "y" * 300 * comm.rank}
                root = size - 1
                everybody = await comm.all_gather_object(mine)
                assert [o["rank"] for o in everybody] == list(range(size))
                assert [len(o["big"]) for o in everybody] == [300 * r for r in range(size)]
                for obj in (SMALL, LARGE, None):
                    assert equal(await comm.broadcast_object(obj if comm.rank == root else None, root), obj)
                gathered = await comm.gather_object(mine, root)
                assert (gathered == everybody) if comm.rank == root else (gathered is None)
                given = [LARGE if r % 2 else r for r in range(size)] if comm.rank == root else None
                assert equal(await comm.scatter_object(given, root), LARGE if comm.rank % 2 else comm.rank)

            await ranks(world, each)

    run(main)


def test_overlapping_object_collectives_stay_apart():
    async def main():
        async with local_world(3) as world:

            async def each(comm):
                works = [comm.all_gather_object([i, comm.rank, "z" * 200 * i]) for i in range(6)]
                for i, work in enumerate(works):
                    assert [o[:2] for o in await work] == [[i, r] for r in range(3)]

            await ranks(world, each)

    anyio.run(main)


def test_pickle_needs_both_ends(run):
    async def main():
        async with local_world(2) as (one, two):
            got = await together(
                lambda: one.send_object({1, 2}, 1, pickle=True), lambda: two.recv_object(0, pickle=True)
            )
            assert got[1] == {1, 2}
            for mine, theirs in ((True, False), (False, True)):
                sent = one.send_object([1], 1, pickle=mine)
                with pytest.raises(ProtocolError, match="pickled by its sender"):
                    await two.recv_object(0, pickle=theirs)
                await sent
            assert (await together(lambda: one.send_object(3, 1), lambda: two.recv_object(0)))[1] == 3

    run(main)


def test_wrong_arguments_of_object_ops_send_nothing():
    async def main():
        async with local_world(2) as (one, two):
            with pytest.raises(ArgumentTypeError, match="obj holds"):
                one.send_object(object(), 1)
            with pytest.raises(ArgumentError, match="dst"):
                one.send_object(1, 2)
            with pytest.raises(ArgumentError, match="tag"):
                one.send_object(1, 1, 2**31)
            with pytest.raises(ArgumentError, match="src"):
                one.recv_object(9)
            with pytest.raises(ArgumentError, match="root"):
                one.broadcast_object(1, 5)
            with pytest.raises(ArgumentError, match="objs"):
                one.scatter_object([1], 0)
            got = await ranks([one, two], lambda comm: comm.all_gather_object(comm.rank))
            assert got == [[0, 1], [0, 1]]

    anyio.run(main)


def test_cancelled_recv_object_leaves_its_message_for_the_next(run):
    async def main():
        async with local_world(2) as (one, two):
            work = two.recv_object(0)
            assert await work.cancel()
            with pytest.raises(WorkCancelledError):
                await work
            with anyio.move_on_after(0):
                await two.recv_object(0)
            with pytest.raises(CommTimeoutError):
                await two.recv_object(0, timeout=0.01)
            assert (await together(lambda: one.send_object("hello", 1), lambda: two.recv_object(0)))[1] == "hello"

    run(main)


@pytest.mark.virtual_time
def test_recv_object_is_not_withdrawn_once_the_header_has_come(run):
    async def main():
        async with local_world(2) as (one, two):
            parcel = parcels.Parcel(LARGE, one.device, pickle=False)
            work = two.recv_object(0)
            await forged.send(one, parcel.header, 1, 0, ops.OBJECT)
            with anyio.move_on_after(0.01) as scope:
                await work.cancel()
            assert scope.cancelled_caught
            assert not work.done()
            await forged.send(one, parcel.body, 1, parcel.tag, ops.OBJECT_DATA)
            assert equal(await work, LARGE)

    run(main)


def test_received_object_is_not_kept_alive(run):
    async def main():
        async with local_world(2) as (one, two):
            work = two.recv_object(0)
            one.send_object({"page": torch.zeros(1000)}, 1)
            gone = weakref.ref((await work)["page"]), weakref.ref(work)
            del work
            await turns()
            assert [ref() for ref in gone] == [None, None]

    run(main)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


class Poisoned:
    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.parametrize("value", [torch.ones(10_007), b"b" * 40_028, "s" * 40_028], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("how", ["recv", "broadcast", "all_gather", "gather", "scatter"])
def test_received_object_is_freed_without_garbage_collection(run, how, value):
    """Reference cycles would pile up hundreds of megabytes, until a collection frees them within a turn of the loop."""
    calls = {
        "recv": lambda comm: comm.recv_object(0) if comm.rank else comm.send_object([value], 1),
        "broadcast": lambda comm: comm.broadcast_object([value], 0),
        "all_gather": lambda comm: comm.all_gather_object([value]),
        "gather": lambda comm: comm.gather_object([value], 0),
        "scatter": lambda comm: comm.scatter_object([[value]] * 2, 0),
    }

    def left():
        return sum(type(o) is torch.Tensor and o.numel() == 40_028 for o in gc.get_objects())

    async def main():
        async with local_world(2) as world:
            gc.collect()
            gc.disable()
            try:
                await ranks(world, calls[how])
                while left():  # A thread that has copied holds the tensor until the thread has ended.
                    await turns()
            finally:
                gc.enable()

    run(main)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_failing_pickle_leaves_the_communicator_usable(run, first):
    async def main():
        async with local_world(2) as (one, two):
            with pytest.raises(ArgumentTypeError, match="obj cannot be pickled: ValueError: not this one"):
                one.send_object(Unpicklable(), 1, pickle=True)
            calls = [lambda: one.send_object(Poisoned(), 1, pickle=True), lambda: two.recv_object(0, pickle=True)]
            works = [call() for call in (calls if first == "send" else calls[::-1])]
            sent, received = works if first == "send" else works[::-1]
            with pytest.raises(ProtocolError, match="cannot be unpickled: ValueError: invalid literal"):
                await received
            await sent
            assert await ranks([one, two], lambda comm: comm.all_gather_object(comm.rank)) == [[0, 1], [0, 1]]

    run(main)


def test_all_gather_object_works_among_a_hundred_ranks():
    """The last rank completes the messages of all ranks, without a deeper recursion for each."""

    async def main():
        async with local_world(100) as world:
            results = await ranks(world, lambda comm: comm.all_gather_object(comm.rank))
            assert results == [list(range(100))] * 100

    anyio.run(main)


@pytest.mark.fault(65, transport="local")
def test_malformed_object_header_raises_protocol_error():
    async def main():
        async with local_world(2) as (one, two):
            for data in (b"\xff" * parcels.HEADER_BYTES, forged.object_header(0, 0, b"", 2**50)):
                sent = forged.send(one, data, 1, 0, ops.OBJECT)
                with pytest.raises(ProtocolError):
                    await two.recv_object(0)
                await sent

    anyio.run(main)


@pytest.mark.fault(65, transport="local")
@pytest.mark.parametrize(
    ("announced", "items"),
    [
        (2**50, []),
        (codec.MAX_OBJECT_BYTES, []),
        (400_000, [torch.ones(100_001)]),
        (400_008, [torch.ones(100_000)]),
        (400_000, [torch.ones(100_000), bytes(100_000)]),
        (0, [bytes(100_000)]),
        (0, ["x" * 100_000]),
    ],
    ids=["huge", "too large together", "a larger tensor", "a smaller tensor", "another one", "bytes", "text"],
)
def test_unannounced_side_messages_are_refused_before_memory_is_allocated(announced, items):
    async def main():
        async with local_world(2) as (one, two):
            data = codec.encode(items, apart=[])
            header = forged.object_header(0, 5, b"", len(data), announced)
            sends = [forged.send(one, header, 1, 0, ops.OBJECT), forged.send(one, bytes(data), 1, 5, ops.OBJECT_DATA)]
            with pytest.raises(ProtocolError, match=r"announced"):
                await two.recv_object(0)
            await sends[0]
            assert (await together(lambda: one.send_object(3, 1), lambda: two.recv_object(0)))[1] == 3
            two.abort("the rest is never taken")

    anyio.run(main)


@pytest.mark.fault(65, transport="local")
def test_too_many_side_messages_of_an_object_are_refused(monkeypatch):
    monkeypatch.setattr(apart, "MAX_APART", 2)
    data = codec.encode([bytes(40_000)] * 3, apart=[])
    with pytest.raises(ProtocolError, match="more is to come"):
        codec.decode(data, landing=apart.Landing(torch.device("cpu"), 120_000))


def test_non_ascii_text_message_raises_protocol_error():
    async def main():
        async with local_world(2) as (one, two):
            data = codec.encode(["x" * 40_000], apart=[])
            header = forged.object_header(0, 5, bytes(data), len(data), 40_000)
            works = [
                forged.send(one, header, 1, 0, ops.OBJECT),
                forged.send(one, b"\xff" * 40_000, 1, 5, ops.OBJECT_DATA),
            ]
            with pytest.raises(ProtocolError, match="not ASCII"):
                await two.recv_object(0)
            for work in works:
                await work
            assert (await together(lambda: one.send_object(3, 1), lambda: two.recv_object(0)))[1] == 3

    anyio.run(main)


def test_large_tensors_bytes_and_texts_travel_as_their_own_messages():
    """The messages are sent from the program's memory, and received into the result's."""
    cpu = torch.device("cpu")
    tensor, data, text = torch.ones(20_000), bytes(40_000), "x" * 40_000
    parcel = parcels.Parcel([tensor, data, text], cpu, pickle=False)
    assert not parcel.late
    assert parcel.messages[0].data_ptr() == tensor.data_ptr()
    arrival = parcels.ArrivingObject(crossing.to_bytes(parcel.header), cpu)
    arrival.body = parcel.body
    into = arrival.unpack()
    value = arrival.open(pickle=False)
    assert into[0].data_ptr() == value[0].data_ptr()
    for target, content in zip(into[1:], b"by", strict=True):
        target.fill_(content)
    assert value[1:] == [b"b" * 40_000, "y" * 40_000]
    del parcel, data, text, arrival, value
    into[1].fill_(1)  # A transport may keep its target after the object is gone.


def test_object_memory_on_another_device_is_copied_to_the_communicators():
    """A device that is the CPU by another name stands for a GPU."""
    device = torch.device("cpu:0")
    obj = [torch.arange(20_000.0), bytes(range(250)) * 200, "y" * 40_000]
    parcel = parcels.Parcel(obj, device, pickle=False)
    assert parcel.late
    parcel.prepare()
    arrival = parcels.ArrivingObject(crossing.to_bytes(parcel.header), device)
    arrival.body = parcel.body
    into = arrival.unpack()
    assert arrival.settle is not None
    apart.copy(parcel.messages, into)
    arrival.settle()
    assert equal(arrival.open(pickle=False)[0], obj[0])
    assert arrival.open(pickle=False)[1:] == obj[1:]


def test_object_copies_are_made_by_a_thread(run, monkeypatch):
    made, message, copy = [], apart.message, apart.copy

    def noted(fn):
        def call(*args):
            result = fn(*args)
            if fn is copy or result.data_ptr() != args[0].data_ptr():
                made.append(threading.current_thread() is threading.main_thread())
            return result

        return call

    monkeypatch.setattr(apart, "message", noted(message))
    monkeypatch.setattr(apart, "copy", noted(copy))

    async def main():
        async with local_world(2) as (one, two):
            matrix = torch.arange(40_000.0).view(100, 400)
            got = await together(lambda: one.send_object(matrix.T, 1), lambda: two.recv_object(0))
            assert got[1].equal(matrix.T)
            got = await ranks([one, two], lambda comm: comm.broadcast_object(matrix if comm.rank == 0 else None, 0))
            assert all(matrix.equal(other) for other in got)

    run(main)
    assert made == [False, False]


@pytest.mark.parametrize("call", ["send", "broadcast", "all_gather", "gather", "scatter"])
def test_object_copies_are_freed_by_a_thread(run, monkeypatch, call):
    """A thread drops the last reference, because the kernel may need longer than a turn of the loop to free memory."""
    freed, let_go = [], parcels.Parcel.let_go

    def noted(parcel):
        memory = parcel.messages[0].untyped_storage()._weak_ref()
        let_go(parcel)
        on_loop = threading.current_thread() is threading.main_thread()
        freed.append((on_loop, torch.UntypedStorage._expired(memory)))
        torch.UntypedStorage._free_weak_ref(memory)

    monkeypatch.setattr(parcels.Parcel, "let_go", noted)

    async def main():
        async with local_world(2) as (one, two):
            obj = torch.arange(40_000.0).view(100, 400).T
            calls = {
                "send": [lambda: one.send_object(obj, 1), lambda: two.recv_object(0)],
                "broadcast": [lambda: one.broadcast_object(obj, 0), lambda: two.broadcast_object(None, 0)],
                "all_gather": [lambda: one.all_gather_object(obj), lambda: two.all_gather_object(None)],
                "gather": [lambda: one.gather_object(obj, 1), lambda: two.gather_object(None, 1)],
                "scatter": [lambda: one.scatter_object([None, obj], 0), lambda: two.scatter_object(None, 0)],
            }
            await together(*calls[call])

    run(main)
    assert freed == [(False, True)]


@pytest.mark.real
@pytest.mark.parametrize("end", ["close", "close of the sender", "abort"])
@pytest.mark.parametrize("came", ["header", "one tensor"])
def test_recv_object_fails_when_the_communicator_ends_amid_its_tensors(run, monkeypatch, end, came):
    monkeypatch.setattr(core, "CLOSE_GRACE", 0.1)

    async def main():
        async with local_world(2) as (one, two):
            parcel = parcels.Parcel([torch.ones(50_000), torch.zeros(50_000)], one.device, pickle=False)
            work = two.recv_object(0)
            works = [forged.send(one, parcel.header, 1, 0, ops.OBJECT)]
            works.append(forged.send(one, parcel.body, 1, parcel.tag, ops.OBJECT_DATA))
            if came == "one tensor":
                works.append(forged.send(one, parcel.messages[0], 1, parcel.tag, ops.OBJECT_DATA))
            for sent in works:
                await sent
            landed = weakref.ref(work)
            if end == "abort":
                one.abort("amid an object")
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(two.aclose if end == "close" else one.aclose)
                    with pytest.raises(CommClosedError if end == "close" else CommAbortedError):
                        await work
            if end == "abort":
                with pytest.raises(CommAbortedError, match="amid an object"):
                    await work
            del work
        while landed() is not None:  # The flight recorder's thread or a traceback may hold the work for a moment.
            gc.collect()
            await turns()

    run(main)


def test_debug_mode_guards_the_tensors_of_an_object(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_DEBUG", "1")

    async def main():
        async with local_world(2) as (one, two):
            tensor = torch.zeros(50_000)
            sending = one.send_object({"tensor": tensor}, 1)
            with pytest.raises(BufferBusyError, match="obj's tensor 0"):
                one.recv(tensor, 1)
            await two.recv_object(0)
            await sending

    anyio.run(main)


def test_memory_error_while_copying_to_itself_fails_only_that_op(run, monkeypatch):
    """The copy fails in a thread before a message is sent, so no other rank waits for it."""

    def full(*_):
        raise MemoryError("no room")

    async def main():
        async with local_world(1) as (comm,):
            large = {"large": torch.zeros(1 << 20)}
            with monkeypatch.context() as patch:
                patch.setattr(apart, "copy", full)
                with pytest.raises(CommError, match="no room"):
                    await comm.all_gather_object(large)
            assert not comm.aborted
            (got,) = await comm.all_gather_object(large)
            assert equal(got, large)

    run(main)
