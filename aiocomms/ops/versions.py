"""Autograd's version counters of tensors. This module increments the counters for writes that torch does not notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from aiocomms.ops._base import Op
from aiocomms.ops._batch import CollectiveBatch
from aiocomms.ops._reducing import Broadcast, InPlace


def _one_by_one(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch._C._increment_version(tensor)


def _increment() -> Callable[[Sequence[Tensor]], None]:
    """Return torch's function that increments versions.

    In new releases of torch, the function accepts several tensors.
    """
    try:
        torch._C._increment_version([])
    except TypeError:
        return _one_by_one
    return cast("Callable[[Sequence[Tensor]], None]", torch._C._increment_version)


_increment_versions = _increment()


def note_writes(op: Op, rank: int) -> None:
    """Increment, at the start of an op, the autograd version of each tensor that the op writes on this rank.

    Autograd compares versions, and refuses to compute a gradient from an overwritten value. All views of one tensor
    share a version. torch increments the version for its own operations. For all other writes, this function must
    increment the version.
    """
    if isinstance(op, InPlace):  # No list of pairs is built for these frequent ops.
        written = [] if type(op) is Broadcast and op.root == rank else [op.tensor]
    elif isinstance(op, CollectiveBatch):
        written = []
        for part in op.parts:
            note_writes(part, rank)
    else:
        written = [tensor for _, tensor in op.writes()]
    if written:
        _increment_versions(written)
