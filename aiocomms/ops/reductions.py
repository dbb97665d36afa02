"""Reduction operators, the dtypes for which each operator is defined, and the functions that combine tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from aiocomms.arguments import as_int, short, wrong_type
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops import buffers
from aiocomms.ops.writing import write, writing

# The float8 types are missing here, because their sums have no meaning without a scale. Transports only carry them.
_FLOAT = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}
# Torch lacks most operators of unsigned integers. It has all operators of signed integers, which have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGER = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}
_BOOL = {torch.bool}

# The sum of bools is not a bool. The mean of integers is in general not an integer. Complex numbers have no order.
SUPPORTED = {
    "sum": _INTEGER | _FLOAT | _COMPLEX,
    "product": _INTEGER | _FLOAT | _COMPLEX,
    "min": _BOOL | _INTEGER | _FLOAT,
    "max": _BOOL | _INTEGER | _FLOAT,
    "band": _BOOL | _INTEGER,
    "bor": _BOOL | _INTEGER,
    "bxor": _BOOL | _INTEGER,
    "avg": _FLOAT | _COMPLEX,
    "premul_sum": _FLOAT | _COMPLEX,
}
"""The dtypes for which each operator is defined, by the operator's kind."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "avg": torch.add,
    "premul_sum": torch.add,
}


class ReduceOp(msgspec.Struct, frozen=True):
    """A reduction operator, which combines the values of several ranks into one.

    The operators are ``ReduceOp.SUM`` and the others in the table. ``ReduceOp.PREMUL_SUM(factor)`` has an argument.

    ======================  ============================================
    operator                dtypes
    ======================  ============================================
    SUM, PRODUCT            integers, floating point, complex
    MIN, MAX                bool, integers, floating point
    BAND, BOR, BXOR         bool, integers
    AVG, PREMUL_SUM         floating point, complex
    ======================  ============================================

    Values of float16 and bfloat16 are accumulated in float32. Integers wrap around.
    """

    kind: str
    factor: float = 1.0
    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]

    def __post_init__(self) -> None:
        if self.kind not in SUPPORTED:
            raise ArgumentError(f"kind is {short(self.kind)}, wanted one of {', '.join(map(repr, SUPPORTED))}")

    @staticmethod
    def PREMUL_SUM(factor: float) -> ReduceOp:  # noqa: N802 - the field's name for it
        """Return the operator that multiplies each value by ``factor`` and then sums the products.

        :raises ArgumentTypeError: ``factor`` is not a number.
        :raises ArgumentError: ``factor`` is too large for a float.
        """
        factor = as_int(factor)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise ArgumentTypeError(f"factor is {factor!r} ({type(factor).__name__}), wanted a number")
        try:
            return ReduceOp("premul_sum", float(factor))
        except OverflowError:
            raise ArgumentError(f"factor is {short(factor)}, wanted a number that a float can hold") from None

    @classmethod
    def parse(cls, value: object) -> ReduceOp:
        """Return the operator with the name ``value``: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``.

        If ``value`` is already an operator, return ``value`` unchanged.

        :raises ArgumentTypeError: the value is neither an operator nor a str.
        :raises ArgumentError: no operator has this name.
        """
        if type(value) is ReduceOp:
            return value
        wanted = f"an aiocomms.ReduceOp or one of {', '.join(map(repr, _NAMES))}"
        if not isinstance(value, str):
            raise wrong_type("op", value, wanted)
        if value not in _NAMES:
            raise ArgumentError(f"op is {short(value)}, wanted {wanted}")
        return _NAMES[value]

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether the operator is defined for ``dtype``."""
        return dtype in SUPPORTED[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}({self.factor!r})" if self.kind == "premul_sum" else self.kind


ReduceOp.SUM = ReduceOp("sum")
ReduceOp.PRODUCT = ReduceOp("product")
ReduceOp.MIN = ReduceOp("min")
ReduceOp.MAX = ReduceOp("max")
ReduceOp.BAND = ReduceOp("band")
ReduceOp.BOR = ReduceOp("bor")
ReduceOp.BXOR = ReduceOp("bxor")
ReduceOp.AVG = ReduceOp("avg")

_NAMES = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}


def lift(op: ReduceOp, tensor: Tensor) -> Tensor:
    """Copy one rank's contribution, convert the copy to the accumulator's dtype, and apply the factor of PREMUL_SUM."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    copy = tensor.detach().to(torch.float32 if half else tensor.dtype, copy=True)
    return copy.mul_(op.factor) if op.kind == "premul_sum" else copy


def combine(op: ReduceOp, accumulator: Tensor, tensor: Tensor) -> None:
    """Compute ``accumulator = accumulator op tensor``.

    The accumulator has the dtype of the result of :func:`lift`. The factor of PREMUL_SUM is already applied to the
    accumulator and to ``tensor``.
    """
    with writing(accumulator):
        if (signed := _SIGNED.get(accumulator.dtype)) is None:
            _COMBINE[op.kind](accumulator, tensor, out=accumulator)
        else:
            _combine_signed(op, accumulator.view(signed), tensor.view(signed))


def _combine_signed(op: ReduceOp, accumulator: Tensor, tensor: Tensor) -> None:
    """Combine unsigned integers by operations on signed integers.

    If the highest bit of two unsigned integers is flipped, a comparison as signed integers gives the right order.
    """
    ordered = op.kind in ("min", "max")
    highest = torch.iinfo(accumulator.dtype).min
    if ordered:
        accumulator.bitwise_xor_(highest)
        tensor = tensor ^ highest
    _COMBINE[op.kind](accumulator, tensor, out=accumulator)
    if ordered:
        accumulator.bitwise_xor_(highest)


def lower(op: ReduceOp, accumulator: Tensor, size: int, out: Tensor) -> None:
    """Write the result of a reduction of ``size`` ranks to ``out``. For AVG, first divide the sum by ``size``."""
    if op.kind == "avg":
        with writing(accumulator):
            accumulator.div_(size)
    write(out, accumulator)


def _of_none(op: ReduceOp, dtype: torch.dtype) -> float:
    least, most = -math.inf, math.inf
    if dtype in _INTEGER | _BOOL:
        least, most = (0, 1) if dtype in _BOOL else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    every_bit = most if least == 0 else -1
    return {"product": 1, "min": most, "max": least, "band": every_bit, "avg": math.nan}.get(op.kind, 0)


def reduce(op: ReduceOp, tensors: Sequence[Tensor], out: Tensor) -> None:
    """Reduce one tensor per rank, in rank order, into ``out``, which may be one of these tensors.

    If there are no tensors, the result is the operator's neutral value, as in torch, or NaN for AVG.
    """
    if not tensors:
        write(out, buffers.full(out.shape, _of_none(op, out.dtype), dtype=out.dtype, device=out.device))
        return
    if len(tensors) == 1 and op.kind != "premul_sum":
        if out.data_ptr() != tensors[0].data_ptr():
            write(out, tensors[0])
        return
    accumulator = lift(op, tensors[0])
    for tensor in tensors[1:]:
        scaled = lift(op, tensor) if op.kind == "premul_sum" else tensor.detach()
        combine(op, accumulator, scaled.view(accumulator.shape))
    lower(op, accumulator, len(tensors), out)
