"""The collectives of a ``torch.distributed`` process group. Each call starts a collective, and returns a work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from aiocomms.ops.reductions import ReduceOp

_OPS: Final[dict[str, Any]] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "avg": dist.ReduceOp.AVG,
}
# gloo computes these reductions correctly. gloo loses NaN in MIN and MAX. It adds float16 in float16, and its sums of
# bool are wrong. It refuses int16, and most operators for complex numbers.
_INTEGER: Final = frozenset({"sum", "product", "min", "max", "band", "bor", "bxor"})
_RIGHT: Final = {
    torch.uint8: _INTEGER,
    torch.int8: _INTEGER,
    torch.int32: _INTEGER,
    torch.int64: _INTEGER,
    torch.float32: frozenset({"sum", "product", "avg"}),
    torch.float64: frozenset({"sum", "product", "avg"}),
    torch.complex64: frozenset({"sum", "avg"}),
    torch.complex128: frozenset({"sum", "avg"}),
}


class C10dGroup:
    """The collectives of a process group. Each call starts a collective, and returns a ``torch.distributed.Work``.

    Collectives without a reduction move tensors as bytes.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def release(self) -> None:
        """Release the process group, because any reference to the group keeps the group's sockets open."""
        self._group = None

    def reduces(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Return whether the group computes the same result as torch for an operator and a dtype."""
        return op.kind in _RIGHT.get(dtype, ())

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Any:
        """Reduce a tensor in place on all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op.kind]
        return self._group.allreduce([tensor], options)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Any:
        """Reduce a tensor in place on the root. On other ranks the contents of ``tensor`` are undefined afterwards."""
        options = dist.ReduceOptions()
        options.reduceOp = _OPS[op.kind]
        options.rootRank = root
        return self._group.reduce([tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Copy the root's bytes to all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([tensor], options)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        """Gather the same number of bytes from each rank into one tensor."""
        return self._group._allgather_base(output, tensor)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Any:
        """Gather the same number of bytes from each rank into one tensor per rank."""
        return self._group.allgather([list(outputs)], [tensor])

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Any:
        """Gather the same number of bytes from each rank on the root."""
        options = dist.GatherOptions()
        options.rootRank = root
        return self._group.gather([list(outputs)] if self.rank == root else [], [tensor], options)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Any:
        """Scatter the same number of bytes to each rank from the root."""
        options = dist.ScatterOptions()
        options.rootRank = root
        return self._group.scatter([output], [list(inputs)] if self.rank == root else [], options)

    def exchange(self, output: Tensor, tensor: Tensor, gets: Sequence[int], gives: Sequence[int]) -> Any:
        """Send ``gives[rank]`` bytes to each rank, and receive ``gets[rank]`` bytes from each rank."""
        return self._group.alltoall_base(output, tensor, list(gets), list(gives))
