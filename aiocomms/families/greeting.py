"""What the two ends of a stream tell each other first: where each receives, its capacity, and the stream's name."""

from __future__ import annotations

import hashlib
import struct

from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.lowlevel.versions import Dialect
from aiocomms.ops import checks

MAX_CAPACITY = 2**20
MAX_NAME = 100
"""The length that a stream's name may have, in bytes of UTF-8."""

_STREAMS = Dialect("streams", b"aioS", 2)
_GREETING = struct.Struct(f"<6sIIB{MAX_NAME}s")  # head, tag of the messages to this end, capacity, length of name, name

GREETING_BYTES = _GREETING.size


def check(capacity: int, name: str) -> None:
    """Check what the program has given.

    :raises ArgumentError: one of them is wrong.
    """
    if type(capacity) is not int:
        raise checks.wrong_type("capacity", capacity, "an int, in messages")
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ArgumentError(f"capacity is {capacity}, wanted 1 to {MAX_CAPACITY} messages")
    if not isinstance(name, str):
        raise checks.wrong_type("name", name, "a str")
    if len(name.encode()) > MAX_NAME:
        raise ArgumentError(f"name is {checks.short(name)}, wanted a str of at most {MAX_NAME} bytes of UTF-8")


def tag_of(name: str) -> int:
    """The tag under which the ends of a stream of this name find each other."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def greet(tag: int, capacity: int, name: str) -> bytes:
    """This end's greeting."""
    encoded = name.encode()
    return _GREETING.pack(_STREAMS.head, tag, capacity, len(encoded), encoded)


def understand(greeting: bytes, peer: int, name: str) -> tuple[int, int]:
    """Return the other end's tag and capacity.

    :raises ProtocolError: it opened something else, or is of another version.
    """
    _STREAMS.check(greeting, f"rank {peer}", peer)
    _, tag, capacity, length, theirs = _GREETING.unpack(greeting)
    if tag & 3 or not 1 <= capacity <= MAX_CAPACITY or theirs[:length] != name.encode():
        raise ProtocolError(f"rank {peer} opened no stream {name!r}")
    return tag, capacity
