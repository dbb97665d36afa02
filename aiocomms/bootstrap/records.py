"""Signed records in a store: what ranks leave there for each other goes through these. Each call blocks.

A record stands under a key of its own, where :func:`write` puts it and only its rank; or in a list, one value to which
every rank appends, so that all of them are read by one call. ``Store.append`` is atomic on every store of torch's but
``EtcdStore``, which has none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from torch.distributed import Store

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel.auth import Seal

_FRAME: Final = struct.Struct("!II")
"""The head that precedes a record in a list: its rank, and its length in bytes."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_FEW: Final = 32
"""Ranks that may look often: each pause is about a fourth of what they have waited by then, so that it adds little."""
_LOOKS: Final = 8000
"""Looks per second that all ranks of a communicator together take at their store while they wait."""


def write(store: Store, seal: Seal, what: str, rank: int, where: str, value: bytes) -> None:
    """Leave a value of a rank under the key ``where``, in place of an earlier one.

    :param what: what it says; the reader has to expect the same.
    """
    store.set(where, seal.sign(what, rank, value))  # type: ignore[arg-type]  # torch takes bytes, too.


def read(store: Store, seal: Seal, what: str, rank: int, where: str) -> bytes | None:
    """Return what a rank has left, or None if it is not there.

    :raises AuthError: the rank has not signed it.
    :raises ProtocolError: it is of another version, or no record.
    """
    record = fetch(store, where)
    return None if record is None else seal.verify(what, rank, record)


def fetch(store: Store, where: str) -> bytes | None:
    """Return a record as it is, unverified, or None if it is not there."""
    return store.get(where) if store.check([where]) else None


def append(store: Store, seal: Seal, what: str, rank: int, where: str, value: bytes) -> None:
    """Leave a value of a rank in the list under the key ``where``, behind all that are there."""
    # torch has this method.
    store.append(where, framed(rank, seal.sign(what, rank, value)))  # type: ignore[attr-defined]


def framed(rank: int, record: bytes) -> bytes:
    """Return a record as it stands in a list."""
    return _FRAME.pack(rank, len(record)) + record


def listed(data: bytes, size: int, where: str) -> dict[int, list[bytes]]:
    """Return the records of a list by rank, each rank's in the order in which they came, unverified.

    :param data: the value of the list.
    :param size: the number of ranks; records of others are left out.
    :raises ProtocolError: it is no list of records.
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
    """Return what a rank says by the newest of its records in a list. A record of another writer does not count.

    :param records: one or more.
    :raises AuthError: the rank has signed none.
    :raises ProtocolError: they are of another version, or no records.
    """
    for record in reversed(records[1:]):
        try:
            return seal.verify(what, rank, record)
        except ProtocolError:  # AuthError is a ProtocolError.
            continue
    return seal.verify(what, rank, records[0])


def number(data: bytes, where: str) -> int:
    """Return what a counter of a store says.

    :raises ProtocolError: it is no counter.
    """
    if not data.isdigit() or len(data) > len(str(2**63)):
        raise ProtocolError(f"the counter {where!r} in the store makes no sense")
    return int(data)


def pauses(size: int) -> Iterator[float]:
    """Seconds between the looks of a rank that waits: short at first, and then as long as spares the store.

    :param size: how many ranks look at the store meanwhile.
    """
    longest = max(_LONGEST_PAUSE, size / _LOOKS)
    pause = min(longest, _FIRST_PAUSE * max(1, size / _FEW))
    growth = 2 if size > _FEW else 1.25
    while True:
        yield pause
        pause = min(growth * pause, longest)


def last_look(size: int, timeout: float) -> float:
    """Seconds before the end of a rank's patience in which it finds out who is missing, for the error to say."""
    return min(timeout / 2, 0.5 + size / 1000)
