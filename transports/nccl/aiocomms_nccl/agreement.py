"""What the other ranks say and do: whether they call the same, close, give up, or die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

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
"""Calls that are remembered."""
_TEXT: Final = 1000
"""Characters of a description."""


class Agreement:
    """The other ranks, as this one knows them, and the collectives that are under way with them."""

    def __init__(
        self, control: Control, rank: int, detects_mismatch: bool, fail: Callable[[CommError], object]
    ) -> None:
        """Begin.

        :param detects_mismatch: whether no collective is complete before all ranks have told that they call it.
        :param fail: called when the communicator is lost.
        """
        self.matcher: Matcher
        """Set by the transport, before anything is heard."""
        self.pending: dict[int, Completion] = {}
        """The collectives that are not done, by their numbers."""
        self._control = control
        self._rank = rank
        self._detects_mismatch = detects_mismatch
        self._fail = fail
        self._log = _CallLog(rank, control.peers)
        self._data_moved: dict[int, Completion] = {}  # done as far as NCCL knows
        self._left: dict[int, int] = {}  # ranks that have closed, and how many collectives they had called
        self._disputed = _NONE  # the collective in which ranks disagree

    # ----------------------------------------------------------------------------------------- this rank's own part

    def call(self, op: ops.Op, work: Completion | None) -> int:
        """This rank has called a collective, which NCCL has enqueued.

        :param work: completed by :meth:`data_moved`; None: it was captured.
        :returns: its number.
        """
        index, wrong = self._log.call(op)
        if work is not None:
            self.pending[index] = work
        if wrong is not None:
            self._dispute(index, wrong)
        elif self._left:
            self._fail_if_needed(index)
        if self._detects_mismatch:
            self.tell_calls()
        return index

    def data_moved(self, index: int) -> None:
        """A collective's data has moved, as far as NCCL knows."""
        if self._detects_mismatch and self._log.waiting_for(index):
            self._data_moved[index] = self.pending[index]
        else:
            self._complete(index)

    def _complete(self, index: int) -> None:
        work = self.pending.pop(index)
        if not work.done():
            work.complete()

    def is_pending(self, work: Completion) -> bool:
        """Whether a work is a collective that is not done."""
        return any(other is work for other in self.pending.values())

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """The ranks that a pending collective waits for. Any thread."""
        found = [index for index, other in list(self.pending.items()) if other is work]
        return self._log.waiting_for(found[0]) if found else ()

    def tell_calls(self) -> None:
        """This rank waits: tell the others in what."""
        for peer in self._control.peers:
            self._tell_calls_to(peer)

    def send_bye(self) -> None:
        """This rank has closed."""
        for peer in self._control.peers:
            self._control.send(peer, wire.Bye(self._log.calls))

    def send_abort(self, error: CommError) -> None:
        """This rank has given up. Any thread."""
        for peer in self._control.peers:
            self._control.send(peer, wire.Abort(Reason.of(error, self._rank), self._disputed))

    def closed_by(self, peer: int) -> CommError | None:
        """What fails that needs a rank which has closed; None: it has not."""
        return closed_by(peer) if peer in self._left else None

    # ------------------------------------------------------------------------------------------- what the others say

    def handle(self, frames: Sequence[tuple[int, wire.Frame | ProtocolError | None]]) -> None:
        """Act on what :meth:`Control.poll` has brought."""
        for peer, frame in frames:
            try:
                self._handle(peer, frame)
            except ProtocolError as error:
                self._fail(error)

    def _handle(self, peer: int, frame: wire.Frame | ProtocolError | None) -> None:
        if frame is None:
            if peer not in self._left:
                self._fail(gone(peer))
        elif isinstance(frame, ProtocolError):
            raise frame
        elif isinstance(frame, wire.Announce):
            self.matcher.handle_announce(peer, frame)
        elif isinstance(frame, wire.Take):
            self.matcher.handle_take(peer, frame)
        elif isinstance(frame, wire.Lane):
            self.matcher.handle_lane(peer, frame)
        elif isinstance(frame, wire.Calls):
            self._handle_calls(peer, frame)
        elif isinstance(frame, wire.Bye):
            self._handle_bye(peer, frame)
        else:
            self._dispute(frame.index, frame.reason.to_error())

    def _handle_calls(self, peer: int, frame: wire.Calls) -> None:
        wrong = self._log.hear(peer, frame)
        if wrong is not None:
            self._dispute(*wrong)
            return
        self._tell_calls_to(peer)
        for index in [index for index in self._data_moved if not self._log.waiting_for(index)]:
            del self._data_moved[index]
            self._complete(index)

    def _tell_calls_to(self, peer: int) -> None:
        frame = self._log.news_for(peer)
        if frame is not None:
            self._control.send(peer, frame)

    def _handle_bye(self, peer: int, frame: wire.Bye) -> None:
        self._left[peer] = frame.calls
        self.matcher.close_peer(peer, closed_by(peer))
        for index in list(self.pending):
            self._fail_if_needed(index)

    def _fail_if_needed(self, index: int) -> None:
        """Whether a pending collective can still come to its end."""
        for peer, calls in self._left.items():
            if index >= calls:
                self._dispute(index, closed_by(peer))
                return

    def _dispute(self, index: int, error: CommError) -> None:
        """All is lost, and one collective is at fault."""
        self._disputed = index
        work = self.pending.get(index)
        if work is not None and not work.done():
            work.fail(error)
        self._fail(error)


