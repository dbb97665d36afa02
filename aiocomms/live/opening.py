"""The opening of a live group.

Like :mod:`aiocomms.communicator.opening`, this module imports few modules, because the import may block a running event
loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocomms.arguments import FORMING, Timeout, as_int, deadline, label, place, wrong_type
from aiocomms.communicator.opening import Opening
from aiocomms.errors import ArgumentError
from aiocomms.loading import loaded

if TYPE_CHECKING:
    from torch.distributed import Store

    from aiocomms.live.group import LiveGroup

CAPACITY = 4 * 2**20


class live_group(Opening["LiveGroup"]):  # noqa: N801 - programs call the class like a function
    """Join a live group as one rank.

    The group's collectives do not wait for dead ranks, and wait for late ranks only until a deadline.

    Await the call to get a :class:`~aiocomms.live.group.LiveGroup`, or write ``async with live_group(...) as group:``.
    The group forms when all ranks have made the call. Later, a new process can make the call to replace a dead rank.
    Ranks of one host share memory if the package with native code is installed. Otherwise the ranks use the job's
    store, which is slower and does not detect deaths.

    :param name: the group's name. All ranks must pass the same name.
    :param store: the store through which the ranks form the group; see :class:`aiocomms.new_comm`. With a store, also
        pass ``rank`` and ``size``. The group needs the store until the group is closed.
    :param rank: this rank.
    :param size: the number of ranks, at most 20.
    :param timeout: the deadline in seconds for the formation of the group, and the default deadline of ops. None: ops
        wait for all live ranks, and the formation has a deadline of 600 s.
    :param capacity: the largest number of bytes that a rank contributes to one op. All ranks must pass the same number.
        The group allocates memory only when ops need it. For each lane and rank, this memory is at most twice the
        capacity.
    :raises ArgumentError: an argument is wrong or differs between ranks, or another live process already has this rank.
    :raises CommTimeoutError: a rank did not join before the deadline. The message names the rank.
    :raises StoreLostError: the store cannot be reached.
    """

    _example = "group = await live_group(...)"

    def __init__(
        self,
        name: str = "live",
        *,
        store: Store | None = None,
        rank: int | None = None,
        size: int | None = None,
        timeout: Timeout = FORMING,
        capacity: int = CAPACITY,
    ) -> None:
        self._name, self._timeout = label(name), deadline("timeout", timeout)
        self._where = store, as_int(rank), as_int(size)
        place(*self._where)
        self._capacity = as_int(capacity)
        if type(self._capacity) is not int:
            raise wrong_type("capacity", capacity, "a number of bytes")
        if not 0 < self._capacity <= 2**40:
            raise ArgumentError(f"capacity is {capacity}, wanted 0 < capacity <= 2**40 bytes")

    async def _open(self) -> LiveGroup:
        await loaded("aiocomms.live.forming")
        from aiocomms.live.forming import form

        return await form(self._name, *self._where, self._timeout, self._capacity)
