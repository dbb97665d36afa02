"""What ranks tell each other over their control connections: on the host, beside NCCL, which matches nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import Reason
from aiocomms.ops.checks import DTYPES

VERSION: Final = 2
LONGEST: Final = 64 * 1024
"""Bytes of a frame."""

DTYPE_LIST: Final = tuple(sorted(DTYPES, key=str))
"""dtypes by the number that stands for them in a frame."""
DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPE_LIST)}


class Announce(msgspec.Struct, tag=0, array_like=True):
    """The sender has a message; ``number`` counts its messages to this rank."""

    number: int
    channel: int
    tag: int
    dtype: int
    nbytes: int


class Take(msgspec.Struct, tag=1, array_like=True):
    """The receiver takes a message, of which it has room for ``nbytes``; in the order of its NCCL calls."""

    number: int
    nbytes: int


class Lane(msgspec.Struct, tag=2, array_like=True):
    """The receiver asks the sender to form the NCCL communicator that carries messages from there to here."""

    unique_id: bytes


class Described(msgspec.Struct, array_like=True):
    """One collective as its caller describes it; where sizes differ from rank to rank, the bytes to and from there."""

    text: str
    sizes: list[int]


class Calls(msgspec.Struct, tag=3, array_like=True):
    """The sender waits in, or has called, collectives: what the last ones of ``count`` are."""

    count: int
    last: list[Described]


class Bye(msgspec.Struct, tag=4, array_like=True):
    """The sender has closed, after so many collectives, and says nothing more."""

    calls: int


class Abort(msgspec.Struct, tag=5, array_like=True):
    """The sender has given up; ``index``: the collective in which ranks disagree, or -1."""

    reason: Reason
    index: int


Frame = Announce | Take | Lane | Calls | Bye | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame) -> bytes:
    """Encode a frame, behind its size."""
    data = _encoder.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(buffer: bytearray) -> list[Frame]:
    """Take the whole frames off what has arrived.

    :raises ProtocolError: it makes no sense.
    """
    frames: list[Frame] = []
    at = 0
    while len(buffer) - at >= 4:
        size = int.from_bytes(buffer[at : at + 4], "little")
        if size > LONGEST:
            raise ProtocolError(f"a control frame of {size} bytes was announced, at most {LONGEST} are taken")
        if len(buffer) - at - 4 < size:
            break
        try:
            frames.append(_decoder.decode(memoryview(buffer)[at + 4 : at + 4 + size]))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a control frame makes no sense: {error}") from None
        at += 4 + size
    del buffer[:at]
    return frames
