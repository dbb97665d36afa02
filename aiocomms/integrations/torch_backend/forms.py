"""The conversion of the arguments that torch passes to the methods of a process group.

Torch passes the arguments of most methods in several forms: a tensor or a list of one tensor, an options object or
separate options. This module converts all forms of a method's arguments to one form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, short
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops.reductions import ReduceOp

UNSET: Final = timedelta(milliseconds=-1)
"""The value that torch uses for an unset timeout."""


class How(NamedTuple):
    """The settings of a call, which torch passes as an options object or as separate arguments."""

    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    timeout: OpTimeout = COMM_TIMEOUT
    device: torch.device | None = None
    """The device that the caller passes to ``barrier``; None for other operations."""


class _OtherForm(Exception):  # noqa: N818 - The exception is no error.
    """The exception that a converter raises if an argument does not have the form that the converter expects."""


def _is(wanted: bool) -> None:
    if not wanted:
        raise _OtherForm


def tensor(value: Any) -> Tensor:
    """Return the value if it is a tensor, else raise :class:`_OtherForm`."""
    _is(isinstance(value, Tensor))
    found: Tensor = value
    return found


def tensors(value: Any) -> list[Tensor]:
    """Return the value if it is a list of tensors, else raise :class:`_OtherForm`."""
    _is(isinstance(value, Sequence))
    return [tensor(each) for each in value]


def lists(value: Any) -> list[list[Tensor]]:
    """Return the value if it is a list of lists of tensors, else raise :class:`_OtherForm`."""
    _is(isinstance(value, Sequence))
    return [tensors(each) for each in value]


def tensor_in_list(value: Any) -> Tensor:
    """Return the tensor of a one-element list.

    In torch, a longer list means that one rank has tensors on several devices.

    :raises ArgumentError: the list has several tensors. torch's own backends treat such a list in different ways; for
        example, gloo adds up the tensors.
    """
    if type(value) is list and len(value) == 1 and isinstance(value[0], Tensor):
        return value[0]
    found = tensors(value)
    if len(found) != 1:
        raise ArgumentError(f"the list has {len(found)} tensors, wanted one; the forms for several are `..._coalesced`")
    return found[0]


def list_in_list(value: Any) -> list[Tensor]:
    """Return the only list of tensors in a list of lists.

    If the outer list is empty, return an empty list. Ranks other than the root pass an empty list.

    :raises ArgumentError: the outer list contains several lists.
    """
    found = lists(value)
    if len(found) > 1:
        raise ArgumentError(f"the list has {len(found)} lists of tensors, wanted one")
    return found[0] if found else []


def whole(value: Any) -> int:
    """Return the value if it is an integer, else raise :class:`_OtherForm`."""
    try:
        return operator.index(value)
    except TypeError:
        raise _OtherForm from None


def wholes(value: Any) -> list[int]:
    """Return the value if it is a list of integers, else raise :class:`_OtherForm`."""
    _is(isinstance(value, Sequence))
    return [whole(each) for each in value]


_OPERATORS: Final = {
    kind: getattr(ReduceOp, name) for name, kind in dist.ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"
}


def reduction(value: Any) -> ReduceOp:
    """Convert a reduction operator of torch to an operator of aiocomms."""
    found: ReduceOp | None = _OPERATORS.get(getattr(value, "op", value))
    if found is None:
        _is(hasattr(value, "factor"))  # The bare enum value PREMUL_SUM has no factor.
        return ReduceOp.PREMUL_SUM(float(value.factor))
    return found


def deadline(value: Any) -> OpTimeout:
    """Convert a timeout of torch to seconds.

    None, 0 and negative values such as :data:`UNSET` mean the group's timeout.
    """
    if value is None:
        return COMM_TIMEOUT
    _is(isinstance(value, (timedelta, float)))
    seconds: float = value.total_seconds() if isinstance(value, timedelta) else value
    return seconds if seconds > 0 else COMM_TIMEOUT


def _options(kind: type) -> Callable[[Any], How]:
    def options(value: Any) -> How:
        _is(isinstance(value, kind))
        op, root = getattr(value, "reduceOp", None), getattr(value, "rootRank", 0)
        device = getattr(value, "device", None)
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return How(ReduceOp.SUM if op is None else reduction(op), root, deadline(value.timeout), device)

    return options


_Form = Mapping[str, Callable[[Any], Any]]
"""One form of a method's arguments. It maps torch's name of each argument to the converter of the argument."""
_FIELDS: Final = {"op": reduction, "root": whole, "timeout": deadline}
_TIMEOUT: Final[_Form] = {"timeout": deadline}
_SUM: Final[_Form] = {"op": reduction, "timeout": deadline}
_ROOTED: Final[_Form] = {"root": whole, "timeout": deadline}
_OPTIONAL: Final = frozenset({"opts", "op", "timeout"})


def _opts(kind: type) -> _Form:
    return {"opts": _options(kind)}


_GATHERED, _SCATTERED = _opts(AllgatherOptions), _opts(ReduceScatterOptions)
_ONE_EACH: Final[_Form] = {"output": tensor, "input": tensor}
_SEVERAL: Final[_Form] = {"outputs": tensors, "inputs": tensors}
_SPLITS: Final[_Form] = {"output_split_sizes": wholes, "input_split_sizes": wholes}
_EXCHANGED = _opts(AllToAllOptions)

FORMS: Final[Mapping[str, tuple[_Form, ...]]] = {
    "allreduce": (
        {"tensors": tensor_in_list, **_opts(AllreduceOptions)},
        {"tensors": tensor_in_list, **_SUM},
        {"tensor": tensor, **_SUM},
    ),
    "allreduce_coalesced": ({"tensors": tensors, **_opts(AllreduceCoalescedOptions)},),
    "reduce": (
        {"tensors": tensor_in_list, **_opts(ReduceOptions)},
        {"tensor": tensor, "root": whole, **_SUM},
    ),
    "broadcast": (
        {"tensors": tensor_in_list, **_opts(BroadcastOptions)},
        {"tensor": tensor, **_ROOTED},
    ),
    "allgather": (
        {"output_tensors": list_in_list, "input_tensors": tensor_in_list, **_GATHERED},
        {"output_tensors": tensors, "input_tensor": tensor, **_TIMEOUT},
    ),
    "allgather_coalesced": ({"output_lists": lists, "input_list": tensors, **_GATHERED},),
    "all_gather_single": ({**_ONE_EACH, **_GATHERED},),
    "all_gather_single_coalesced": ({**_SEVERAL, **_GATHERED},),
    "reduce_scatter": (
        {"output_tensors": tensor_in_list, "input_tensors": list_in_list, **_SCATTERED},
        {"output": tensor, "input": tensors, **_SUM},
        {"output_tensors": tensor, "input_tensor": tensors, **_SUM},
    ),
    "reduce_scatter_single": ({"outputTensor": tensor, "inputTensor": tensor, **_SCATTERED},),
    "reduce_scatter_single_coalesced": ({**_SEVERAL, **_SCATTERED},),
    "alltoall": (
        {"output_tensors": tensors, "input_tensors": tensors, **_EXCHANGED},
        {"output_tensor": tensors, "input_tensor": tensors, **_EXCHANGED},
    ),
    "all_to_all_single": (
        {**_ONE_EACH, **_SPLITS, **_EXCHANGED},
        {**_ONE_EACH, **_SPLITS, **_TIMEOUT},
    ),
    "gather": (
        {"output_tensors": list_in_list, "input_tensors": tensor_in_list, **_opts(GatherOptions)},
        {"output_tensors": tensors, "input_tensor": tensor, **_ROOTED},
    ),
    "scatter": (
        {"output_tensors": tensor_in_list, "input_tensors": list_in_list, **_opts(ScatterOptions)},
        {"output_tensor": tensor, "input_tensors": tensors, **_ROOTED},
    ),
    "barrier": (_opts(BarrierOptions), _TIMEOUT),
    "send": ({"tensors": tensor_in_list, "dstRank": whole, "tag": whole},),
    "recv": ({"tensors": tensor_in_list, "srcRank": whole, "tag": whole},),
    "recv_anysource": ({"arg0": tensor_in_list, "arg1": whole},),
}
"""The forms of each method's arguments: first the forms of ``ProcessGroup``, then the forms of ``Backend``.

