"""The data of checks: random tensors that each rank can compute for any rank, tensors with guards, and reductions."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiocomms import ReduceOp
from aiocomms.arguments import describe
from aiocomms.ops.checks import DTYPES

ALL_DTYPES = tuple(sorted(DTYPES, key=str))
CARRIED_ONLY = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""The dtypes that reductions refuse.

The checks compare this list with the library's own list.
"""
REDUCED_DTYPES = tuple(dtype for dtype in ALL_DTYPES if dtype not in CARRIED_ONLY)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""The dtypes for which torch itself lacks most operators."""
HALVES = (torch.float16, torch.bfloat16)

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2, 0, 3), (7,), (8, 8), (257,), (1031,))
"""Shapes of 0 to 3 dimensions.

The sizes of the dimensions are 0, 1, primes, powers of two, and sizes that are not divisible by the number of ranks.
"""

LARGE = (40_009,)
"""A shape with a prime number of elements. No transport sends so many elements in one piece."""

_POISON = 0xA5
_GUARD = 3
"""The number of guard elements on each side of a tensor.

The number is odd, so that the tensor's address is aligned to the element size, and to no larger power of two.
"""


class WrongData(AssertionError):  # noqa: N818 - the name explains the failure in every trace
    """The error of an operation that has delivered wrong data, or has written to memory that it must not write."""


# Contents and results are computed once for all ranks of a process.


def forget() -> None:
    """Drop the cached contents and results of a check that has ended."""
    for function in (bits, numbers, _reduced):
        function.cache_clear()


@functools.lru_cache(maxsize=None, typed=True)
def bits(seed: int, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
    """Return a tensor of random bits, for operations that only move data.

    Floating-point tensors contain NaNs. Do not change the returned tensor.

    :param key: the values that, with the seed, decide the content. These values are the same on every rank.
    """
    pool = _bools(seed) if dtype == torch.bool else _bits(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    if 2 * nbytes > pool.numel():
        pool = pool.repeat(2 * nbytes // pool.numel() + 1)
    begin = _place(key) % (pool.numel() - nbytes) & -16
    return pool[begin : begin + nbytes].view(dtype).view(shape)


@functools.lru_cache(maxsize=None, typed=True)
def numbers(seed: int, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
    """Return random numbers: integers of the dtype's whole range, or floats with magnitudes from 1/2 to 2 and any sign.

    :param key: the values that, with the seed, decide the content. These values are the same on every rank.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return bits(seed, dtype, shape, *key)
    pool, count = _numbers(seed, dtype), math.prod(shape)
    begin = _place(key) % (pool.numel() - count)
    return pool[begin : begin + count].view(shape)


# Each content is a piece of a pool, as drawing new numbers each time would take most of the suite's time.
_pools: list[tuple[Tensor, int]] = []
"""All pools, each with the checksum of its content. The random tensors of checks are pieces of these pools."""


def verify() -> None:
    """Check that no code has written to the pools of random data, because other checks also use these pools."""
    if any(checksum(pool) != was for pool, was in _pools):
        raise WrongData("random data was changed that an operation, or a check, was given to read only")


def _pool(content: Tensor) -> Tensor:
    _pools.append((content, checksum(content)))
    return content


@functools.cache
def _bits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return _pool(torch.randint(-(2**63), 2**63 - 1, (2**17,), generator=generator).view(torch.uint8))


@functools.cache
def _bools(seed: int) -> Tensor:
    return _pool(_bits(seed) & 1)


