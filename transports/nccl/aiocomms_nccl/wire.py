"""The wire format: the frames on the control connections. They exist because NCCL itself matches nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import ControlCodec, Dialect, Reason
from aiocomms.ops.checks import DTYPES

VERSION: Final = 6
LONGEST: Final = 64 * 1024
"""Most bytes of a frame."""

DTYPE_LIST: Final = tuple(sorted(DTYPES, key=str))
"""The dtypes, in the order of the numbers that stand for them in a frame."""
DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPE_LIST)}


class Announce(msgspec.Struct, tag=0, array_like=True):
    """The sender has a message. ``number`` identifies it among the sender's messages."""

    number: int
    channel: int
    tag: int
    dtype: int
    nbytes: int


class TakeMessage(msgspec.Struct, tag=1, array_like=True):
    """The receiver takes ``nbytes`` of a message. It sends these frames in the order of its NCCL calls."""

    number: int
    nbytes: int


class DirectionRequest(msgspec.Struct, tag=2, array_like=True):
    """The receiver asks the sender to form the NCCL communicator that carries messages from there to here."""

    unique_id: bytes


class DescribedCall(msgspec.Struct, array_like=True):
    """One collective as its caller describes it. ``sizes``: the bytes to and from the receiver, if they may differ."""

    text: str
    sizes: list[int]


class Calls(msgspec.Struct, tag=3, array_like=True):
    """The sender has called ``count`` collectives, and may wait in one. ``last`` describes the last ones."""

    count: int
    last: list[DescribedCall]


class Progress(msgspec.Struct, array_like=True):
    """How far the sender has come in its directions with the receiver."""

    joined: bool
    """Whether it forms the direction on which it sends, for which the receiver has asked."""
    sent: int
    """How many messages it has given to NCCL there."""
    received: int
    """How many it has given to NCCL on the direction on which it receives."""


class NcclBye(msgspec.Struct, tag=4, array_like=True):
    """The sender has closed after ``calls`` collectives, and sends nothing more."""

    calls: int
    progress: Progress


class NcclAbort(msgspec.Struct, tag=5, array_like=True):
    """The sender has aborted. ``index`` is the number of the collective in which ranks disagree, or -1."""

    reason: Reason
    index: int


class NcclNote(msgspec.Struct, tag=6, array_like=True):
    """What the core of the sender says to the receiver's."""

    text: bytes


Frame = Announce | TakeMessage | DirectionRequest | Calls | NcclBye | NcclAbort | NcclNote

_FRAMES = ControlCodec[Frame](Frame, "a control frame", limit=LONGEST)


def dialect() -> Dialect:
    """Return what a rank's first record begins with. The ranks compare it before they tell each other anything else."""
    return Dialect("the nccl transport", b"aioN", VERSION)


def pack(frame: Frame) -> bytes:
    """Encode a frame, with its size in front."""
    data = _FRAMES.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(buffer: bytearray) -> list[Frame]:
    """Remove the complete frames from the start of a buffer, and decode them.

    :raises ProtocolError: a frame makes no sense.
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
