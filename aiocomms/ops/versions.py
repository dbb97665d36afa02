"""Autograd's versions of tensors. This module raises them for writes that torch itself does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from aiocomms.ops._base import Op
from aiocomms.ops._reducing import Broadcast, InPlace


def _one_by_one(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch._C._increment_version(tensor)


def _increment() -> Callable[[Sequence[Tensor]], None]:
    """Return torch's function that raises versions. It takes several tensors at once from some release after 2.4 on."""
    try:
        torch._C._increment_version([])
    except TypeError:
        return _one_by_one
    return cast("Callable[[Sequence[Tensor]], None]", torch._C._increment_version)


_increment_versions = _increment()


def note_writes(op: Op, rank: int) -> None:
    """Increase the autograd version of each tensor that an op of this rank writes. The op may write until it ends.

    Autograd compares the versions, and then refuses a gradient that needs an old value. All views of one tensor share a
    version. Only torch's own operations increase the version by themselves.
    """
    if isinstance(op, InPlace):  # No list of pairs is built for these frequent ops.
        written = [] if type(op) is Broadcast and op.root == rank else [op.tensor]
    else:
        written = [tensor for _, tensor in op.writes()]
    if written:
        _increment_versions(written)