All forms of a method's arguments are converted to the same arguments.
"""


def one_form(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
    """Convert a call's arguments to the form that the group's method needs: tensors and numbers, then a :class:`How`.

    :param name: the name of the method that torch calls.
    :raises ArgumentTypeError: the arguments have none of torch's forms.
    :raises ArgumentError: a list has several tensors, but must have one tensor.
    """
    for form in FORMS[name]:
        try:
            return _taken(form, args, given)
        except _OtherForm:
            continue
    got = ", ".join([*map(short, args), *(f"{key}={short(value)}" for key, value in given.items())])
    wanted = " or ".join(f"({', '.join(form)})" for form in FORMS[name])
    raise ArgumentTypeError(f"{name} is called with ({got}), wanted {wanted}, each as torch has it")


def _taken(form: _Form, args: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
    _is(len(args) + len(given) <= len(form))
    values, how, left = [], How(), len(given)
    for place, (name, take) in enumerate(form.items()):
        if place < len(args):
            value = args[place]
        elif name in given:
            value, left = given[name], left - 1
        else:
            _is(name in _OPTIONAL)
            continue
        taken = take(value)
        if name == "opts":
            how = taken
        elif name in _FIELDS:
            how = how._replace(**{name: taken})
        else:
            values.append(taken)
    _is(left == 0)
    return [*values, how]
