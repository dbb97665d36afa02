"""The functions that make the library's buffers.

A mode of torch that a program has switched on does not affect a buffer.

Each buffer is on the given device, not on torch's default device. Each buffer is an ordinary tensor, even within
inference mode or a dispatch mode such as ``FakeTensorMode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aiocomms.ops.modes import unaffected

Device = torch.device | str


@unaffected
def empty(*shape: Any, dtype: torch.dtype, device: Device) -> Tensor:
    """Return an uninitialized tensor.

    :param shape: integers, or one sequence of integers.
    """
    return torch.empty(*shape, dtype=dtype, device=device)


@unaffected
def like(tensor: Tensor) -> Tensor:
    """Return an uninitialized, contiguous tensor with the shape, dtype and device of another tensor."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@unaffected
def zeros(*shape: Any, dtype: torch.dtype, device: Device) -> Tensor:
    """Return a new tensor of zeros. The parameters are those of :func:`empty`."""
    return torch.zeros(*shape, dtype=dtype, device=device)


@unaffected
def full(shape: Sequence[int], value: float, *, dtype: torch.dtype, device: Device) -> Tensor:
    """Return a tensor whose elements are all ``value``."""
    return torch.full(shape, value, dtype=dtype, device=device)


@unaffected
def int64(values: Sequence[int], device: Device) -> Tensor:
    """Return a one-dimensional int64 tensor with the elements ``values``."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@unaffected
def arange(count: int, device: Device) -> Tensor:
    """Return a one-dimensional int64 tensor of the numbers from 0 to ``count - 1``."""
    return torch.arange(count, dtype=torch.int64, device=device)
