"""The wire format: the frames on the control connections. Ranks need frames because NCCL does not match messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import ControlCodec, Dialect, Reason
from aiocomms.ops.checks import DTYPES

VERSION: Final = 7
LONGEST: Final = 64 * 1024
"""The most bytes of a frame."""

_PIECE: Final = LONGEST // 2
"""The approximate limit, in bytes, of the lane calls or entries in one frame."""

Lane = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""The number of a lane."""
DTYPE_LIST: Final = tuple(sorted(DTYPES, key=str))
"""The dtypes, in the order of their numbers in frames."""
DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPE_LIST)}


class Announce(msgspec.Struct, tag=0, array_like=True):
    """The sender has a message. ``number`` identifies the message among the sender's messages."""

    number: int
    channel: int
    tag: int
    dtype: int
    nbytes: int


class TakeMessage(msgspec.Struct, tag=1, array_like=True):
    """The receiver takes ``nbytes`` of a message. A receiver sends such frames in the order of its NCCL calls."""

    number: int
    nbytes: int


class DirectionRequest(msgspec.Struct, tag=2, array_like=True):
    """The receiver asks the sender to form the NCCL communicator that carries the sender's messages."""

    unique_id: bytes


class DescribedCall(msgspec.Struct, array_like=True):
    """The description of one collective call. ``sizes`` has the bytes to and from the frame's receiver, or is empty."""

    text: str
    sizes: list[int]


class Calls(msgspec.Struct, tag=3, array_like=True):
    """The sender has called ``count`` collectives, and may wait in one. ``last`` describes the latest calls."""

    count: int
    last: list[DescribedCall]


class Progress(msgspec.Struct, array_like=True):
    """The sender's progress in the two directions between sender and receiver."""

    joined: bool
    """True if the sender has begun to form the direction in which it sends."""
    sent: int
    """The number of messages that the sender has passed to NCCL in the direction in which it sends."""
    received: int
    """The number of messages that the sender has passed to NCCL in the direction in which it receives."""


class NcclBye(msgspec.Struct, tag=4, array_like=True):
    """The sender has closed after ``calls`` collectives. This is its last frame."""

    calls: int
    progress: Progress


class NcclAbort(msgspec.Struct, tag=5, array_like=True):
    """The sender has aborted. ``index`` is the number of the collective in which ranks disagree, or -1."""

    reason: Reason
    index: int


class NcclNote(msgspec.Struct, tag=6, array_like=True):
    """A note from the core of the sender to the core of the receiver."""

    text: bytes


class LaneCall(msgspec.Struct, array_like=True):
    """A collective that the sender has called in a lane."""

    lane: Lane
    text: str
    """The description of the collective, on which all ranks must agree."""
    gives: list[int]
    """The bytes that the sender sends to each rank, if these may differ from rank to rank; else empty."""
    takes: list[int]
    """The bytes that the sender receives from each rank, if these may differ from rank to rank; else empty."""


class LaneCalls(msgspec.Struct, tag=7, array_like=True):
    """A frame to the sequencer: the calls of the sender in lanes, in their order within each lane."""

    calls: list[LaneCall]


class LaneGivenUp(msgspec.Struct, tag=8, array_like=True):
    """A frame to the sequencer: the sender gives a lane up and waits for :class:`LaneEnd`."""

    lane: Lane


class LaneEntries(msgspec.Struct, tag=9, array_like=True):
    """A frame of the sequencer: the next entries of the log.

    Each entry names a lane, whose next collective is launched.
    """

    lanes: list[Lane]


class LaneEnd(msgspec.Struct, tag=10, array_like=True):
    """A frame of the sequencer: a lane that the receiver has given up gets no more entries in the log."""

    lane: Lane


class LaneFault(msgspec.Struct, tag=11, array_like=True):
    """A frame of the sequencer: the next collective that the receiver has called in a lane fails."""

    lane: Lane
    reason: Reason


class LaneWaits(msgspec.Struct, tag=12, array_like=True):
    """A frame of the sequencer: the lanes in which the receiver waits, each with the missing ranks."""

    waits: list[tuple[Lane, list[int]]]


class FormChannels(msgspec.Struct, tag=13, array_like=True):
    """A frame of the sequencer: all ranks form the communicators that carry lanes."""

    unique_ids: list[bytes]


LaneFrame = LaneCalls | LaneGivenUp | LaneEntries | LaneEnd | LaneFault | LaneWaits | FormChannels
"""The frames about lanes."""
Frame = Announce | TakeMessage | DirectionRequest | Calls | NcclBye | NcclAbort | NcclNote | LaneFrame

_FRAMES = ControlCodec[Frame](Frame, "a control frame", limit=LONGEST)


def dialect() -> Dialect:
    """Return the beginning of a rank's first record, which the ranks compare first."""
    return Dialect("the nccl transport", b"aioN", VERSION)


def lane_calls(calls: Sequence[LaneCall]) -> Iterator[LaneCalls]:
    """Yield the frames with calls in lanes: one frame, or more if there are too many calls."""
    part: list[LaneCall] = []
    nbytes = 0
    for call in calls:
        nbytes += 4 * len(call.text) + 9 * (len(call.gives) + len(call.takes) + 2)
        if part and nbytes > _PIECE:
            yield LaneCalls(part)
            part, nbytes = [], 0
        part.append(call)
    yield LaneCalls(part)


def lane_entries(lanes: Sequence[int]) -> Iterator[LaneEntries]:
    """Return the frames with entries of the log: one frame, or more if there are too many entries."""
    most = _PIECE // 9
    return (LaneEntries(list(lanes[at : at + most])) for at in range(0, len(lanes), most))


def lane_waits(waits: Sequence[tuple[int, list[int]]]) -> Iterator[LaneWaits]:
    """Return the frames that name the missing ranks to a rank: one frame, or more if there are too many lanes."""
    most = _PIECE // (9 * (2 + max(len(ranks) for _, ranks in waits)))
    return (LaneWaits(list(waits[at : at + most])) for at in range(0, len(waits), most))


def pack(frame: Frame) -> bytes:
    """Encode a frame. The frame's size precedes the frame."""
    data = _FRAMES.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(buffer: bytearray) -> list[Frame]:
    """Remove the complete frames from the start of a buffer, and decode them.

    :raises ProtocolError: a frame is invalid.
    """
    frames: list[Frame] = []
    at = 0
    while len(buffer) - at >= 4:
        size = int.from_bytes(buffer[at : at + 4], "little")
        if size > LONGEST:
            raise ProtocolError(f"a control frame of {size} bytes was announced, at most {LONGEST} are taken")
        if len(buffer) - at - 4 < size:
            break
        frames.append(_FRAMES.decode(memoryview(buffer)[at + 4 : at + 4 + size]))
        at += 4 + size
    del buffer[:at]
    return frames
