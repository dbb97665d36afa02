"""The results of prefix reductions on all ranks, for example in lanes, in threads and after cancellations."""

from __future__ import annotations

import math
import unittest

import pytest
import torch
from torch import Tensor

from aiocomms import Portal, ReduceOp, ops
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, MismatchError
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, cancel_await, ranks
from aiocomms.testing.conformance.test_mismatch import call
from aiocomms.testing.conformance.test_portal import synchronous
from aiocomms.testing.conformance.test_timeouts import SHORT, expect_timeout

pytestmark: pytest.MarkDecorator = pytest.mark.fault(140)


def number(comm: Communicator | Portal, value: float) -> Tensor:
    return torch.tensor([value], device=comm.device)


@pytest.mark.core
@ranks(1, 2, 3, 4, 7)
async def test_scan_and_exscan_reduce_the_preceding_ranks(comm: Communicator, case: Case) -> None:
    """Rank ``r`` has ``r + 1`` rows of one array. The scans compute where each rank's rows begin and end."""
    before = sum(range(comm.rank + 1))
    assert (await comm.exscan(number(comm, comm.rank + 1))).tolist() == [before]
    assert (await comm.scan(number(comm, comm.rank + 1))).tolist() == [before + comm.rank + 1]
    assert (await comm.scan(number(comm, comm.rank), "max")).tolist() == [comm.rank]
    assert (await comm.scan(number(comm, float(comm.rank)), "mean")).tolist() == [comm.rank / 2]
    exact = number(comm, float(comm.rank * 2))
    await comm.exscan(exact, ReduceOp.AVG)
    assert exact.tolist() == [comm.rank - 1.0] if comm.rank else exact.isnan().all()


INT64 = torch.iinfo(torch.int64)
OF_NONE: dict[torch.dtype, dict[str, float]] = {
    torch.float16: {"sum": 0, "product": 1, "min": math.inf, "max": -math.inf, "premul_sum": 0},
    torch.complex64: {"sum": 0, "product": 1},
    torch.bool: {"min": True, "max": False, "band": True, "bor": False, "bxor": False},
    torch.int64: {"sum": 0, "product": 1, "min": INT64.max, "max": INT64.min, "band": -1, "bor": 0, "bxor": 0},
    torch.uint64: {"sum": 0, "product": 1, "min": 2**64 - 1, "max": 0, "band": 2**64 - 1, "bor": 0, "bxor": 0},
}


@ranks(1, 2)
async def test_exscan_gives_rank_0_the_neutral_element(comm: Communicator, case: Case) -> None:
    """No rank precedes rank 0, so rank 0 gets the neutral element. Rank 1 gets rank 0's tensor."""
    for dtype, wanted in OF_NONE.items():
        content = case.numbers(dtype, (5,), 0)
        for kind, value in wanted.items():
            slot = case.full(content)
            await comm.exscan(slot.tensor, ReduceOp(kind))
            slot.expect(content if comm.rank else torch.full((5,), value, dtype=dtype))


@ranks(3, more=(2, 7))
async def test_scans_in_lanes_stay_apart(comm: Communicator, case: Case) -> None:
    """The ranks use the lanes in different orders. In a lane, scans and exscans with two operators do not interfere."""
    keys = [(i + comm.rank) % 5 for i in range(5)]
    works = {
        key: [f(number(comm, key + 1), op) for f in (lane.scan, lane.exscan) for op in (ReduceOp.SUM, ReduceOp.BOR)]
        for key, lane in ((key, comm.lane(key)) for key in keys)
    }
    for key, of_lane in works.items():
        value, rank = key + 1, comm.rank
        wanted = [value * (rank + 1), value, value * rank, value if rank else 0]
        assert [(await work).tolist() for work in of_lane] == [[want] for want in wanted]


@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3)
async def test_cancelled_scan_completes_on_all_ranks(comm: Communicator, case: Case) -> None:
    """The last rank cancels its ``await`` before the first rank calls the scan. The scan nevertheless completes."""
    contents = [case.numbers(torch.int64, (9,), r) for r in range(comm.size)]
    slot = case.full(contents[comm.rank])
    last = comm.size - 1
    if comm.rank == last:
        work = comm.scan(slot.tensor)
        await cancel_await(work)
        assert not work.done()
        case.tell("cancelled")
        await work
    else:
        await case.told("cancelled", last)
        await comm.scan(slot.tensor)
    slot.expect(data.reduced(ReduceOp.SUM, contents[: comm.rank + 1]).value)


@pytest.mark.clock
@pytest.mark.loops
@ranks(2, 3)
@pytest.mark.parametrize("name", ["scan", "exscan"])
async def test_scan_past_its_deadline_aborts_the_communicator(comm: Communicator, case: Case, name: str) -> None:
    if comm.rank == comm.size - 1:
        error = await expect_timeout(comm.timeout, lambda: getattr(comm, name)(number(comm, 1), timeout=SHORT))
        assert (error.op, error.rank) == (name, comm.rank)
        case.tell("late")
    await case.told("late", comm.size - 1)
    with pytest.raises(CommAbortedError, match=name):
        await comm.barrier()


@ranks(2)
@pytest.mark.parametrize("what", ["size", "dtype", "operation"])
async def test_scan_whose_ranks_disagree_loses_the_communicator_on_all_ranks(
    comm: Communicator, case: Case, what: str
) -> None:
    """The last rank's call differs from the calls of the other ranks. All ranks lose the communicator.

    The other ranks do not need any data from the last rank.
    """
    if what == "operation" and not case.native(ops.Scan):
        raise unittest.SkipTest("collectives made of messages compare sizes and dtypes alone")
    tensor = torch.ones(6 + (what == "size" and comm.rank), device=comm.device)
    tensor = tensor.to(torch.int32) if what == "dtype" and comm.rank else tensor
    work = call(comm, lambda comm: (comm.exscan if what == "operation" and comm.rank else comm.scan)(tensor))
    if work is not None:
        await work.wait()
        error = work.exception()
        if isinstance(error, CommAbortedError) and not comm.rank:  # The message of rank 0 was on its way.
            assert "ranks disagree" in str(error)
        else:
            assert isinstance(error, MismatchError if comm.rank else MismatchError | None)
    await comm.lost()


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_scan_and_exscan_return_the_prefix(comm: Portal, case: Case) -> None:
    assert comm.scan(number(comm, 3)).wait().tolist() == [3 * (comm.rank + 1)]
    assert comm.exscan(number(comm, 3), "product").wait().tolist() == [3 if comm.rank else 1]
