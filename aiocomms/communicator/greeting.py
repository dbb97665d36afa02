"""The greeting: the first message that each end of a stream sends to the other end.

The greeting contains the sender's tag, the sender's capacity, the type of the items, and the name of the stream.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

from aiocomms import arguments
from aiocomms.communicator.items import Kind
from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.lowlevel.versions import Dialect

MAX_CAPACITY = 2**20
MAX_NAME = 100
"""The maximum length of a stream's name, in bytes of UTF-8."""

MAX_BYTES = 2**62
_MAX_TEXT = 100
_STREAMS = Dialect("streams", b"aioS", 3)
# The fields are the head, the tag of the messages to this end, the capacity in messages and in bytes (0: any), the
# type of items as a digest and as text, the length of the name, and the name.
_GREETING = struct.Struct(f"<6sIIQ8s{_MAX_TEXT}sB{MAX_NAME}s")

GREETING_BYTES = _GREETING.size


class Greeting(NamedTuple):
    """The content of the first message that each end of a stream sends to the other end."""

    tag: int
    """The tag of the messages that the other end sends to this end."""
    capacity: int
    """The number of received messages that this end can buffer."""
    capacity_bytes: int
    """The number of received bytes that this end can buffer. 0 means no limit."""


def check(capacity: int, name: str, capacity_bytes: int | None) -> None:
    """Check the arguments of a stream.

    :raises ArgumentError: an argument is wrong.
    """
    _check_count("capacity", capacity, MAX_CAPACITY, "messages")
    if capacity_bytes is not None:
        _check_count("capacity_bytes", capacity_bytes, MAX_BYTES, "bytes")
    if len(arguments.in_utf8("name", name)) > MAX_NAME:
        raise ArgumentError(f"name is {arguments.short(name)}, wanted a str of at most {MAX_NAME} bytes of UTF-8")


def _check_count(argument: str, value: int, most: int, unit: str) -> None:
    if type(value) is not int:
        raise arguments.wrong_type(argument, value, f"an int, in {unit}")
    if not 1 <= value <= most:
        raise ArgumentError(f"{argument} is {value}, wanted 1 to {most} {unit}")


def tag_of(name: str) -> int:
    """Return the tag of the greetings of all streams with the name ``name``."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def greet(mine: Greeting, kind: Kind[Any], name: str) -> bytes:
    """Encode this end's greeting."""
    encoded = name.encode()
    return _GREETING.pack(_STREAMS.head, *mine, kind.digest, kind.text.encode()[:_MAX_TEXT], len(encoded), encoded)


def understand(greeting: bytes, peer: int, kind: Kind[Any], name: str) -> Greeting:
    """Parse and check the other end's greeting.

    :raises ProtocolError: the two ends have different stream names, item types or protocol versions.
    """
    _STREAMS.check(greeting, f"rank {peer}", peer)
    _, *told, digest, text, length, theirs = _GREETING.unpack(greeting)
    other = Greeting(*told)
    wrong = other.tag & 3 or not 1 <= other.capacity <= MAX_CAPACITY or other.capacity_bytes > MAX_BYTES
    if wrong or theirs[:length] != name.encode():
        raise ProtocolError(f"rank {peer} opened no stream {name!r}")
    if digest != kind.digest:
        items = text.rstrip(b"\0").decode(errors="replace")
        raise ProtocolError(f"rank {peer} opened stream {name!r} for {items}, and this rank for {kind.text}")
    return other
