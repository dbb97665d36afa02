"""What a rank learns of those for which it has waited, when the deadline of a receive passes.

The communicator goes on, so nobody is asked. Each rank leaves word of its own late receives, and looks for that of the
rank which it has waited for, and of the rank which that one has waited for, and so on. The last rank of a circle finds
it whole. What cannot be learnt leaves the error as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from aiocomms.bootstrap.board import Board
from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.postmortem import ASKED, PATIENCE, in_time, printable
from aiocomms.errors import CommError
from aiocomms.lowlevel.failures import UNREADABLE

PERIOD: Final = 0.5
"""Seconds between two inquiries of a communicator: a program that polls by short deadlines is not to load the store."""

_LATE: Final = "late"
_LARGEST: Final = 1024
"""Bytes of what another rank says."""


class Late(NamedTuple):
    """A receive of this rank whose deadline has just passed."""

    rank: int
    peer: int
    what: str
    age: float
    """Seconds since it was called."""


class Waited(msgspec.Struct, array_like=True):
    """A receive whose deadline has passed. Times are seconds of the wall clock."""

    rank: int
    peer: int
    what: str
    since: float
    until: float


_waited = msgspec.json.Decoder(Waited)


class Inquiry:
    """Finds out for one communicator, a rank of which has waited too long, whom that rank has waited for."""

    def __init__(self, board: Board, size: int) -> None:
        self._board = board
        self._size = size
        self._not_before = float("-inf")

    def begin(self, late: Late, end: Callable[[str], object]) -> None:
        """Leave word of a late receive, and follow it from rank to rank; on the watchdog's thread.

        :param end: called once, on any thread, with what is to be added to the error.
        """
        now = time.monotonic()
        if self._size > 1 and self._board.store is not None and now >= self._not_before:
            self._not_before = now + PERIOD
            until = time.time()  # the ranks' hosts have no other clock in common
            mine = Waited(late.rank, late.peer, late.what, until - late.age, until)
            if dumps.in_background(lambda: end(in_time(PATIENCE, "", lambda: self._follow(mine)))):
                return
        end("")

    def _follow(self, mine: Waited) -> str:
        chain, following = [mine], mine.peer
        since, until = mine.since, mine.until
        try:
            self._board.tell(_LATE, msgspec.json.encode(mine))
            while following not in [one.rank for one in chain] and len(chain) <= ASKED:
                found = self._read(self._board.told(_LATE, following), following)
                if found is None:
                    break
                since, until = max(since, found.since), min(until, found.until)
                if since > until:  # all of them must have waited at one time
                    break
                chain.append(found)
                following = found.peer
        except CommError:
            return ""
        return _report(chain, following)

    def _read(self, said: bytes | None, rank: int) -> Waited | None:
        """What a rank said; None if it said nothing, or nothing that makes sense."""
        if said is None or len(said) > _LARGEST:
            return None
        try:
            found = _waited.decode(said)
        except UNREADABLE:
            return None
        found.what = printable(found.what)
        return found if found.rank == rank and 0 <= found.peer < self._size else None


def _report(chain: Sequence[Waited], following: int) -> str:
    """Say what the others have waited for; and whether in a circle: whether the last one has waited for one of them."""
    if len(chain) == 1:
        return ""
    others = ", ".join(f"rank {one.rank} was late in {one.what}" for one in chain[1:])
    ranks = [one.rank for one in chain]
    if following not in ranks:
        return f": {others}"
    circle = " -> ".join(f"rank {rank}" for rank in (*ranks[ranks.index(following) :], following))
    return f": {others}: they waited in a circle: {circle}"
