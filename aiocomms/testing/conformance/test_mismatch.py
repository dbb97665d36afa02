"""Ranks that call different operations. Every rank gets an error, and no rank gets wrong data."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aiocomms import ReduceOp, Work, ops
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, MismatchError
from aiocomms.testing.conformance.case import Case, ranks

Call = Callable[[Communicator], Work[object]]


def some(comm: Communicator, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype, device=comm.device)


def several(comm: Communicator, count: int = 6) -> list[Tensor]:
    return [some(comm, count) for _ in range(comm.size)]


DISAGREEMENTS: dict[str, tuple[Call, Call]] = {
    "operation": (lambda c: c.all_reduce(some(c)), lambda c: c.broadcast(some(c), 0)),
    "operation without data": (lambda c: c.barrier(), lambda c: c.all_reduce(some(c))),
    "form of the same operation": (
        lambda c: c.all_gather(several(c), some(c)),
        lambda c: c.all_gather_single(some(c, 6 * c.size), some(c)),
    ),
    "size": (lambda c: c.all_reduce(some(c, 6)), lambda c: c.all_reduce(some(c, 7))),
    "large size": (lambda c: c.all_reduce(some(c, 40_009)), lambda c: c.all_reduce(some(c, 40_010))),
    "empty or not": (lambda c: c.all_reduce(some(c, 0)), lambda c: c.all_reduce(some(c, 1))),
    "dtype": (lambda c: c.all_reduce(some(c)), lambda c: c.all_reduce(some(c, dtype=torch.int32))),
    "reduction": (lambda c: c.all_reduce(some(c)), lambda c: c.all_reduce(some(c), ReduceOp.MAX)),
    "factor": (
        lambda c: c.all_reduce(some(c), ReduceOp.PREMUL_SUM(2.0)),
        lambda c: c.all_reduce(some(c), ReduceOp.PREMUL_SUM(3.0)),
    ),
    "root": (lambda c: c.broadcast(some(c), 0), lambda c: c.broadcast(some(c), 1)),
    "root of a gather": (
        lambda c: c.gather(several(c) if c.rank == 0 else None, some(c), 0),
        lambda c: c.gather(several(c) if c.rank == 1 else None, some(c), 1),
    ),
    "size of a gather": (
        lambda c: c.all_gather(several(c, 6), some(c, 6)),
        lambda c: c.all_gather(several(c, 3), some(c, 3)),
    ),
    "size of a scatter": (
        lambda c: c.scatter(some(c, 4), several(c, 4) if c.rank == 0 else None, 0),
        lambda c: c.scatter(some(c, 5), several(c, 5) if c.rank == 0 else None, 0),
    ),
    "size of a reduce_scatter": (
        lambda c: c.reduce_scatter_single(some(c, 2), some(c, 2 * c.size)),
        lambda c: c.reduce_scatter_single(some(c, 3), some(c, 3 * c.size)),
    ),
    "part of a batch": (
        lambda c: c.batch().broadcast(some(c), 0).all_reduce(some(c)).issue(),
        lambda c: c.batch().broadcast(some(c), 0).all_reduce(some(c), ReduceOp.MAX).issue(),
    ),
    "size within a batch": (
        lambda c: c.batch().broadcast(some(c), 0).all_reduce(some(c, 6)).issue(),
        lambda c: c.batch().broadcast(some(c), 0).all_reduce(some(c, 5)).issue(),
    ),
    "batch or one operation": (
        lambda c: c.batch().all_reduce(some(c)).issue(),
        lambda c: c.broadcast(some(c), 0),
    ),
    "what is exchanged": (
        lambda c: c.all_to_all_v_single(some(c, 2 * c.size), some(c, 2 * c.size), [2] * c.size, [2] * c.size),
        lambda c: c.all_to_all_v_single(some(c, 3 * c.size), some(c, 3 * c.size), [3] * c.size, [3] * c.size),
    ),
}


@pytest.mark.fault(23, 24, 25, 26, 29)
@ranks(2, 3)
@pytest.mark.parametrize("what", DISAGREEMENTS)
async def test_collective_that_disagrees_on_the_last_rank_raises_mismatch_error(
    comm: Communicator, case: Case, what: str
) -> None:
    usual, other = DISAGREEMENTS[what]
    need_comparison(case)
    work = call(comm, other if comm.rank == comm.size - 1 else usual)
    if work is not None:
        with pytest.raises(MismatchError) as caught:
            await work
        assert caught.value.op == work.op.name, vars(caught.value)
        if what == "operation":
            assert all(name in caught.value.message for name in ("all_reduce", "broadcast")), caught.value
    with pytest.raises(CommAbortedError):
        await comm.barrier()
    assert comm.aborted


@pytest.mark.fault(27)
@pytest.mark.memory
@ranks(2, 3)
async def test_collectives_called_in_swapped_order_raise_mismatch_error(comm: Communicator, case: Case) -> None:
    """The two ranks call two collectives in opposite order."""
    need_comparison(case)
    calls: list[Call] = [lambda c: c.all_reduce(some(c, 4)), lambda c: c.all_reduce(some(c, 5))]
    works = [call(comm, start) for start in (calls if comm.rank == 0 else calls[::-1])]
    if works[0] is not None:
        with pytest.raises(MismatchError):
            await works[0]
    if works[1] is not None:
        with pytest.raises(CommAbortedError):
            await works[1]
    assert comm.aborted


def need_comparison(case: Case) -> None:
    """Skip the check if neither the transport nor the core compares the operations of the ranks."""
    if not case.native(ops.AllReduce):
        raise unittest.SkipTest("collectives made of messages do not compare what the ranks do")
    if not case.capabilities("collectives").detects_mismatch:
        raise unittest.SkipTest(f"{case.place.transport} does not compare what the ranks do")


def call(comm: Communicator, start: Call) -> Work[object] | None:
    """Call a collective, and return its work; return None if this rank already has the error of the mismatch."""
    try:
        return start(comm)
    except CommAbortedError:
        return None


@pytest.mark.fault(25)
@ranks(2)
@pytest.mark.parametrize("early", ["send", "recv"])
@pytest.mark.parametrize("count", [4, 40_009])
async def test_recv_of_another_dtype_raises_mismatch_error(
    comm: Communicator, case: Case, early: str, count: int
) -> None:
    """A message of another dtype is an error, even if the dtypes have the same size, such as float32 and int32."""
    case.need("p2p")
    if (comm.rank == 0) != (early == "send"):
        await case.told("posted", 1 - comm.rank)
    if comm.rank == 0:
        work: Work[Tensor] = comm.send(some(comm, count), 1)
        case.tell("posted")
        await work.wait()
        work.exception()
        await case.told("compared", 1)
        return
    slot = case.empty(torch.int32, (count,))
    work = comm.recv(slot.tensor, 0)
    case.tell("posted")
    with pytest.raises(MismatchError, match="float32"):
        await work
    slot.expect_untouched()
    assert comm.aborted
    case.tell("compared")
