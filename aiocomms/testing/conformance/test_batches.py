"""Batches of collectives: results, order among other collectives, dtypes, lanes, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms import ReduceOp, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, CommTimeoutError, UnsupportedOperation
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.complex64]


class BatchTrial:
    """A batch with one collective of each kind that a batch accepts, and the results that this rank expects."""

    def __init__(self, comm: Communicator, case: Case, dtype: torch.dtype, key: object) -> None:
        size, rank, self.root = comm.size, comm.rank, comm.size - 1
        contents = [case.numbers(dtype, (6, size), key, r) for r in range(size)]
        self.slots = [case.full(contents[rank]) for _ in range(3)]
        self.whole, self.pieces = case.full(contents[rank].T.contiguous()), case.empty(dtype, (6,))
        self.mine, self.all = case.full(contents[rank]), case.empty(dtype, (size, 6, size))
        total = case.reduced(ReduceOp.SUM, contents)
        self.sums = total, case.reduced(ReduceOp.SUM, [it.T[rank].contiguous() for it in contents])
        self.sent, self.own, self.stack = contents[self.root], contents[rank], torch.stack(contents)
        self.rank = rank

    def add_to(self, batch: Any) -> Any:
        """Add the collectives to a batch."""
        first, second, third = (slot.tensor for slot in self.slots)
        batch.all_reduce(first).broadcast(second, self.root).reduce(third, self.root)
        return batch.all_gather_single(self.all.tensor, self.mine.tensor).reduce_scatter_single(
            self.pieces.tensor, self.whole.tensor
        )

    def check(self, results: list[Tensor]) -> None:
        """Check the results of the batch."""
        slots = [*self.slots, self.all, self.pieces]
        assert len(results) == len(slots)
        assert all(result is slot.tensor for result, slot in zip(results, slots, strict=True))
        total, share = self.sums
        self.slots[0].expect(*total)
        self.slots[1].expect(self.sent)
        self.slots[2].expect(*(total if self.rank == self.root else (self.own,)))
        self.all.expect(self.stack)
        self.pieces.expect(*share)


@ranks(1, 2, 3, 4)
async def test_batch_of_collectives_gives_each_result(comm: Communicator, case: Case) -> None:
    for dtype in DTYPES:
        trial = BatchTrial(comm, case, dtype, str(dtype))
        trial.check(await trial.add_to(comm.batch()).issue())


@ranks(2, 3)
async def test_batches_keep_their_place_among_collectives(comm: Communicator, case: Case) -> None:
    trials: list[tuple[BatchTrial, data.Slot, data.Slot]] = []
    works: list[Work[Any]] = []
    for key in range(6):
        before, after = (case.full(case.numbers(torch.float64, (5,), key, k, comm.rank)) for k in range(2))
        trials.append((BatchTrial(comm, case, DTYPES[key % 3], key), before, after))
        works.append(comm.all_reduce(before.tensor))
        works.append(trials[-1][0].add_to(comm.batch()).issue())
        works.append(comm.all_reduce(after.tensor, ReduceOp.MAX))
    for key, (trial, before, after) in enumerate(trials):
        for k, (slot, op) in enumerate([(before, ReduceOp.SUM), (after, ReduceOp.MAX)]):
            await works[3 * key + 2 * k]
            given = [case.numbers(torch.float64, (5,), key, k, r) for r in range(comm.size)]
            slot.expect(*case.reduced(op, given))
        trial.check(await works[3 * key + 1])


@pytest.mark.core
@ranks(2, more=(3,))
async def test_batches_of_lanes_stay_apart(comm: Communicator, case: Case) -> None:
    keys = [0, 1] if comm.rank else [1, 0]
    trials = {key: BatchTrial(comm, case, DTYPES[2 * key], key) for key in keys}
    works = {key: trials[key].add_to(comm.lane(key).batch()).issue() for key in keys}
    for key in (0, 1):
        trials[key].check(await works[key])


@ranks(2)
async def test_batch_accepts_operators_and_empty_tensors(comm: Communicator, case: Case) -> None:
    given = [case.numbers(torch.float32, (4,), r) for r in range(2)]
    highest, scaled, none = case.full(given[comm.rank]), case.full(given[comm.rank]), case.empty(torch.float32, (0,))
    batch = comm.batch().all_reduce(highest.tensor, "max").all_reduce(none.tensor)
    await batch.all_reduce(scaled.tensor, ReduceOp.PREMUL_SUM(0.5)).broadcast(none.tensor, 0).issue()
    highest.expect(*case.reduced(ReduceOp.MAX, given))
    data.near(scaled.tensor.cpu(), *case.reduced(ReduceOp.PREMUL_SUM(0.5), given))


@pytest.mark.core
@ranks(2)
async def test_batch_with_a_wrong_argument_is_refused(comm: Communicator, case: Case) -> None:
    tensor = torch.ones(4, device=comm.device)
    batch = comm.batch().all_reduce(tensor)
    with pytest.raises(ArgumentError, match="send follows all_reduce"):
        batch.send(tensor, 1 - comm.rank)
    with pytest.raises(ArgumentError, match="root is 2"):
        batch.broadcast(tensor, 2)
    with pytest.raises(ArgumentError, match="op is 'most'"):
        batch.all_reduce(tensor, "most")
    with pytest.raises(UnsupportedOperation, match="not defined"):
        batch.all_reduce(torch.ones(2, device=comm.device), ReduceOp.BAND)
    with pytest.raises(ArgumentError, match=r"of part 1 \(broadcast\) overlaps the tensor of part 0"):
        comm.batch().all_reduce(tensor).broadcast(tensor[2:], 0).issue()
    both = torch.ones(2, 4, device=comm.device)
    inside = comm.batch().all_gather_single(both, both[comm.rank]).all_reduce(tensor)
    assert (await inside.issue())[1].tolist() == [2.0] * 4
    assert (await batch.issue())[0].tolist() == [4.0] * 4


@ranks(2)
async def test_deadline_of_a_batch_names_the_late_rank(comm: Communicator, case: Case) -> None:
    if comm.rank == 0:
        tensors = [torch.ones(4, device=comm.device) for _ in range(2)]
        with pytest.raises(CommTimeoutError) as caught:
            await comm.batch().all_reduce(tensors[0]).all_reduce(tensors[1]).issue(timeout=0.2)
        assert (caught.value.op, caught.value.late) == ("batch", (1,)), vars(caught.value)
        case.tell("late")
    else:
        await case.told("late", 0)
