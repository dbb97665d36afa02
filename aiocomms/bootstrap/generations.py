"""How ranks find each other on a store that may hold an earlier run's keys.

A store may keep the keys of a crashed run: the store of a launcher that restarts the ranks, or a file that is used
again. Each rank therefore gives every arrival a random name, and writes it down in place of its last one. It writes
down which arrivals of the other ranks it sees, and goes on when all ranks see the same. The keys of a process that is
gone are not taken for a rank, nor is what somebody writes without the job's token. These records have this shape in
every version, so that ranks of two versions can say so.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from typing import Final

from torch.distributed import Store

from aiocomms.bootstrap.records import fetch, read, write
from aiocomms.errors import ArgumentError
from aiocomms.lowlevel.auth import Seal, claimed
from aiocomms.lowlevel.stores import store_errors

FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks at the store: short at first, and longer later so as not to load the store."""

_NAME: Final = re.compile(r"[0-9a-f]{16}")
_NOBODY: Final = "-"


class Arrival:
    """One arrival of a rank under a communicator's name. It is used by one thread, which it blocks."""

    def __init__(self, store: Store, rank: int, size: int, seal: Seal) -> None:
        """Create an arrival, of which the other ranks know nothing before :meth:`meet`.

        :param store: a store with the keys of this name alone.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._seal = seal
        self.present: set[int] = {rank}
        """The ranks that see this rank's arrival."""
        self._agreed: set[int] = {rank}

    @store_errors()
    def meet(self, given_up: threading.Event) -> str:
        """Wait until all ranks see the same arrivals, or until ``given_up`` is set.

        :returns: a text that is the same on all ranks, and differs from that of all other arrivals on this store.
        :raises ArgumentError: another process has come as this rank.
        :raises AuthError: what a rank has written that sees this rank is not signed, or this rank's own name is not.
        :raises ProtocolError: a rank that sees this rank is of another version.
        :raises StoreLostError: the store is gone.
        """
        mine, came = secrets.token_hex(8), f"came/{self._rank}"
        view = [_NOBODY] * self._size
        view[self._rank] = mine
        write(self._store, self._seal, "came", self._rank, came, mine.encode())
        pause = FIRST_PAUSE
        while not given_up.is_set():
            if self._look(view):
                self._agreed = {self._rank}
                write(self._store, self._seal, f"sees {mine}", self._rank, f"sees/{self._rank}/{mine}", _text(view))
            for rank in set(range(self._size)) - self._agreed:
                self._read_view(rank, view)
            if len(self._agreed) == self._size:
                break
            if read(self._store, self._seal, "came", self._rank, came) != mine.encode():
                raise ArgumentError(
                    f"another process has come as rank {self._rank} while this one waited: was a rank started twice, "
                    "or do two jobs use one store and one name?"
                )
            given_up.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return hashlib.sha256(_text(view)).hexdigest()[:16]

    def _look(self, view: list[str]) -> bool:
        """Read the other ranks' arrivals, except of those that have agreed; return whether any has changed."""
        before = list(view)
        for rank in set(range(self._size)) - self._agreed:
            name = claimed(fetch(self._store, f"came/{rank}") or b"").decode(errors="replace")
            view[rank] = name if _NAME.fullmatch(name) else _NOBODY
        return view != before

    def _read_view(self, rank: int, view: list[str]) -> None:
        """Read which arrivals a rank sees, and note whether it sees this rank's, and whether it agrees on all.

        Whoever names this arrival is there, and no process that is gone. So only then is it an error that it has
        another token or another version.
        """
        name = view[rank]
        record = None if name == _NOBODY else fetch(self._store, f"sees/{rank}/{name}")
        if record is not None and view[self._rank].encode() in claimed(record).split():
            self.present.add(rank)
            if self._seal.verify(f"sees {name}", rank, record) == _text(view):
                self._agreed.add(rank)


def _text(view: list[str]) -> bytes:
    return " ".join(view).encode()
