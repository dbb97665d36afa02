"""The groups of a communicator. Some of its ranks form a group without the other ranks."""

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
    """The groups of one communicator's ranks.

    Each member counts how often it has formed the same group, and the members' counts agree.
    """

    def __init__(self, rendezvous: StoreRendezvous, plan: Selection, transports: Mapping[Family, Transport]) -> None:
        self._rendezvous, self._plan, self._transports = rendezvous, plan, transports
        self._calls: Counter[str] = Counter()

    async def form(self, members: Sequence[int], name: str, seconds: float) -> Formed:
        """Form a group. Collective over its members.

        :param members: ranks of the communicator; this rank is one of them.
        :param seconds: the deadline of the forming, and afterwards the default timeout of the group's ops.
        """
        own = hashlib.blake2b(repr((name, members)).encode(), digest_size=16).hexdigest()
        self._calls[own] += 1
        rank, size = members.index(self._rendezvous.rank), len(members)
        child = self._rendezvous.child(f"{own}#{self._calls[own]}", name, rank, size, timeout=seconds)

        async def opened(cls: type[Transport], family: Family) -> Transport:
            parent, options = self._transports[family], self._plan.options
            if cls.split_nobody is Transport.split_nobody:
                return await parent.split(child, members, options)
            return await cls.open(child, options)  # A split of this class would need all ranks of the communicator.

        try:
            transports = await formed(child, open_transports(self._plan, opened))
        except CommError as error:
            raise error.about(comm=name, op="create_group", rank=rank) from error.__cause__
        child.timeout = seconds
        return Formed(child, self._plan, transports)
