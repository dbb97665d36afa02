"""What the ranks say to each other: frames, each a fixed header and a body that it describes.

Every frame is received into a buffer of one fixed size, and a header that does not fit it is refused before use.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import Reason

VERSION: Final = 4

EAGER, RTS, CTS, DATA, VOID, DONE, CREDIT, CALL, LANDED, ABORT, BYE, BYE_ACK, ACK = range(13)
"""Kinds: a message with its payload; a large one announced, asked for, sent, given up while it was being sent, and
received; room for eager messages given back; one rank's part in the agreement on a collective, and that gloo is done
with its tensors there; the end of the communicator, for a reason or for none; and that so many frames have come."""

INLINE: Final = 64 * 1024
"""Most bytes of payload that a frame carries; larger tensors travel on their own."""

TEXT: Final = 3072
"""Most bytes of text in a frame."""

_HEADER = struct.Struct("<4sBBBBiHHqq")
_MAGIC: Final = b"aioC"
_KIND: Final = 5
"""Where it stands."""
_DTYPES: Final = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""The numbers that stand for dtypes."""

_REASONS: Final = ("CommAbortedError", "PeerDiedError", "MismatchError", "CommTimeoutError")


class Header(NamedTuple):
    """A frame's header; what a kind has no use for is 0.

    :param ident: the number of a large message or of a collective, or an amount.
    :param nbytes: the size of the message, or of the payload in this frame.
    :param text: bytes of text in this frame.
    :param sizes: 64-bit integers in this frame, after the text.
    """

    kind: int
    channel: int = 0
    dtype: int = 0
    tag: int = 0
    text: int = 0
    sizes: int = 0
    ident: int = 0
    nbytes: int = 0

    @property
    def type(self) -> torch.dtype:
        """The message's dtype."""
        return _DTYPES[self.dtype]


class Frame(NamedTuple):
    """A frame as it was received; the payload is a view of a buffer that the next frame will overwrite."""

    header: Header
    text: bytes
    sizes: tuple[int, ...]
    payload: Tensor


def capacity(size: int) -> int:
    """Bytes of the largest frame in a communicator of ``size`` ranks."""
    return _HEADER.size + TEXT + 16 * size + INLINE


def pack(header: Header, text: bytes = b"", sizes: Sequence[int] = (), payload: Tensor | None = None) -> Tensor:
    """Make a frame.

    :param payload: flat and of dtype uint8.
    :returns: its bytes, in memory of their own.
    """
    start = _HEADER.size + len(text) + 8 * len(sizes)
    buffer = bytearray(start + (0 if payload is None else payload.numel()))
    kind, channel, dtype, tag, _, _, ident, nbytes = header
    _HEADER.pack_into(
        buffer, 0, _MAGIC, VERSION, kind, channel, dtype, tag, len(text), len(sizes), ident, nbytes
    )  # fmt: skip
    if text:
        buffer[_HEADER.size : _HEADER.size + len(text)] = text
    if sizes:
        struct.pack_into(f"<{len(sizes)}q", buffer, _HEADER.size + len(text), *sizes)
    frame = torch.frombuffer(buffer, dtype=torch.uint8)
    if payload is not None:
        frame[start:].copy_(payload)
    return frame


def void(frame: Tensor) -> None:
    """Make a frame of kind DATA say VOID, unless gloo has sent it: gloo reads it only then."""
    frame[_KIND] = VOID


def unpack(buffer: bytearray, tensor: Tensor) -> Frame:
    """Read a frame.

    :param buffer: where it was received.
    :param tensor: the same memory.
    :raises ProtocolError: it makes no sense.
    """
    magic, version, *fields = _HEADER.unpack_from(buffer)
    header = Header(*fields)
    inside = header.nbytes if header.kind in (EAGER, CALL) else 0
    start = _HEADER.size + header.text + 8 * header.sizes
    if (
        magic != _MAGIC
        or version != VERSION
        or header.kind > ACK
        or header.dtype >= len(_DTYPES)
        or header.nbytes < 0
        or header.text > TEXT
        or start + inside > len(buffer)
    ):
        raise ProtocolError(f"a frame makes no sense: {bytes(buffer[: _HEADER.size]).hex()}")
    text = bytes(buffer[_HEADER.size : _HEADER.size + header.text])
    sizes = struct.unpack_from(f"<{header.sizes}q", buffer, _HEADER.size + header.text)
    return Frame(header, text, sizes, tensor[start : start + inside])


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def pack_error(error: CommError, rank: int, call: int) -> Tensor:
    """Make the frame that tells a peer why this rank gives up.

    :param call: the collective that ranks disagree on, or -1.
    """
    reason = Reason.of(error, rank)
    header = Header(ABORT, dtype=_REASONS.index(reason.error), tag=reason.peer, ident=call)
    return pack(header, reason.message.encode()[:TEXT])


def unpack_error(frame: Frame) -> CommError:
    """The reason in a peer's last frame."""
    code = frame.header.dtype
    kind = _REASONS[code] if code < len(_REASONS) else _REASONS[0]
    return Reason(kind, frame.text.decode(errors="replace"), frame.header.tag).to_error()
