"""Lanes: collectives that are matched by a key, and in the order of the calls among those of their key alone.

Where the transport does not carry them itself, they go by messages, and each message has a tag that is made of the key.
So nothing is ordered between lanes, and a message that comes before its receive waits for it like any
other. Those of one lane run one after the other: then the order of the calls tells them apart, and a lane needs neither
a number that all ranks count alike nor memory while nothing of it is under way.
"""

from __future__ import annotations

import struct
from collections import deque
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError
from aiocomms.lowering.runs import Poster, Run, Steps
from aiocomms.lowlevel.threads import copied
from aiocomms.progress.inflight import LaneWork

Key = str | bytes | int
"""The key by which the ranks call a lane; keys of different types are different."""

_ABOVE = 1 << 62
"""Tags of lanes are at least this, and all others are less than 2**31."""
_BITS = _ABOVE - 1
GIVEN_UP = 1 << 61
"""The tag under which ranks tell each other of lanes that are given up, on the channel of collectives."""
_MOST_FINGERPRINTS = 4096
_SPREAD = 0x9E3779B97F4A7C15
"""The distance between a lane's tags, which is odd: lanes whose numbers are close share none of the small ones."""


def number_of(key: Key) -> int:
    """Return the number of a lane: 62 bits of a hash of its key, the same on all ranks."""
    if isinstance(key, str):
        data = b"s" + key.encode("utf-8", "surrogatepass")
    else:
        data = b"b" + key if isinstance(key, bytes) else b"i%x" % key if key >= 0 else b"i-%x" % -key
    return _hash(data)


def _hash(data: bytes) -> int:
    found: int = struct.unpack("<Q", blake2b(data, digest_size=8).digest())[0]
    return found & _BITS


def tag_of(number: int, tag: int) -> int:
    """Return the tag that a message of a lane has in place of its user's tag."""
    return _ABOVE | (number + tag * _SPREAD) & _BITS


def collective_tag(number: int, op: Any) -> int:
    """Return the tag of a collective's messages, which ranks that call different collectives do not share.

    What differs in size or dtype has one tag, and is found when a message arrives.
    """
    what = (op.name, getattr(op, "root", None), getattr(op, "op", None))
    fingerprint = _fingerprints.get(what)
    if fingerprint is None:
        if len(_fingerprints) == _MOST_FINGERPRINTS:
            _fingerprints.clear()
        fingerprint = _fingerprints[what] = _hash(repr(what).encode())
    return _ABOVE | (number + fingerprint) & _BITS


_fingerprints: dict[tuple[object, ...], int] = {}
"""The fingerprints of the kinds of collectives that this process has called on lanes."""


def collective_tags(number: int) -> list[int]:
    """Return the tags of a lane's collectives, of all kinds that this process has called."""
    return [_ABOVE | (number + fingerprint) & _BITS for fingerprint in _fingerprints.values()]


def within(op: Any, number: int) -> Any:
    """Return a message, or a batch of them, as one of a lane."""
    if isinstance(op, ops.Batch):
        return ops.Batch(tuple(within(part, number) for part in op.parts))
    return replace(op, tag=tag_of(number, op.tag))


class _LaneRun(Run):
    """The run of a collective of a lane, once it is its turn."""

    __slots__ = ("_turn",)

    work: LaneWork[Any]

    def __init__(self, comm: Poster, steps: Steps, work: LaneWork[Any], turn: _Turn) -> None:
        super().__init__(comm, steps, work)
        self._turn = turn

    def advance(self) -> None:
        super().advance()
        self._turn.look()

    def begin(self) -> None:
        """Start it after the one before it. Its caller has gone, so what is raised ends the communicator."""
        self._posted = True
        self.advance()

    def part_failed(self, error: CommError) -> None:
        super().part_failed(error)
        self._turn.look()

    def _give_up(self, error: CommError) -> None:
        named = self.work.located(error) if isinstance(error, MismatchError) else error
        super()._give_up(named.about(comm=self.work._comm_name()))


class _Turn(deque[_LaneRun]):
    """The collectives of one lane that have not ended: the first is under way, the others wait for their turn."""

    def __init__(self, turns: dict[int, _Turn], number: int) -> None:
        super().__init__()
        self._turns = turns
        self._number = number
        self._looking = False

    def call(self, run: _LaneRun) -> None:
        """Start a collective, now or when those before it have ended."""
        self.append(run)
        if len(self) == 1:
            try:
                run.advance()
            except BaseException:  # The exception is the caller's, and nothing was sent.
                self.clear()
                del self._turns[self._number]
                raise

    def look(self) -> None:
        """Start the next one if the first has ended. Without recursion: thousands may end at once."""
        if self._looking:
            return
        self._looking = True
        try:
            while self and self[0].work.done():
                self.popleft()
                if self:
                    self[0].begin()
        finally:
            self._looking = False
        if not self:
            self._turns.pop(self._number, None)


class Turns(dict[int, _Turn]):
    """The lanes of one communicator that have collectives under way, by their numbers."""

    def __init__(self, comm: Poster) -> None:
        super().__init__()
        self._comm = comm

    def call(self, steps: Steps, work: LaneWork[Any]) -> None:
        """Start a collective of a lane when it is its turn."""
        number = work.number
        turn = self.get(number)
        if turn is None:
            turn = self[number] = _Turn(self, number)
        turn.call(_LaneRun(self._comm, steps, work, turn))

    def waiting_for(self, work: LaneWork[Any]) -> list[int] | None:
        """Return the ranks whose messages a collective waits for, or the one that is before it in its lane. Any thread.

        :returns: None: the collective is not made of messages.
        """
        for turn in copied(self.values()):
            runs = copied(turn)
            if any(run.work is work for run in runs):
                return runs[0].waits_for()
        return None

    def stop(self, number: int, error: CommError) -> list[ops.Send]:
        """End the collectives of one lane; see :meth:`Run.stop`.

        :returns: the messages that nothing may have matched yet.
        """
        runs = list(self.pop(number, ()))
        left = [send for run in runs for send in run.unfinished_sends()]
        for run in reversed(runs):  # In this order no run begins when the one before it ends.
            run.stop(error)
        return left
