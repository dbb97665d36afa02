"""The meeting of a communicator's surviving ranks: the store that all survivors reach, and the time for recovery.

The survivors meet at the store in which the communicator was formed. If that store is gone, the lowest surviving rank
serves a new store, and sends the store's address to the others. To send the address, the rank needs a side channel of
the transport. Each survivor also sends the address to the next survivor, because the lowest rank may die.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import anyio
from torch.distributed import Store

from aiocomms.bootstrap.notes import MeetingPlace, Notes
from aiocomms.bootstrap.records import pauses
from aiocomms.bootstrap.registry import Selection
from aiocomms.bootstrap.rendezvous import PROBE, StoreRendezvous
from aiocomms.errors import ArgumentError, CommError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.hosts import LOOPBACK, reachable_address
from aiocomms.lowlevel.stores import reach_store, serve_store
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.progress.guard import guarded
from aiocomms.transport import SideChannel

_T = TypeVar("_T")
_Place = tuple[Store, Store | None]
"""A pair: the root store of all communicators, and None or the root store again.

The second element is the root store if the survivors meet at a new store, and None if they meet at the old store.
"""
_OLD: Final = b"the old store"
_LATE: Final = 0.05
"""A delay in seconds. If a wait ends this much later than its deadline, this process was stopped during the wait."""


class Predecessor(NamedTuple):
    """The communicator that a new communicator replaces."""

    rendezvous: StoreRendezvous
    plan: Selection
    notes: Notes
    timeout: float
    reason: CommError | None
    """The error that every later op raises; None if the communicator is not lost."""


class Meeting:
    """One rank's search for the store at which the survivors meet."""

    def __init__(self, before: Predecessor, ranks: Sequence[int] | None, wanted: int | None, seconds: float) -> None:
        """Create the search.

        :param ranks: the ranks that shall meet; None for all survivors.
        :param wanted: the size of the new communicator, if newcomers take its free ranks; None if no newcomers join.
        :param seconds: the time for the whole recovery, in seconds.
        """
        self._before = before
        self._old = before.rendezvous
        self._ranks = ranks
        self._wanted = wanted
        self._seconds = seconds
        self._ends = clock.now() + seconds
        side_channels = (guarded(None, transport.side_channel) for transport in before.notes.transports)
        self.line: SideChannel | None = next((line for line in side_channels if line is not None), None)
        self.moved: bool = False
        """True if the ranks meet at a new store."""

    def left(self) -> float:
        """Return the seconds that are left for the recovery."""
        return self._ends - clock.now()

    def dead(self, rank: int) -> bool:
        """Return whether a rank is known to be dead, or has closed the communicator."""
        reason, closed = self._before.reason, rank in self._before.notes.leaving
        named = isinstance(reason, PeerDiedError) and reason.peer == rank
        return rank != self._old.rank and (named or closed or (self.line is not None and self.line.gone(rank)))

    async def place(self) -> _Place:
        """Return a pair: the root store that all survivors reach, and None or that root store again.

        The second element is the root store if it is new, and None if it is the old store.
        """
        for pause in pauses(self._old.size):
            place = await (self._known_place() if self.line is None else self._told_place(self.line))
            if place is not None:
                return place
            if self.left() <= 0:
                break
            await anyio.sleep(pause)
        raise CommTimeoutError(f"after {self._seconds:g} s no rank had said where to meet")

    async def _known_place(self) -> _Place:
        root = self._old.root
        if root is None or not await self._answers(self.left()):
            raise StoreLostError(
                "the rendezvous store is lost, and without it the ranks of this transport cannot find each other"
            )
        return root, None

    async def _told_place(self, line: SideChannel) -> _Place | None:
        """Return the meeting place that the lowest living rank names.

        If that rank is late, the next rank names a place.
        """
        rank = self._old.rank
        alive = [it for it in self._ranks or range(self._old.size) if not self.dead(it)]
        places = self._before.notes.places
        teller, note = next(((it, places[it]) for it in alive if it != rank and it in places), (rank, None))
        if note is None and self._seconds - self.left() < alive.index(rank) * self._seconds / 4:
            return None
        reached: _Place | None
        if note is None:
            note, reached = await self._lead(line)
            untold = alive
        else:
            reached = await self._follow(note)
            untold = alive[alive.index(rank) + 1 :][:1]  # The teller may have died before it told the next rank.
        if reached is not None:
            for other in untold:
                self._before.notes.say(other, MeetingPlace(note))
        elif places.get(teller) == note:  # The place is from an earlier recovery, and its store is gone.
            del places[teller]
        return reached

    async def _lead(self, line: SideChannel) -> tuple[bytes, _Place]:
        """Return a meeting place for all survivors: the old store if it answers, else a new store on this rank."""
        old, root = self._old, self._old.root
        if root is not None and await self._answers(PROBE if self._wanted is None else self.left()):
            return _OLD, (root, None)
        self._move()
        far = any(line.far(rank) for rank in range(old.size) if rank != old.rank)
        host = reachable_address((), root) if far else LOOPBACK
        store, port = await self.off_loop("serving a store", lambda: serve_store(host, self._seconds))
        return f"{host} {port}".encode(), (store, store)

    async def _follow(self, note: bytes) -> _Place | None:
        """Return the meeting place that another rank has named; None if this rank cannot reach that place."""
        root = self._old.root
        if note == _OLD:
            return (root, None) if root is not None and await self._answers(self.left()) else None
        host, _, port = note.decode(errors="replace").partition(" ")
        if not port.isdecimal():
            raise ProtocolError(f"a rank has named {note[:80]!r} as the place to meet, wanted a host and a port")
        reach = functools.partial(reach_store, host, int(port), self._old.rank, max(0.1, self.left()))
        try:
            store = await self.off_loop("reaching the new store", reach)
        except StoreLostError:
            return None
        self._move()
        return store, store

    def _move(self) -> None:
        self.moved = True
        if self._wanted is not None:
            raise StoreLostError("the rendezvous store is lost, so that no newcomer finds the others: leave out size")

    async def _answers(self, seconds: float) -> bool:
        """Return whether the old communicator's store answers within ``seconds``.

        If the store is gone, return False at once.
        """
        board = self._old

        def probe() -> bool:
            board.tell("probe", b"1")
            return board.told("probe", board.rank) is not None

        while True:
            ends = clock.now() + max(0.0, seconds)
            with anyio.move_on_after(max(0.0, seconds)):
                try:
                    return await run_in_thread(probe)
                except (StoreLostError, ArgumentError):  # The store is gone, or there never was one.
                    return False
            if clock.now() < ends + _LATE or self.left() <= 0:
                return False
            # This process was stopped, and the store may have answered meanwhile.

    async def off_loop(self, what: str, call: Callable[[], _T], more: float = 0.0) -> _T:
        """Run a function in a thread, within the time that is left for the recovery.

        :param what: a name for the work of the function, for the error's message.
        :param more: the seconds that the function may take beyond the time that is left.
        :raises CommTimeoutError: the function took longer.
        """
        with anyio.move_on_after(max(0.0, self.left()) + more):
            result: _T = await run_in_thread(call)
            return result
        raise CommTimeoutError(f"{what} took longer than {self._seconds:g} s")
