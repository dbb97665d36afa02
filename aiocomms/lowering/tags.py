"""The keys of lanes, and the tags of messages in lanes and of messages that execute collectives."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from aiocomms import ops

Key = str | bytes | int
"""The key of a lane. Keys of different types are never equal."""

_ABOVE = 1 << 62
"""The smallest tag of messages in lanes, and of messages that execute collectives. User tags are less than 2**31."""
_BITS = _ABOVE - 1
GIVEN_UP = 1 << 61
"""The tag of notices about aborted lanes. These notices use the channel of collectives."""
_MOST_FINGERPRINTS = 4096
_SPREAD = 0x9E3779B97F4A7C15
"""The difference between two tags of a lane's messages if the program's tags of these messages differ by 1.

This difference is odd. So for small tags of the program, two lanes with close numbers get different tags.
"""


def number_of(key: Key) -> int:
    """Return the number of a lane: 62 bits of a hash of its key, the same on all ranks."""
    if isinstance(key, str):
        data = b"s" + key.encode("utf-8", "surrogatepass")
    else:
        data = b"b" + key if isinstance(key, bytes) else b"i%x" % key if key >= 0 else b"i-%x" % -key
    return _hash(data)


def _hash(data: bytes) -> int:
    found: int = struct.unpack("<Q", blake2b(data, digest_size=8).digest())[0]
    return found & _BITS


def tag_of(number: int, tag: int) -> int:
    """Return the tag that replaces the user's tag in a lane's message."""
    return _ABOVE | (number + tag * _SPREAD) & _BITS


def collective_tag(number: int, op: Any) -> int:
    """Return the tag of a collective's messages.

    The tag is derived from a number, and from the collective's name, root and operator.

    The tag of a batch is derived from all its collectives. Collectives that differ only in size or dtype have the same
    tag. If the ranks disagree on the size or the dtype, the receiver finds the mismatch when a message arrives.

    :param number: the number of the lane, or the number of a collective that is in no lane.
    """
    what = _described(op)
    fingerprint = _fingerprints.get(what)
    if fingerprint is None:
        if len(_fingerprints) == _MOST_FINGERPRINTS:
            _fingerprints.clear()
        fingerprint = _fingerprints[what] = _hash(repr(what).encode())
    return _ABOVE | (number + fingerprint) & _BITS


def _described(op: Any) -> tuple[object, ...]:
    if isinstance(op, ops.CollectiveBatch):
        return tuple(map(_described, op.parts))
    return op.name, getattr(op, "root", None), getattr(op, "op", None)


_fingerprints: dict[tuple[object, ...], int] = {}
"""The fingerprint of each kind of collective that this process has executed as messages.

A fingerprint is a hash of the collective's name, root and operator.
"""


def collective_tags(number: int) -> list[int]:
    """Return the tags of a lane's collectives, for each kind of collective that has a fingerprint."""
    return [_ABOVE | (number + fingerprint) & _BITS for fingerprint in _fingerprints.values()]


def within(op: Any, number: int) -> Any:
    """Return a copy of a message, or of a batch of messages, with a lane's tags in place of the program's tags."""
    if isinstance(op, ops.Batch):
        return ops.Batch(tuple(within(part, number) for part in op.parts))
    return replace(op, tag=tag_of(number, op.tag))
