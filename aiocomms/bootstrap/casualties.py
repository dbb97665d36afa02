"""Failure notices of ranks that fail before the rendezvous, in the store that all ranks reach.

The store may be older than this run of the job, and so may what is written there. A rank that waits believes

* what comes to be written while it waits;
* of what is there when it comes, that a process of the same host has failed since this rank's own process was started,
  if the two have never met: only clocks of one host can be compared.

A process that comes in a failed rank's place says that it is there. Who tells and who hears are of one run, then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
from torch.distributed import PrefixStore, Store

from aiocomms.bootstrap.early import MARKS, has_met
from aiocomms.bootstrap.launchers import Launch, read_environment
from aiocomms.bootstrap.records import append, believed, fetch, listed
from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import CommAbortedError, ProtocolError
from aiocomms.lowlevel import failures
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.hosts import host_id

KEY: Final = "aiocomms/failed"
"""The list of those that have failed; it stands in the store that the launcher names, under no prefix."""
PATIENCE: Final = 1.0
"""Seconds for which a process that fails tries to say so, and at most so long between two looks of one that waits."""
_STAYS: Final = 2
"""Looks for which rank 0 waits once it has heard of one: it may serve the store, where the others have to look, too."""
_LOOKS: Final = 1000
"""Looks per second that all ranks of a communicator together take at most."""
_LONGEST: Final = 2000
"""Characters of an error that travels."""
_TORCHS: Final = "aiocomms.integrations.torch_backend"
"""The module with which a program meets in a store of torch's own."""


class Casualty(msgspec.Struct, array_like=True):
    """The record that a rank leaves of itself."""

    error: str
    """The error that has ended it; empty: another process has come in its place."""
    host: str
    at: float
    """Seconds since its host was started."""


_CASUALTIES = ControlCodec[Casualty](Casualty, "what has ended a rank")


class Casualties:
    """The ranks that have failed, as a rank that waits for the others hears of them. Each call blocks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Begin, before the first look.

        :param store: where the ranks meet; what it stands on is looked at.
        """
        self._store = at_the_bottom(store)
        self._rank = rank
        self._size = size
        self._seal = _seal()
        self._known: dict[int, list[bytes]] = {}
        self._waited = 0.0
        self._heard: CommAbortedError | None = None
        self._stays = _STAYS if rank == 0 else 0

    def arrive(self) -> None:
        """Look which ranks have failed, and say that this rank has not.

        :raises CommAbortedError: one has.
        """
        self._known = self._listed()
        mine = self._said(self._rank)
        if mine is not None and mine.error:
            _leave(self._store, self._seal, self._rank, "")
        if has_met():
            return
        started, here = _started(), host_id()
        for rank in self._known:
            told = self._said(rank)
            if told is not None and told.host == here and told.at > started:
                self._give_up(rank, told)

    def after(self, pause: float) -> None:
        """Look which ranks have failed since the last look, if a second of pauses has gone by.

        :raises CommAbortedError: one has.
        """
        self._waited += pause
        if self._waited < max(PATIENCE, self._size / _LOOKS):
            return
        self._waited, before = 0.0, self._known
        self._known = self._listed()
        if self._heard is not None:
            self._go()
            return
        for rank, records in self._known.items():
            told = self._said(rank) if records != before.get(rank) else None
            if told is not None:
                self._give_up(rank, told)

    def _listed(self) -> dict[int, list[bytes]]:
        with contextlib.suppress(ProtocolError):  # A stranger has left something there that is no list.
            return listed(fetch(self._store, KEY) or b"", self._size, KEY)
        return {}

    def _said(self, rank: int) -> Casualty | None:
        """Return what a rank has said last; None: nothing that it can be shown to have said."""
        if rank in self._known:
            with contextlib.suppress(ProtocolError):  # AuthError is a ProtocolError.
                record = believed(self._seal, KEY, rank, self._known[rank])
                return _CASUALTIES.decode(record, rank)
        return None

    def _give_up(self, rank: int, told: Casualty) -> None:
        if told.error and rank != self._rank and self._heard is None:
            what = told.error[:_LONGEST]
            self._heard = CommAbortedError(f"rank {rank} failed before it came: {what}", peer=rank)
            self._go()

    def _go(self) -> None:
        if self._stays == 0 and self._heard is not None:
            error, self._heard = self._heard, None  # The error holds this frame, which must not hold the error.
            raise error
        self._stays -= 1


def tell(error: Exception) -> None:
    """Tell the other ranks of a job what ends this one, within a second; if another one is at fault, that tells."""
    launch = read_environment(os.environ)
    if launch is None or launch.size == 1 or failures.is_caused(error) or _helps(launch):
        return
    thread = threading.Thread(target=_reach, args=(launch, f"{type(error).__name__}: {error}"), daemon=True)
    thread.start()
    thread.join(PATIENCE)


def at_the_bottom(store: Store) -> Store:
    """Return the store to which all prefixes are added."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _reach(launch: Launch, what: str) -> None:
    torchs = launch.agent_store or _TORCHS in sys.modules
    if launch.host is None or launch.port is None or (launch.rank == 0 and not launch.agent_store):
        return  # This rank would have served the store, so there is none.
    with contextlib.suppress(Exception):  # The error that has ended the process has been shown.
        store = connect_store(
            launch.host, launch.port, launch.rank, launch.size, agent_store=torchs, timeout=PATIENCE
        )  # fmt: skip
        _leave(store, _seal(), launch.rank, what)


def _leave(store: Store, seal: Seal, rank: int, what: str) -> None:
    said = Casualty(what[:_LONGEST], host_id(), time.clock_gettime(time.CLOCK_BOOTTIME))
    append(store, seal, KEY, rank, KEY, _CASUALTIES.encode(said))


def _seal() -> Seal:
    return Seal(read_token(os.environ), "", "casualties")  # no communicator has an empty name


def _started() -> float:
    """Return when this process was started, in seconds since its host was."""
    return _stat(os.getpid())[1]


def _stat(process: int) -> tuple[int, float]:
    """Return a process's parent, and when it was started, as proc_pid_stat(5) tells."""
    _, _, stat = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")
    fields = stat.split()
    return int(fields[1]), int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _helps(launch: Launch) -> bool:
    """Return whether this process is none of the launcher's, but a rank has started it: its end is not the rank's.

    Then a process above it is a Python, too, and has its rank in the environment that it was started with. Between a
    rank and its launcher may be a shell, or a tool that binds it to cores.
    """
    mark, process = f"{MARKS[launch.launcher]}=".encode(), os.getpid()
    mine = Path("/proc/self/exe").readlink()
    try:
        while process := _stat(process)[0]:
            if not any(it.startswith(mark) for it in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                return False
            if Path(f"/proc/{process}/exe").readlink() == mine:
                return True
    except OSError:  # The process is another user's, and no rank.
        pass
    return False
