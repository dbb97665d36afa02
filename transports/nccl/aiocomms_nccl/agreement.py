"""The agreement of the ranks on the collectives that they call.

This module also handles the close, the abort and the death of a rank. NCCL waits without end for a rank that calls a
different collective. Each rank stores a description of its last calls. If a collective is quick and
``detects_mismatch`` is false, the ranks send no frame about it. If a collective waits for some milliseconds, the
waiting rank sends a frame to each other rank. The frame describes all calls since the rank's previous frame. The other
ranks compare the described calls with their own calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError, ProtocolError
from aiocomms.lowlevel import Reason, closed_by, disagreement, gone
from aiocomms.transport import Completion
from aiocomms_nccl import wire
from aiocomms_nccl.control import Control
from aiocomms_nccl.matching import Matcher

_NONE: Final = -1
_KEPT: Final = 32
"""The number of latest calls that a rank remembers."""
TELL_AFTER: Final = 0.005
"""The seconds for which a collective waits before this rank describes the collective to other ranks.

Most collectives end sooner.
"""
_TEXT: Final = 1000
"""The maximum length of a description, in characters."""


class LaneFrames(Protocol):
    """The object that handles frames about lanes from the other ranks."""

    def handle(self, peer: int, frame: wire.LaneFrame) -> None:
        """Handle a frame about lanes.

        :raises ProtocolError: the frame is invalid.
        """

    def leave(self, rank: int) -> None:
        """Handle the event that another rank has closed the communicator."""


class NcclAgreement:
    """This rank's pending collectives, and this rank's knowledge of the calls and closes of other ranks."""

    def __init__(
        self, control: Control, rank: int, detects_mismatch: bool, fail: Callable[[CommError], object]
    ) -> None:
        """Create an agreement without calls.

        :param detects_mismatch: whether a collective completes only after all ranks have announced their calls.
        :param fail: the function that this object calls with an error to mark the communicator as lost.
        """
        self.matcher: Matcher
        """The handler of frames about messages. The transport sets this attribute before the first frame arrives."""
        self.lanes: LaneFrames
        """The handler of frames about lanes. The transport sets this attribute before the first frame arrives."""
        self.pending: dict[int, Completion] = {}
        """The works of the collectives that are not done. The keys are the collectives' numbers."""
        self._control = control
        self._rank = rank
        self._detects_mismatch = detects_mismatch
        self._fail = fail
        self._log = _CallLog(rank, control.peers)
        self._data_moved: dict[int, Completion] = {}  # collectives whose data NCCL has moved, by number
        self._left: dict[int, int] = {}  # the ranks that have closed, and how many collectives each had called
        self._disputed = _NONE  # the number of the collective in which ranks disagree
        self._owed: set[int] = set()  # the ranks to which this rank must describe its calls
        self._waits = 0  # the number of own calls when the reminder was set

    # ----------------------------------------------------------------------------------------- this rank's own part

    def call(self, op: ops.Op, work: Completion | None) -> int:
        """Record that this rank has called a collective, and that NCCL has enqueued the collective.

        :param work: the work that :meth:`data_moved` completes; None if a CUDA graph has captured the collective.
        :returns: the number of the collective.
        """
        index, wrong = self._log.call(op)
        if work is not None:
            self.pending[index] = work
        if wrong is not None:
            self._dispute(index, wrong)
        elif self._left:
            self._fail_if_needed(index)
        if self._detects_mismatch:
            self._tell_calls()
        return index

    def data_moved(self, index: int) -> None:
        """Record that NCCL has moved the data of a collective, and complete the collective.

        If ``detects_mismatch`` is true, the completion waits until all ranks have announced their calls.
        """
        if self._detects_mismatch and self._log.waiting_for(index):
            self._data_moved[index] = self.pending[index]
        else:
            self._complete(index)

    def _complete(self, index: int) -> None:
        work = self.pending.pop(index)
        if not work.done():
            work.complete()

    def number_of(self, work: Completion) -> int | None:
        """Return the number of a pending collective; None if the work belongs to no pending collective."""
        return next((index for index, other in self.pending.items() if other is work), None)

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """Return the ranks for which a pending collective waits. Any thread may call this method."""
        found = [index for index, other in list(self.pending.items()) if other is work]
        return self._log.waiting_for(found[0]) if found else ()

    def tell_soon(self) -> None:
        """Schedule a frame that describes this rank's calls, because one of the called collectives waits."""
        if not self._control.reminds and self._log.has_news:
            self._remind()

    def _remind(self) -> None:
        if not self._control.reminds:
            self._waits = self._log.calls
        self._control.remind(TELL_AFTER)

    def _tell_calls(self) -> None:
        for peer in self._control.peers:
            self._tell_calls_to(peer)

    def send_bye(self) -> None:
        """Tell the other ranks that this rank has closed the communicator."""
        for peer in self._control.peers:
            self._control.send(peer, wire.NcclBye(self._log.calls, self.matcher.progress_with(peer)))

    def send_abort(self, error: CommError) -> None:
        """Tell the other ranks that this rank has aborted the communicator. Any thread may call this method."""
        for peer in self._control.peers:
            self._control.send(peer, wire.NcclAbort(Reason.of(error, self._rank), self._disputed))

    def closed_by(self, peer: int) -> CommError | None:
        """Return the error for ops that need ``peer``, or None if ``peer`` has not closed the communicator."""
        return closed_by(peer) if peer in self._left else None

    # -------------------------------------------------------------------------------------------- frames of the others

    def handle(
        self,
        frames: Sequence[tuple[int, wire.Frame | ProtocolError | None]],
        on_note: Callable[[int, bytes], object],
    ) -> None:
        """Handle the frames and errors that :meth:`Control.poll` has returned.

        :param on_note: the function that gets each note from another rank. The arguments are the rank and the note.
        """
        for peer, frame in frames:
            try:
                if isinstance(frame, wire.NcclNote):
                    on_note(peer, frame.text)
                else:
                    self._handle(peer, frame)
            except ProtocolError as error:
                self._fail(error)
        if self._control.reminded():
            self._tell_due()

    def _tell_due(self) -> None:
        """Describe this rank's calls to other ranks, when the timer that :meth:`Control.remind` started has expired.

        If a collective has waited since the timer was set, all ranks get a description. Otherwise only the ranks that
        have described their own calls get a description.
        """
        owed, self._owed = self._owed, set()
        first = next(iter(self.pending), self._waits)
        for peer in self._control.peers if first < self._waits else owed:
            self._tell_calls_to(peer)
        if first >= self._waits and self.pending and self._log.has_news:
            self._remind()

    def _handle(self, peer: int, frame: wire.Frame | ProtocolError | None) -> None:
        if frame is None:
            if peer not in self._left:
                self._fail(gone(peer))
        elif isinstance(frame, ProtocolError):
            raise frame
        elif isinstance(frame, wire.Announce):
            self.matcher.handle_announce(peer, frame)
        elif isinstance(frame, wire.TakeMessage):
            self.matcher.handle_take(peer, frame)
        elif isinstance(frame, wire.DirectionRequest):
            self.matcher.handle_direction(peer, frame)
        elif isinstance(frame, wire.Calls):
            self._handle_calls(peer, frame)
        elif isinstance(frame, wire.NcclBye):
            self._handle_bye(peer, frame)
        elif isinstance(frame, wire.LaneFrame):
            self.lanes.handle(peer, frame)
        elif isinstance(frame, wire.NcclAbort):
            self._dispute(frame.index, frame.reason.to_error())

    def _handle_calls(self, peer: int, frame: wire.Calls) -> None:
        wrong = self._log.hear(peer, frame)
        if wrong is not None:
            self._dispute(*wrong)
            return
        if self._detects_mismatch:
            self._tell_calls_to(peer)
        elif self._log.has_news:
            self._owed.add(peer)
            self._remind()
        for index in [index for index in self._data_moved if not self._log.waiting_for(index)]:
            del self._data_moved[index]
            self._complete(index)

    def _tell_calls_to(self, peer: int) -> None:
        frame = self._log.news_for(peer)
        if frame is not None:
            self._control.send(peer, frame)

    def _handle_bye(self, peer: int, frame: wire.NcclBye) -> None:
        self._left[peer] = frame.calls
        self.matcher.close_peer(peer, frame.progress, closed_by(peer))
        self.lanes.leave(peer)
        for index in list(self.pending):
            self._fail_if_needed(index)

    def _fail_if_needed(self, index: int) -> None:
        """Fail a collective and mark the communicator as lost, if a closed rank has not called the collective."""
        for peer, calls in self._left.items():
            if index >= calls:
                self._dispute(index, closed_by(peer))
                return

    def _dispute(self, index: int, error: CommError) -> None:
        """Fail the pending collective with the number ``index``, if there is one, and mark the communicator as lost."""
        self._disputed = index
        work = self.pending.get(index)
        if work is not None and not work.done():
            work.fail(error)
        self._fail(error)


