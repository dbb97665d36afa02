"""Ranks find out which of them are there, on a store that may be older than they are.

A store keeps the keys of a crashed run: a launcher's that starts the ranks anew, or a file that is used again. So each
rank counts its arrivals in the store, which gives every arrival a number of its own; says which arrivals of the others
it sees; and goes on when all of them see the same. What a process left behind that is gone is taken for nobody.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Final

from torch.distributed import Store

from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.lowlevel.stores import store_errors

FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks: soon at first, and later without loading the store."""


class Arrival:
    """One rank's, under a communicator's name. Used by one thread, which it blocks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Begin.

        :param store: of this name alone.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self.present: set[int] = {rank}
        """Ranks that see this one."""
        self._agreed: set[int] = {rank}

    @store_errors()
    def meet(self, given_up: threading.Event) -> str:
        """Wait until all ranks see the same arrivals, or nobody waits any more.

        :returns: what tells these arrivals from all others on this store; the same on all ranks.
        :raises ArgumentError: another process has come as this rank.
        :raises StoreLostError: the store is gone.
        """
        mine = self._store.add(f"came/{self._rank}", 1)
        view = [0] * self._size
        view[self._rank] = mine
        pause = FIRST_PAUSE
        while not given_up.is_set():
            if self._look(view):
                self._agreed = {self._rank}
                self._store.set(f"sees/{self._rank}/{mine}", _text(view))
            for rank in set(range(self._size)) - self._agreed:
                self._hear(rank, view)
            if len(self._agreed) == self._size:
                break
            if count(self._store, f"came/{self._rank}") != mine:
                raise ArgumentError(
                    f"another process has come as rank {self._rank} while this one waited: was a rank started twice, "
                    "or do two jobs use one store and one name?"
                )
            given_up.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return hashlib.sha256(_text(view).encode()).hexdigest()[:16]

    def _look(self, view: list[int]) -> bool:
        """See who has come by now; whether that is news. Who has agreed already is not asked again."""
        before = list(view)
        for rank in set(range(self._size)) - self._agreed:
            view[rank] = count(self._store, f"came/{rank}")
        return view != before

    def _hear(self, rank: int, view: list[int]) -> None:
        """Hear what a rank sees that has come."""
        said = told(self._store, f"sees/{rank}/{view[rank]}") if view[rank] else None
        if said is not None:
            if said.split()[self._rank : self._rank + 1] == [b"%d" % view[self._rank]]:
                self.present.add(rank)
            if said == _text(view).encode():
                self._agreed.add(rank)


def _text(view: list[int]) -> str:
    return " ".join(map(str, view))


def told(store: Store, key: str) -> bytes | None:
    """What a key holds, if it is there."""
    return store.get(key) if store.check([key]) else None


def count(store: Store, key: str) -> int:
    """How far a counter is; 0: nobody has begun it.

    :raises ProtocolError: it is no number.
    """
    said = told(store, key) or b"0"
    try:
        return int(said)
    except ValueError:
        raise ProtocolError(f"the store's counter {key!r} is no number") from None
