"""The sequencer, which runs on rank 0 and determines one launch order of lane collectives for all ranks.

NCCL requires that all ranks call the collectives in the same order. But programs may call the collectives of different
lanes in different orders on different ranks. So each rank announces its calls in lanes to rank 0. When all ranks have
called a collective, the sequencer appends it to a log. All ranks receive the log, and launch the collectives in the
order of the log.

A rank launches a lane's collective only if the collective is in the log. Otherwise, a kernel could wait for a rank that
has aborted the lane. NCCL cannot stop one kernel alone.

This module only stores the calls. It has no tensors or connections, and does not call NCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, Protocol

from aiocomms.errors import CommError, MismatchError
from aiocomms.lowlevel import closed_by, disagreement
from aiocomms_nccl.wire import LaneCall

MOST_NAMED: Final = 16
"""The maximum number of missing ranks of one lane in the sequencer's report to a waiting rank."""


class Sequenced(Protocol):
    """The interface through which the sequencer announces its decisions."""

    def append(self, lane: int) -> None:
        """Append a lane's next collective, which all ranks have called, to the log."""

    def refuse(self, rank: int, lane: int, error: CommError) -> None:
        """Make a rank fail its oldest collective in a lane, among the collectives that are not in the log."""


class _LaneMeetings:
    """A lane in which some ranks have called collectives that are not in the log."""

    __slots__ = ("ahead", "meetings")

    def __init__(self) -> None:
        self.meetings: deque[dict[int, LaneCall]] = deque()
        """The collectives that are not in the log, oldest first.

        Each entry is a dict. The keys are ranks, and the values are the calls of these ranks.
        """
        self.ahead: dict[int, int] = {}
        """A dict from each rank to the number of collectives in :attr:`meetings` that the rank has called."""

    def next_of(self, rank: int) -> dict[int, LaneCall]:
        """Return the first collective that a rank has not called. Add an empty entry if there is no such collective."""
        ahead = self.ahead.get(rank, 0)
        if ahead == len(self.meetings):
            self.meetings.append({})
        return self.meetings[ahead]


class Sequencer:
    """The collectives of lanes that some ranks have called and other ranks have not."""

    def __init__(self, size: int, outcome: Sequenced) -> None:
        self._size = size
        self._outcome = outcome
        self._lanes: dict[int, _LaneMeetings] = {}
        self._left: set[int] = set()
        self._unsaid: dict[int, None] = {}  # lanes whose waiting ranks do not know the missing ranks yet

    def __len__(self) -> int:
        """Return the number of lanes in which at least one rank waits for another rank."""
        return len(self._lanes)

    def hear(self, rank: int, call: LaneCall) -> None:
        """Record that a rank has called the next collective of a lane."""
        found = self._lanes.get(call.lane)
        if found is None:
            found = self._lanes[call.lane] = _LaneMeetings()
        meeting = found.next_of(rank)
        if self._disagrees(rank, call, meeting):
            return  # the mismatch loses the communicator
        meeting[rank] = call
        found.ahead[rank] = found.ahead.get(rank, 0) + 1
        if len(meeting) == self._size:  # this meeting is the oldest, because every rank calls in order
            found.meetings.popleft()
            found.ahead = {other: ahead - 1 for other, ahead in found.ahead.items()}
            self._look(call.lane, found)
            self._outcome.append(call.lane)
        else:
            self._unsaid[call.lane] = None
            self._refuse_left(call.lane, meeting)

    def _disagrees(self, rank: int, call: LaneCall, meeting: dict[int, LaneCall]) -> bool:
        """Compare a rank's call with other ranks' calls of the same collective.

        If two calls differ, refuse both calls and return True.
        """
        for other, theirs in meeting.items():
            if (wrong := disagree(rank, call, other, theirs)) is not None:
                self._outcome.refuse(other, call.lane, disagree(other, theirs, rank, call) or wrong)
                self._outcome.refuse(rank, call.lane, wrong)
                return True
            if not call.gives:
                return False  # the calls of all others are equal to this one
        return False

    def _look(self, lane: int, found: _LaneMeetings) -> None:
        """Delete the data of a lane if no rank waits in the lane."""
        if not found.meetings:
            del self._lanes[lane]
            self._unsaid.pop(lane, None)

    def give_up(self, rank: int, lane: int) -> None:
        """Delete a rank's calls in a lane, except the calls that are in the log.

        The rank makes no more calls in the lane.
        """
        found = self._lanes.get(lane)
        if found is None:
            return
        for meeting in islice(found.meetings, found.ahead.pop(rank, 0)):
            del meeting[rank]
        while found.meetings and not found.meetings[-1]:
            found.meetings.pop()
        self._look(lane, found)

    def leave(self, rank: int) -> None:
        """Record that a rank has closed, and refuse the collectives that need this rank."""
        self._left.add(rank)
        for lane, found in list(self._lanes.items()):
            for meeting in list(found.meetings):
                self._refuse_left(lane, meeting)

    def _refuse_left(self, lane: int, meeting: dict[int, LaneCall]) -> None:
        for gone in self._left:
            if gone not in meeting:
                for rank in list(meeting):
                    self._outcome.refuse(rank, lane, closed_by(gone))
                return

    def missing(self, lane: int) -> list[int]:
        """Return the ranks for which other ranks wait in a lane. Any thread may call this method."""
        found = self._lanes.get(lane)
        meeting = next(iter(list(found.meetings)), {}) if found is not None else {}
        return [rank for rank in range(self._size) if rank not in meeting] if meeting else []

    @property
    def has_news(self) -> bool:
        """True if a rank waits in some lane and does not know the missing ranks."""
        return bool(self._unsaid)

    def news(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield the lanes whose waiting ranks do not know the missing ranks. Each lane is yielded once.

        Each item is the lane, the lane's waiting ranks, and the lane's missing ranks.
        """
        lanes, self._unsaid = self._unsaid, {}
        for lane in lanes:
            meeting = self._lanes[lane].meetings[0]
            missing = islice((rank for rank in range(self._size) if rank not in meeting), MOST_NAMED)
            yield lane, list(meeting), list(missing)


def disagree(rank: int, mine: LaneCall, peer: int, theirs: LaneCall) -> MismatchError | None:
    """Return the error for ``rank`` if its call does not match the call of ``peer``; None if the calls match."""
    here, there = mine.text, theirs.text
    if here == there:
        if not mine.gives or (mine.takes[peer], mine.gives[peer]) == (theirs.gives[rank], theirs.takes[rank]):
            return None
        here += f" for {mine.takes[peer]} bytes from rank {peer} and {mine.gives[peer]} to it"
        there += f" for {theirs.takes[rank]} bytes from rank {rank} and {theirs.gives[rank]} to it"
    return disagreement(peer, there, rank, here)
