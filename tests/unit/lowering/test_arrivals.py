"""Receives from any rank, and probes, over a fake transport: their turns, and the withdrawal of those that lose."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from aiocomms import ops
from aiocomms.errors import CommError, LaneAbortedError, PeerDiedError, UnsupportedOperation
from aiocomms.lowering.arrivals import Arrivals
from aiocomms.lowering.routing import Router
from aiocomms.testing import local_world
from aiocomms.testing.faults import inject, kill
from aiocomms.transport import OP_RESULT, Capabilities, Completion, Transport

pytestmark = pytest.mark.deterministic

TENSOR = torch.zeros(2)


class Asked:
    """The work of one call."""

    hints = None

    def __init__(self, op: Any) -> None:
        self.op = op
        self.outcome: Any = None

    def done(self) -> bool:
        return self.outcome is not None

    def complete(self, value: Any = OP_RESULT) -> None:
        self.fail(value)

    def fail(self, error: Any) -> None:
        assert self.outcome is None
        self.outcome = error


class Wire:
    """A communicator of three ranks, whose transport a test controls."""

    rank, size, name, device = 0, 3, "fake", torch.device("cpu")

    def __init__(self) -> None:
        self.posted: list[tuple[ops.Op, Any]] = []
        self.left: list[Any] = []
        """The works that were withdrawn."""
        self.withdraws = True
        self.fails: CommError | None = None
        self.arrivals = Arrivals(cast("Any", self))

    def caller_stream(self) -> Any:
        return nullcontext

    def post(self, op: ops.Op, work: Completion) -> None:
        if self.fails is not None:
            raise self.fails
        self.posted.append((op, work))

    def withdraw(self, work: Completion) -> bool:
        self.left.append(work)
        return self.withdraws

    def call(self, op: Any) -> Asked:
        work = Asked(op)
        self.arrivals.call(op, cast("Any", work))
        return work

    def probes(self) -> list[int]:
        """Return the sources of the pending probes, in the order of their posts."""
        return [
            op.src for op, work in self.posted if type(op) is ops.Probe and not work.done() and work not in self.left
        ]

    def see(self, src: int) -> None:
        """Let a message of a rank come."""
        for op, work in list(self.posted):
            if isinstance(op, ops.Probe) and op.src == src and not work.done() and work not in self.left:
                work.complete(op.message(8, torch.float32))

    def lose(self, src: int, error: CommError) -> None:
        """Fail the probes of a rank that will send no message."""
        for op, work in list(self.posted):
            if isinstance(op, ops.Probe) and op.src == src and not work.done():
                work.fail(error)

    def takes(self) -> list[Any]:
        return [work for op, work in self.posted if isinstance(op, ops.Take) and not work.done()]

    @property
    def empty(self) -> bool:
        return not self.arrivals._queues and not self.arrivals._calls and not self.probes()


def from_any(*sources: int) -> ops.RecvAny:
    return ops.RecvAny(TENSOR, sources or (1, 2), 0)


def test_recv_any_ops_share_one_probe_per_rank() -> None:
    wire = Wire()
    works = [wire.call(op) for op in (from_any(), from_any(2), from_any(), ops.ProbeAny((1,), 0))]
    assert wire.probes() == [1, 2]
    wire.see(2)
    (take,) = wire.takes()
    assert wire.probes() == [1, 2]  # The calls behind the first one still wait.
    take.complete()
    assert works[0].outcome == 2
    wire.see(1)
    wire.takes()[0].complete()
    assert [work.outcome for work in works] == [2, None, 1, None]
    wire.see(1)
    assert works[3].outcome == (1, 0, 8, torch.float32)
    assert not wire.takes()
    assert wire.probes() == [2]
    wire.see(2)
    wire.takes()[0].complete()
    assert works[1].outcome == 2
    assert wire.empty


def test_recv_any_whose_message_is_gone_keeps_its_turn() -> None:
    wire = Wire()
    first, second = wire.call(from_any()), wire.call(from_any())
    wire.see(1)
    wire.takes()[0].complete(False)
    assert not first.done()
    assert sorted(wire.probes()) == [1, 2]
    wire.see(1)
    wire.takes()[0].complete()
    assert first.outcome == 1
    assert not second.done()
    wire.see(2)
    wire.takes()[0].complete()
    assert second.outcome == 2
    assert wire.empty


def test_recv_any_takes_messages_of_all_ranks_in_turn() -> None:
    """The rank that was served last comes last; only a limited number of tags is remembered."""
    wire = Wire()
    work = wire.call(from_any())
    wire.see(1)
    wire.see(2)  # The first message is being taken.
    wire.takes()[0].complete()
    assert work.done()
    assert wire.empty
    wire.posted.clear()
    wire.call(from_any())
    assert wire.probes() == [2, 1]
    for tag in range(1, 400):
        wire.arrivals.note(tag, 1)
    assert len(wire.arrivals._last) < 300
    assert wire.arrivals.in_turn(399, [0, 1, 2]) == [2, 0, 1]
    assert wire.arrivals.in_turn(0, [2, 1]) == [1, 2]


def test_recv_any_withdrawn_while_pending_withdraws_its_probes() -> None:
    wire = Wire()
    works = [wire.call(from_any(1)), wire.call(from_any())]
    assert wire.arrivals.withdraw(cast("Any", works[1]))
    assert wire.probes() == [1]
    assert wire.arrivals.withdraw(cast("Any", works[0]))
    assert wire.empty
    assert len(wire.left) == 2
    assert not wire.arrivals.withdraw(cast("Any", works[0]))
    wire.left[0].complete(ops.Message(2, 0, 8, torch.float32))  # The withdrawal of the probe came too late.
    assert wire.empty
    assert not wire.takes()


@pytest.mark.parametrize("matched", [False, True])
def test_recv_any_is_withdrawn_while_taking_unless_matched(matched: bool) -> None:
    """A transport that delays ops may not have begun the one that takes the message."""
    wire = Wire()
    work = wire.call(from_any())
    wire.see(1)
    (take,) = wire.takes()
    wire.withdraws = not matched
    assert wire.arrivals.withdraw(cast("Any", work)) is not matched
    if matched:
        take.complete()
        assert work.outcome == 1
    assert wire.empty


def test_recv_any_fails_when_its_probe_cannot_be_posted() -> None:
    wire = Wire()
    error = wire.fails = CommError("no")
    assert wire.call(from_any()).outcome is error
    assert wire.empty
    wire.fails = None
    work = wire.call(ops.RecvMessage((1,), 0))
    wire.fails = error
    wire.see(1)
    assert work.outcome is error
    assert wire.empty


def test_recv_any_fails_only_if_all_other_sources_are_lost() -> None:
    """Calls that wait for other sources stay pending, and so does a call that waits for this rank itself."""
    wire = Wire()
    one, some, own = (wire.call(op) for op in (from_any(1), from_any(0, 1, 2), from_any(0)))
    wire.lose(1, first := CommError("1"))
    assert one.outcome is first
    assert not some.done()
    wire.lose(2, second := CommError("2"))
    assert some.outcome is second
    assert not own.done()
    assert wire.probes() == [0]


def test_lane_abort_fails_its_recv_any_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, error = Wire(), LaneAbortedError("enough")

    class Laned(Asked):
        number = 5

        def abandon(self, error: CommError) -> None:
            self.fail(error)

    monkeypatch.setattr("aiocomms.lowering.arrivals.LaneWork", Laned)
    works = [Laned(from_any()), Laned(from_any())]
    for work in works:
        wire.arrivals.call(work.op, cast("Any", work))
    beside = wire.call(from_any())
    wire.see(1)
    wire.withdraws = False
    wire.arrivals.stop(5, error)
    assert [work.outcome for work in works] == [None, error]
    wire.takes()[0].complete()
    assert works[0].outcome is error
    assert not beside.done()


def test_clear_leaves_no_probe_or_queue() -> None:
    wire = Wire()
    wire.call(from_any())
    wire.arrivals.clear()
    posted = len(wire.posted)
    wire.see(1)
    assert len(wire.posted) == posted
    assert not wire.arrivals._queues


def test_recv_any_without_transport_probes_is_refused() -> None:
    transport = cast("Transport", SimpleNamespace(capabilities=Capabilities(ops=ops.P2P), post=lambda op, work: None))
    router = Router(cast("Any", SimpleNamespace(offload=None, rank=0, name="comm", calls=0)), {"p2p": transport})
    for op in (from_any(), ops.ProbeAny((1,), 0), ops.RecvMessage((1,), 0)):
        with pytest.raises(UnsupportedOperation, match="no transport of this communicator carries it"):
            router[type(op)](op, cast("Any", Asked(op)))
        with pytest.raises(UnsupportedOperation, match="no transport of this communicator carries it"):
            router.within[type(op)](op, 5, cast("Any", Asked(op)))


@pytest.mark.asyncio
async def test_dead_rank_fails_pending_recv_any_and_probe() -> None:
    async with local_world(3) as comms:
        works = [comms[0].recv_any(TENSOR), comms[0].recv_message([2]), comms[0].probe()]
        with inject(comms, kill(ranks=[1], op="barrier")):
            comms[1].barrier()
            for work in works:
                with pytest.raises(PeerDiedError) as caught:
                    await work
                assert caught.value.peer == 1
