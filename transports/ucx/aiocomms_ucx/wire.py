"""The wire format: what the Python sides of two ranks tell each other, in the store and over control connections."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import UNREADABLE, Dialect, Reason

VERSION: Final = 11
"""Of all that the two sides of this transport tell each other, the engine's messages included."""
_PREFIX: Final = b"\x01"  # the engine has no frames of its own with this prefix
_NOTE: Final = b"N"  # the engine does not give these to the loop


class Dispute(msgspec.Struct, tag=True, array_like=True):
    """The sender describes its call of collective ``index``, counted from 0."""

    group: int
    index: int
    text: str


class LaneDispute(msgspec.Struct, tag=True, array_like=True):
    """The sender describes what it calls in a lane; an empty text: nothing."""

    group: int
    lane: int
    text: str


class Abort(msgspec.Struct, tag=True, array_like=True):
    """The sender has aborted. ``index`` is the number of the collective in which ranks disagree, or -1."""

    group: int
    reason: Reason
    index: int


class Note(msgspec.Struct, tag=True, array_like=True):
    """What the core of the sender says to the receiver's. Whatever the loop is doing, it is heard."""

    group: int
    text: bytes


Frame = Dispute | LaneDispute | Abort | Note
_decoder = msgspec.msgpack.Decoder(Frame)


_Record = TypeVar("_Record")


def record(rank: int, raw: bytes, kind: type[_Record]) -> _Record:
    """Decode a record in which a rank describes itself.

    :raises ProtocolError: it is not such a record.
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"rank {rank} does not introduce itself as this version does: {error}", peer=rank) from None


def dialect() -> Dialect:
    """Return what a rank's first record begins with. The ranks compare it before they tell each other anything else."""
    return Dialect("the ucx transport", b"aioU", VERSION)


def pack(frame: Frame) -> bytes:
    """Encode a frame."""
    return (_NOTE if isinstance(frame, Note) else _PREFIX) + msgspec.msgpack.encode(frame)


def unpack(frame: bytes) -> Frame:
    """Decode a frame.

    :raises ProtocolError: the bytes are not a frame.
    """
    try:
        decoded: Frame = _decoder.decode(frame[1:])
        if frame[:1] != (_NOTE if isinstance(decoded, Note) else _PREFIX):
            raise msgspec.DecodeError("unknown kind")
        return decoded
    except UNREADABLE as error:
        raise ProtocolError(f"a control frame makes no sense: {error}") from None
