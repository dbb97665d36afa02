"""Integers of other types than int, such as NumPy's and an IntEnum's, as ranks, tags and sizes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from concurrency import together

import aiocomms
from aiocomms import ops
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops import membership
from aiocomms.ops.arrays import checked
from aiocomms.testing import local_world
from aiocomms.testing.faults import drop, inject

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(130)]


class Place(enum.IntEnum):
    """A program's names of ranks, tags and other numbers."""

    ZERO, ONE, TWO, THREE, FOUR = range(5)


class Indexed:
    """An object that is a number by ``__index__`` alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


Whole = Callable[[int], Any]
KINDS = [np.int64, np.uint8, Place, Indexed]
"""Functions that make a number of another type from an int."""


@pytest.mark.parametrize("whole", KINDS)
def test_operations_accept_any_integer_type(run: Any, whole: Whole) -> None:
    n0, n1, n2, n3 = map(whole, range(4))

    async def rank_of(comm: Any, peer: Any, me: Any) -> None:
        t, two = torch.full((2,), comm.rank + 1.0), torch.zeros(2)
        await comm.broadcast(t, n1)
        assert t.tolist() == [2.0, 2.0]
        await comm.reduce(torch.ones(2), n1)
        assert (await comm.broadcast_object("word" if comm.rank else None, n1)) == "word"
        assert (await comm.gather_object(comm.rank, n0)) == ([0, 1] if comm.rank == 0 else None)
        assert (await comm.scatter_object(["a", "b"] if comm.rank else None, n1)) == "ab"[comm.rank]
        await comm.gather([torch.zeros(2), torch.zeros(2)] if comm.rank else None, t, n1)
        await comm.gather_single(torch.zeros(4) if comm.rank else None, t, n1)
        await comm.scatter(t, [torch.zeros(2), torch.ones(2)] if comm.rank else None, n1)
        assert t.tolist() == [comm.rank] * 2
        out = torch.zeros(4)
        await comm.all_to_all_v_single(out, torch.arange(4.0), [n2, n2], (n2, n2))
        assert out.tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1] * 2
        work = comm.send(t, peer, n3)
        assert type(work.op.dst) is type(work.op.tag) is int
        assert await comm.recv(two, peer, n3) is two
        await work
        await comm.batch().send(t, peer).recv(two, peer, tag=n0).issue(timeout=n3)
        sent = comm.send_object({1: 2}, peer, n2)
        assert await comm.recv_object(peer, n2) == {1: 2}
        await sent
        assert comm.lane(n2).key == 2
        await comm.lane(n2).all_reduce(t, timeout=n3)
        child = await comm.split([n0, n1], timeout=whole(4))
        assert (child.rank, type(child.rank)) == (comm.rank, int)
        await child.aclose()
        async with await comm.open_stream(peer, n2, capacity_bytes=n3) as stream:
            await stream.send(t)
            await stream.receive()
        async with await comm.new_window(torch.zeros(4, dtype=torch.int64)) as window:
            await window.put(torch.ones(2, dtype=torch.int64), peer, n1)
            await window.put_signal(torch.ones(1, dtype=torch.int64), peer, n3)
            await window.wait_signal(peer)
            await window.signal(peer)
            await window.wait_signal(peer)
            await window.get(torch.zeros(2, dtype=torch.int64), peer, n1)
            await window.flush(peer)
            assert await window.fetch_add(me, n0, n3) == 0
            assert await window.compare_swap(me, n0, n3, n1) == 3
            assert not window.mapped(peer) or await window.map_remote_tensor(peer) is not None
        comm.set_timeout(n3)
        assert comm.timeout == 3.0

    async def main() -> None:
        async with local_world(n2) as (one, two):
            await together(lambda: rank_of(one, n1, n0), lambda: rank_of(two, n0, n1))

    run(main)


@pytest.mark.parametrize("whole", KINDS)
def test_constructors_accept_any_integer_type(run: Any, whole: Whole) -> None:
    async def main() -> None:
        async with aiocomms.new_comm("local", rank=whole(0), size=whole(1)) as comm:
            assert (comm.rank, comm.size, type(comm.rank), type(comm.size)) == (0, 1, int, int)
        async with local_world(2) as comms:
            again = [partial(it.reconfigure, [whole(0), whole(1)], size=whole(2), timeout=whole(4)) for it in comms]
            new = await together(*again)
            assert [type(it.size) for it in new] == [int, int]
            await together(*(it.aclose for it in new))
        async with local_world(2) as comms:
            with inject(comms, drop(ranks=[whole(1)], op="send", nth=whole(1)), seed=whole(3)):
                pass
        assert aiocomms.ReduceOp.PREMUL_SUM(whole(2)).factor == 2.0

    run(main)


class Members:
    """A communicator of two ranks with the attributes that checks read."""

    rank, size, device, fast_check = 0, 2, torch.device("cpu"), None


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float32(1), "1", None, np.array(1), torch.tensor(1)])
def test_value_that_is_no_integer_is_refused(value: Any) -> None:
    """A bool or a tensor is more often a mistake than a rank."""
    group: Any = Members()
    t = torch.ones(2)
    for op in (ops.Send(t, value, 0), ops.Send(t, 1, value), ops.Broadcast(t, value)):
        with pytest.raises(ArgumentTypeError, match=r"wanted an? (rank as an )?int"):
            checked(op, group)
    with pytest.raises(ArgumentTypeError, match=r"input_split_sizes\[0\]"):
        checked(ops.AllToAllVSingle(torch.ones(2), torch.zeros(2), (1, 1), (value, 1)), group)
    with pytest.raises(ArgumentTypeError):
        membership.members([value], group)


@pytest.mark.parametrize("whole", [np.int64, Indexed])
def test_integer_out_of_bounds_is_printed_as_an_int(whole: Whole) -> None:
    group: Any = Members()
    with pytest.raises(ArgumentError, match="dst is 2, wanted a rank of this communicator"):
        checked(ops.Send(torch.ones(2), whole(2), 0), group)
    with pytest.raises(ArgumentError, match="tag is 2147483648, wanted a 32-bit"):
        checked(ops.Send(torch.ones(2), 1, whole(2**31)), group)
