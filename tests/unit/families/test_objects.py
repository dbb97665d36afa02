"""Objects as messages, on every loop."""

from __future__ import annotations

import weakref

import anyio
import forged
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms import ops
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommTimeoutError, ProtocolError, WorkCancelledError
from aiocomms.families import objects
from aiocomms.testing import local_world

SMALL = {"id": 7, "shape": (2, 3), "dtype": torch.float16, "data": torch.arange(4)}
LARGE = {"text": "x" * 5000, "tensor": torch.arange(1000.0)}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


@pytest.mark.parametrize("obj", [None, SMALL, LARGE, b"", [], "é" * 300], ids=["none", "small", "large", "b", "l", "s"])
def test_send_and_receive(run, obj):
    async def main():
        async with local_world(2) as (one, two):
            got = await together(lambda: one.send_object(obj, 1, 5), lambda: two.recv_object(0, 5))
            assert got[0] is None
            assert equal(got[1], obj)

    run(main)


def test_tags_keep_objects_apart_and_in_order(run):
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
def test_collectives(run, size):
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


def test_overlapping_collectives_do_not_mix():
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


def test_bad_arguments_send_nothing():
    async def main():
        async with local_world(2) as (one, two):
            with pytest.raises(ArgumentTypeError, match="obj holds"):
                one.send_object(object(), 1)
            with pytest.raises(ArgumentError, match="dst"):
                one.send_object(1, 0)
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


def test_a_receive_is_withdrawn_and_its_message_goes_to_the_next(run):
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


def test_an_object_whose_header_has_come_is_not_withdrawn(run):
    async def main():
        async with local_world(2) as (one, two):
            parcel = objects.Parcel(LARGE, one.device, pickle=False)
            work = two.recv_object(0)
            await forged.send(one, parcel.header, 1, 0, ops.OBJECT)
            with anyio.move_on_after(0.01) as scope:
                await work.cancel()
            assert scope.cancelled_caught
            assert not work.done()
            await forged.send(one, parcel.body, 1, parcel.tag, ops.OBJECT_DATA)
            assert equal(await work, LARGE)

    run(main)


def test_an_object_that_was_received_is_let_go_of(run):
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


@pytest.mark.parametrize("first", ["send", "receive"])
def test_pickles_that_fail_harm_nobody_else(run, first):
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


def test_a_hundred_ranks():
    """The last to come completes everybody's messages, without going deeper with each."""

    async def main():
        async with local_world(100) as world:
            results = await ranks(world, lambda comm: comm.all_gather_object(comm.rank))
            assert results == [list(range(100))] * 100

    anyio.run(main)


@pytest.mark.fault(65, transport="local")
def test_a_header_that_makes_no_sense_is_refused():
    async def main():
        async with local_world(2) as (one, two):
            for data in (b"\xff" * objects.HEADER_BYTES, forged.object_header(0, 0, b"", 2**50)):
                sent = forged.send(one, data, 1, 0, ops.OBJECT)
                with pytest.raises(ProtocolError):
                    await two.recv_object(0)
                await sent

    anyio.run(main)
