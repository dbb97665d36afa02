"""The collectives of a communicator's lanes. The engine executes the collectives. This module completes their works.

A lane is an independent sequence of operations.
"""

from __future__ import annotations

from typing import Final

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError
from aiocomms.lowlevel import closed_by
from aiocomms.transport import Completion, conclude
from aiocomms_ucx import wire
from aiocomms_ucx._engine import LaneQueues
from aiocomms_ucx.collectives import START, describe
from aiocomms_ucx.member import Member
from aiocomms_ucx.shared_engine import kept
from aiocomms_ucx.status import DONE, DROPPED, error_of

_NOTHING: Final = ""
"""The description that a rank sends if it has no running collective in a lane."""


class LaneCollectives:
    """The lanes of one communicator, by number. A lane without a pending collective has no entry."""

    def __init__(self, transport: Member) -> None:
        self._transport = transport
        self._size = transport.size
        self._calls = transport.engine.lanes(transport.group)
        self.pending = LaneQueues()
        """The pending collectives, in the order of the calls. Other threads also add collectives."""
        self.given_up: dict[int, CommError] = {}
        """The errors of aborted lanes, by lane number.

        The engine has not yet dropped the collectives of these lanes.
        """
        self._told: dict[int, str] = {}  # The call that this rank has described, by lane.
        self._asked: set[tuple[int, int]] = set()  # The lanes and ranks of repeated questions.
        self._disagreeing: dict[int, int] = {}  # the rank with another call than this rank's, by lane
        self._said: dict[tuple[int, int], str] = {}  # The calls that ranks have described, by lane and rank.

    def post(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """See :meth:`LaneTransport.post_in_lane`."""
        start, form = START[type(op)]
        try:
            if at := start(self._calls, id(work), lane, self._size, op, form):
                work.complete()
                return at
        except CommError:
            raise
        except BaseException:  # A signal handler may have raised this, and the engine may already use the op's memory.
            if not work.done():
                self._keep(work, lane)
            raise
        self._follow(work, lane)
        return None

    def _keep(self, work: Completion, lane: int) -> None:
        """Keep a reference to a collective and its tensors until the collective is done."""
        self.pending.add(lane, work)
        self._transport.shared.pending[id(work)] = (self, work, lane, kept(work))

    def _follow(self, work: Completion, lane: int) -> None:
        """Keep a reference to a collective that the engine now executes.

        Also handle the failures and outcomes that have occurred since the call.
        """
        self._keep(work, lane)
        self.look_after(lane)

    def look_after(self, lane: int) -> None:
        """Handle the failures and outcomes that have occurred since the engine got a collective.

        This object already has a reference to the collective.
        """
        transport = self._transport
        if transport.failure is not None:
            transport.on_failure(transport.failure)
        if transport.engine.ready:
            transport.shared.progress()

    def finish(self, work: Completion, lane: int, status: int, a: int, b: int) -> None:
        """Complete a collective that has ended.

        The work may already be done, because the engine also reports the end of abandoned ops.
        """
        given_up = self.given_up.get(lane)
        if self.pending.remove(lane, work):
            self.given_up.pop(lane, None)
        if given_up is not None:
            conclude(work, given_up)
        if work.done() or status == DROPPED:
            return  # the communicator ends a work that is not done
        if status == DONE:
            work.complete()
        else:
            work.fail(error_of(work.op, status, a, b, self._transport.rank, self._size))

    def give_up(self, lane: int, error: CommError) -> None:
        """See :meth:`LaneTransport.give_up_lane`. The engine ends the pending collectives, and their works end."""
        transport = self._transport
        if lane in self.pending:
            self.given_up[lane] = error
            transport.engine.give_up_lane(transport.group, lane)
            if transport.engine.ready:
                transport.shared.progress()

    def forget(self, lane: int, rank: int) -> None:
        """See :meth:`LaneTransport.forget_lane`."""
        transport = self._transport
        transport.engine.forget_lane(transport.group, lane, rank)
        if transport.engine.ready:
            transport.shared.progress()

    def waiting_for(self, work: Completion) -> list[int]:
        """Return the ranks for which a collective, or an earlier collective of the same lane, waits.

        If the collective belongs to no lane, return the ranks for which the communicator's own collectives wait.
        """
        transport = self._transport
        owner, _, lane, _ = transport.shared.pending.get(id(work), (None, work, 0, None))
        if owner is self:
            return transport.engine.missing_in_lane(transport.group, lane)
        return transport.engine.missing(transport.group)

    def _first(self, lane: int) -> Completion | None:
        """Return the running collective of a lane.

        The method asks the engine, because :attr:`pending` may still list earlier collectives that have ended.
        """
        transport = self._transport
        ticket = transport.engine.under_way_in_lane(transport.group, lane)
        owner, work, *_ = transport.shared.pending.get(ticket, (None, None))
        return None if owner is not self or work is None or work.done() else work

    # ----------------------------------------------------------------------------- what cannot complete any more

    def left(self, rank: int, lane: int) -> None:
        """Fail the running collective of a lane, because a rank that the collective needs has closed."""
        work = self._first(lane)
        if work is not None and lane not in self.given_up:
            work.fail(closed_by(rank))

    def disagrees(self, rank: int, lane: int) -> None:
        """Describe this rank's call in a lane, because another rank's call differs.

        The other rank also sends a description of its call.
        """
        self._disagreeing[lane] = rank
        self._tell(lane, again=False)
        self._reconsider(lane)

    def hear(self, rank: int, said: wire.LaneDispute) -> None:
        """Store another rank's description of its call in a lane, and answer with a description of this rank's call."""
        self._said[said.lane, rank] = said.text
        # The rank may ask because this rank has made a call after its last answer.
        self._tell(said.lane, again=said.text != _NOTHING and self._told.get(said.lane) == _NOTHING)
        self._reconsider(said.lane)

    def reconsider(self) -> None:
        """Check again all lanes in which the ranks' calls differ.

        This method is called after a rank has closed the communicator, because a description from that rank may never
        arrive.
        """
        for lane in list(self._disagreeing):
            self._reconsider(lane)

    def _tell(self, lane: int, *, again: bool) -> None:
        """Send a description of this rank's call in a lane to all ranks.

        :param again: whether to send a description even if one was sent earlier.
        """
        if again or lane not in self._told:
            work = self._first(lane)
            text = self._told[lane] = _NOTHING if work is None else describe(work.op)
            self._transport.tell_all(lambda number: wire.LaneDispute(number, lane, text))

    def _reconsider(self, lane: int) -> None:
        """Fail the collective of a lane if another rank's call differs.

        The method waits for the description of the other rank's call, unless the other rank has left.
        """
        rank, work = self._disagreeing.get(lane), self._first(lane)
        if rank is None or work is None:
            return
        theirs = self._said.get((lane, rank))
        if theirs == _NOTHING and (lane, rank) not in self._asked:  # The answer may precede the call.
            self._asked.add((lane, rank))
            del self._said[lane, rank]
            theirs = None
            self._tell(lane, again=True)
        if theirs is None and rank not in self._transport.gone:
            return
        mine = describe(work.op)
        calls = f"calls {theirs}" if theirs and theirs != mine else "has called another collective"
        work.fail(MismatchError(f"rank {rank} {calls}, and rank {self._transport.rank} calls {mine}", peer=rank))
