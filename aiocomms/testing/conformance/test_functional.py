"""The functional forms, which return a new tensor and do not change their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms import ReduceOp, functional
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks

pytestmark: pytest.MarkDecorator = pytest.mark.core

NAMES = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}


def awkward(content: Tensor, comm: Communicator) -> Tensor:
    """Copy a tensor. If its dtype is floating-point, the copy requires grad.

    If the tensor has several dimensions, the copy is not contiguous.
    """
    if content.dim() > 1:
        content = content.transpose(0, 1).contiguous().transpose(0, 1)
    return content.to(comm.device).requires_grad_(content.is_floating_point())


@ranks(2, 3, more=(1, 4, 7))
async def test_data_movement_forms_return_new_tensors(comm: Communicator, case: Case) -> None:
    everyone, n = range(comm.size), comm.size
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8):
        for shape in ((n, 3), (2 * n, 0), (3 * n,)):
            given = [case.numbers(dtype, shape, r) for r in everyone]
            mine = awkward(given[comm.rank], comm)
            before = mine.detach().clone()
            root = len(shape) % n
            data.same_bits(await functional.broadcast(mine, root), given[root])
            data.same_bits(await functional.all_gather(mine, comm), torch.stack(given))
            gathered = await functional.gather(mine, root)
            assert (gathered is None) == (comm.rank != root)
            if gathered is not None:
                data.same_bits(gathered, torch.stack(given))
            scattered = await functional.scatter(mine if comm.rank == root else None, root)
            data.same_bits(scattered, given[root].tensor_split(n)[comm.rank])
            exchanged = await functional.all_to_all(mine)
            data.same_bits(exchanged, torch.cat([tensor.tensor_split(n)[comm.rank] for tensor in given]))
            data.same_bits(mine, before.cpu())
    await functional.barrier()


@ranks(3, more=(1, 2, 4, 7))
@pytest.mark.parametrize("op", NAMES)
async def test_reduction_forms_return_new_tensors(comm: Communicator, case: Case, op: str) -> None:
    given = [case.numbers(torch.float64, (comm.size, 5), r) for r in range(comm.size)]
    mine = awkward(given[comm.rank], comm)
    before = mine.detach().clone()
    root = comm.size - 1
    want = data.reduced(NAMES[op], given)
    everywhere = await functional.all_reduce(mine, op)
    data.near(everywhere, *want)
    data.near(await functional.reduce(mine, root, op), *(want if comm.rank == root else (before.cpu(), None)))
    data.near(await functional.scan(mine, op), *data.reduced(NAMES[op], given[: comm.rank + 1]))
    before_it = await functional.exscan(mine, op)
    if comm.rank:
        data.near(before_it, *data.reduced(NAMES[op], given[: comm.rank]))
    share = data.reduced(NAMES[op], [tensor[comm.rank : comm.rank + 1] for tensor in given])
    data.near(await functional.reduce_scatter(mine, op), *share)
    assert not everywhere.requires_grad
    data.same_bits(mine, before.cpu())


@ranks(2, more=(3,))
async def test_send_and_recv_forms_return_what_was_sent(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    content = case.bits(torch.int16, (4, 6), comm.rank)
    sending = functional.send(awkward(content, comm), right, 8)
    got = await functional.recv((4, 6), left, 8, dtype=torch.int16)
    await sending
    data.same_bits(got, case.bits(torch.int16, (4, 6), left))


@ranks(2)
async def test_group_is_found_by_its_name_until_it_closes(comm: Communicator, case: Case) -> None:
    other = await case.open("another name")
    for group in (None, "", comm.name, comm, "another name", other):
        total = await functional.all_reduce(torch.ones(2, device=comm.device), group=group)
        assert total.tolist() == [2, 2]
    with pytest.raises(ArgumentError, match="no such group"):
        functional.barrier("no such group")
    await other.aclose()
    await case.meet("closed")  # if the ranks share a process, a rank may find the other rank's communicator
    with pytest.raises(ArgumentError, match="another name"):
        functional.barrier("another name")


@ranks(2)
async def test_wrong_arguments_of_functional_forms_are_refused(comm: Communicator, case: Case) -> None:
    tensor = torch.ones(3, device=comm.device)
    anything: Any = None
    calls: list[Callable[[], object]] = [
        lambda: functional.all_reduce(anything),
        lambda: functional.all_to_all(tensor),
        lambda: functional.reduce_scatter(tensor),
        lambda: functional.scatter(tensor, comm.rank),
        lambda: functional.all_gather(anything),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="tensor"):
            call()
    with pytest.raises(ArgumentError, match="op is 'average'"):
        functional.all_reduce(tensor, "average")
    assert (await functional.all_reduce(tensor)).tolist() == [2, 2, 2]