class _OwnCall(msgspec.Struct):
    """One of this rank's calls, without its tensors."""

    signature: tuple[object, ...]
    gives: list[int]
    """Bytes for each rank, where these need not be the same for all; else nothing."""
    takes: list[int]

    def text(self) -> str:
        name, *rest = self.signature
        return f"{name}({', '.join(map(str, rest))})"[:_TEXT]


def _own_call(op: Any, size: int) -> _OwnCall:
    if op.kind != ops.AllToAll.kind:
        return _OwnCall(op.signature(), [], [])
    return _OwnCall(op.signature(), [t.nbytes for t in op.ins(size)], [t.nbytes for t in op.outs(size)])


class _CallLog:
    """What this rank has called, and what it has heard of the others."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.calls = 0
        """Collectives that this rank has called."""
        self._rank = rank
        self._size = len(peers) + 1
        self._heard = dict.fromkeys(peers, 0)  # as far as this rank knows, how many each other rank has called
        self._told = dict.fromkeys(peers, 0)
        self._mine: dict[int, _OwnCall] = {}
        self._others: dict[int, dict[int, wire.Described]] = {}  # of what this rank has not called yet

    def call(self, op: ops.Op) -> tuple[int, MismatchError | None]:
        """This rank calls a collective.

        :returns: its number, and what is wrong with it as far as is known.
        """
        index = self.calls
        self.calls = index + 1
        self._mine[index] = _own_call(op, self._size)
        self._mine.pop(index - _KEPT, None)
        error = None
        for peer, described in self._others.pop(index, {}).items():
            error = error or self._compare(index, peer, described)
        return index, error

    def news_for(self, peer: int) -> wire.Calls | None:
        """What a rank has not been told yet."""
        told = self._told.get(peer, self.calls)
        if told == self.calls:
            return None
        self._told[peer] = self.calls
        last = []
        for index in range(max(told, self.calls - _KEPT), self.calls):
            mine = self._mine[index]
            last.append(wire.Described(mine.text(), [mine.gives[peer], mine.takes[peer]] if mine.gives else []))
        return wire.Calls(self.calls, last)

    def hear(self, peer: int, news: wire.Calls) -> tuple[int, MismatchError] | None:
        """A rank tells what it has called.

        :returns: the collective in which it does something else, if there is one.
        """
        self._heard[peer] = max(self._heard.get(peer, 0), news.count)
        for index, described in enumerate(news.last, news.count - len(news.last)):
            if index >= self.calls:
                self._others.setdefault(index, {})[peer] = described
            elif (error := self._compare(index, peer, described)) is not None:
                return index, error
        return None

    def waiting_for(self, index: int) -> list[int]:
        """The ranks that have not called a collective, as far as this rank knows. Any thread."""
        return [peer for peer, count in list(self._heard.items()) if count <= index]

    def _compare(self, index: int, peer: int, described: wire.Described) -> MismatchError | None:
        mine = self._mine.get(index)
        if mine is None:
            return None
        here, there = mine.text(), described.text
        if mine.text() == described.text:
            if not mine.gives or described.sizes == [mine.takes[peer], mine.gives[peer]]:
                return None
            here += f" for {mine.takes[peer]} bytes from there and {mine.gives[peer]} to there"
            there += f" for {described.sizes} bytes"
        return disagreement(index, peer, there, self._rank, here)
