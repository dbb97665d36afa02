"""The head of all data that ranks send to each other.

The head names the format of the data, and the version of the format. The receiver checks the head before it decodes
other bytes. So the receiver can distinguish data of another version from random bytes. All versions of a format have
the same form of head. So the error about another version can always name both versions.
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
        """The first :data:`HEAD_BYTES` bytes of all data in this format."""
        return _HEAD.pack(self.magic, self.version)

    def other_version(self, data: bytes) -> int | None:
        """Return the version of ``data`` if the data have this format but another version; None in all other cases."""
        if len(data) < HEAD_BYTES:
            return None
        magic, version = _HEAD.unpack_from(data)
        return version if magic == self.magic and version != self.version else None

    def check(self, data: bytes, who: str, peer: int | None = None) -> bytes:
        """Check the head, and return the bytes after the head.

        :param who: the name of the sender. The message of an error begins with this name.
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
        """Return the text of an error that names the sender's version and this rank's version."""
        return (
            f"{who} speaks version {version} of {self.what}, this rank version {self.version}: install the same "
            "aiocomms on all ranks"
        )


HEAD_BYTES: Final = _HEAD.size
"""The size of a head in bytes."""
