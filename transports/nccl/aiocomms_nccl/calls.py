"""Plans as data: each op as a list of calls of NCCL and CUDA, in numbers. Launchers carry plans out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor

COPY, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV = range(8)
"""The numbers of the functions; the native launcher has the same. :data:`COPY` is ``cudaMemcpyAsync``."""
NONE: Final = 0
"""The value in place of a number that a call does not have."""

Call = tuple[int, int, int, int, int, int, int]
"""One call: the function's number, source, target, count, dtype, operator, and root or other rank.

Source and target are addresses. The count of a copy is one of bytes, any other one of elements of the dtype.
"""
Kernel = Callable[[], object]
"""A function that enqueues torch's kernels on the current stream."""


class CallPlan(NamedTuple):
    """All that is enqueued for an op, in order: kernels, copies, calls of NCCL in one group, and kernels again."""

    calls: list[Call]
    before: Sequence[Kernel] = ()
    after: Sequence[Kernel] = ()
    kept: Sequence[Tensor] = ()
    """The temporary memory that the plan uses. It is kept until the op is done."""
