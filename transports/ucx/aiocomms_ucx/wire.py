"""The wire format of the records in the store, and of the control connections' frames that Python code handles."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.lowlevel import ControlCodec, Dialect, Reason

VERSION: Final = 12
"""The version of all records, frames and messages of this transport, including the engine's."""
_PREFIX: Final = b"\x01"  # the engine uses other prefixes for its own frames
_NOTE: Final = b"N"  # the engine does not pass these frames to the loop


class Dispute(msgspec.Struct, tag=True, array_like=True):
    """The frame in which the sender describes its call of the collective with number ``index``, counted from 0."""

    group: int
    index: int
    text: str


class LaneDispute(msgspec.Struct, tag=True, array_like=True):
    """The frame in which the sender describes its call in a lane. The text is empty if the sender has no call."""

    group: int
    lane: int
    text: str


class Abort(msgspec.Struct, tag=True, array_like=True):
    """The frame by which the sender reports that it has aborted the communicator.

    If the ranks' calls of a collective differ, ``index`` is the number of this collective. Otherwise, ``index`` is -1.
    """

    group: int
    reason: Reason
    index: int


class Note(msgspec.Struct, tag=True, array_like=True):
    """A note, which is data that the core of aiocomms sends from one rank to another.

    The receiver gets the note even while its loop is busy.
    """

    group: int
    text: bytes


Frame = Dispute | LaneDispute | Abort | Note
_FRAMES = ControlCodec[Frame](Frame, "a control frame")


def dialect() -> Dialect:
    """Return the beginning of a rank's first record.

    The ranks compare the beginnings before they decode the records.
    """
    return Dialect("the ucx transport", b"aioU", VERSION)


def pack(frame: Frame) -> bytes:
    """Encode a frame."""
    return _prefix(frame) + _FRAMES.encode(frame)


def unpack(data: bytes) -> Frame:
    """Decode a frame.

    :raises ProtocolError: the bytes are no valid frame.
    """
    frame = _FRAMES.decode(data[1:])
    if data[:1] != _prefix(frame):
        raise _FRAMES.unreadable("it is of an unknown kind")
    return frame


def _prefix(frame: Frame) -> bytes:
    return _NOTE if isinstance(frame, Note) else _PREFIX
