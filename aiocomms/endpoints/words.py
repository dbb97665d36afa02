"""The notes that the two ends of a connection send each other about their regions."""

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


Word = Ask | Refuse | Grant | RegionOpening | Leave | Closing | Bye | Here
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
