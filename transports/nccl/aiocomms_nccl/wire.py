"""The format of the frames on the control connections.

The ranks need frames because NCCL does not match messages by tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import ControlCodec, Dialect, Reason
from aiocomms.ops.checks import DTYPES

VERSION: Final = 7
LONGEST: Final = 64 * 1024
"""The maximum size of a frame, in bytes."""

_PIECE: Final = LONGEST // 2
"""The approximate maximum size of the list of calls, entries or waits in one frame about lanes, in bytes."""

Lane = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""The number of a lane."""
DTYPE_LIST: Final = tuple(sorted(DTYPES, key=str))
"""The dtypes, in the order of their numbers in frames."""
DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPE_LIST)}


class Announce(msgspec.Struct, tag=0, array_like=True):
    """A frame with which the sender announces a message. Each message of a sender has its own ``number``."""

    number: int
    channel: int
    tag: int
    dtype: int
    nbytes: int


class TakeMessage(msgspec.Struct, tag=1, array_like=True):
    """A frame with which the receiver of an announced message accepts ``nbytes`` bytes of the message.

    A receiver sends these frames in the order in which it calls NCCL for the messages.
    """

    number: int
    nbytes: int


class DirectionRequest(msgspec.Struct, tag=2, array_like=True):
    """A frame with which a receiver asks the sender to join the NCCL communicator for the sender's messages."""

    unique_id: bytes


class DescribedCall(msgspec.Struct, array_like=True):
    """The description of one collective call of the frame's sender.

    For an all-to-all op, ``sizes`` has two numbers: how many bytes the call sends to the frame's receiver, and
    how many bytes the call receives from that rank. For other ops, ``sizes`` is empty.
    """

    text: str
    sizes: list[int]


class Calls(msgspec.Struct, tag=3, array_like=True):
    """A frame of a sender that has called ``count`` collectives. ``last`` describes the latest of these calls.

    One of the collectives may still wait for other ranks.
    """

    count: int
    last: list[DescribedCall]


class Progress(msgspec.Struct, array_like=True):
    """The progress of the frame's sender in two directions: to the frame's receiver, and from the receiver."""

    joined: bool
    """True if the sender has begun to form the communicator of the direction to the receiver."""
    sent: int
    """The number of messages that the sender has passed to NCCL in the direction to the receiver."""
    received: int
    """The number of messages that the sender has passed to NCCL in the direction from the receiver."""


class NcclBye(msgspec.Struct, tag=4, array_like=True):
    """The last frame of a sender. The sender has called ``calls`` collectives, and then has closed the communicator."""

    calls: int
    progress: Progress


class NcclAbort(msgspec.Struct, tag=5, array_like=True):
    """A frame of a sender that has aborted the communicator.

    If the ranks disagree on a collective, ``index`` is the number of the collective. Otherwise, ``index`` is -1.
    """

    reason: Reason
    index: int


class NcclNote(msgspec.Struct, tag=6, array_like=True):
    """A frame with data (a note) that the core of aiocomms sends from one rank to another."""

    text: bytes


class LaneCall(msgspec.Struct, array_like=True):
    """A collective that the frame's sender has called in a lane."""

    lane: Lane
    text: str
    """The description of the collective, on which all ranks must agree."""
    gives: list[int]
    """A list: for each rank, the number of bytes that the frame's sender sends to it.

    The list is empty for all ops except all-to-all ops.
    """
    takes: list[int]
    """A list: for each rank, the number of bytes that the frame's sender receives from it.

    The list is empty for all ops except all-to-all ops.
    """


class LaneCalls(msgspec.Struct, tag=7, array_like=True):
    """A frame to the sequencer: the calls of the sender in lanes, in their order within each lane."""

    calls: list[LaneCall]


class LaneGivenUp(msgspec.Struct, tag=8, array_like=True):
    """A frame to the sequencer: the sender has aborted a lane, and waits for :class:`LaneEnd`."""

    lane: Lane


class LaneEntries(msgspec.Struct, tag=9, array_like=True):
    """A frame of the sequencer: the next entries of the log.

    Each entry is the number of a lane. The receiver launches the next collective of this lane.
    """

    lanes: list[Lane]


class LaneEnd(msgspec.Struct, tag=10, array_like=True):
    """A frame of the sequencer: the log gets no more entries of a lane that the receiver has aborted."""

    lane: Lane


class LaneFault(msgspec.Struct, tag=11, array_like=True):
    """A frame of the sequencer that makes the receiver fail a collective.

    The collective is the oldest collective that the receiver has called in the lane and that is not in the log.
    """

    lane: Lane
    reason: Reason


class LaneWaits(msgspec.Struct, tag=12, array_like=True):
    """A frame of the sequencer: the lanes in which the receiver waits, each with the missing ranks."""

    waits: list[tuple[Lane, list[int]]]


class FormChannels(msgspec.Struct, tag=13, array_like=True):
    """A frame of the sequencer that makes the receiver join the communicators for lane collectives."""

    unique_ids: list[bytes]


LaneFrame = LaneCalls | LaneGivenUp | LaneEntries | LaneEnd | LaneFault | LaneWaits | FormChannels
"""The type of all frames about lanes."""
Frame = Announce | TakeMessage | DirectionRequest | Calls | NcclBye | NcclAbort | NcclNote | LaneFrame

_FRAMES = ControlCodec[Frame](Frame, "a control frame", limit=LONGEST)


def dialect() -> Dialect:
    """Return the name and the version of the wire format. The ranks compare the versions in their first records."""
    return Dialect("the nccl transport", b"aioN", VERSION)


def lane_calls(calls: Sequence[LaneCall]) -> Iterator[LaneCalls]:
    """Yield frames with calls in lanes. If the calls do not fit into one frame, yield several frames."""
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
    """Return frames with entries of the log. If the entries do not fit into one frame, return several frames."""
    most = _PIECE // 9
    return (LaneEntries(list(lanes[at : at + most])) for at in range(0, len(lanes), most))


def lane_waits(waits: Sequence[tuple[int, list[int]]]) -> Iterator[LaneWaits]:
    """Return frames that list the missing ranks of lanes for a waiting rank.

    If the lanes do not fit into one frame, return several frames.
    """
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
