"""The notes that the ranks of one communicator send each other in addition to their ops, with :meth:`Transport.say`.

Recovery, diagnosis and endpoints use notes. A received note is ignored if its type is none of the record types in this
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from aiocomms.errors import CommError, ProtocolError, StoreLostError
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.progress.guard import guarded
from aiocomms.transport import Transport

LARGEST: Final = 2048
"""The largest size of a note in bytes."""


class Question(msgspec.Struct, tag=0, array_like=True):
    """A question about the state of a rank. ``number`` identifies the question among the sender's questions."""

    number: int


class Waiting(msgspec.Struct, array_like=True):
    """An op of the sender that waits for another rank."""

    rank: int
    age: float
    """The seconds since the op was called."""


class Late(Waiting, array_like=True):
    """The sender's last receive that has missed its deadline."""

    what: str
    ago: float
    """The seconds since the receive's deadline."""


class Answer(msgspec.Struct, tag=1, array_like=True):
    """The answer to a question."""

    number: int
    doing: str
    waits: list[Waiting]
    late: Late | None


class MeetingPlace(msgspec.Struct, tag=2, array_like=True):
    """The place at which the survivors of a lost communicator meet."""

    where: bytes


class Passed(msgspec.Struct, tag=3, array_like=True):
    """A note with bytes that another module sends and receives. This module does not interpret the bytes."""

    what: bytes


class Parting(msgspec.Struct, tag=4, array_like=True):
    """The notice that the sender closes the communicator, and receives nothing more."""


class NoStore(msgspec.Struct, tag=5, array_like=True):
    """The notice that the sender has lost the store during a split, before the sender's new communicator was formed."""

    number: int
    """The number of the split among the splits of the communicator."""


Note = Question | Answer | MeetingPlace | Passed | Parting | NoStore
NOTES = ControlCodec[Note](Note, "a note", limit=LARGEST)


class Notes:
    """The notes that one rank sends to the other ranks and receives from them. Any thread may use this object."""

    def __init__(self, transports: Sequence[Transport], size: int) -> None:
        """Create the object, without received notes.

        :param transports: the communicator's transports, which pass each received note to :meth:`hear`.
        """
        self.transports = transports
        self.places: dict[int, bytes] = {}
        """A mapping from a rank to the place that the rank has named as the survivors' meeting place."""
        self.tried: set[str] = set()
        """The keys of the recovery's decisions that this rank has tried to carry out, with or without success."""
        self.on_word: Callable[[int, Question | Answer], object] = lambda rank, word: None
        """The function that is called with each question or answer of another rank. The function must not block."""
        self.on_passed: Callable[[int, bytes], object] = lambda rank, what: None
        """The function that is called with the bytes of each :class:`Passed` record of another rank.

        The function must not block.
        """
        self.leaving: set[int] = set()
        """The ranks that have closed the communicator."""
        self.storeless: set[tuple[int, int]] = set()
        """Pairs of a split's number and a rank. The rank has reported that it lost the store during this split."""
        self.on_leaving: Callable[[], object] = lambda: None
        """The function that is called when another rank leaves. The function must not block."""
        self._size = size

    def say(self, rank: int, note: Note) -> bool:
        """Send a note to a rank through the first transport that carries notes.

        Return False if no transport carries notes.
        """
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
        elif isinstance(found, NoStore):
            self.storeless.add((found.number, rank))
        elif isinstance(found, Passed):
            self.on_passed(rank, found.what)
        else:
            self.on_word(rank, found)

    def tell_no_store(self, number: int, members: Sequence[int]) -> None:
        """Tell the members of this rank's group in a split that this rank has lost the store.

        The members may still reach the store.
        """
        for rank in members:
            self.say(rank, NoStore(number))

    def no_store(self, number: int, members: Sequence[int]) -> CommError | None:
        """Return an error if a member of this rank's group in a split has reported the loss of the store."""
        lost = [rank for rank in members if (number, rank) in self.storeless]
        return StoreLostError(f"ranks {lost} have lost the store") if lost else None


def read(note: bytes, size: int) -> Note:
    """Decode a note.

    :param size: the number of ranks.
    :raises ProtocolError: the note is malformed.
    """
    found = NOTES.decode(note)
    if isinstance(found, Answer):
        late = [found.late] if found.late else []
        ages = [wait.age for wait in (*found.waits, *late)] + [one.ago for one in late]
        ranks = [wait.rank for wait in (*found.waits, *late)]
        if not all(0 <= rank < size for rank in ranks) or not all(0 <= age < math.inf for age in ages):
            raise NOTES.unreadable(f"it tells of ranks {ranks}, and {ages} s")
    return found
