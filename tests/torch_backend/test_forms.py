"""The forms in which torch calls a group's methods: all are known, and give the same tensors and options."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from calls import Calls
from forms import TIMEOUT, Call, Form, calls, forms

from aiocomms.arguments import COMM_TIMEOUT
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.integrations.torch_backend import Group
from aiocomms.integrations.torch_backend.forms import FORMS, UNSET, How, one_form
from aiocomms.ops.reductions import ReduceOp

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(114)]


def ours(method: str) -> str:
    """Return the name under which `FORMS` has the forms of a method of torch."""
    name: str = getattr(Group, method).__name__
    return name


def of_ours() -> Iterator[Form]:
    """Return the forms of torch's methods, without methods that call another one with the same arguments in C++."""
    return (form for form in forms() if form.method in vars(Group))


def test_every_form_of_torch_is_known() -> None:
    """A newer torch with another form or method fails here, before its arguments are misread."""
    known = {method: [tuple(form) for form in found] for method, found in FORMS.items()}
    unknown = [str(form) for form in of_ours() if tuple(form.types) not in known.get(ours(form.method), [])]
    assert not unknown
    assert {ours(form.method) for form in of_ours()} == set(FORMS)


def spoken(call: Call) -> How:
    """Return the options that the arguments of a call give beside its tensors."""
    types = set() if call.how == "by defaults" else set(call.form.types)
    reduces, rooted = "reduce" in call.form.method, call.form.method in ("broadcast", "reduce", "gather", "scatter")
    return How(
        ReduceOp.MAX if reduces and types & {"opts", "op"} else ReduceOp.SUM,
        1 if rooted and {"opts", "root"} & (types | {"root"} & set(call.form.types)) else 0,
        TIMEOUT.total_seconds() if types & {"opts", "timeout"} else COMM_TIMEOUT,
    )


def test_every_form_comes_to_one() -> None:
    """Each form gives the same tensors and options, by places, by names or by defaults."""
    for form in of_ours():
        for call in (call for call in calls(form, 1) if call.right):
            *values, how = one_form(ours(form.method), call.args, call.named)
            assert how == spoken(call), str(call)
            first = [type(value) for value in one_form(ours(form.method), next(calls(form, 1)).args, {})]
            assert [type(value) for value in (*values, how)] == first, str(call)


def test_a_timeout_is_that_of_its_operation() -> None:
    comm = Calls()
    group = Group(cast("Any", comm), dist.HashStore())
    for form in of_ours():
        for call in (call for call in calls(form, 1) if call.right and not form.method.startswith("recv")):
            comm.deadlines.clear()
            getattr(group, form.method)(*call.args, **call.named)
            assert comm.deadlines == [spoken(call).timeout], str(call)


@pytest.mark.parametrize("timeout", [None, timedelta(0), UNSET])
def test_a_timeout_that_says_nothing_is_the_groups(timeout: timedelta | None) -> None:
    assert one_form("barrier", [timeout] if timeout else [], {}) == [How()]
    assert one_form("broadcast", [torch.ones(1), 1, timeout], {}) == [torch.ones(1), How(root=1)]


@pytest.mark.parametrize(
    ("method", "args", "named", "error", "words"),
    [
        ("allreduce", [[torch.ones(1), torch.ones(1)]], {}, ArgumentError, "2 tensors, wanted one"),
        ("allgather", [[[torch.ones(1)]] * 2, [torch.ones(1)]], {}, ArgumentError, "2 lists of tensors, wanted one"),
        ("send", [torch.ones(2), 1, 0], {}, ArgumentTypeError, r"wanted \(tensors, dstRank, tag\)"),
        ("send", [[torch.ones(2)], 1.0, 0], {}, ArgumentTypeError, "send is called with"),
        ("broadcast", [torch.ones(2)], {}, ArgumentTypeError, r"\(tensors, opts\) or \(tensor, root, timeout\)"),
        ("broadcast", [torch.ones(2), 0], {"root": 0}, ArgumentTypeError, "root=0"),
        ("broadcast", [torch.ones(2), 0], {"rank": 0}, ArgumentTypeError, "rank=0"),
        ("broadcast", [torch.ones(2), 0, None, None], {}, ArgumentTypeError, "None, None"),
        ("allreduce", [torch.ones(2), "sum"], {}, ArgumentTypeError, "'sum'"),
        ("allreduce", [torch.ones(2), dist.ReduceOp.PREMUL_SUM], {}, ArgumentTypeError, "PREMUL_SUM"),
        ("barrier", [5], {}, ArgumentTypeError, r"\(opts\) or \(timeout\)"),
    ],
)
def test_what_torch_has_not_is_refused(
    method: str, args: list[Any], named: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        one_form(method, args, named)
