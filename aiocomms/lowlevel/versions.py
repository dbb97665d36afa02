"""The head of all bytes that ranks send each other: the format, and the version of the format.

The receiver checks the head before it decodes other bytes. So the receiver can distinguish a rank of another version
from random bytes. The error names both versions, even if the rest of the format differs.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from aiocomms.errors import ProtocolError

_HEAD: Final = struct.Struct("<4sH")


class Dialect(NamedTuple):
    """A format and its version on this rank."""

    what: str
    """The name of the protocol that has the format, such as ``"the ucx transport"``."""
    magic: bytes
    """The four bytes that distinguish this format from other formats."""
    version: int

    @property
    def head(self) -> bytes:
        """The :data:`HEAD_BYTES` bytes with which data of this format begin."""
        return _HEAD.pack(self.magic, self.version)

    def other_version(self, data: bytes) -> int | None:
        """Return the version of ``data`` if the data have this format, but another version; else None."""
        if len(data) < HEAD_BYTES:
            return None
        magic, version = _HEAD.unpack_from(data)
        return version if magic == self.magic and version != self.version else None

    def check(self, data: bytes, who: str, peer: int | None = None) -> bytes:
        """Check the head, and return the bytes after the head.

        :param who: the name of the sender, with which an error's message begins.
        :raises ProtocolError: the data have another version, or another format.
        """
        other = self.other_version(data)
        if other is not None:
            raise ProtocolError(self.differs(who, other), peer=peer)
        if data[:HEAD_BYTES] != self.head:
            raise ProtocolError(
                f"{who} sent what makes no sense: it begins with {data[:HEAD_BYTES].hex() or 'nothing'}, and "
                f"{self.what} with {self.head.hex()}", peer=peer,
            )  # fmt: skip
        return data[HEAD_BYTES:]

    def differs(self, who: str, version: object) -> str:
        """Return the text that names both versions."""
        return (
            f"{who} speaks version {version} of {self.what}, this rank version {self.version}: install the same "
            "aiocomms on all ranks"
        )


HEAD_BYTES: Final = _HEAD.size
"""The number of bytes of each head."""
