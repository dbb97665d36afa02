"""Python objects as messages and in collectives."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import anyio
import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 1.5, math.inf, "", "é\U0001f600\0", b"", b"\xff" * 50, [], (), {},
    [1, [2.0, ("three", b"4", None)]], {"a": {1: (), None: [True], 2.5: "x", b"k": ()}}, ((),), [()] * 3,
    torch.float16, torch.device("cpu"), torch.device("meta"), torch.Size([2, 0, 3]), {"shape": torch.Size([])},
    *("x" * n for n in (180, 230, 231, 232, 233, 234, 240, 255, 256, 257, 300, 70_000)), b"y" * 3_000_000,
    list(range(1000)),
]  # fmt: skip


def same(got: Any, want: Any) -> None:
    """Check that two objects are equal and have equal types."""
    assert type(got) is type(want), f"got {got!r}, wanted {want!r}"
    if isinstance(want, torch.Tensor):
        data.same_bits(got, want)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for item, wanted in zip(got, want, strict=True):
            same(item, wanted)
    elif isinstance(want, dict):
        same(list(got), list(want))
        same(list(got.values()), list(want.values()))
    else:
        assert got == want


def tensors(case: Case) -> list[Any]:
    return [{"t": case.bits(dtype, shape, "object")} for dtype in data.ALL_DTYPES for shape in ((), (0, 2), (3, 5))]


@pytest.mark.core
@ranks(2)
async def test_objects_arrive_equal(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    values = [*VALUES, *tensors(case)]
    if comm.rank == 0:
        for value in values:
            await comm.send_object(value, 1, 4)
    else:
        for value in values:
            same(await comm.recv_object(0, 4), value)


@ranks(2)
async def test_objects_match_by_tag_in_order(comm: Communicator, case: Case) -> None:
    """Short and long objects match by tag, and do not overtake each other."""
    case.need_any_order()
    values = [(tag, f"{tag} {i}" * (1 + 400 * (i % 2))) for i in range(10) for tag in (0, 7, -7)]
    if comm.rank == 0:
        for work in [comm.send_object(value, 1, tag) for tag, value in values]:
            await work
        return
    works = {tag: [comm.recv_object(0, tag) for _ in range(10)] for tag in (7, -7, 0)}
    got = {tag: [await work for work in its] for tag, its in works.items()}
    assert got == {tag: [value for its, value in values if its == tag] for tag in works}


@ranks(2)
async def test_object_may_be_changed_after_send_object_and_its_tensors_once_it_is_done(
    comm: Communicator, case: Case
) -> None:
    """The program must not change the object's tensors until the operation is done, as with ``send``.

    The program may change the rest of the object immediately after the call.
    """
    case.need("p2p")
    if comm.rank == 0:
        value = {"list": [1, 2], "tensor": torch.ones(300_000)}
        work = comm.send_object(value, 1)
        value["list"].append(3)  # type: ignore[attr-defined]
        case.tell("changed")
        await work
        value["tensor"].fill_(-1)  # type: ignore[attr-defined]
        case.tell("changed again")
    else:
        await case.told("changed", 0)
        receiving = comm.recv_object(0)
        await case.told("changed again", 0)
        same(await receiving, {"list": [1, 2], "tensor": torch.ones(300_000)})


def large(case: Case, rank: int) -> Any:
    """Return an object with large tensors, bytes and texts. Some tensors are empty, conjugate or not contiguous."""
    bits = case.bits(torch.float32, (300, 500), "large", rank)
    return {
        "matrix": bits,
        "again": [bits, (bits[:, :7], bits[0])],
        "transposed": bits.T,
        "strided": bits[::2, ::3],
        "conjugate": case.numbers(torch.complex64, (20_001,), rank).conj(),
        "bytes": bits.numpy().tobytes(),
        "text": str(rank) * 70_000,
        "not ASCII": "é" * 40_000,
        "dtypes": [case.bits(dtype, (40_009,), rank) for dtype in data.ALL_DTYPES[rank::5]],
        "empty": torch.empty(0, 3),
    }


def plain(value: Any) -> Any:
    """Return an object as it arrives: its tensors are contiguous and without lazy conjugates."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value.resolve_conj().contiguous() if isinstance(value, torch.Tensor) else value


@pytest.mark.memory
@ranks(3, more=(2,))
async def test_large_tensors_bytes_and_texts_in_an_object_arrive_in_new_memory(comm: Communicator, case: Case) -> None:
    """Large values arrive unchanged in new memory.

    The values of different messages do not mix, and do not disturb later messages.
    """
    case.need("p2p")
    everyone = [large(case, r) for r in range(comm.size)]
    mine, expected = everyone[comm.rank], [plain(obj) for obj in everyone]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = [comm.send_object(mine, right, 1), comm.send_object("next", right, 2), comm.send_object(mine, right, 1)]
    for _ in range(2):
        same(await comm.recv_object(left, 1), expected[left])
    assert await comm.recv_object(left, 2) == "next"
    for work in sending:
        await work
    root = comm.size - 1
    got = await comm.broadcast_object(mine if comm.rank == root else None, root)
    same(got, expected[root])
    assert got["matrix"].data_ptr() != mine["matrix"].data_ptr()
    same(await comm.all_gather_object(mine), expected)
    same(await comm.gather_object(mine, root), expected if comm.rank == root else None)
    same(await comm.scatter_object(everyone if comm.rank == root else None, root), expected[comm.rank])
    same(plain(mine), expected[comm.rank])


