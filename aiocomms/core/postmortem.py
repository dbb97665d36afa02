"""The post mortem of a communicator that a missed deadline has ended: which ranks were missing, and why.

When a deadline passes, every rank writes its activity to the store of the rendezvous. The *reporting rank*, whose
deadline has passed, waits briefly for the other ranks' records. The reporting rank derives a verdict from the records,
and writes the verdict to the store. Then the pending works end. The post mortem runs in a thread. The duration of the
post mortem and the size of each record are limited. The verdict also names the ranks that wrote no record in time. If a
rank does not get the verdict in time, the errors of its works contain no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from aiocomms.bootstrap.board import Board
from aiocomms.core.lifecycle import Failure, Verdict
from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.dumps import Record
from aiocomms.diagnosis.hang_report import behind, judge
from aiocomms.diagnosis.recorder import LONGEST, SHOWN, Brief, Item, Snapshot
from aiocomms.errors import ArgumentError, CommTimeoutError, ProtocolError, StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.clock import Reply
from aiocomms.lowlevel.control import ControlCodec

if TYPE_CHECKING:
    from aiocomms.core.core import Core

T = TypeVar("T")

PATIENCE, LONGER = 0.2, 0.3
"""The lengths of two waits in seconds. Both waits begin at the loss of the communicator.

For ``PATIENCE`` seconds the reporting rank reads the other ranks' records. For ``LONGER`` seconds the works wait for
the verdict. A work must fail within 0.5 s after its deadline. The remaining 0.2 s are a reserve for a busy machine.
"""
WRITING = 1.0
"""The largest number of seconds for which works wait for the flight recorder's file.

The errors of the works contain the path of this file. To write the file takes about 1 ms, but the write may never end
if the file system hangs.
"""
ASKED = 64
"""The largest number of ranks whose records are read. The missing ranks are read first."""

_DOING, _VERDICT = "doing", "verdict"
"""The keys of the records in the store: each rank's activity, and the reporting rank's verdict."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
_LARGEST = 16384
"""The largest size of a record from another rank, in bytes."""
_BRIEFS = ControlCodec[Brief](Brief, "what a rank says it is doing", limit=_LARGEST)
_VERDICTS = ControlCodec[Verdict](Verdict, "a verdict", limit=_LARGEST)


