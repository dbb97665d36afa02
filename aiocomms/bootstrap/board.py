"""The board of a communicator: signed records in the store. Each rank writes its own records, and can read all records.

Recovery and diagnosis use the board, on threads other than the event loop's thread. Transports do not use the board. A
call to the board blocks until the store answers.
"""

from __future__ import annotations

from typing import Final

from torch.distributed import Store

from aiocomms.bootstrap.records import fetch, read, write
from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.lowlevel.auth import Seal
from aiocomms.lowlevel.stores import store_errors

ANYBODY: Final = -1
"""The number that the signature of a decision covers in place of a rank.

The signature of every other record covers the rank that signed the record.
"""


class Board:
    """One rank's access to the board of a communicator."""

    def __init__(self, store: Store | None, rank: int, seal: Seal) -> None:
        """Open the board.

        :param store: the part of the store that belongs to this communicator; None if the communicator has no store.
        """
        self.store = store
        self.rank = rank
        self._seal = seal

    @store_errors()
    def tell(self, key: str, value: bytes) -> None:
        """Write a value that the other ranks can read.

        :raises StoreLostError: the store is gone.
        """
        write(self._store(), self._seal, key, self.rank, f"{key}/{self.rank}", value)

    @store_errors()
    def told(self, key: str, rank: int) -> bytes | None:
        """Return the value that a rank has written under a key.

        Return None if there is no value, or if the rank has not signed the value.

        :raises StoreLostError: the store is gone.
        """
        try:
            return read(self._store(), self._seal, key, rank, f"{key}/{rank}")
        except ProtocolError:  # AuthError is a ProtocolError.
            return None

    @store_errors()
    def decide(self, key: str, value: bytes) -> bytes:
        """Decide on a value for all ranks, and return the decision: the first value that any rank gives for the key.

        :raises StoreLostError: the store is gone.
        :raises AuthError: no rank has signed the record in the store.
        """
        wanted = self._seal.sign(key, ANYBODY, value).hex()
        return self._opened(key, self._store().compare_set(key, "", wanted))

    @store_errors()
    def decided(self, key: str) -> bytes | None:
        """Return the decision on a key, or None if no rank has decided yet.

        :raises StoreLostError: the store is gone.
        :raises AuthError: no rank has signed the record in the store.
        """
        record = fetch(self._store(), key)
        return None if record is None else self._opened(key, record)

    def _opened(self, key: str, record: bytes) -> bytes:
        try:
            return self._seal.verify(key, ANYBODY, bytes.fromhex(record.decode()))
        except ValueError:
            raise ProtocolError(f"the record {key!r} in the store makes no sense") from None

    def _store(self) -> Store:
        if self.store is None:
            raise ArgumentError("store is None, wanted a Store: the ranks need one to meet", rank=self.rank)
        return self.store