@functools.cache
def _numbers(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size, angle = torch.rand((2, 2**17), generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return _pool(torch.polar(size * 1.5 + 0.5, angle * math.tau).to(dtype))
    reals: Tensor = (size * 1.5 + 0.5) * (angle - 0.5).sign()
    return _pool(reals.to(dtype))


def _place(key: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


@functools.cache
def _poison(nbytes: int, device: torch.device) -> Tensor:
    return torch.full((nbytes,), _POISON, dtype=torch.uint8, device=device)


class Slot:
    """A tensor inside a larger allocation. No code may write the other bytes of the allocation.

    The tensor holds ``content``. If ``content`` is None, the tensor holds a pattern that no result equals.
    """

    def __init__(self, content: Tensor | None, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> None:
        guard = _GUARD * dtype.itemsize
        nbytes = math.prod(shape) * dtype.itemsize
        self._memory = torch.full((nbytes + 2 * guard,), _POISON, dtype=torch.uint8, device=device)
        self._content = content
        self._guards = self._memory[:guard], self._memory[guard + nbytes :]
        self._poison = _poison(guard, device)
        self.tensor: Tensor = self._memory[guard : guard + nbytes].view(dtype).view(tuple(shape))
        if content is not None:
            self.tensor.copy_(content)

    def expect(self, want: Tensor, allowance: Tensor | None = None) -> None:
        """Check the tensor's content, bit by bit or within a tolerance for each element. Also check the guards."""
        near(self.tensor, want, allowance)
        for guard in self._guards:
            if not torch.equal(guard, self._poison):
                raise WrongData(f"memory around {describe(self.tensor)} was written")

    def expect_untouched(self) -> None:
        """Check that no code has written to the tensor or to the guards around it."""
        poison = torch.full((self.tensor.nbytes,), _POISON, dtype=torch.uint8)
        self.expect(poison.view(self.tensor.dtype).view(self.tensor.shape) if self._content is None else self._content)


def same_bits(got: Tensor, want: Tensor) -> None:
    """Check that two tensors, on any devices, agree in dtype, shape and every bit."""
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(_raw(got), _raw(want)):
        raise WrongData(f"{describe(got)}: {_difference(got, want)}")


def near(got: Tensor, want: Tensor, allowance: Tensor | None) -> None:
    """Compare a tensor with the expected tensor, bit by bit or within a tolerance for each element."""
    if allowance is None:
        same_bits(got, want)
        return
    got, want = got.detach().cpu(), want.detach().cpu()
    error = (got.to(_wide(got.dtype)) - want).abs()
    if got.shape != want.shape or not bool((error <= allowance).all()):  # A NaN fails the comparison.
        raise WrongData(f"{_difference(got, want)}; error {_brief(error)}, allowed {_brief(allowance)}")


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's content."""
    raw: Any = _raw(tensor.cpu()).numpy()
    return zlib.crc32(raw)


class ExpectedResult(NamedTuple):
    """A result, and the tolerance: the largest allowed difference of each element.

    If the tolerance is None, no difference is allowed.
    """

    value: Tensor
    allowance: Tensor | None


def reduced(op: ReduceOp, tensors: Sequence[Tensor], rounds_each_step: bool = False) -> ExpectedResult:
    """Return the result of a reduction of one tensor per rank, as torch computes it.

    The tolerance allows sums and products in any order, with float16 and bfloat16 accumulated in float32.

    :param rounds_each_step: True if float16 and bfloat16 may be rounded after each rank's contribution.
    """
    return _reduced(op, tuple(tensors), rounds_each_step)


@functools.lru_cache(maxsize=None, typed=True)
def _reduced(op: ReduceOp, tensors: tuple[Tensor, ...], rounds_each_step: bool) -> ExpectedResult:
    stack = torch.stack(tensors)
    dtype, n = stack.dtype, len(tensors)
    if op.kind in ("min", "max") or not (dtype.is_floating_point or dtype.is_complex):
        return ExpectedResult(_exactly(op, stack), None)
    wide = stack.to(_wide(dtype))
    factor = {"avg": 1 / n, "premul_sum": op.factor}.get(op.kind, 1.0)
    value = wide.prod(0) if op.kind == "product" else wide.sum(0) * factor
    magnitude = value.abs() if op.kind == "product" else wide.abs().sum(0) * abs(factor)
    info = torch.finfo(dtype)
    accumulates = torch.finfo(torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32).eps
    allowance = 2 * (n + 1) * accumulates * magnitude
    if n > 1 or factor != 1:
        rounded = n * (magnitude if op.kind != "product" else value.abs()) if rounds_each_step else value.abs()
        allowance = allowance + info.eps * rounded + info.smallest_normal * info.eps
    return ExpectedResult(value, allowance)


def of_none(op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the result of a reduction of zero tensors: the operator's neutral element, or NaN for ``avg``."""
    least, most = -math.inf, math.inf
    if not (dtype.is_floating_point or dtype.is_complex):
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    every_bit = -1 if least else most
    value = {"min": most, "max": least, "band": every_bit, "product": 1, "avg": math.nan}.get(op.kind, 0)
    return torch.full(shape, value, dtype=dtype)


_EXACT = {
    "min": lambda stack: functools.reduce(torch.minimum, stack),
    "max": lambda stack: functools.reduce(torch.maximum, stack),
    "band": lambda stack: functools.reduce(operator.and_, stack),
    "bor": lambda stack: functools.reduce(operator.or_, stack),
    "bxor": lambda stack: functools.reduce(operator.xor, stack),
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


_EXACT_INTS: dict[str, Callable[[int, int], int]] = {
    "min": min, "max": max, "band": operator.and_, "bor": operator.or_, "bxor": operator.xor, "sum": operator.add,
    "product": operator.mul,
}  # fmt: skip


def _exactly(op: ReduceOp, stack: Tensor) -> Tensor:
    if stack.dtype in UNSIGNED:
        columns = zip(*(row.flatten().tolist() for row in stack), strict=True)
        values = [functools.reduce(_EXACT_INTS[op.kind], column) % 256**stack.itemsize for column in columns]
        return torch.tensor(values, dtype=stack.dtype).view(stack.shape[1:])
    value: Tensor = _EXACT[op.kind](stack)
    return value


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _brief(tensor: Tensor) -> str:
    text = str(tensor.detach().cpu().flatten()[:8].tolist())
    return text if tensor.numel() <= 8 else f"{text[:-1]}, ...]"


def _difference(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"got the shape {list(got.shape)}, wanted {list(want.shape)}"
    given, wanted = got.flatten(), want.flatten().to(got.dtype)
    size = got.itemsize
    wrong = (_raw(given) != _raw(wanted)).view(-1, size).any(1).nonzero()
    first = int(wrong[0]) if len(wrong) else 0
    return f"got {_brief(given[first:])}, wanted {_brief(wanted[first:])}, from element {first} on"
