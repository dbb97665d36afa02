"""How ranks find each other on a store that may hold an earlier run's keys.

A store may keep the keys of a crashed run: the store of a launcher that restarts the ranks, or a file that is used
again. Each rank therefore counts its arrivals in the store, which gives every arrival a number of its own. It writes
down which arrivals of the other ranks it sees, and goes on when all ranks see the same. The keys of a process that is
gone are not taken for a rank.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Final

from torch.distributed import Store

from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.lowlevel.auth import RENDEZVOUS
from aiocomms.lowlevel.stores import store_errors

FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks at the store: short at first, and longer later so as not to load the store."""


class Arrival:
    """One arrival of a rank under a communicator's name. It is used by one thread, which it blocks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Create an arrival, of which the other ranks know nothing before :meth:`meet`.

        :param store: a store with the keys of this name alone.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self.present: set[int] = {rank}
        """The ranks that see this rank's arrival."""
        self._agreed: set[int] = {rank}

    @store_errors()
    def meet(self, given_up: threading.Event) -> str:
        """Wait until all ranks see the same arrivals, or until ``given_up`` is set.

        :returns: a text that is the same on all ranks, and differs from that of all other arrivals on this store.
        :raises ArgumentError: another process has come as this rank.
        :raises ProtocolError: a rank that sees this rank is of another version.
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
                self._read_view(rank, view)
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
        """Read the other ranks' arrivals, except of those that have agreed; return whether any number has changed."""
        before = list(view)
        for rank in set(range(self._size)) - self._agreed:
            view[rank] = count(self._store, f"came/{rank}")
        return view != before

    def _read_view(self, rank: int, view: list[int]) -> None:
        """Read which arrivals a rank sees, and note whether it sees this rank's, and whether it agrees on all."""
        other_view = read(self._store, f"sees/{rank}/{view[rank]}") if view[rank] else None
        if other_view is not None:
            _, version, *numbers = (
                other_view.split() if other_view.startswith(_MAGIC) else (b"", b"1", *other_view.split())
            )
            if numbers[self._rank : self._rank + 1] == [b"%d" % view[self._rank]]:
                self.present.add(rank)
                # Only now is it certain that it is there, and no process that is gone.
                if version != b"%d" % RENDEZVOUS.version:
                    raise ProtocolError(
                        RENDEZVOUS.differs(f"rank {rank}", version[:16].decode(errors="replace")), peer=rank
                    )
            if other_view == _text(view).encode():
                self._agreed.add(rank)


_MAGIC: Final = RENDEZVOUS.magic + b" "


def _text(view: list[int]) -> str:
    """What a rank writes down: magic and version, then the arrivals. In every version it begins like this."""
    return " ".join([RENDEZVOUS.magic.decode(), str(RENDEZVOUS.version), *map(str, view)])


def read(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if the key is not there."""
    return store.get(key) if store.check([key]) else None


def count(store: Store, key: str) -> int:
    """Return the value of a counter; 0 if nobody has begun it.

    :raises ProtocolError: the value is no number.
    """
    number = read(store, key) or b"0"
    try:
        return int(number)
    except ValueError:
        raise ProtocolError(f"the store's counter {key!r} is no number") from None
