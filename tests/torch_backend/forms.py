"""The forms of a group's methods, from the docstrings of torch's binding, and calls that are made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from aiocomms.integrations.torch_backend import Group

PART, WHOLE, PARTS, ROWS = "a rank's part", "all in one tensor", "all parts", "all parts, each in a list"
TENSORS = {
    "allgather": (PARTS, PART),
    "allgather_coalesced": (ROWS, PART),
    "all_gather_single": (WHOLE, PART),
    "_allgather_base": (WHOLE, PART),
    "all_gather_single_coalesced": (WHOLE, PART),
    "allgather_into_tensor_coalesced": (WHOLE, PART),
    "reduce_scatter": (PART, PARTS),
    "reduce_scatter_single": (PART, WHOLE),
    "_reduce_scatter_base": (PART, WHOLE),
    "reduce_scatter_single_coalesced": (PART, WHOLE),
    "reduce_scatter_tensor_coalesced": (PART, WHOLE),
    "alltoall": (PARTS, PARTS),
    "all_to_all_single": (WHOLE, WHOLE),
    "alltoall_base": (WHOLE, WHOLE),
    "gather": (PARTS, PART),
    "scatter": (PART, PARTS),
}
"""The tensors that each method writes and reads. Other methods have one tensor, which is a part."""
TIMEOUT = timedelta(seconds=50)
_WORDS = {"root": 1, "srcRank": 0, "dstRank": 1, "tag": 3, "arg1": 3, "timeout": TIMEOUT, "op": dist.ReduceOp.MAX}
_DEPTHS = {PART: 0, WHOLE: 0, PARTS: 1, ROWS: 2}


@dataclass(frozen=True)
class Form:
    """One form of a method: the types of its arguments by their names, as torch has them."""

    owner: str
    method: str
    types: Mapping[str, str]
    defaults: frozenset[str]

    def __str__(self) -> str:
        return f"{self.owner}.{self.method}({', '.join(self.types)})"


def forms() -> Iterator[Form]:
    """Yield each form of each method that starts an operation; of Backend, only methods that `Group` has."""
    for owner in (c10d.ProcessGroup, c10d.Backend):
        for method, function in vars(owner).items():
            if owner is c10d.Backend and method not in vars(Group):  # ProcessGroup has such a method in C++.
                continue
            for line in (getattr(function, "__doc__", None) or "").splitlines():
                found = re.fullmatch(rf"(?:\d+\. )?{method}\(self: [\w.]+(?:, (.*))?\) -> c10d::Work", line)
                if found and method != "_end_coalescing":
                    given = [each for each in re.split(r", (?=\w+: )", found[1] or "") if each]
                    types = dict(each.split(" = ")[0].split(": ") for each in given)
                    optional = frozenset(each.split(": ")[0] for each in given if " = " in each)
                    yield Form(owner.__name__, method, types, optional)


def options(kind: type) -> Any:
    """Return options of torch with other values than their defaults, where there are any."""
    made = kind()
    made.timeout = TIMEOUT
    for name, value in (("reduceOp", dist.ReduceOp.MAX), ("rootRank", 1)):
        if hasattr(made, name):
            setattr(made, name, value)
    return made


def _tensors(what: str, rank: int, depth: int) -> Any:
    parts = [torch.arange(2.0) + 10 * rank + 100 * part for part in range(2)]
    value: Any = {PART: parts[0], WHOLE: torch.cat(parts), PARTS: parts, ROWS: [[each] for each in parts]}[what]
    for _ in range(depth - _DEPTHS[what]):
        value = [value]
    return value


def _value(form: Form, name: str, rank: int, root: int) -> Any:
    kind = form.types[name]
    if kind.endswith("Options"):
        return options(getattr(c10d, kind.rsplit(".", 1)[-1]))
    if name in _WORDS:
        return _WORDS[name]
    if name.endswith("split_sizes"):
        return [2, 2]
    assert "Tensor" in kind, f"{form} has an argument that the tests do not know: {name}: {kind}"
    written, read = TENSORS.get(form.method, (PART, PART))
    of_root = {"gather": "output", "scatter": "input"}.get(form.method)
    if of_root is not None and name.startswith(of_root) and rank != root:
        return []
    return _tensors(written if name.startswith("output") else read, rank, kind.count("Sequence["))


@dataclass(frozen=True)
class Call:
    """One call of a form, on one rank."""

    form: Form
    how: str
    root: int
    args: list[Any]
    named: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.form} {self.how}"

    @property
    def right(self) -> bool:
        """True for a call that torch accepts."""
        return self.how.startswith("by ")


def calls(form: Form, rank: int) -> Iterator[Call]:
    """Yield right calls by places, names and defaults, and calls with one argument of a wrong type."""

    def values(root: int) -> dict[str, Any]:
        return {name: _value(form, name, rank, root) for name in form.types}

    root = int("root" in form.types or "opts" in form.types)
    yield Call(form, "by places", root, list(values(root).values()), {})
    if "arg0" not in form.types:
        yield Call(form, "by names", root, [], values(root))
    if form.defaults:
        root = int("root" in form.types)
        given = [value for name, value in values(root).items() if name not in form.defaults]
        yield Call(form, "by defaults", root, given, {})
    for wrong, kind in form.types.items():
        if "Sequence[" in kind:
            yield Call(form, f"with a tensor as {wrong}", 1, list((values(1) | {wrong: torch.ones(2, 2)}).values()), {})
        elif kind.endswith("Options"):
            other = options(c10d.BroadcastOptions if "Barrier" in kind else c10d.BarrierOptions)
            yield Call(form, f"with {wrong} of another", 1, list((values(1) | {wrong: other}).values()), {})


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return value.tolist() if value.dim() else [value.item()]
    return [_flat(each) for each in value] if isinstance(value, list) else []


def _answer(world: Any, method: str, tensors: list[Tensor]) -> dict[str, Any]:
    """Send or receive the other end of a message whose method is tried on the other rank."""
    (world.recv(tensors, 0, 3) if method == "send" else world.send(tensors, 1, 3)).wait()
    return {"tensors": tensors}


def _outcome(world: Any, call: Call, rank: int) -> Any:
    form, named = call.form, call.named
    target = world if form.owner == "ProcessGroup" else world._get_backend(torch.device("cpu"))
    caller = {"send": 0, "recv": 1, "recv_anysource": 1}.get(form.method, rank)
    try:
        if rank == caller:
            getattr(target, form.method)(*call.args, **named).wait()
        elif call.right:
            named = _answer(target, form.method, _tensors(PART, rank, 1))
    except TypeError:
        return "refused"
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    if form.method == "reduce" and rank != call.root:
        return "its own affair"
    return [_flat(each) for each in (*call.args, *named.values())]


def outcomes(world: Any, rank: int) -> dict[str, Any]:
    """Return the final values of each call of each form, or its refusal, or its error."""
    return {str(call): _outcome(world, call, rank) for form in forms() for call in calls(form, rank)}
