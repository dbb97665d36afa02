"""The messages that ranks which disagree in a lane send each other, one by one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomms import ReduceOp, ops
from aiocomms.errors import CommAbortedError, MismatchError

pytestmark = pytest.mark.deterministic

lanes = pytest.importorskip("aiocomms_ucx.lane_collectives", reason="needs the ucx transport", exc_type=ImportError)
transports = pytest.importorskip("aiocomms_ucx.transport", reason="needs the ucx transport", exc_type=ImportError)
LANE = 7


class Side:
    """One rank's side, without an engine: its messages stay in `sent` until they are delivered."""

    def __init__(self, rank: int) -> None:
        self.work: Any = None
        self.sent: list[Any] = []
        self.gone: dict[int, Any] = {}
        engine = SimpleNamespace(lanes=lambda _: None, under_way_in_lane=lambda *_: id(self.work))
        shared = SimpleNamespace(pending={})
        self._transport: Any = SimpleNamespace(
            engine=engine, shared=shared, rank=rank, size=3, group=0, gone=self.gone, tell_all=self._tell_all
        )
        self.lanes: Any = lanes.LaneCollectives(self._transport)

    def _tell_all(self, make: Any) -> None:
        self.sent.append(make(0))

    def call(self, op: ops.Op) -> None:
        failures: list[Exception] = []
        work = SimpleNamespace(op=op, failures=failures, fail=failures.append, done=lambda: bool(failures))
        self.work = work
        self._transport.shared.pending[id(work)] = (self.lanes, work, LANE, None)

    def deliver(self, rank: int, to: Side) -> None:
        while self.sent:
            to.lanes.hear(rank, self.sent.pop(0))


def ranks() -> tuple[Side, Side]:
    one, two = Side(0), Side(2)
    two.call(ops.Reduce(torch.ones(3), 1, ReduceOp.SUM))
    return one, two


@pytest.mark.parametrize("first", ["seen", "said"])
def test_rank_that_calls_after_a_dispute_began_reports_its_call(first: str) -> None:
    """The rank said so because others disagreed before it had called; what it calls then is said all the same."""
    one, two = ranks()
    two.lanes.disagrees(1, LANE)
    two.deliver(2, one)
    assert [said.text for said in one.sent] == [""]
    one.call(ops.Barrier())
    if first == "seen":
        two.lanes.disagrees(0, LANE)
    one.deliver(0, two)
    if first == "said":
        two.lanes.disagrees(0, LANE)
    assert not two.work.failures, "it waits to hear what the other calls"
    two.deliver(2, one)
    one.lanes.disagrees(2, LANE)
    one.deliver(0, two)
    (error,) = two.work.failures
    assert isinstance(error, MismatchError)
    assert "rank 0 calls barrier" in str(error)


def test_rank_whose_collective_has_ended_reports_nothing() -> None:
    """The rank has nothing to say, also when it is asked again."""
    one, two = ranks()
    two.lanes.disagrees(0, LANE)
    for _ in range(2):
        assert not two.work.failures
        two.deliver(2, one)
        one.deliver(0, two)
    (error,) = two.work.failures
    assert "rank 0 has called another collective" in str(error)
    two.deliver(2, one)
    one.deliver(0, two)
    assert (one.sent, two.sent) == ([], [])


def test_ranks_hear_of_an_abort_behind_its_writes() -> None:
    """A rank may use its memory again as soon as it hears of the end."""
    order: list[str] = []
    transport: Any = SimpleNamespace(
        _ending=nullcontext(), _aborted=False, _closed=False, _disputed=None, rank=0, group=1, peers=[],
        engine=SimpleNamespace(lose_group=lambda _: order.append("lost")), tell_all=lambda _: order.append("told"),
    )  # fmt: skip
    transports.UcxTransport.abort(transport, CommAbortedError("enough"))
    transports.UcxTransport.abort(transport, CommAbortedError("twice"))
    assert order == ["lost", "told"]
