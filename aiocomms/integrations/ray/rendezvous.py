"""The rendezvous of actors by name.

Rank 0 serves a store. During the rendezvous, Ray's own key-value store contains the address of this store.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import anyio
import torch
from torch.distributed import Store

from aiocomms.arguments import FORMING, Timeout, as_int
from aiocomms.communicator.opening import new_comm
from aiocomms.errors import ArgumentError, CommError
from aiocomms.integrations.ray.meeting import RayMeeting
from aiocomms.lowlevel import run_in_thread


class rendezvous(new_comm):  # noqa: N801 - The class is called like a function, as new_comm is.
    """Form a communicator with all actors that call this function with the same name. The call is collective.

    Write ``comm = await rendezvous(...)`` or ``async with rendezvous(...) as comm:``, as with
    :func:`aiocomms.new_comm`. All actors must be in one namespace of Ray. Drivers and tasks of Ray can also call this
    function. All ranks use a store that rank 0's process serves until the communicator is closed. After this call, the
    same actors or other actors may use the name again. When the call returns or is cancelled, Ray's own key-value store
    contains no entry of this call.

    If the actors are on several nodes, the job needs a token: ``AIOCOMMS_TOKEN`` in the ``env_vars`` of Ray's
    ``runtime_env``. Without a token, all actors must be on one node.

    :param name: the name of the rendezvous and of the communicator.
    :param rank: this actor's rank.
    :param size: the number of actors.
    :param transport: see :func:`aiocomms.new_comm`.
    :param device: the device of all tensors.
    :param timeout: a deadline in seconds. The rendezvous and then the formation of the communicator each have this
        deadline. This deadline is also the default deadline of the communicator's ops. If None, the rendezvous and the
        formation have 600 s each, and ops have no deadline.
    :param hints: advice to the transports.
    :raises ArgumentError: an argument has a wrong value, two actors have the same rank, or the actors are on several
        nodes and the job has no token.
    :raises MismatchError: the actors pass different sizes.
    :raises CommTimeoutError: some ranks did not arrive before the deadline. The error names these ranks.
    :raises StoreLostError: rank 0 was lost before all ranks had arrived.
    :raises AuthError: a rank has another token.
    :raises CommError: Ray is not initialized in this process.
    """

    _example = "comm = await aiocomms.integrations.ray.rendezvous(...)"

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        transport: str | Mapping[str, str] = "auto",
        device: str | torch.device = "cpu",
        timeout: Timeout = FORMING,
        hints: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(transport, device, name=name, timeout=timeout, hints=hints)
        rank, size = as_int(rank), as_int(size)
        for what, value in (("rank", rank), ("size", size)):
            if type(value) is not int:
                raise ArgumentError(f"{what} is {value!r}, wanted an int")
        if not 0 <= rank < size:
            raise ArgumentError(f"rank is {rank} and size is {size}, wanted 0 <= rank < size")
        self._rank, self._size = rank, size

    async def _launched(self) -> tuple[Store | None, int, int]:
        if self._size == 1:
            return None, 0, 1
        seconds = FORMING if self._timeout == inf else self._timeout
        meeting = RayMeeting(self._name, self._rank, self._size, seconds)
        try:
            store = await run_in_thread(meeting.run)
        except CommError as error:
            raise error.about(comm=self._name, op="rendezvous", rank=self._rank) from error.__cause__
        except anyio.get_cancelled_exc_class():  # The thread outlives the cancellation.
            with anyio.CancelScope(shield=True):
                await run_in_thread(meeting.give_up, anyhow=True)
            raise
        return store, self._rank, self._size
