"""The sum of sparse tensors, as DDP needs for the gradients of embeddings: all-gathers, and a sum on each rank."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor

from aiocomms import blocking
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.portal.operations import BlockingLane
from aiocomms.errors import MismatchError, UnsupportedOperation
from aiocomms.ops import buffers
from aiocomms.ops.reductions import ReduceOp
from aiocomms.ops.writing import writing


def check(tensor: Tensor, op: ReduceOp, gpu: torch.device | None) -> None:
    """Check that a sparse all-reduce is supported.

    :param gpu: the GPU of the tensor; None if the tensor is on the CPU.
    :raises UnsupportedOperation: the layout is not COO, the op is not SUM, or the tensor is on a GPU.
    """
    if gpu is not None:
        raise UnsupportedOperation(f"all_reduce of a sparse tensor has it on {gpu}, wanted it on the CPU, or dense")
    if tensor.layout is not torch.sparse_coo or op != ReduceOp.SUM:
        raise UnsupportedOperation(
            f"all_reduce of a sparse tensor has layout {tensor.layout} and op {op!r}, wanted torch.sparse_coo and SUM"
        )


def all_reduce(comm: blocking.Communicator, tensor: Tensor, number: int, timeout: OpTimeout) -> None:
    """Replace a tensor by the sum of all ranks' tensors. Blocks.

    The number of stored elements may differ between ranks.

    :param tensor: a tensor with the same shape, dtype and number of sparse dimensions on every rank.
    :param number: the number of this call, the same on all ranks. The number keeps the steps of concurrent calls apart.
    :param timeout: the deadline of each step.
    """
    lane = comm.lane(f"aiocomms.integrations.torch_backend: sparse all_reduce {number}")
    if timeout is not COMM_TIMEOUT:
        lane.set_timeout(timeout)
    given = tensor.detach().coalesce()
    counts = buffers.zeros(comm.size, dtype=torch.int64, device="cpu")
    lane.all_gather_single(counts, buffers.int64([given._nnz()], device="cpu")).wait()
    room = given.shape[: given.sparse_dim()].numel()
    if not 0 <= int(counts.min()) <= int(counts.max()) <= room:
        raise MismatchError(f"ranks have {counts.tolist()} elements, where a tensor of this shape has room for {room}")
    indices = _gathered(lane, given.indices().t(), counts.tolist())
    values = _gathered(lane, given.values(), counts.tolist())
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
