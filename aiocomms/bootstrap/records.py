"""Signed records in a store, by which ranks exchange values. Each call blocks.

A record either has a key of its own, or is part of a list. Usually only one rank writes such a key, with :func:`write`.
A list is one value to which every rank appends, so that one call reads all records. ``Store.append`` is atomic on every
store of torch except ``EtcdStore``, which has no ``append``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from torch.distributed import Store

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel.auth import Seal

_FRAME: Final = struct.Struct("!II")
"""The header that precedes a record in a list: the record's rank, and its length in bytes."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_FEW: Final = 32
"""The largest number of ranks for which a waiting rank reads the store often.

Among so few ranks, a pause is about a fourth of the time that the rank has waited.
"""
_LOOKS: Final = 8000
"""The number of times per second that all waiting ranks of a communicator together read from their store."""


def write(store: Store, seal: Seal, what: str, rank: int, where: str, value: bytes) -> None:
    """Write a value of a rank under the key ``where``, and replace an earlier value.

    :param what: the purpose of the value. The signature covers the purpose, so the reader must pass the same purpose.
    """
    store.set(where, seal.sign(what, rank, value))  # type: ignore[arg-type]  # torch takes bytes, too.


def read(store: Store, seal: Seal, what: str, rank: int, where: str) -> bytes | None:
    """Return a value that a rank has written, or None if there is none.

    :raises AuthError: the rank has not signed the record.
    :raises ProtocolError: the record has another version, or is no record.
    """
    record = fetch(store, where)
    return None if record is None else seal.verify(what, rank, record)


def fetch(store: Store, where: str) -> bytes | None:
    """Return an unverified record, or None if there is none."""
    return store.get(where) if store.check([where]) else None


def append(store: Store, seal: Seal, what: str, rank: int, where: str, value: bytes) -> None:
    """Append a value of a rank to the list under the key ``where``."""
    # torch's stubs lack this method.
    store.append(where, framed(rank, seal.sign(what, rank, value)))  # type: ignore[attr-defined]


def framed(rank: int, record: bytes) -> bytes:
    """Return a record together with the header that precedes it in a list."""
    return _FRAME.pack(rank, len(record)) + record


def listed(data: bytes, size: int, where: str) -> dict[int, list[bytes]]:
    """Return the unverified records of a list, grouped by rank. Each group keeps the order of the list.

    :param data: the value of the list.
    :param size: the number of ranks. Records of ranks that are not below ``size`` are left out.
    :raises ProtocolError: ``data`` is no list of records.
    """
    records: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        start = at + _FRAME.size
        rank, length = _FRAME.unpack_from(data, at) if start <= len(data) else (0, len(data))
        at = start + length
        if at > len(data):
            raise ProtocolError(f"the list {where!r} in the store makes no sense")
        if rank < size:
            records.setdefault(rank, []).append(data[start:at])
    return records


def believed(seal: Seal, what: str, rank: int, records: Sequence[bytes]) -> bytes:
    """Return the value of a rank's newest record in a list. Records that another rank signed are ignored.

    :param records: one or more records.
    :raises AuthError: the rank has signed none of the records.
    :raises ProtocolError: the records have another version, or are no records.
    """
    for record in reversed(records[1:]):
        try:
            return seal.verify(what, rank, record)
        except ProtocolError:  # AuthError is a ProtocolError.
            continue
    return seal.verify(what, rank, records[0])


def number(data: bytes, where: str) -> int:
    """Return the value of a counter in a store.

    :raises ProtocolError: ``data`` is no counter.
    """
    if not data.isdigit() or len(data) > len(str(2**63)):
        raise ProtocolError(f"the counter {where!r} in the store makes no sense")
    return int(data)


def pauses(size: int) -> Iterator[float]:
    """Yield the seconds that a waiting rank pauses between two reads of the store.

    The pauses are short at first, and then longer to spare the store.

    :param size: the number of ranks that read the store at the same time.
    """
    longest = max(_LONGEST_PAUSE, size / _LOOKS)
    pause = min(longest, _FIRST_PAUSE * max(1, size / _FEW))
    growth = 2 if size > _FEW else 1.25
    while True:
        yield pause
        pause = min(growth * pause, longest)


def last_look(size: int, timeout: float) -> float:
    """Return how many seconds before the deadline a waiting rank begins to determine which ranks are missing."""
    return min(timeout / 2, 0.5 + size / 1000)
