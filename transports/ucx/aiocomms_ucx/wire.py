"""The wire format: the records and frames of the ranks' Python sides, in the store and over control connections."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.lowlevel import ControlCodec, Dialect, Reason

VERSION: Final = 11
"""The version of all that the two sides of this transport tell each other, the engine's messages included."""
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
    """The note of the sender's core to the receiver's. It is heard whatever the loop is doing."""

    group: int
    text: bytes


Frame = Dispute | LaneDispute | Abort | Note
_FRAMES = ControlCodec[Frame](Frame, "a control frame")


def dialect() -> Dialect:
    """Return the beginning of a rank's first record. The ranks compare it before they send anything else."""
    return Dialect("the ucx transport", b"aioU", VERSION)


def pack(frame: Frame) -> bytes:
    """Encode a frame."""
    return _prefix(frame) + _FRAMES.encode(frame)


def unpack(data: bytes) -> Frame:
    """Decode a frame.

    :raises ProtocolError: the bytes are not a frame.
    """
    frame = _FRAMES.decode(data[1:])
    if data[:1] != _prefix(frame):
        raise _FRAMES.unreadable("it is of an unknown kind")
    return frame


def _prefix(frame: Frame) -> bytes:
    return _NOTE if isinstance(frame, Note) else _PREFIX
