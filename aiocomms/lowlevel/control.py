"""The encoding of control messages. All messages between ranks are control messages, except messages with tensor data.

A control message is usually a msgspec ``Struct``, and is sent in msgpack format. If the ranks have not compared
versions yet, the message begins with a head, which names the format and its version (:mod:`.versions`). The decoder
checks the size and the content of a message. If the message is invalid, the decoder raises a :class:`ProtocolError`.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel.versions import Dialect

_T = TypeVar("_T")
# These are the errors that msgspec raises for bytes that it cannot decode.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LENGTH_BYTES: Final = 4
LIMIT: Final = 1 << 20
"""The largest size in bytes of a control message, unless its format sets another limit."""


class ControlCodec(Generic[_T]):
    """The encoder and decoder of the control messages of one format."""

    def __init__(self, kind: Any, what: str, *, dialect: Dialect | None = None, limit: int = LIMIT) -> None:
        """Describe the format.

        :param kind: the type of the format's messages, which may be a union of types.
        :param what: the name of a message of this format. The texts of errors begin with this name.
        :param dialect: the format and version in the head of each message. None: the messages have no head, because the
            ranks have already compared versions.
        :param limit: the largest size of a message in bytes, without the head.
        """
        self._what = what
        self._dialect = dialect
        self._head = b"" if dialect is None else dialect.head
        self._limit = limit
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, word: _T) -> bytes:
        """Return a message as bytes."""
        return self._head + self._encoder.encode(word)

    def decode(self, data: bytes | bytearray | memoryview, peer: int | None = None) -> _T:
        """Return the message that :meth:`encode` encoded.

        :param peer: the rank that has sent the message; the error names the sender.
        :raises ProtocolError: the data are not a message of this format, are too long, or are of another version.
        """
        return self._decode(self._body(data, peer), peer)

    def encode_padded(self, word: _T, size: int) -> bytes:
        """Return a message as bytes, padded to at least ``size`` bytes, for a receive with a buffer of fixed size."""
        body = self._encoder.encode(word)
        return (self._head + len(body).to_bytes(_LENGTH_BYTES, "little") + body).ljust(size, b"\0")

    def decode_padded(self, data: bytes, peer: int | None = None) -> _T:
        """Return the message that :meth:`encode_padded` encoded; see :meth:`decode`."""
        body = self._body(data, peer)
        end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        return self._decode(body[_LENGTH_BYTES:end], peer)

    def unreadable(self, why: object, peer: int | None = None) -> ProtocolError:
        """Return the error for a message that this codec cannot decode."""
        who = "" if peer is None else f" of rank {peer}"
        return ProtocolError(f"{self._what}{who} makes no sense: {why}", peer=peer)

    def _decode(self, body: Any, peer: int | None) -> _T:
        if len(body) > self._limit:
            raise self.unreadable(f"it has {len(body)} bytes, wanted at most {self._limit}", peer)
        try:
            word: _T = self._decoder.decode(body)
        except _UNREADABLE as error:
            raise self.unreadable(error, peer) from None
        return word

    def _body(self, data: Any, peer: int | None) -> Any:
        if self._dialect is None:
            return data
        return self._dialect.check(data, self._what if peer is None else f"rank {peer}", peer)