@pytest.mark.core
@ranks(2)
async def test_recv_object_with_pickle_refuses_a_plain_object_and_takes_its_messages(
    comm: Communicator, case: Case
) -> None:
    """The receive fails, but nevertheless takes all messages of the object, so that the sender's work ends."""
    case.need("p2p")
    if comm.rank == 0:
        await comm.send_object({"t": torch.ones(100_000)}, 1)
        await comm.send_object("next", 1)
    else:
        with pytest.raises(ProtocolError, match="not pickled by its sender"):
            await comm.recv_object(0, pickle=True)
        assert await comm.recv_object(0) == "next"


@pytest.mark.core
@ranks(2, 3, more=(1, 4, 7))
async def test_object_collectives_deliver_from_every_root(comm: Communicator, case: Case) -> None:
    """Each rank is the root once, with short objects, with long objects, and with both."""
    case.need("p2p")
    everyone = list(range(comm.size))
    for factor in (0, 1, 1000):
        mine = ("rank", comm.rank, "z" * factor * comm.rank)
        all_of_it = [("rank", r, "z" * factor * r) for r in everyone]
        same(await comm.all_gather_object(mine), all_of_it)
        for root in everyone:
            same(await comm.broadcast_object(mine if comm.rank == root else None, root), all_of_it[root])
            same(await comm.gather_object(mine, root), all_of_it if comm.rank == root else None)
            given = [(root, r, "s" * factor * r) for r in everyone] if comm.rank == root else None
            same(await comm.scatter_object(given, root), (root, comm.rank, "s" * factor * comm.rank))


@pytest.mark.core
@ranks(2, more=(3,))
async def test_concurrent_object_collectives_stay_apart(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    gathering = [comm.all_gather_object((i, comm.rank, "w" * 100 * i)) for i in range(8)]
    broadcasting = [comm.broadcast_object((i, "w" * 100 * i), i % comm.size) for i in range(8)]
    for i, (gathered, broadcast) in enumerate(zip(gathering, broadcasting, strict=True)):
        assert await gathered == [(i, r, "w" * 100 * i) for r in range(comm.size)]
        assert await broadcast == (i, "w" * 100 * i)


@pytest.mark.core
@ranks(2, more=(3,))
async def test_pickle_carries_any_object_when_every_rank_allows_it(comm: Communicator, case: Case) -> None:
    """Ranks can send any object that pickle can encode, if every rank of the operation allows pickle."""
    case.need("p2p")
    value = {dt.timedelta(1): {1, 2}, "deep": [range(3)]}
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = comm.send_object(value, right, pickle=True)
    assert await comm.recv_object(left, pickle=True) == value
    await sending
    assert await comm.broadcast_object(value, 0, pickle=True) == value
    assert await comm.all_gather_object(value, pickle=True) == [value] * comm.size
    with pytest.raises(ArgumentError, match="obj"):
        comm.send_object(value, right)


@pytest.mark.core
@ranks(2)
@pytest.mark.parametrize("sent", [True, False])
async def test_rank_without_pickle_unpickles_nothing(comm: Communicator, case: Case, sent: bool) -> None:
    case.need("p2p")
    for length in (1, 1000):
        if comm.rank == 0:
            await comm.send_object("p" * length, 1, pickle=sent)
            await comm.send_object("next", 1)
        else:
            with pytest.raises(ProtocolError, match="pickle"):
                await comm.recv_object(0, pickle=not sent)
            assert await comm.recv_object(0) == "next"


@pytest.mark.core
@ranks(2)
async def test_unsupported_object_is_refused(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value in (
        object(),
        {1, 2},
        1j,
        2**64,
        {(1, 2): 3},
        deep,
        [lambda: None],
        torch.ones(3).to_sparse(),
        bytearray(3),
    ):
        with pytest.raises(ArgumentError, match="obj"):
            comm.send_object(value, 1 - comm.rank)
    assert await comm.all_gather_object(comm.rank) == [0, 1]


@pytest.mark.loops
@ranks(2)
async def test_cancelled_recv_object_is_withdrawn(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    for text in ("short", "long" * 1000):
        if comm.rank == 0:
            await case.told(f"cancelled {len(text)}", 1)
            await comm.send_object(text, 1)
            continue
        assert await comm.recv_object(0).cancel()
        with anyio.move_on_after(0):
            await comm.recv_object(0)
        case.tell(f"cancelled {len(text)}")
        assert await comm.recv_object(0) == text
