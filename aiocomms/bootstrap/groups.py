"""The groups of a communicator. The members of a group form it without the communicator's other ranks."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import anyio

from aiocomms.bootstrap.forming import FORMS_AGAIN, Transports, formed, tell
from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, CommTimeoutError, StoreLostError
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import Family
from aiocomms.transport import Transport

_FORMED: Final = "formed"
"""The key under which a member reports that it has formed the group, before it begins to form the group again."""


class Formed(NamedTuple):
    """The parts from which the communicator of a group is made."""

    rendezvous: StoreRendezvous
    plan: Selection
    transports: Mapping[Family, Transport]


class Groups:
    """The groups of one communicator's ranks.

    The members arrive at a part of the store that belongs to the list of members and the group's name, see
    :class:`Arrival`. So the records of failed calls have no effect, even if some members have called :meth:`form` more
    often than other members.
    """

    def __init__(self, rendezvous: StoreRendezvous, plan: Selection, transports: Mapping[Family, Transport]) -> None:
        self._rendezvous, self._plan, self._transports = rendezvous, plan, transports
        self._forming: dict[str, anyio.CancelScope] = {}
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._formed: dict[str, StoreRendezvous] = {}
        """A mapping from the digest of a group's name and members to the last rendezvous that formed this group."""

    def end(self, _reason: object = None) -> None:
        """Cancel the forming of all groups, because the communicator is lost or closed."""
        self._formed.clear()
        for scope in self._forming.values():
            scope.cancel()

    async def form(self, members: Sequence[int], name: str, seconds: float) -> Formed | None:
        """Form a group. Collective over the group's members.

        :param members: ranks of the communicator; this rank is one of them.
        :param seconds: the time in seconds for forming the group; also the default timeout of the group's ops.
        :returns: the parts of the group; None if :meth:`end` was called during the forming.
        """
        own = hashlib.blake2b(repr((name, members)).encode(), digest_size=16).hexdigest()
        rank, size = members.index(self._rendezvous.rank), len(members)
        if own in self._forming:
            raise ArgumentError(
                f"name is {name!r}, wanted another one: a call with this name and these ranks is pending"
            )
        place = self._rendezvous.child(own, name, rank, size, timeout=seconds)
        with anyio.CancelScope() as scope:
            self._forming[own] = scope
            try:
                await self._tell_formed(own)
                rendezvous, transports = await self._form(place, members, self._turns[own])
                if size > 1:
                    self._formed[own] = copy.copy(rendezvous)  # The group's communicator releases its own copy.
            except CommError as error:
                raise error.about(comm=name, op="create_group", rank=rank) from error.__cause__
            finally:
                del self._forming[own]
            rendezvous.timeout = seconds
            return Formed(rendezvous, self._plan, transports)
        return None

    async def _tell_formed(self, own: str) -> None:
        """Report that this rank has formed the last group with these members and this name.

        Members that still form that group read the report. A member that arrives again without a report has given up
        the last group.
        """
        if (last := self._formed.get(own)) is not None:
            with contextlib.suppress(StoreLostError):
                await run_in_thread(partial(last.tell, _FORMED, b"1"))

    async def _form(
        self, place: StoreRendezvous, members: Sequence[int], turn: threading.Lock
    ) -> tuple[StoreRendezvous, Transports]:
        """Meet the other members, and form the group. Repeat both steps if a member has begun another attempt."""
        while True:
            rendezvous = copy.copy(place)
            arrival = await rendezvous.meet(turn)
            opening = self._open(rendezvous, members)
            try:
                return rendezvous, await formed(rendezvous, opening, partial(_left, rendezvous, arrival))
            except FORMS_AGAIN as error:
                if await _is_over(rendezvous, arrival):
                    continue
                if isinstance(error, CommTimeoutError):  # The other members may have later deadlines.
                    await tell(rendezvous, error)
                raise

    async def _open(self, rendezvous: StoreRendezvous, members: Sequence[int]) -> Transports:
        async def opened(cls: type[Transport], family: Family) -> Transport:
            parent, options = self._transports[family], self._plan.options
            if cls.split_nobody is Transport.split_nobody:
                return await parent.split(rendezvous, members, options)
            # A split of this class would need all ranks of the communicator.
            return await cls.open(rendezvous, options)

        return await open_transports(self._plan, opened)


def _left(rendezvous: StoreRendezvous, arrival: Arrival | None) -> CommError | None:
    """Return an error if a member has given up this attempt to form the group, and begun another one. Blocks."""
    again = [] if arrival is None else arrival.repeated()
    if all(rendezvous.told(_FORMED, rank) for rank in again):
        return None
    return CommAbortedError("another member has given up this attempt, and has called again")


async def _is_over(rendezvous: StoreRendezvous, arrival: Arrival | None) -> bool:
    """Return whether a member has given up this attempt and begun another one, and there is time to repeat."""
    with anyio.move_on_after(max(0.0, rendezvous.left())), contextlib.suppress(StoreLostError):
        return await run_in_thread(partial(_left, rendezvous, arrival)) is not None
    return False
