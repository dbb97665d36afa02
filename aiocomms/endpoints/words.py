"""The notes that the two ends of a connection send each other, about regions and about blocks that are lent."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import ControlCodec

LEADER: Final = 0
"""The rank that decides in which order regions are opened and closed."""
LONGEST_WHY: Final = 200
"""Characters of a reason."""


class Ask(msgspec.Struct, tag=0, array_like=True):
    """The question whether the sender may use a region of the receiver."""

    question: int
    descriptor: bytes


class Refuse(msgspec.Struct, tag=1, array_like=True):
    """The answer that it may not."""

    question: int
    why: str


class Grant(msgspec.Struct, tag=2, array_like=True):
    """The answer that it may, which asks the leader to open the region."""

    question: int
    number: int


class RegionOpening(msgspec.Struct, tag=3, array_like=True):
    """The leader opens a region of the rank ``owner``, because of a question of the other one."""

    owner: int
    number: int
    question: int


class Leave(msgspec.Struct, tag=4, array_like=True):
    """The request to the leader that it close a region."""

    owner: int
    number: int
    why: str


class Closing(msgspec.Struct, tag=5, array_like=True):
    """The word of the leader that it closes a region."""

    owner: int
    number: int
    why: str


class Bye(msgspec.Struct, tag=6, array_like=True):
    """The word of an endpoint that it closes the connection."""


class Here(msgspec.Struct, tag=7, array_like=True):
    """The word of an end that it is there."""

    place: str
    """The host and its numbering of processes: ends of one place may map each other's memory."""
    process: int
    """Its number there; 0: it is not known."""


class Shelf(msgspec.Struct, tag=8, array_like=True):
    """A pool of the sender, of which it is about to lend blocks."""

    pool: int
    blocks: bytes
    """The descriptor of its memory."""
    words: bytes
    """The descriptor of the words that vouch for what is read."""
    shape: tuple[int, ...]
    """The shape of its memory: the number of blocks, and what a block is."""


class Lend(msgspec.Struct, tag=9, array_like=True):
    """The sender lends blocks; its body has their indices, and what the program has to say."""

    number: int
    """The number of the hand-over among those of the sender's endpoint, which is never used again."""
    slot: int
    """The place of its word."""
    pool: int
    write: bool
    body: bytes
    more: int = 0
    """The number of :class:`Piece` in which the rest of the body follows."""


class Piece(msgspec.Struct, tag=10, array_like=True):
    """A part of the body of what was said before."""

    body: bytes


class Recall(msgspec.Struct, tag=11, array_like=True):
    """The sender takes back what it has lent; it waits for :class:`GiveBack` or :class:`LetGo`."""

    number: int
    why: str


class GiveBack(msgspec.Struct, tag=12, array_like=True):
    """The sender is through with what it was lent, and uses it no more; its body is the program's answer."""

    number: int
    body: bytes
    more: int = 0


class LetGo(msgspec.Struct, tag=13, array_like=True):
    """The sender uses no more what it was lent: it was taken back, or dropped."""

    number: int
    why: str
    over: bool = False
    """True if that is because the connection is over."""


OfLeases = Here | Shelf | Lend | Piece | Recall | GiveBack | LetGo
"""The words about blocks that are lent."""
Word = Ask | Refuse | Grant | RegionOpening | Leave | Closing | Bye | OfLeases
WORDS: Final = ControlCodec[Word](Word, "what the other endpoint says")


def read(what: bytes, rank: int) -> Word:
    """Decode what the other end says.

    :param rank: this end's.
    :raises ProtocolError: it makes no sense, or is not for this end to hear.
    """
    word = WORDS.decode(what, 1 - rank)
    if isinstance(word, (RegionOpening, Closing) if rank == LEADER else (Grant, Leave)):
        raise ProtocolError(f"the other endpoint says {type(word).__name__}, which this one decides", peer=1 - rank)
    return word
