"""The plans of ops. A plan lists NCCL and CUDA calls as tuples of numbers. A launcher makes these calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor

COPY, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV = range(8)
"""The numbers of the functions. The native launcher uses the same numbers. :data:`COPY` is ``cudaMemcpyAsync``."""
NONE: Final = 0
"""The value of a field that a call does not use."""

Call = tuple[int, int, int, int, int, int, int]
"""One call: the function's number, source, target, count, dtype, operator, and root or other rank.

Source and target are addresses. The count of a copy is in bytes. Every other count is in elements of the dtype.
"""
Kernel = Callable[[], object]
"""A function that enqueues torch's kernels on the current stream."""


class CallPlan(NamedTuple):
    """The work that is enqueued for an op, in order: kernels, copies, a group of NCCL calls, and more kernels."""

    calls: list[Call]
    before: Sequence[Kernel] = ()
    after: Sequence[Kernel] = ()
    kept: Sequence[Tensor] = ()
    """The temporary memory that the plan uses. The launcher keeps this memory until the op is done."""
