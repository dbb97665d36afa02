"""The sum of sparse tensors: tensors that differ between ranks, and dtypes that torch cannot add."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from concurrency import in_threads
from torch import Tensor

from aiocomms import blocking
from aiocomms.errors import MismatchError, UnsupportedOperation
from aiocomms.integrations.torch_backend import sparse
from aiocomms.ops.reductions import ReduceOp

pytestmark = pytest.mark.deterministic


def one(size: int, dtype: torch.dtype = torch.float32, hybrid: bool = False) -> Tensor:
    """Return a sparse tensor with its last row stored."""
    value = torch.ones((1, 2) if hybrid else 1, dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor([[size - 1]]), value, (size, *value.shape[1:]), check_invariants=True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (one(5), r"rank 0 has float32\[3\] of 1 sparse dimensions, and rank 1 has float32\[5\]"),
        (one(3, torch.float64), r"rank 1 has float64\[3\]"),
        (one(3, hybrid=True), r"rank 1 has float32\[3, 2\]"),
        (torch.ones(3, 2).to_sparse(2), "rank 1 has .* of 2 sparse dimensions"),
    ],
)
def test_tensors_that_differ_raise_an_error_on_every_rank(other: Tensor, words: str) -> None:
    """Every rank raises the same error, no tensor is written, and the communicator stays usable."""
    store = dist.HashStore()
    given, equal = (one(3), other), (one(3), one(3))

    def summed(rank: int) -> None:
        with blocking.new_comm("local", store=store, rank=rank, size=2) as comm:
            with pytest.raises(MismatchError, match=words):
                sparse.all_reduce(comm, given[rank], 1, 10.0)
            sparse.all_reduce(comm, equal[rank], 2, 10.0)

    in_threads(*(lambda rank=rank: summed(rank) for rank in range(2)))
    assert given[0].to_dense().tolist() == [0.0, 0.0, 1.0]
    assert [each.to_dense().tolist() for each in equal] == [[0.0, 0.0, 2.0]] * 2


def test_dtypes_that_torch_cannot_add_are_refused() -> None:
    for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(UnsupportedOperation, match=f"dtype {dtype}, wanted one that torch adds"):
            sparse.check(one(3, dtype), ReduceOp.SUM, None)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        sparse.check(one(3, dtype), ReduceOp.SUM, None)
