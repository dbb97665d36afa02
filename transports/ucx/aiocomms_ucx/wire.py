"""What the Python sides of two ranks tell each other: in the store, and over their control connection."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from aiocomms.errors import (
    TOLD_TO_PEERS,
    CommAbortedError,
    CommError,
    ProtocolError,
)

VERSION: Final = 4
_PREFIX: Final = b"\x01"  # what the engine takes for none of its own frames
_LONGEST: Final = 2000
"""Characters of a reason or description."""

_ERRORS: Final = {cls.__name__: cls for cls in TOLD_TO_PEERS}


class Dispute(msgspec.Struct, tag=True, array_like=True):
    """In the collective of this number, counted from 0, the sender does what is described."""

    group: int
    index: int
    text: str


class Abort(msgspec.Struct, tag=True, array_like=True):
    """The sender has given up; ``index``: the collective in which ranks disagree, or -1."""

    group: int
    error: str
    message: str
    peer: int
    index: int


class Note(msgspec.Struct, tag=True, array_like=True):
    """What the sender wants to have said although the communicator is lost."""

    group: int
    text: bytes

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise ValueError("a note is too long")


Frame = Dispute | Abort | Note
_decoder = msgspec.msgpack.Decoder(Frame)


_Record = TypeVar("_Record")


def record(rank: int, raw: bytes, kind: type[_Record]) -> _Record:
    """Decode what a rank has said of itself.

    :raises ProtocolError: it says something else.
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"rank {rank} does not introduce itself as this version does: {error}", peer=rank) from None


def pack(frame: Frame) -> bytes:
    """Encode a frame."""
    return _PREFIX + msgspec.msgpack.encode(frame)


def unpack(frame: bytes) -> Frame:
    """Decode a frame.

    :raises ProtocolError: it is none.
    """
    try:
        if frame[:1] != _PREFIX:
            raise msgspec.DecodeError("unknown kind")
        said: Frame = _decoder.decode(frame[1:])
        return said
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a control frame makes no sense: {error}") from None


def abort_frame(group: int, error: CommError, rank: int, index: int) -> Abort:
    """What tells a peer that this rank has given up."""
    peer = rank if error.peer is None else error.peer
    return Abort(group, type(error).__name__, error.message[:_LONGEST], peer, index)


def error_of(frame: Abort) -> CommError:
    """The error that a peer's frame stands for."""
    return _ERRORS.get(frame.error, CommAbortedError)(frame.message[:_LONGEST], peer=frame.peer)
