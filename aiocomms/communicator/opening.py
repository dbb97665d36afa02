"""The functions that open a communicator: through a launcher, a store or a process group, or with one rank.

A program may use this module for the first time while its event loop runs. So this module imports only modules that are
needed to check the arguments. When the program awaits the communicator, a thread imports the other modules.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aiocomms.arguments import DEFAULT, FORMING, Timeout, advice, as_int, deadline, device_of, label, place
from aiocomms.bootstrap import supervised
from aiocomms.loading import loaded

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from aiocomms.communicator.communicator import Communicator

_FORMATION = "aiocomms.communicator.formation"

_Opened = TypeVar("_Opened", bound=AbstractAsyncContextManager[Any])


class Opening(ABC, Generic[_Opened]):
    """The result of a call such as ``new_comm()``.

    An ``await`` or ``async with`` on this object opens a communicator or an endpoint.
    """

    _example: str
    """The example in the error about a forgotten ``await``."""
    _it: _Opened | None = None

    @abstractmethod
    async def _open(self) -> _Opened:
        """Open the communicator or endpoint, and return it."""

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._open().__await__()

    # Type checkers find a forgotten await themselves. With this method they would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("__") else f": did you forget `await`? {self._example}"
            raise AttributeError(f"{type(self).__name__}(...) has no attribute {name!r}{hint}")

    async def __aenter__(self) -> _Opened:
        self._it = await self._open()
        return self._it

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._it is not None
        await self._it.__aexit__(kind, error, trace)


class new_comm(Opening["Communicator"]):  # noqa: N801 - The class is called like a function, as asyncpg.create_pool is.
    """Form a communicator with the other ranks; collective.

    Await the call to get a :class:`~aiocomms.communicator.communicator.Communicator`, or write
    ``async with new_comm(...) as comm:``. The block closes the communicator at its end. If the block's body raises an
    error, the communicator is aborted on all ranks before it is closed.

    :param transport: a transport's name; ``"auto"`` for the best available transport; or a mapping from families of ops
        to transports' names. The families are ``"collectives"``, ``"p2p"`` and ``"rma"``.
    :param device: the device of all tensors.
    :param store: the store where the ranks meet. With ``store``, also pass ``rank`` and ``size``. The communicator uses
        the store for splits and recovery until the communicator is closed. Without ``store``, ``rank`` and ``size``,
        these values come from the launcher's environment variables (torchrun, Open MPI, MPICH, Slurm). Without a
        launcher the communicator has one rank.
    :param rank: this rank.
    :param size: the number of ranks.
    :param name: the communicator's name, the same on all ranks. The name distinguishes communicators that share a
        store.
    :param timeout: the deadline of the formation in seconds, and afterwards the default deadline of ops. None: ops have
        no deadline, and the formation has 600 s.
    :param hints: advice to the transports, by name. The hint ``"heartbeat"`` is the number of seconds without a
        heartbeat after which a rank counts as dead; 0: never. The default of this hint is the value of
        ``AIOCOMMS_HEARTBEAT``, or else 5.
    :param join: whether to join an existing communicator as a replacement of a lost rank, or as an additional rank. The
        other ranks call :meth:`~aiocomms.communicator.communicator.Communicator.reconfigure` with the same ``size``.
        None: join if the launcher has restarted only this rank, as ``aiocomms run --restart on-failure`` does.
    :raises ArgumentError: an argument is wrong, or the environment is incomplete; one error lists all problems.
    :raises UnsupportedOperation: the transport is not available; the message gives the reason, and lists the other
        transports.
    :raises CommTimeoutError: a rank did not arrive in time; the message names the rank.
    :raises CommAbortedError: another rank failed or was cancelled before the end of the formation; the message names
        this other rank.
    :raises StoreLostError: the store cannot be reached.
    :raises AuthError: a rank has a different token; the message names the rank.
    """

    _example = "comm = await new_comm(...)"

    def __init__(
        self,
        transport: str | Mapping[str, str] = "auto",
        device: str | torch.device = "cpu",
        *,
        store: Store | None = None,
        rank: int | None = None,
        size: int | None = None,
        name: str = DEFAULT,
        timeout: Timeout = FORMING,
        hints: Mapping[str, Any] | None = None,
        join: bool | None = None,
    ) -> None:
        self._transport = transport
        self._device = checked(device)
        rank, size = as_int(rank), as_int(size)
        self._where = (store, rank, size)
        self._name = label(name)
        self._timeout = deadline("timeout", timeout)
        self._options = advice(hints)
        self._join = join
        place(store, rank, size)

    async def _open(self) -> Communicator:
        await loaded(_FORMATION)
        from aiocomms.communicator.formation import form

        store, rank, size = self._where
        join = self._join
        if rank is None or size is None:
            store, rank, size = await self._launched()
            join = supervised.is_newcomer() if join is None and store is not None else join
        given = self._transport, self._device, store, rank, size, self._name, self._timeout
        return await form(*given, self._options, bool(join))

    async def _launched(self) -> tuple[Store | None, int, int]:
        """Return the launcher's store, this rank and the number of ranks."""
        from aiocomms.communicator.formation import launched

        return await launched(self._name, self._timeout)


async def from_process_group(
    pg: Any, device: str | torch.device = "cpu", *, name: str = DEFAULT, timeout: Timeout = FORMING
) -> Communicator:
    """Form a communicator over an existing ``torch.distributed`` process group; collective.

    The process group still belongs to the program. The communicator neither closes nor aborts the group, and other code
    may use the group afterwards.

    :param pg: the process group, over which the ranks meet. Until this call returns, no other code may use the group,
        not even a second call of this function.
    :param device: the device of all tensors.
    :param name: the communicator's name.
    :param timeout: the deadline of the formation in seconds, and afterwards the default deadline of ops. None: ops have
        no deadline, and the formation has 600 s.
    :raises ArgumentTypeError: no available transport can run over the group.
    """
    where, seconds = checked(device), deadline("timeout", timeout)
    await loaded(_FORMATION)
    from aiocomms.communicator.formation import adopt

    return await adopt(pg, where, label(name), seconds)


def checked(device: str | torch.device) -> str | torch.device:
    """Check the name of a device if torch is loaded. Otherwise the formation checks the name later.

    :raises ArgumentError: the argument names no device.
    """
    return device_of(device) if "torch" in sys.modules else device