class PostMortem:
    """The post mortem of one lost communicator.

    The communicator's works wait until the missed deadline is explained.
    """

    def __init__(self, comm: Core, board: Board, failure: Failure) -> None:
        """Create the post mortem. Its time limits begin at the loss of the communicator.

        :param failure: the reason for the loss.
        """
        self._comm, self._board, self._failure = comm, board, failure
        assert isinstance(failure.error, CommTimeoutError)
        self._error = failure.error
        self._nothing = Verdict("", self._error.late)
        self._closed = clock.event()

    def hold(self, record: Record, end: Callable[[Verdict, Path | None], object]) -> None:
        """Start the post mortem on a background thread. Any thread and any signal handler may call this.

        :param end: a function that is called once, on any thread, with the verdict and the path of the flight
            recorder's file.
        """
        if not dumps.in_background(lambda: self._sit(record, end)):
            end(self._nothing, None)

    def close(self) -> None:
        """Stop the post mortem, because no work waits for the verdict any more."""
        self._closed.set()

    def _sit(self, record: Record, end: Callable[[Verdict, Path | None], object]) -> None:
        verdict, path = self._nothing, None
        try:
            snapshot = record.snapshot()
            if snapshot is not None:
                if self._comm.size > 1 and self._board.store is not None:
                    verdict = in_time(self._left(LONGER), verdict, lambda: self._verdict(snapshot))
                snapshot.header.verdict = verdict.report
                path = in_time(WRITING, None, lambda: dumps.try_write(snapshot))
        finally:
            end(verdict, path)

    def _left(self, seconds: float) -> float:
        """Return the number of seconds that remain until ``seconds`` have passed since the loss."""
        return self._failure.since + seconds - clock.now()

    def _verdict(self, snapshot: Snapshot) -> Verdict:
        """Write this rank's activity to the store, and return the verdict.

        The reporting rank reads the other ranks' records and makes the verdict. Any other rank reads the verdict.
        """
        comm, brief = self._comm, snapshot.header.brief
        try:
            self._board.tell(_DOING, _BRIEFS.encode(brief))
            teller = self._error.teller
            if teller is None:  # This rank's own op is late.
                verdict = self._ask(snapshot)
                self._board.tell(_VERDICT, _VERDICTS.encode(verdict))
                return verdict
            if teller != comm.rank:
                said = self._hear(_VERDICT, [teller], LONGER).get(teller)
                return self._nothing if said is None else _read_verdict(said, comm.size)
        except (ArgumentError, StoreLostError, ProtocolError):  # A communicator that is closed has no store.
            pass
        return self._nothing

    def _ask(self, snapshot: Snapshot) -> Verdict:
        comm, absent = self._comm, self._error.late
        op = next((item for item in snapshot.pending if item.seq == self._error.seq), None)
        if op is None:
            return self._nothing
        others = [] if op.collective is None else [r for r in range(comm.size) if r not in absent]
        asked = [rank for rank in (*absent, *others) if rank != comm.rank][:ASKED]
        said = self._hear(_DOING, asked, PATIENCE)
        briefs = {rank: brief for rank in asked if (brief := read_brief(said.get(rank), rank)) is not None}
        mine = {} if op.collective is None else {comm.rank: snapshot.header.brief}
        silent = set(asked) - briefs.keys()
        report = judge(op, {**briefs, **mine}, silent)[: 4 * LONGEST]
        return Verdict(report, absent if op.collective is None else behind(op, briefs, silent, absent))

    def _hear(self, key: str, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
        """Read the ranks' records until all are read, the time limit has passed, or the communicator is closed."""
        heard: dict[int, bytes] = {}
        pause = _FIRST_PAUSE
        while True:
            for rank in ranks:
                if rank not in heard and (value := self._board.told(key, rank)) is not None:
                    heard[rank] = value
            left = self._left(seconds)
            if len(heard) == len(ranks) or left <= 0 or self._closed.wait(min(pause, left)):
                return heard
            pause = min(2 * pause, _LONGEST_PAUSE)


def in_time(seconds: float, otherwise: T, call: Callable[[], T]) -> T:
    """Call a function on a background thread, and return ``otherwise`` if the function takes longer than ``seconds``.

    The function may block without end, if the store's host is stopped or lost, or if the file system hangs.
    """
    answer = Reply[T]()
    if not dumps.in_background(lambda: answer.put(call())):
        return otherwise
    try:
        return answer.get(seconds)
    except TimeoutError:
        return otherwise


def read_brief(said: bytes | None, rank: int) -> Brief | None:
    """Return a rank's record of its activity; None if there is no record or the record is invalid."""
    if said is None:
        return None
    try:
        brief = _BRIEFS.decode(said, rank)
    except ProtocolError:
        return None
    tidy(brief)
    return brief if brief.rank == rank else None


def _read_verdict(said: bytes, size: int) -> Verdict:
    """Return the reporting rank's verdict.

    :raises ProtocolError: the verdict is invalid.
    """
    verdict = _VERDICTS.decode(said)
    if not all(0 <= rank < size for rank in verdict.late):
        raise _VERDICTS.unreadable(f"it tells of ranks {verdict.late}")
    return Verdict(printable(verdict.report, 4 * LONGEST), verdict.late)


def tidy(brief: Brief) -> None:
    """Change the texts of another process's record so that an error message can contain them.

    The texts become short and printable. The record is changed in place.
    """
    brief.last = printable(brief.last)
    brief.pending = [tidied(item) for item in brief.pending[:SHOWN]]


def tidied(item: Item) -> Item:
    """Return a copy of another process's op with short and printable texts, for an error message."""
    args = {printable(name, 20): value for name, value in list(item.args.items())[:SHOWN]}
    texts = {name: printable(getattr(item, name)) for name in ("error", "task", "where", "lane", "of")}
    tensors = [printable(text) for text in item.tensors[:SHOWN]]
    return msgspec.structs.replace(item, name=printable(item.name, 60), args=args, tensors=tensors, **texts)


def printable(text: str, longest: int = LONGEST) -> str:
    """Return the first ``longest`` characters of another process's text, with ``?`` for each unprintable character."""
    return "".join(c if c.isprintable() else "?" for c in text[:longest])
