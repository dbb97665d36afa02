"""The wire format: frames, each with a fixed header and a body that the header describes.

Every frame is received into a buffer of a fixed size. A frame is refused if its header describes more bytes than this
buffer has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import Reason
from aiocomms.ops.writing import octets, ordinary

VERSION: Final = 6

EAGER, RTS, CTS, DATA, VOID, DONE, CREDIT, CALL, LANDED, ABORT, BYE, BYE_ACK, ACK, NOTE = range(14)
"""The kinds of frames.

EAGER contains a message with its payload. A large message is announced (RTS), requested (CTS), sent (DATA) and received
(DONE). VOID replaces DATA if the message has become invalid. CREDIT permits the receiver of this frame to send more
bytes of eager messages. CALL is one rank's announcement of a collective. LANDED reports that gloo is done with the
sender's tensors. ABORT ends the communicator with a reason. BYE ends the communicator without a reason, and BYE_ACK
confirms a BYE. ACK confirms that a number of frames have arrived. NOTE contains data that the core of aiocomms sends
from one rank to another.
"""

INLINE: Final = 64 * 1024
"""The largest number of bytes of payload in a frame. Larger tensors travel outside of frames."""

TEXT: Final = 3072
"""The largest number of bytes of text in a frame."""

_HEADER = struct.Struct("<4sBBBBqHHqq")
_MAGIC: Final = b"aioC"
_KIND: Final = 5
"""The offset of the kind in the header."""
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
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""The number that represents each dtype in frames."""

_REASONS: Final = ("CommAbortedError", "PeerDiedError", "MismatchError", "CommTimeoutError", "DriverLostError")


class C10dHeader(NamedTuple):
    """A frame's header. A field is 0 if the frame's kind does not use it.

    :param ident: the number of a large message or of a collective; in a CREDIT frame, a number of bytes; in an ACK
        frame, a number of frames.
    :param nbytes: the size of the message, or of the payload in this frame.
    :param text: the number of bytes of text in this frame.
    :param sizes: the number of 64-bit integers in this frame, after the text.
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


class C10dFrame(NamedTuple):
    """A received frame. Later frames overwrite the memory of ``payload``."""

    header: C10dHeader
    text: bytes
    sizes: tuple[int, ...]
    payload: Tensor


def capacity(size: int) -> int:
    """Return the size in bytes of the largest frame in a communicator of ``size`` ranks."""
    return _HEADER.size + TEXT + 16 * size + INLINE


def pack(header: C10dHeader, text: bytes = b"", sizes: Sequence[int] = (), payload: Tensor | None = None) -> Tensor:
    """Make a frame.

    :param payload: a flat tensor of dtype uint8.
    :returns: the frame's bytes, in new memory.
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
    """Turn a DATA frame into a VOID frame. The change has an effect only before gloo sends the frame."""
    frame[_KIND] = VOID


def unpack(buffer: bytearray, tensor: Tensor) -> C10dFrame:
    """Read a frame.

    :param buffer: the memory with the received frame.
    :param tensor: a tensor over the memory of ``buffer``.
    :raises ProtocolError: the frame is invalid.
    """
    magic, version, *fields = _HEADER.unpack_from(buffer)
    if magic == _MAGIC and version != VERSION:
        raise ProtocolError(f"a frame is of version {version} of c10d's frames, this rank speaks version {VERSION}")
    header = C10dHeader(*fields)
    inside = header.nbytes if header.kind in (EAGER, CALL) else 0
    start = _HEADER.size + header.text + 8 * header.sizes
    if (
        magic != _MAGIC
        or header.kind > NOTE
        or header.dtype >= len(_DTYPES)
        or header.nbytes < 0
        or header.text > TEXT
        or start + inside > len(buffer)
    ):
        raise ProtocolError(f"a frame makes no sense: {bytes(buffer[: _HEADER.size]).hex()}")
    text = bytes(buffer[_HEADER.size : _HEADER.size + header.text])
    sizes = struct.unpack_from(f"<{header.sizes}q", buffer, _HEADER.size + header.text)
    return C10dFrame(header, text, sizes, tensor[start : start + inside])


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as bytes."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return octets(ordinary(tensor))
    return octets(tensor)


def pack_error(error: CommError, rank: int, call: int) -> Tensor:
    """Make the frame with the reason of this rank's abort, for a peer.

    :param call: the number of the collective on which ranks disagree; -1 if there is none.
    """
    reason = Reason.of(error, rank)
    header = C10dHeader(ABORT, dtype=_REASONS.index(reason.error), tag=reason.peer, ident=call)
    return pack(header, reason.message.encode()[:TEXT], reason.late)


def unpack_error(frame: C10dFrame) -> CommError:
    """Return the reason of an abort, from a peer's ABORT frame."""
    code = frame.header.dtype
    kind = _REASONS[code] if code < len(_REASONS) else _REASONS[0]
    return Reason(kind, frame.text.decode(errors="replace"), frame.header.tag, frame.sizes).to_error()