class OwnCall(msgspec.Struct):
    """The description of one call of this rank, without its tensors."""

    signature: tuple[object, ...]
    gives: list[int]
    """A list: for each rank, the number of bytes that this rank sends to it.

    The list is empty for all ops except all-to-all ops.
    """
    takes: list[int]
    """A list: for each rank, the number of bytes that this rank receives from it.

    The list is empty for all ops except all-to-all ops.
    """

    def text(self) -> str:
        """Return the text that describes the call to other ranks."""
        name, *rest = self.signature
        text = f"{name}({', '.join(map(str, rest))})"
        if len(text) <= _TEXT:
            return text
        return f"{text[: _TEXT - 12]}... {zlib.crc32(text.encode()):08x}"


def own_call(op: Any, size: int) -> OwnCall:
    """Return the description of a collective that this rank calls in a communicator of ``size`` ranks."""
    if op.kind != ops.AllToAll.kind:
        return OwnCall(op.signature(), [], [])
    return OwnCall(op.signature(), [t.nbytes for t in op.ins(size)], [t.nbytes for t in op.outs(size)])


class _CallLog:
    """The collectives that this rank has called, and the descriptions of other ranks' calls."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.calls = 0
        """The number of collectives that this rank has called."""
        self._rank = rank
        self._size = len(peers) + 1
        self._heard = dict.fromkeys(peers, 0)  # the known number of calls of each rank
        self._told = dict.fromkeys(peers, 0)  # the number of own calls that each rank knows
        self._mine: dict[int, OwnCall] = {}
        self._others: dict[int, dict[int, wire.DescribedCall]] = {}  # the others' calls that this rank has not made yet

    def call(self, op: ops.Op) -> tuple[int, MismatchError | None]:
        """Record that this rank calls a collective.

        :returns: the number of the collective, and an error or None. The error means that another rank has announced a
            different collective with this number.
        """
        index = self.calls
        self.calls = index + 1
        self._mine[index] = own_call(op, self._size)
        self._mine.pop(index - _KEPT, None)
        error = None
        for peer, described in self._others.pop(index, {}).items():
            error = error or self._compare(index, peer, described)
        return index, error

    @property
    def has_news(self) -> bool:
        """True if at least one other rank does not know this rank's last call."""
        return any(told < self.calls for told in self._told.values())

    def news_for(self, peer: int) -> wire.Calls | None:
        """Return this rank's calls that the rank ``peer`` does not know yet, or None if ``peer`` knows all calls."""
        told = self._told.get(peer, self.calls)
        if told == self.calls:
            return None
        self._told[peer] = self.calls
        last = []
        for index in range(max(told, self.calls - _KEPT), self.calls):
            mine = self._mine[index]
            last.append(wire.DescribedCall(mine.text(), [mine.gives[peer], mine.takes[peer]] if mine.gives else []))
        return wire.Calls(self.calls, last)

    def hear(self, peer: int, news: wire.Calls) -> tuple[int, MismatchError] | None:
        """Compare another rank's calls with this rank's calls.

        :returns: the number and the error of the first call that differs; None if all calls match.
        """
        self._heard[peer] = max(self._heard.get(peer, 0), news.count)
        for index, described in enumerate(news.last, news.count - len(news.last)):
            if index >= self.calls:
                self._others.setdefault(index, {})[peer] = described
            elif (error := self._compare(index, peer, described)) is not None:
                return index, error
        return None

    def waiting_for(self, index: int) -> list[int]:
        """Return the ranks that have not announced their call of a collective. Any thread may call this method."""
        return [peer for peer, count in list(self._heard.items()) if count <= index]

    def _compare(self, index: int, peer: int, described: wire.DescribedCall) -> MismatchError | None:
        mine = self._mine.get(index)
        if mine is None:
            return None
        here, there = mine.text(), described.text
        if mine.text() == described.text:
            if not mine.gives or described.sizes == [mine.takes[peer], mine.gives[peer]]:
                return None
            here += f" for {mine.takes[peer]} bytes from rank {peer} and {mine.gives[peer]} to it"
            there += f" for {described.sizes} bytes to rank {self._rank} and from it"
        return disagreement(peer, there, self._rank, here)
