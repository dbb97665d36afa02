"""The notes that the ranks of one communicator send each other beside their ops, by :meth:`Transport.say`.

Recovery, diagnosis and endpoints use it. What a rank has sent is one of the records that stand here, or it is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.progress.guard import guarded
from aiocomms.transport import Transport

LARGEST: Final = 2048
"""Bytes of a note."""


class Question(msgspec.Struct, tag=0, array_like=True):
    """The question what a rank is doing. ``number`` identifies it among the sender's questions."""

    number: int


class Waiting(msgspec.Struct, array_like=True):
    """A wait of the sender for another rank."""

    rank: int
    age: float
    """Seconds since the op was called."""


class Late(Waiting, array_like=True):
    """The last receive of the sender whose deadline has passed."""

    what: str
    ago: float
    """Seconds since its deadline."""


class Answer(msgspec.Struct, tag=1, array_like=True):
    """The answer to a question."""

    number: int
    doing: str
    waits: list[Waiting]
    late: Late | None


class MeetingPlace(msgspec.Struct, tag=2, array_like=True):
    """The survivors of a lost communicator meet there."""

    where: bytes


class Passed(msgspec.Struct, tag=3, array_like=True):
    """The bytes that are to be passed on as they are."""

    what: bytes


class Parting(msgspec.Struct, tag=4, array_like=True):
    """The sender closes the communicator, and takes nothing any more that was sent to it."""


Note = Question | Answer | MeetingPlace | Passed | Parting
NOTES = ControlCodec[Note](Note, "a note", limit=LARGEST)


class Notes:
    """The notes that one rank sends to the others, and hears of them; any thread."""

    def __init__(self, transports: Sequence[Transport], size: int) -> None:
        """Begin with nothing heard.

        :param transports: the communicator's, which give what they hear to :meth:`hear`.
        """
        self.transports = transports
        self.places: dict[int, bytes] = {}
        """The places where, as ranks have said, the survivors meet."""
        self.tried: set[str] = set()
        """The keys of the decisions on a successor that this rank has failed to form."""
        self.on_word: Callable[[int, Question | Answer], object] = lambda rank, word: None
        """The call for a question or an answer of another rank. It waits for nothing."""
        self.on_passed: Callable[[int, bytes], object] = lambda rank, what: None
        """The call for what a rank has passed on; it waits for nothing, either."""
        self.leaving: set[int] = set()
        """The ranks that take nothing any more."""
        self.on_leaving: Callable[[], object] = lambda: None
        """The call when there is another one; it waits for nothing, either."""
        self._size = size

    def say(self, rank: int, note: Note) -> bool:
        """Send a rank a note, by the first transport that carries notes; False: none does."""
        data = NOTES.encode(note)
        return any(guarded(False, transport.say, rank, data) for transport in self.transports)

    def hear(self, rank: int, note: bytes) -> None:
        """See :meth:`Transport.on_note`."""
        try:
            found = read(note, self._size)
        except ProtocolError:
            return
        if isinstance(found, MeetingPlace):
            self.places[rank] = found.where
        elif isinstance(found, Parting):
            self.leaving.add(rank)
            self.on_leaving()
        elif isinstance(found, Passed):
            self.on_passed(rank, found.what)
        else:
            self.on_word(rank, found)


def read(note: bytes, size: int) -> Note:
    """Decode what a rank has said.

    :param size: the ranks there are.
    :raises ProtocolError: it makes no sense.
    """
    found = NOTES.decode(note)
    if isinstance(found, Answer):
        late = [found.late] if found.late else []
        ages = [wait.age for wait in (*found.waits, *late)] + [one.ago for one in late]
        ranks = [wait.rank for wait in (*found.waits, *late)]
        if not all(0 <= rank < size for rank in ranks) or not all(0 <= age < math.inf for age in ages):
            raise NOTES.unreadable(f"it tells of ranks {ranks}, and {ages} s")
    return found
