"""The lanes of one rank, and the log of their collectives, which determines the launch order on all ranks.

A lane is an independent sequence of operations. Each rank announces its calls of lane collectives to the sequencer on
rank 0. The sequencer appends a collective to the log after all ranks have called it. The sequencer sends the log to all
ranks, in frames on the control connections.

If a rank aborts a lane that has collectives outside the log, the rank notifies the sequencer. The sequencer's answer
means that the log gets no more entries of this lane. Collectives of this lane that are already in the log complete on
all ranks. All other collectives of this lane are never launched.
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
"""The rank on which the sequencer runs. The sequencer writes the log."""
_TURNS: Final = 8
"""The number of loop iterations without frames, after which the sequencer tells waiting ranks which ranks are missing.

A missing rank has not called a collective for which other ranks wait.
"""


class LaneOwner(ChannelsOwner, Protocol):
    """The interface through which the log uses its transport."""

    control: Control

    def plan(self, op: ops.Op) -> CallPlan:
        """Plan a collective.

        :raises CommError: the collective needs GPU memory, but no GPU memory is free.
        """


class _Lane:
    """The collectives of one lane that this rank has called and that have not ended."""

    __slots__ = ("error", "missing", "ordered", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[PostedInLane] = deque()
        """The collectives that are not in the log, in the order of the calls."""
        self.ordered: list[PostedInLane] = []
        """The collectives that are in the log."""
        self.error: CommError | None = None
        """The error of the lane, if this rank has aborted the lane or the sequencer's rank has closed; else None.

        When the lane ends, the :attr:`waiting` collectives fail with this error.
        """
        self.missing: Sequence[int] = ()
        """The ranks that have not called the first collective in :attr:`waiting`, as far as this rank knows."""


class LaneLog:
    """The lanes of one rank. Methods run on the loop's thread, unless their docstrings say otherwise."""

    def __init__(self, owner: LaneOwner) -> None:
        self._owner = owner
        self._lanes: dict[int, _Lane] = {}  # a lane without collectives has no entry
        self._posted: dict[Completion, PostedInLane] = {}
        self._channels = LaneChannels(owner, self._ended)
        self._sequencer = Sequencer(owner.size, self) if owner.rank == SEQUENCER else None
        self._calls: list[wire.LaneCall] = []  # calls that are not sent to the sequencer yet
        self._entries: list[int] = []  # entries that are neither sent nor launched yet
        self._fresh = True  # True until something is sent in this turn of the loop
        self._vain = 0
        self._closed = False  # True once the sequencer's rank has closed

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
        self._flush()  # launches the log's entries, and sends this rank's calls before LaneGivenUp
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
        """Handle the event that a rank has closed its transport. The collectives that wait for this rank fail."""
        if self._sequencer is not None:
            self._sequencer.leave(rank)
        elif rank == SEQUENCER:
            self._closed = True
            for lane, found in list(self._lanes.items()):
                found.error = found.error or closed_by(SEQUENCER)
                self._end(lane)

    def end_of(self, work: Completion) -> Any:
        """Return the object that :meth:`Launcher.wait_stream` needs for a collective; None before its launch."""
        posted = self._posted.get(work)
        return None if posted is None else posted.end

    def waiting_for(self, work: Completion) -> Sequence[int] | None:
        """Return the ranks for which a collective waits.

        These ranks have not called the collective, or have not called an earlier collective of the same lane. Any
        thread may call this method.

        :returns: the ranks; None if the collective belongs to no lane.
        """
        posted = self._posted.get(work)
        found = None if posted is None else self._lanes.get(posted.lane)
        if posted is None or found is None:
            return None
        if posted in list(found.ordered):
            return ()
        return found.missing if self._sequencer is None else self._sequencer.missing(posted.lane)

    def comm_streams(self, *, busy: bool = False) -> list[CommStream]:
        """Return the communicators of the channels. Any thread may call this method.

        :param busy: whether to return only communicators with running collectives.
        """
        return self._channels.comm_streams(busy=busy)

    def clear(self) -> None:
        """Drop all collectives. The transport calls this method at the end of its close."""
        self._lanes.clear()
        self._posted.clear()
        self._channels.clear()

    # -------------------------------------------------------------------------------------------- frames to other ranks

    def _soon(self) -> None:
        """Send the first call or log entry of a loop iteration immediately.

        Further calls and entries of the iteration are sent together in the next iteration.
        """
        if self._fresh and (self._calls or self._entries):
            self._fresh = False
            self._flush()
        if self._calls or self._entries or (self._sequencer is not None and self._sequencer.has_news):
            self._owner.control.wake()

    def turn(self, came: bool) -> None:
        """Send the calls and log entries that are not sent yet.

        The transport calls this method in each loop iteration, after it has handled all frames.

        :param came: whether frames arrived in this iteration.
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
        """Send the calls to the sequencer, and the log entries to all ranks. Then launch the entries' collectives.

        The frames are sent before the launch, because frames need more time than a launch.
        """
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
        """Send to each waiting rank the list of the ranks for which it waits."""
        waits: dict[int, list[tuple[int, list[int]]]] = {}
        for lane, ranks, missing in sequencer.news():
            for rank in ranks:
                waits.setdefault(rank, []).append((lane, missing))
        for rank, told in waits.items():
            for part in wire.lane_waits(told):
                self._owner.control.send(rank, part)

    # -------------------------------------------------------------------------------------------- frames of other ranks

    def handle(self, peer: int, frame: wire.LaneFrame) -> None:
        """Handle a frame about lanes.

        :raises ProtocolError: the frame is invalid.
        """
        if isinstance(frame, (wire.LaneCalls, wire.LaneGivenUp)):
            if self._sequencer is None:
                raise ProtocolError(f"rank {peer} sends calls of lanes here, wanted at rank {SEQUENCER}", peer=peer)
            self._hear(self._sequencer, peer, frame)
        elif peer != SEQUENCER:
            raise ProtocolError(f"rank {peer} sends the order of lanes, which only rank {SEQUENCER} does", peer=peer)
        else:
            self._obey(frame)

    def _obey(
        self, frame: wire.LaneEntries | wire.LaneEnd | wire.LaneFault | wire.LaneWaits | wire.FormChannels
    ) -> None:
        """Handle a frame from the sequencer."""
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
            raise ProtocolError(f"rank {SEQUENCER} forms another number of communicators for lanes", peer=SEQUENCER)
        else:
            self._channels.form(lambda: frame.unique_ids)

    def _hear(self, sequencer: Sequencer, peer: int, frame: wire.LaneCalls | wire.LaneGivenUp) -> None:
        if isinstance(frame, wire.LaneGivenUp):
            sequencer.give_up(peer, frame.lane)
            self._flush()  # the present entries of the log come before the end of the lane
            self._owner.control.send(peer, wire.LaneEnd(frame.lane))
            return
        for call in frame.calls:
            if len(call.gives) not in (0, self._owner.size) or len(call.takes) != len(call.gives):
                raise ProtocolError(f"rank {peer} calls a collective with sizes for another number of ranks", peer=peer)
            sequencer.hear(peer, call)

    def append(self, lane: int) -> None:
        """See :meth:`Sequenced.append`."""
        if not self._channels.begun:
            self._channels.form(self._make_channels)
        self._entries.append(lane)

    def _make_channels(self) -> list[bytes]:
        """Make the channels' ids, and send them to all ranks. This method runs in a thread."""
        unique_ids = [self._owner.library.unique_id() for _ in range(CHANNELS)]
        for peer in self._owner.control.peers:
            self._owner.control.send(peer, wire.FormChannels(unique_ids))
        return unique_ids

    def refuse(self, rank: int, lane: int, error: CommError) -> None:
        """See :meth:`Sequenced.refuse`."""
        if rank == SEQUENCER:
            self._flush()  # launches the log's entries, which do not include the refused call
            self._fail(lane, error)
        else:
            self._owner.control.send(rank, wire.LaneFault(lane, Reason.of(error, SEQUENCER)))

    def _launch(self, lane: int) -> None:
        """Launch the next collective of a lane, after the sequencer has appended this collective to the log."""
        found = self._lanes.get(lane)
        if found is None or not found.waiting:
            raise ProtocolError(f"rank {SEQUENCER} orders a collective of a lane that was not called", peer=SEQUENCER)
        posted = found.waiting.popleft()
        posted.error = found.error
        found.ordered.append(posted)
        found.missing = ()
        self._channels.add(posted)

    # ---------------------------------------------------------------------------------------------- ends of collectives

    def _ended(self, posted: PostedInLane) -> None:
        """Complete the work of a collective that the GPU has finished.

        Until this call, ``posted`` keeps the tensors alive.
        """
        found = self._lanes[posted.lane]
        found.ordered.remove(posted)
        self._forget(posted, found)
        conclude(posted.work, OP_RESULT if posted.error is None else posted.error)

    def _forget(self, posted: PostedInLane, found: _Lane) -> None:
        del self._posted[posted.work]
        if not found.waiting and not found.ordered:
            del self._lanes[posted.lane]

    def _end(self, lane: int) -> None:
        """Fail the waiting collectives of a lane with the lane's error, because they never enter the log."""
        found = self._lanes.get(lane)
        while found is not None and found.waiting:
            posted = found.waiting.popleft()
            self._forget(posted, found)
            assert found.error is not None
            conclude(posted.work, found.error)

    def _fail(self, lane: int, error: CommError) -> None:
        """Fail the first waiting collective of a lane. This failure also marks the communicator as lost."""
        found = self._lanes.get(lane)
        if found is not None and found.waiting and found.error is None:
            conclude(found.waiting[0].work, error)
