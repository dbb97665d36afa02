"""The all-reduce of sparse tensors, which DDP needs for embeddings. Each rank gathers all tensors and adds them up."""

from __future__ import annotations

from functools import cache, reduce
from operator import add

import torch
from torch import Tensor

from aiocomms import blocking
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, describe
from aiocomms.communicator.portal.operations import BlockingLane
from aiocomms.errors import MismatchError, UnsupportedOperation
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.ops.reductions import ReduceOp
from aiocomms.ops.writing import writing


def check(tensor: Tensor, op: ReduceOp, gpu: torch.device | None) -> None:
    """Check that a sparse all-reduce is supported.

    :param gpu: the GPU of the tensor; None if the tensor is on the CPU.
    :raises UnsupportedOperation: the layout is not COO, the op is not SUM, the tensor is on a GPU, or torch cannot add
        sparse tensors of the dtype.
    """
    if gpu is not None:
        raise UnsupportedOperation(f"all_reduce of a sparse tensor has it on {gpu}, wanted it on the CPU, or dense")
    if tensor.layout is not torch.sparse_coo or op != ReduceOp.SUM:
        raise UnsupportedOperation(
            f"all_reduce of a sparse tensor has layout {tensor.layout} and op {op!r}, wanted torch.sparse_coo and SUM"
        )
    if not _adds(tensor.dtype):
        raise UnsupportedOperation(
            f"all_reduce of a sparse tensor has dtype {tensor.dtype}, wanted one that torch adds in a sparse tensor"
        )


@cache
@unaffected
def _adds(dtype: torch.dtype) -> bool:
    """Return whether torch can add sparse tensors of a dtype, and can merge elements with equal indices."""
    try:
        twice = buffers.zeros(1, 2, dtype=torch.int64, device="cpu"), buffers.zeros(2, dtype=dtype, device="cpu")
        one = torch.sparse_coo_tensor(*twice, (1,), check_invariants=True).coalesce()
        add(one, one)
    except RuntimeError:
        return False
    return True


def all_reduce(comm: blocking.Communicator, tensor: Tensor, number: int, timeout: OpTimeout) -> None:
    """Replace a sparse tensor by the sum of all ranks' tensors. Blocks.

    The number of stored elements may differ between ranks.

    :param tensor: a tensor with the same shape, dtype and number of sparse dimensions on every rank.
    :param number: the number of this call, which is equal on all ranks. The steps of concurrent calls are distinguished
        by these numbers.
    :param timeout: the deadline of each step in seconds; None: no deadline.
    :raises MismatchError: the tensors differ between ranks. Every rank raises this error.
    """
    lane = comm.lane(f"aiocomms.integrations.torch_backend: sparse all_reduce {number}")
    if timeout is not COMM_TIMEOUT:
        lane.set_timeout(timeout)
    given = tensor.detach().coalesce()
    kind = f"{describe(given)} of {given.sparse_dim()} sparse dimensions"
    found: list[tuple[int, str]] = lane.all_gather_object((given._nnz(), kind)).wait()
    counts, kinds = [count for count, _ in found], [kind for _, kind in found]
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise MismatchError(f"all_reduce of a sparse tensor: rank 0 has {kinds[0]}, and rank {rank} has {other}")
    room = given.shape[: given.sparse_dim()].numel()
    if not 0 <= min(counts) <= max(counts) <= room:
        raise MismatchError(f"ranks have {counts} elements, where a tensor of this shape has room for {room}")
    indices = _gathered(lane, given.indices().t(), counts)
    values = _gathered(lane, given.values(), counts)
    parts = [
        torch.sparse_coo_tensor(i.t(), v, given.shape, check_invariants=True)
        for i, v in zip(indices, values, strict=True)
    ]
    total = reduce(add, parts).coalesce()
    with torch.no_grad(), writing(tensor):
        tensor.copy_(total)


def _gathered(lane: BlockingLane, rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Gather each rank's rows; ``counts`` has the number of rows of each rank."""
    into = [rows.new_empty((count, *rows.shape[1:])) for count in counts]
    lane.all_gather_v(into, rows.contiguous()).wait()
    return into
