"""The code that passes a group's collectives through torch's dispatcher, for dispatch modes and tensor subclasses.

If a process group is written in C++, torch calls the group through torch's dispatcher, with the operators ``c10d::*``.
If a process group is written in Python, torch calls the group's methods directly, without the dispatcher. If a dispatch
mode or a tensor subclass handles operators, this module passes the collective through the dispatcher. The dispatcher
finally calls a method of the group with plain tensors.
"""

# mypy: disable-error-code="no-untyped-call"
# The methods of torch's modes have no types.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode as Mode

from aiocomms.errors import UnsupportedOperation
from aiocomms.integrations.torch_backend.forms import FORMS, How, deadline, reduction
from aiocomms.integrations.torch_backend.works import GroupWork
from aiocomms.ops.modes import dispatch_modes
from aiocomms.ops.reductions import ReduceOp

_METHODS: Final = {
    "c10d::allreduce_": "allreduce",
    "c10d::allreduce_coalesced_": "allreduce_coalesced",
    "c10d::reduce_": "reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::allgather_": "allgather",
    "c10d::allgather_coalesced_": "allgather_coalesced",
    "c10d::_allgather_base_": "all_gather_single",
    "c10d::allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter_single",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "c10d::alltoall_": "alltoall",
    "c10d::alltoall_base_": "all_to_all_single",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::barrier": "barrier",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv_anysource",
}
"""The name of a group's method for each ``c10d`` operator."""
_SAID: Final = frozenset(
    ["process_group", "reduce_op", "root_rank", "root_tensor", "sparse_indices", "device_ids", "async_op", "timeout"]
)
"""The names of the operator arguments that :class:`How` contains, or that this package's groups ignore."""


def is_seen(arguments: list[Any]) -> bool:
    """Return whether a call must go through the dispatcher, because of a dispatch mode or a tensor subclass."""
    return dispatch_modes() > 0 or _decides(arguments)


def _decides(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return isinstance(value, list) and any(map(_decides, value))


@contextlib.contextmanager
def seen() -> Iterator[list[GroupWork]]:
    """Within the ``with`` block, make torch's ``c10d`` operators call the methods of this package's groups.

    :returns: a list. Each call of a group's method within the block adds its work to the list.
    """
    last = _Last()
    with _replaced(dispatch_modes(), lambda others: [last, *others]):
        yield last.works


@contextlib.contextmanager
def _replaced(count: int, by: Callable[[list[Mode]], list[Mode]]) -> Iterator[list[Mode]]:
    """Replace the topmost dispatch modes of this thread within the ``with`` block.

    Each list of modes begins with the lowest mode.

    :param count: the number of modes to replace.
    :param by: a function that gets the list of the replaced modes, and returns the list of the new modes.
    """
    before = [modes._pop_mode() for _ in range(count)][::-1]
    within = by(before)
    try:
        for mode in within:
            modes._push_mode(mode)
        yield before
    finally:
        for _ in within:
            modes._pop_mode()
        for mode in before:
            modes._push_mode(mode)


class _Last(Mode):
    """The dispatch mode below all other modes. This mode gets each call that no other mode handles."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[GroupWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`torch.utils._python_dispatch.TorchDispatchMode`."""
        named = kwargs or {}
        method = _METHODS.get(func._schema.name)
        if method is None:
            return func(*args, **named)
        # torch keeps its own modes, such as FakeTensorMode, below those of its users. Such a mode gets the call first.
        if dispatch_modes():
            with _replaced(1, lambda _: [self]) as (mode,):
                return mode.__torch_dispatch__(func, types, args, named)
        if types:
            return NotImplemented  # The tensor subclasses handle the call themselves.
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | named
        group = dist.ProcessGroup.unbox(given["process_group"])
        begin = getattr(getattr(type(group), method, None), "begin", None)
        if begin is None:  # The group has another backend.
            return func(*args, **named)
        work = begin(group, *_one_form(method, given))
        self.works.append(work)
        return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())


def _one_form(method: str, given: Mapping[str, Any]) -> list[Any]:
    """Convert an operator's arguments to a list in the same form as the lists that ``forms.one_form`` returns.

    :param given: a mapping from the name of each argument to its value.
    """
    takers = [take for name, take in FORMS[method][0].items() if name != "opts"]
    values = [value for name, value in given.items() if name not in _SAID]
    how = How(
        _reduction(given["reduce_op"].op()) if "reduce_op" in given else ReduceOp.SUM,
        given.get("root_rank", 0),
        deadline(timedelta(milliseconds=given.get("timeout", -1))),
    )
    return [*(take(value) for take, value in zip(takers, values, strict=False)), how]


def _reduction(kind: int) -> ReduceOp:
    found = dist.ReduceOp.RedOpType(kind)
    if found == dist.ReduceOp.PREMUL_SUM:
        raise UnsupportedOperation("torch's dispatcher does not tell the factor of a PREMUL_SUM; give plain tensors")
    return reduction(found)
