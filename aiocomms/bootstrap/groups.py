"""The groups of a communicator: some of its ranks form one of their own, of which the others need not know."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiocomms.bootstrap.forming import formed
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import CommError
from aiocomms.ops import Family
from aiocomms.transport import Transport


class Formed(NamedTuple):
    """The parts that a communicator is made of."""

    rendezvous: StoreRendezvous
    plan: Selection
    transports: Mapping[Family, Transport]


class Groups:
    """The groups that the ranks of one communicator have formed; the count is the same on all that take part."""

    def __init__(self, rendezvous: StoreRendezvous, plan: Selection, transports: Mapping[Family, Transport]) -> None:
        self._rendezvous, self._plan, self._transports = rendezvous, plan, transports
        self._calls: Counter[str] = Counter()

    async def form(self, members: Sequence[int], name: str, seconds: float) -> Formed:
        """Form one; collective over its members.

        :param members: ranks of the communicator, with this one among them.
        :param seconds: the time to form in, and then that of its ops.
        """
        own = hashlib.blake2b(repr((name, members)).encode(), digest_size=16).hexdigest()
        self._calls[own] += 1
        rank, size = members.index(self._rendezvous.rank), len(members)
        child = self._rendezvous.child(f"{own}#{self._calls[own]}", name, rank, size, timeout=seconds)

        async def opened(cls: type[Transport], family: Family) -> Transport:
            parent, options = self._transports[family], self._plan.options
            if cls.split_nobody is Transport.split_nobody:
                return await parent.split(child, members, options)
            return await cls.open(child, options)  # A split of this class needs the ranks that join none, too.

        try:
            transports = await formed(child, open_transports(self._plan, opened))
        except CommError as error:
            raise error.about(comm=name, op="create_group", rank=rank) from error.__cause__
        child.timeout = seconds
        return Formed(child, self._plan, transports)
