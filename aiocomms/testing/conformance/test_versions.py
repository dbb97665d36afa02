"""Operations report every write to autograd, so that autograd refuses a gradient that needs an overwritten value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms.communicator.communicator import Communicator
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_arguments import GOOD, WRITTEN, carried

LARGE = 2**18
"""A large number of elements.

A transport may use different methods for many elements and for few elements.
"""


def tensors(args: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of an operation, each with the name of its parameter."""
    for name, value in args.items():
        yield from ((name, item) for item in (value if isinstance(value, list) else [value]) if torch.is_tensor(item))


@pytest.mark.fault(117)
@ranks(1, 2)
async def test_operations_raise_the_autograd_version_of_written_tensors_only(comm: Communicator, case: Case) -> None:
    """The versions of written tensors rise, and the versions of tensors that are only read do not."""
    for name, good in GOOD.items():
        if not carried(comm, name) or name.endswith("object"):
            continue
        args = good(comm) | ({"root": 0} if "root" in good(comm) else {})
        before = [item._version for _, item in tensors(args)]
        other = {"send": "recv", "recv": "send"}.get(name)
        beside = getattr(comm, other)(**GOOD[other](comm)) if other else None
        await getattr(comm, name)(**args)
        if beside is not None:
            await beside
        for (parameter, item), version in zip(tensors(args), before, strict=True):
            writes = name in WRITTEN.get(parameter, ())
            if comm.rank != 0 and (name == "reduce" or ("gather" in name and "root" in args)):
                continue  # The documentation leaves open whether this rank, no root, writes the tensor.
            if name == "broadcast" and comm.rank == 0:
                writes = False
            assert (item._version > version) == writes, f"{name}: {parameter}"


@pytest.mark.fault(117)
@ranks(2)
@pytest.mark.parametrize("count", [3, LARGE])
async def test_backward_through_an_overwritten_tensor_raises(comm: Communicator, case: Case, count: int) -> None:
    weight = torch.ones(count, device=comm.device, requires_grad=True)
    for name in ("all_reduce", "broadcast", "all_gather_single"):
        saved = torch.full((2 * count,), 2.0, device=comm.device)
        loss = (weight * saved[:count]).sum()  # Autograd keeps a view of this tensor.
        if name == "all_reduce":
            await comm.all_reduce(saved)
        elif name == "broadcast":
            await comm.broadcast(saved, 0)
        else:
            await comm.all_gather_single(saved, torch.ones(count, device=comm.device))
        if name == "broadcast" and comm.rank == 0:
            torch.autograd.backward(loss)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)
