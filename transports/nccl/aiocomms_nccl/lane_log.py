"""The collectives of lanes on one rank: what it has called, and the log that says what is launched.

A rank tells the sequencer, on rank 0, what it calls. The log comes back in frames on the control connection from there,
and whatever it names all ranks have called. A rank that gives a lane up tells the sequencer so, and hears where the
lane ends in the log: what is before that runs to its end on all ranks, and nothing behind it is ever launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from aiocomms import ops
from aiocomms.errors import CommError, ProtocolError, UnsupportedOperation
from aiocomms.lowlevel import Reason, closed_by
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms_nccl import wire
from aiocomms_nccl.agreement import own_call
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.channels import CHANNELS, ChannelsOwner, LaneChannels, PostedInLane
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.control import Control
from aiocomms_nccl.sequencer import Sequencer

SEQUENCER: Final = 0
"""The rank that makes the log."""
_TURNS: Final = 8
"""Turns of the loop in which nothing comes before ranks that wait are told for whom: most never need to know."""


class LaneOwner(ChannelsOwner, Protocol):
    """What the log needs of its transport."""

    control: Control

    def plan(self, op: ops.Op) -> CallPlan:
        """Plan a collective.

        :raises CommError: there is no memory for it.
        """


class _Lane:
    """What this rank has called in one lane, and has not ended."""

    __slots__ = ("error", "missing", "ordered", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[PostedInLane] = deque()
        """What the log has not named, in the order of the calls."""
        self.ordered: list[PostedInLane] = []
        """What it has."""
        self.error: CommError | None = None
        """Why it was given up; what waits ends with that, once the sequencer says where the lane ends."""
        self.missing: Sequence[int] = ()
        """The ranks that have not called the first that waits, as far as this rank was told."""


class LaneLog:
    """The lanes of one rank. Its methods run on the loop's thread unless they say otherwise."""

    def __init__(self, owner: LaneOwner) -> None:
        self._owner = owner
        self._lanes: dict[int, _Lane] = {}  # those at rest are not known
        self._posted: dict[Completion, PostedInLane] = {}
        self._channels = LaneChannels(owner, self._ended)
        self._sequencer = Sequencer(owner.size, self) if owner.rank == SEQUENCER else None
        self._calls: list[wire.LaneCall] = []  # of which the sequencer is not told yet
        self._entries: list[int] = []  # of which the other ranks are not told yet, nor are they launched here
        self._fresh = True  # whether nothing was sent in this turn of the loop
        self._vain = 0
        self._closed = False  # whether the sequencer's rank has closed

    def post(self, op: ops.Op, lane: int, work: Completion) -> None:
        """See :meth:`LaneTransport.post_in_lane`."""
        owner = self._owner
        if owner.cuda.capturing():
            raise UnsupportedOperation(
                "a collective of a lane cannot be captured into a CUDA graph, because ranks agree on it on the host; "
                "call it outside of the capture, or capture one of the communicator itself"
            )
        if self._closed:
            work.fail(closed_by(SEQUENCER))
            return
        posted = PostedInLane(op, lane, work, owner.plan(op), owner.launcher.mark())
        mine = own_call(op, owner.size)
        call = wire.LaneCall(lane, mine.text(), mine.gives, mine.takes)
        self._lanes.setdefault(lane, _Lane()).waiting.append(posted)
        self._posted[work] = posted
        if self._sequencer is None:
            self._calls.append(call)
        else:
            self._vain = 0
            self._sequencer.hear(owner.rank, call)
        self._soon()

    def give_up(self, lane: int, error: CommError) -> None:
        """See :meth:`LaneTransport.give_up_lane`."""
        self._flush()  # what is in the log is launched, and what this rank has called comes before its word
        found = self._lanes.get(lane)
        if found is None:
            return
        for posted in found.ordered:
            posted.error = error
        found.error = error
        if not found.waiting:
            return
        if self._sequencer is None:
            self._owner.control.send(SEQUENCER, wire.LaneGivenUp(lane))
        else:
            self._sequencer.give_up(SEQUENCER, lane)
            self._end(lane)

    def leave(self, rank: int) -> None:
        """Note that a rank has closed. What needs it fails."""
        if self._sequencer is not None:
            self._sequencer.leave(rank)
        elif rank == SEQUENCER:
            self._closed = True
            for lane, found in list(self._lanes.items()):
                found.error = found.error or closed_by(SEQUENCER)
                self._end(lane)

    def end_of(self, work: Completion) -> Any:
        """Return the end of a collective that is launched, for :meth:`Launcher.wait_stream`; else None."""
        posted = self._posted.get(work)
        return None if posted is None else posted.end

    def waiting_for(self, work: Completion) -> Sequence[int] | None:
        """Return the ranks that a collective waits for, or the one before it in its lane. Any thread may call this.

        :returns: None: it is of no lane.
        """
        posted = self._posted.get(work)
        found = None if posted is None else self._lanes.get(posted.lane)
        if posted is None or found is None:
            return None
        if posted in list(found.ordered):
            return ()
        return found.missing if self._sequencer is None else self._sequencer.missing(posted.lane)

    def comm_streams(self, *, busy: bool = False) -> list[CommStream]:
        """Return the communicators of the channels. Any thread may call this.

        :param busy: only those which have something under way.
        """
        return self._channels.comm_streams(busy=busy)

    def clear(self) -> None:
        """Let go of everything, at the end."""
        self._lanes.clear()
        self._posted.clear()
        self._channels.clear()

    # ------------------------------------------------------------------------------------------------- what is told

    def _soon(self) -> None:
        """Send what is to be told: the first of a turn of the loop at once, and the others together in the next."""
        if self._fresh and (self._calls or self._entries):
            self._fresh = False
            self._flush()
        if self._calls or self._entries or (self._sequencer is not None and self._sequencer.has_news):
            self._owner.control.wake()

    def turn(self, came: bool) -> None:
        """Send what this turn of the loop has to tell. It is called in every turn, after all frames were handled.

        :param came: whether there were any.
        """
        self._flush()
        self._fresh = True
        if self._sequencer is not None and self._sequencer.has_news:
            self._vain = 0 if came else self._vain + 1
            if self._vain < _TURNS:
                self._owner.control.wake()
            else:
                self._tell_news(self._sequencer)

    def _flush(self) -> None:
        """Tell the other ranks what is to be told, and launch what they are told to: the telling takes longer."""
        calls, self._calls = self._calls, []
        entries, self._entries = self._entries, []
        control = self._owner.control
        if calls:
            for told in wire.lane_calls(calls):
                control.send(SEQUENCER, told)
        if entries:
            for part in wire.lane_entries(entries):
                for peer in control.peers:
                    control.send(peer, part)
            for lane in entries:
                self._launch(lane)

    def _tell_news(self, sequencer: Sequencer) -> None:
        """Tell the ranks that wait for whom they do."""
        waits: dict[int, list[tuple[int, list[int]]]] = {}
        for lane, ranks, missing in sequencer.news():
            for rank in ranks:
                waits.setdefault(rank, []).append((lane, missing))
        for rank, told in waits.items():
            for part in wire.lane_waits(told):
                self._owner.control.send(rank, part)

    # ------------------------------------------------------------------------------------------------- what is heard

    def handle(self, peer: int, frame: wire.LaneFrame) -> None:
        """Act on a frame about lanes.

        :raises ProtocolError: it makes no sense.
        """
        if isinstance(frame, (wire.LaneCalls, wire.LaneGivenUp)):
            if self._sequencer is None:
                raise ProtocolError(f"rank {peer} tells of lanes, and rank {SEQUENCER} is their sequencer", peer=peer)
            self._hear(self._sequencer, peer, frame)
        elif peer != SEQUENCER:
            raise ProtocolError(f"rank {peer} orders lanes, and rank {SEQUENCER} is their sequencer", peer=peer)
        else:
            self._obey(frame)

    def _obey(
        self, frame: wire.LaneEntries | wire.LaneEnd | wire.LaneFault | wire.LaneWaits | wire.FormChannels
    ) -> None:
        """Do what the sequencer says."""
        if isinstance(frame, wire.LaneEntries):
            for lane in frame.lanes:
                self._launch(lane)
        elif isinstance(frame, wire.LaneEnd):
            self._end(frame.lane)
        elif isinstance(frame, wire.LaneFault):
            self._fail(frame.lane, frame.reason.to_error())
        elif isinstance(frame, wire.LaneWaits):
            for lane, ranks in frame.waits:
                if (found := self._lanes.get(lane)) is not None:
                    found.missing = ranks
        elif self._channels.begun or len(frame.unique_ids) != CHANNELS:
            raise ProtocolError(f"rank {SEQUENCER} has another number of channels formed", peer=SEQUENCER)
        else:
            self._channels.form(lambda: frame.unique_ids)

    def _hear(self, sequencer: Sequencer, peer: int, frame: wire.LaneCalls | wire.LaneGivenUp) -> None:
        if isinstance(frame, wire.LaneGivenUp):
            sequencer.give_up(peer, frame.lane)
            self._flush()  # what is in the log by now comes before the end
            self._owner.control.send(peer, wire.LaneEnd(frame.lane))
            return
        for call in frame.calls:
            if len(call.gives) not in (0, self._owner.size) or len(call.takes) != len(call.gives):
                raise ProtocolError(f"rank {peer} calls a collective of another number of ranks", peer=peer)
            sequencer.hear(peer, call)

    def append(self, lane: int) -> None:
        """See :meth:`Sequenced.append`."""
        if not self._channels.begun:
            self._channels.form(self._make_channels)
        self._entries.append(lane)

    def _make_channels(self) -> list[bytes]:
        """Have all ranks form the channels. Runs in a thread."""
        unique_ids = [self._owner.library.unique_id() for _ in range(CHANNELS)]
        for peer in self._owner.control.peers:
            self._owner.control.send(peer, wire.FormChannels(unique_ids))
        return unique_ids

    def refuse(self, rank: int, lane: int, error: CommError) -> None:
        """See :meth:`Sequenced.refuse`."""
        if rank == SEQUENCER:
            self._flush()  # what is in the log is none of it
            self._fail(lane, error)
        else:
            self._owner.control.send(rank, wire.LaneFault(lane, Reason.of(error, SEQUENCER)))

    def _launch(self, lane: int) -> None:
        """Launch a lane's next collective, for the log names it."""
        found = self._lanes.get(lane)
        if found is None or not found.waiting:
            raise ProtocolError(f"rank {SEQUENCER} orders a collective of a lane that was not called", peer=SEQUENCER)
        posted = found.waiting.popleft()
        posted.error = found.error
        found.ordered.append(posted)
        found.missing = ()
        self._channels.add(posted)

    # ------------------------------------------------------------------------------------------------ what has ended

    def _ended(self, posted: PostedInLane) -> None:
        """End a collective that the GPU has done. Until then, it keeps its tensors."""
        found = self._lanes[posted.lane]
        found.ordered.remove(posted)
        self._forget(posted, found)
        conclude(posted.work, OP_RESULT if posted.error is None else posted.error)

    def _forget(self, posted: PostedInLane, found: _Lane) -> None:
        del self._posted[posted.work]
        if not found.waiting and not found.ordered:
            del self._lanes[posted.lane]

    def _end(self, lane: int) -> None:
        """End what the log will not name any more, in a lane that was given up."""
        found = self._lanes.get(lane)
        while found is not None and found.waiting:
            posted = found.waiting.popleft()
            self._forget(posted, found)
            assert found.error is not None
            conclude(posted.work, found.error)

    def _fail(self, lane: int, error: CommError) -> None:
        """Fail what was called next in a lane, and so lose the communicator."""
        found = self._lanes.get(lane)
        if found is not None and found.waiting and found.error is None:
            conclude(found.waiting[0].work, error)
