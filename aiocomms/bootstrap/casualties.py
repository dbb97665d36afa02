"""Failure notices of ranks that fail before the rendezvous. The notices are in the store that all ranks reach.

The store and its notices may be older than this run of the job. A waiting rank believes

* notices that are written while it waits;
* notices that a process on the same host wrote earlier, if that process failed after this rank's process was started.
  Once the rank's process has met other ranks, the rank no longer believes earlier notices. The rank ignores earlier
  notices from other hosts, because the clocks of two hosts cannot be compared.

A process that replaces a failed rank withdraws the failed rank's notice. So a rank believes only notices of its own run
of the job.
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
from aiocomms.errors import CommAbortedError, ProtocolError, as_reason
from aiocomms.lowlevel import failures
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.hosts import host_id

KEY: Final = "aiocomms/failed"
"""The key, without a prefix, of the list of failure notices in the launcher's store."""
PATIENCE: Final = 1.0
"""The time in seconds for which a failing process tries to write its notice.

A waiting rank reads the notices at this interval, or less often if there are many ranks.
"""
_STAYS: Final = 2
"""The number of reading intervals for which rank 0 still waits after it has found a notice.

Rank 0 may serve the store, and waits so that the other ranks can read the notice before the store ends.
"""
_LOOKS: Final = 1000
"""The largest number of times per second that all ranks of a communicator together read the notices."""
_LONGEST: Final = 2000
"""The largest number of characters of an error in a notice."""
_TORCHS: Final = "aiocomms.integrations.torch_backend"
"""The name of the module with the backend for ``torch.distributed``.

A program that has loaded that module uses torch's store for the rendezvous.
"""


class Casualty(msgspec.Struct, array_like=True):
    """The notice that a rank leaves in the store about its own failure or replacement."""

    error: str
    """The error that ended the rank; empty if another process has replaced the rank."""
    host: str
    at: float
    """The time at which the notice was written, in seconds since the boot of the writer's host."""


_CASUALTIES = ControlCodec[Casualty](Casualty, "what has ended a rank")


class Casualties:
    """The reader of failure notices, for a rank that waits for the other ranks. Each call blocks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Create a reader that has not read any notices.

        :param store: the store at which the ranks meet. The reader uses the store that is inside all ``PrefixStore``
            wrappers, because the keys of notices have no prefix.
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
        """Read the notices, and withdraw a notice of an earlier process of this rank.

        :raises CommAbortedError: a rank has failed.
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
        """Read the new notices if the rank has waited :data:`PATIENCE` seconds or longer since the last reading.

        :param pause: the seconds for which the rank has waited since the last call.
        :raises CommAbortedError: a rank has failed.
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
        with contextlib.suppress(ProtocolError):  # A stranger has written a value that is no list.
            return listed(fetch(self._store, KEY) or b"", self._size, KEY)
        return {}

    def _said(self, rank: int) -> Casualty | None:
        """Return the last notice of a rank; None if the rank has signed no notice."""
        if rank in self._known:
            with contextlib.suppress(ProtocolError):  # AuthError is a ProtocolError.
                record = believed(self._seal, KEY, rank, self._known[rank])
                return _CASUALTIES.decode(record, rank)
        return None

    def _give_up(self, rank: int, told: Casualty) -> None:
        if told.error and rank != self._rank and self._heard is None:
            what = told.error[:_LONGEST]
            self._heard = CommAbortedError(f"rank {rank} failed before it joined: {what}", peer=rank)
            self._go()

    def _go(self) -> None:
        if self._stays == 0 and self._heard is not None:
            error, self._heard = self._heard, None  # The error refers to this frame, which must not refer to the error.
            raise error
        self._stays -= 1


def tell(error: Exception) -> None:
    """Write a notice of the error that ends this rank, unless another rank caused the error. Block up to a second."""
    launch = read_environment(os.environ)
    if launch is None or launch.size == 1 or failures.is_caused(error) or _helps(launch):
        return
    thread = threading.Thread(target=_reach, args=(launch, as_reason(error)), daemon=True)
    thread.start()
    thread.join(PATIENCE)


def at_the_bottom(store: Store) -> Store:
    """Return the store that is inside all ``PrefixStore`` wrappers of ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _reach(launch: Launch, what: str) -> None:
    torchs = launch.agent_store or _TORCHS in sys.modules
    if launch.host is None or launch.port is None or (launch.rank == 0 and not launch.agent_store):
        return  # This rank would have served the store, so there is none.
    with contextlib.suppress(Exception):  # The user has already seen the error that ends the process.
        store = connect_store(
            launch.host, launch.port, launch.rank, launch.size, agent_store=torchs, timeout=PATIENCE
        )  # fmt: skip
        _leave(store, _seal(), launch.rank, what)


def _leave(store: Store, seal: Seal, rank: int, what: str) -> None:
    said = Casualty(what[:_LONGEST], host_id(), time.clock_gettime(time.CLOCK_BOOTTIME))
    append(store, seal, KEY, rank, KEY, _CASUALTIES.encode(said))


def _seal() -> Seal:
    return Seal(read_token(os.environ), "", "casualties")  # No communicator has an empty name.


def _started() -> float:
    """Return the start time of this process, in seconds since the boot of its host."""
    return _stat(os.getpid())[1]


def _stat(process: int) -> tuple[int, float]:
    """Return the pid of a process's parent, and the process's start time in seconds since the boot.

    See proc_pid_stat(5).
    """
    _, _, stat = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")
    fields = stat.split()
    return int(fields[1]), int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _helps(launch: Launch) -> bool:
    """Return whether a rank, not the launcher, has started this process.

    If so, the end of this process is not the end of the rank. A rank has started this process if an ancestor of the
    process runs the same Python executable, and had a launcher's rank variable in its environment at its start. Between
    a rank and its launcher there may be a shell, or a tool that binds the rank to cores.
    """
    mark, process = f"{MARKS[launch.launcher]}=".encode(), os.getpid()
    mine = Path("/proc/self/exe").readlink()
    try:
        while process := _stat(process)[0]:
            if not any(it.startswith(mark) for it in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                return False
            if Path(f"/proc/{process}/exe").readlink() == mine:
                return True
    except OSError:  # The process belongs to another user, and is no rank.
        pass
    return False
