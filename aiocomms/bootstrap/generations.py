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

from aiocomms.errors import ArgumentError, CommAbortedError, ProtocolError

_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.05
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

    def meet(self, given_up: threading.Event) -> str:
        """Wait until all ranks see the same arrivals, or nobody waits any more.

        :returns: what tells these arrivals from all others on this store; the same on all ranks.
        :raises ArgumentError: another process has come as this rank.
        """
        mine = self._store.add(f"came/{self._rank}", 1)
        view = [0] * self._size
        view[self._rank] = mine
        pause = _FIRST_PAUSE
        while not given_up.is_set():
            if self._look(view):
                self._agreed = {self._rank}
                self._store.set(f"sees/{self._rank}/{mine}", _text(view))
            for rank in set(range(self._size)) - self._agreed:
                self._hear(rank, view)
            if len(self._agreed) == self._size:
                break
            if _count(self._store, f"came/{self._rank}") != mine:
                raise ArgumentError(
                    f"another process has come as rank {self._rank} while this one waited: was a rank started twice, "
                    "or do two jobs use one store and one name?"
                )
            given_up.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return hashlib.sha256(_text(view).encode()).hexdigest()[:16]

    def _look(self, view: list[int]) -> bool:
        """See who has come by now; whether that is news. Who has agreed already is not asked again."""
        before = list(view)
        for rank in set(range(self._size)) - self._agreed:
            view[rank] = _count(self._store, f"came/{rank}")
        return view != before

    def _hear(self, rank: int, view: list[int]) -> None:
        """Hear what a rank sees that has come."""
        said = _told(self._store, f"sees/{rank}/{view[rank]}") if view[rank] else None
        if said is not None:
            if said.split()[self._rank : self._rank + 1] == [b"%d" % view[self._rank]]:
                self.present.add(rank)
            if said == _text(view).encode():
                self._agreed.add(rank)


class Claims:
    """Processes that would take the place of a rank in the next epoch. Blocks as long as the store does."""

    def __init__(self, store: Store) -> None:
        """Begin.

        :param store: of this name alone.
        """
        self._store = store

    def add(self, rank: int) -> int:
        """Ask for a rank; the claim's number."""
        return self._store.add(f"join/{rank}", 1)

    def newest(self, rank: int) -> int:
        """The number of the last claim to a rank that nobody has answered; 0: there is none."""
        number = _count(self._store, f"join/{rank}")
        return 0 if number and self._store.check([f"join/{rank}/{number}"]) else number

    def answer(self, rank: int, number: int, record: bytes) -> None:
        """Tell who claims a rank what was decided. Twice is once."""
        self._store.set(f"join/{rank}/{number}", record)  # type: ignore[arg-type]  # bytes are fine

    def wait(self, rank: int, number: int, given_up: threading.Event) -> bytes:
        """Wait for the answer to a claim, or until nobody waits any more.

        :raises CommAbortedError: another process has claimed the same rank since.
        """
        pause = _FIRST_PAUSE
        while not given_up.wait(pause):
            record = _told(self._store, f"join/{rank}/{number}")
            if record is not None:
                return record
            if _count(self._store, f"join/{rank}") != number:
                raise CommAbortedError(f"another process has asked since to become rank {rank}")
            pause = min(2 * pause, _LONGEST_PAUSE)
        return b""


def _text(view: list[int]) -> str:
    return " ".join(map(str, view))


def _told(store: Store, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _count(store: Store, key: str) -> int:
    said = _told(store, key) or b"0"
    try:
        return int(said)
    except ValueError:
        raise ProtocolError(f"the store's counter {key!r} is no number") from None
