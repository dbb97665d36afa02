"""Signed records in a store: what ranks leave there for each other goes through these. Each call blocks."""

from __future__ import annotations

from torch.distributed import Store

from aiocomms.lowlevel.auth import Seal


def write(store: Store, seal: Seal, what: str, rank: int, where: str, value: bytes) -> None:
    """Leave a value of a rank under the key ``where``, in place of an earlier one.

    :param what: what it says; the reader has to expect the same.
    """
    store.set(where, seal.sign(what, rank, value))  # type: ignore[arg-type]  # bytes are fine


def read(store: Store, seal: Seal, what: str, rank: int, where: str) -> bytes | None:
    """Return what a rank has left, or None if it is not there.

    :raises AuthError: the rank has not signed it.
    :raises ProtocolError: it is of another version, or no record.
    """
    record = fetch(store, where)
    return None if record is None else seal.verify(what, rank, record)


def fetch(store: Store, where: str) -> bytes | None:
    """Return a record as it is, whoever wrote it, or None if it is not there."""
    return store.get(where) if store.check([where]) else None
