"""Random programs give the same over gloo, the backend and communicators: fixed seeds here, others in the search."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from differential import (
    KINDS,
    OPS,
    Call,
    Outcome,
    Program,
    compares,
    defined,
    differs,
    drawn,
    expected,
    first_differences,
)
from processes import HANGS, Run


@pytest.mark.real
@pytest.mark.timeout(HANGS)
@pytest.mark.parametrize("transport", ["ucx"])
def test_programs_come_to_the_same(ranks: Run) -> None:
    found: Counter[str] = sum(ranks(2, compares, range(300)), Counter())
    assert not first_differences(found)
    assert found["programs"] == 300


PROGRAM = Program(1, "plain", False, (Call("all_reduce", torch.int64, (2,), "contiguous", "SUM", 0, "function"),))


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("", [torch.tensor([0, 0])], [1], [], ""), "wanted"),
        (Outcome("RuntimeError: no", [], [], [], ""), "RuntimeError: no"),
        (Outcome("", expected(PROGRAM, 0, 0, 2) or [], [0], [], ""), "autograd is not told"),
        (Outcome("", expected(PROGRAM, 0, 0, 2) or [], [1], [1], ""), "of what is read"),
    ],
)
def test_a_difference_is_seen(outcome: Outcome, words: str) -> None:
    assert words in differs(PROGRAM, 0, 0, 2, "communicator over ucx", outcome)


@pytest.mark.deterministic
def test_all_is_drawn() -> None:
    calls = [call for seed in range(300) for call in drawn(seed, 3).calls]
    assert {call.kind for call in calls} == set(KINDS)
    assert {call.op for call in calls} == set(OPS)
    assert any(not defined(call.op, call.dtype) for call in calls)
