"""The live group of one process, which has the rank of this process and the group's lanes."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Final, Self

from aiocomms.arguments import label
from aiocomms.core.leak_guard import LeakGuard
from aiocomms.errors import ArgumentError, CommError
from aiocomms.live.lane import LiveLane, LivePlace
from aiocomms.live.registers import LANES, LEFT, NAME, Registers, place_of, register_of
from aiocomms.live.rounds import Rounds
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.background import Background

DEFAULT_LANE: Final = "main"


class LiveGroup(Handle):
    """A group whose collectives complete even if ranks are dead or late.

    :class:`aiocomms.live_group` makes the group. The ranks agree on each collective through memory that stays valid
    when a rank dies, so the death of a rank does not end the group. If a new process replaces the dead rank, the
    process's first call in a lane joins the lane's current collective. The group belongs to the event loop on which it
    was made. The end of an ``async with`` block closes the group.
    """

    def __init__(self, place: LivePlace, registers: Registers, holder: int, kept: contextlib.AsyncExitStack) -> None:
        """Start without lanes.

        :param holder: the number of this process. The shared register of this rank contains this number.
        :param kept: the resources that :meth:`aclose` closes.
        """
        self._place, self._registers, self._holder, self._kept = place, registers, holder, kept
        self._lanes: dict[str, LiveLane] = {}
        self._background = Background(f"live group '{place.name}'")
        self._guard = LeakGuard(self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        return f"<LiveGroup '{self.name}', rank {self.rank} of {self.size}{state}>"

    @property
    def name(self) -> str:
        """The group's name."""
        return self._place.name

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._place.rank

    @property
    def size(self) -> int:
        """The number of ranks, including dead ranks."""
        return self._place.size

    @property
    def closed(self) -> bool:
        """True once the group is closed on this rank."""
        return self._place.closed

    async def lane(self, name: str = DEFAULT_LANE) -> LiveLane:
        """Open a lane, or return the open lane with this name. Each lane has its own order of calls.

        :param name: the lane's name, which has 1 to 200 characters. Ranks pass the same name to use the same lane.
        :raises ArgumentError: the name is not valid, or the group already has 256 other lanes.
        :raises CommClosedError: the group is closed.
        """
        try:
            self._place.check("lane")
            if label(name) not in self._lanes:
                number = await self._number_of(name)
                rounds = Rounds(self._registers, number, self.rank, self.size, self._holder)
                self._lanes.setdefault(name, LiveLane(name, self._place, rounds, self._background))
        except CommError as error:
            raise error.about(comm=self.name, op="lane", rank=self.rank) from error.__cause__
        return self._lanes[name]

    async def _number_of(self, name: str) -> int:
        """Return the number of a lane, which is the hash of the lane's name modulo the number of possible lanes.

        If a lane with another name has this number, the next free number is used.
        """
        wanted = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 or 1
        for step in range(LANES):
            number = (wanted + step) % LANES
            register = register_of(number, NAME)
            held = await self._registers.load(register) or await self._registers.swap(register, 0, wanted)
            if held in (0, wanted):
                return number
        raise ArgumentError(f"name is {name!r}, and the group has {LANES} other lanes already")

    async def aclose(self) -> None:
        """Leave the group, so that the other ranks no longer wait for this rank. Idempotent."""
        if self.closed:
            return
        self._place.check("aclose")
        self._mark_closed()
        await shielded(self._leave)

    async def _leave(self) -> None:
        await self._background.aclose()  # Another process may use this rank's memory as soon as the place is free.
        for lane in self._lanes.values():
            lane.close()
        try:
            with contextlib.suppress(CommError):  # An error means that the memory, and so the group, is gone.
                if await self._registers.swap(place_of(self.rank), self._holder, LEFT) == self._holder:
                    await self._registers.tell(None)
        finally:
            self._registers.close()
            self._guard.dismiss()
            await self._kept.aclose()

    def _disown(self) -> None:
        """Mark the group as closed in a forked child, which must neither use nor close the parent's resources."""
        self._mark_closed()

    def _mark_closed(self) -> None:
        self._place.closed = True
        for lane in self._lanes.values():
            lane.release_native()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
