"""The reductions that NCCL can do, and the NCCL dtypes and operators that represent torch's dtypes and operators.

Ops that only move data need no dtype: NCCL moves the data as bytes. NCCL does a reduction itself if NCCL supports the
dtype, or supports another dtype with the same arithmetic. NCCL adds a complex number as two real numbers. For NCCL, a
bool is a byte with the value 0 or 1. For bools, NCCL's minimum computes "and", and NCCL's maximum computes "or". NCCL's
sum computes "xor": the result is true if the sum is odd. The core of aiocomms implements all other reductions with
messages.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch

from aiocomms.ops.reductions import ReduceOp
from aiocomms_nccl import nccl

_NATIVE: Final = {
    torch.int8: nccl.INT8,
    torch.uint8: nccl.UINT8,
    torch.int32: nccl.INT32,
    torch.uint32: nccl.UINT32,
    torch.int64: nccl.INT64,
    torch.uint64: nccl.UINT64,
    torch.float16: nccl.FLOAT16,
    torch.bfloat16: nccl.BFLOAT16,
    torch.float32: nccl.FLOAT32,
    torch.float64: nccl.FLOAT64,
}
_PARTS: Final = {torch.complex64: nccl.FLOAT32, torch.complex128: nccl.FLOAT64}
_OPS: Final = {
    "sum": nccl.SUM,
    "product": nccl.PROD,
    "min": nccl.MIN,
    "max": nccl.MAX,
    "avg": nccl.AVG,
    "premul_sum": nccl.SUM,
}
_BOOL: Final = {"min": nccl.MIN, "max": nccl.MAX, "band": nccl.MIN, "bor": nccl.MAX, "bxor": nccl.SUM}
_ADDING: Final = frozenset({"sum", "avg", "premul_sum"})

HALVES: Final = frozenset({torch.float16, torch.bfloat16})
"""The dtypes in which NCCL rounds the intermediate result each time NCCL includes the contribution of a rank."""

REDUCTIONS: Final = {
    **{dtype: frozenset(_OPS) for dtype in _NATIVE},
    **dict.fromkeys(_PARTS, _ADDING),
    torch.bool: frozenset(_BOOL),
}
"""See :attr:`aiocomms.transport.Capabilities.reductions`."""


class Reduction(NamedTuple):
    """The way in which NCCL does one reduction on one torch dtype."""

    dtype: int
    parts: int
    """The number of NCCL elements in one torch element."""
    op: int
    scaled: bool
    """True if each rank multiplies its contribution by a factor before the reduction, as in ``premul_sum``."""
    odd: bool
    """True if the reduction's result is only the lowest bit of the value that NCCL computes."""


def reduction(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """Return the way in which NCCL does a reduction that is in :data:`REDUCTIONS`."""
    return _reduction(op.kind, dtype)


@functools.cache
def _reduction(kind: str, dtype: torch.dtype) -> Reduction:
    if dtype == torch.bool:
        return Reduction(nccl.UINT8, 1, _BOOL[kind], False, kind == "bxor")
    parts = 2 if dtype in _PARTS else 1
    code = _PARTS[dtype] if dtype in _PARTS else _NATIVE[dtype]
    return Reduction(code, parts, _OPS[kind], kind == "premul_sum", False)
