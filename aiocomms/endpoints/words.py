"""Notes that the two ends of a connection send each other, about regions and lent blocks."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import ControlCodec

LEADER: Final = 0
"""The rank that decides the order in which regions are opened and closed."""
LONGEST_WHY: Final = 200
"""The largest number of characters of a reason that a note contains."""


class Ask(msgspec.Struct, tag=0, array_like=True):
    """A request of the sender to use a region of the receiver."""

    question: int
    descriptor: bytes


class Refuse(msgspec.Struct, tag=1, array_like=True):
    """A refusal of an :class:`Ask`."""

    question: int
    why: str


class Grant(msgspec.Struct, tag=2, array_like=True):
    """The consent of rank 1 to an :class:`Ask` that the leader (rank 0) has sent. The leader then opens the region."""

    question: int
    number: int


class RegionOpening(msgspec.Struct, tag=3, array_like=True):
    """A note in which the leader says that it opens a region of rank ``owner``, as the other rank requested."""

    owner: int
    number: int
    question: int


class Leave(msgspec.Struct, tag=4, array_like=True):
    """A request to the leader to close a region."""

    owner: int
    number: int
    why: str


class Closing(msgspec.Struct, tag=5, array_like=True):
    """A note in which the leader says that it closes a region."""

    owner: int
    number: int
    why: str


class Bye(msgspec.Struct, tag=6, array_like=True):
    """A note in which an endpoint says that it closes the connection."""


class Here(msgspec.Struct, tag=7, array_like=True):
    """The first note that each end of a connection sends; it says where the sender's process runs."""

    place: str
    """The host and the process-id namespace. Two ends with the same place may map each other's memory."""
    process: int
    """The id of the sender's process in ``place``; 0 if the id is unknown."""


class Shelf(msgspec.Struct, tag=8, array_like=True):
    """A description of a pool, which the sender sends before it lends the pool's first blocks."""

    pool: int
    blocks: bytes
    """The descriptor of the pool's memory."""
    words: bytes
    """The descriptor of the region with :attr:`LeaseLedger.words`. A borrower uses this region to check its reads."""
    shape: tuple[int, ...]
    """The shape of the pool's memory: the number of blocks, then the shape of a block."""


class Lend(msgspec.Struct, tag=9, array_like=True):
    """A hand-over of blocks to the receiver; the body has the indices of the blocks and the program's ``meta``."""

    number: int
    """The number of the hand-over. The sender's endpoint never uses this number for another hand-over."""
    slot: int
    """The index of the hand-over's word in :attr:`LeaseLedger.words`."""
    pool: int
    write: bool
    body: bytes
    more: int = 0
    """The number of :class:`Piece` notes that contain the rest of the body."""


class Piece(msgspec.Struct, tag=10, array_like=True):
    """A part of the body of the preceding :class:`Lend` or :class:`GiveBack`."""

    body: bytes


class Recall(msgspec.Struct, tag=11, array_like=True):
    """A recall of lent blocks by their owner. The owner then waits for :class:`GiveBack` or :class:`LetGo`."""

    number: int
    why: str


class GiveBack(msgspec.Struct, tag=12, array_like=True):
    """The return of lent blocks by their borrower; the body is the program's answer."""

    number: int
    body: bytes
    more: int = 0


class LetGo(msgspec.Struct, tag=13, array_like=True):
    """The release of lent blocks by their borrower without an answer: after a recall, an error or a cancellation."""

    number: int
    why: str
    over: bool = False
    """True if the borrower releases the blocks because the connection is over."""


OfLeases = Here | Shelf | Lend | Piece | Recall | GiveBack | LetGo
"""The notes about lent blocks."""
Word = Ask | Refuse | Grant | RegionOpening | Leave | Closing | Bye | OfLeases
WORDS: Final = ControlCodec[Word](Word, "what the other endpoint says")


def read(what: bytes, rank: int) -> Word:
    """Decode a note from the other end.

    :param rank: the rank of this end.
    :raises ProtocolError: the note is malformed, or the other end has no right to send it.
    """
    word = WORDS.decode(what, 1 - rank)
    if isinstance(word, (RegionOpening, Closing) if rank == LEADER else (Grant, Leave)):
        raise ProtocolError(f"the other endpoint says {type(word).__name__}, which this one decides", peer=1 - rank)
    return word
