"""An implementation of torch's functional all-gather for process groups that are written in Python."""

# mypy: disable-error-code="no-untyped-call"
# The methods of torch's library of kernels have no types.

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from aiocomms.integrations.torch_backend.group import Group

_LIBRARY: Final = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather_into_tensor_out(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    """Start an all-gather. Code that torch's inductor has generated calls this function, and waits for ``out``."""
    group = _resolve_process_group(group_name)
    if isinstance(group, Group):
        torch._C._distributed_c10d._register_work(out, group.all_gather_single(out, input))
        return out
    operator = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    whole: Tensor = operator._op_dk(
        torch._C.DispatchKey.CompositeExplicitAutograd, input, group_size, group_name, out=out
    )
    return whole


def register() -> None:
    """Replace torch's implementation of the functional all-gather, which supports only groups with a C++ backend."""
    if hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)
