"""The functions that open a communicator: through a launcher, a store, alone, over a process group, and by its name.

A program names this module first perhaps on a running loop. So the module loads only what the checks of arguments need.
A thread loads the rest when the communicator is awaited.
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
    """An object that opens another one: it is awaited for it, or is used itself by ``async with``."""

    _example: str
    """An example of a program that does not forget the ``await``."""
    _it: _Opened | None = None

    @abstractmethod
    async def _open(self) -> _Opened:
        """Open it."""

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._open().__await__()

    # Type checkers see a forgotten await by themselves, and would take any attribute for granted.
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

    Await it for a :class:`~aiocomms.communicator.communicator.Communicator`, or use it as
    ``async with new_comm(...) as comm:``, which closes the communicator at the end, and aborts it on all ranks if the
    body raises.

    :param transport: a transport's name; ``"auto"`` for the best that is available; or a name for each of some of the
        families ``"collectives"``, ``"p2p"`` and ``"rma"``.
    :param device: the device of all tensors.
    :param store: where the ranks meet, with ``rank`` and ``size``; the communicator keeps it until it is closed, for
        its splits and its recovery. With none of the three the launcher's environment says (torchrun, Open MPI, MPICH,
        Slurm), and without a launcher it is a world of one.
    :param rank: this rank.
    :param size: how many ranks there are.
    :param name: the communicator's name, the same on all ranks; tells apart communicators that share a store.
    :param timeout: the deadline in seconds for forming it, and afterwards that of ops that are given none. None: these
        have no deadline, and forming has 600 s.
    :param hints: advice to the transports, by name; and ``"heartbeat"``: seconds without a sign of life after which a
        rank is taken for dead, 0 for never. Without it ``AIOCOMMS_HEARTBEAT`` says, or else it is 5.
    :param join: take the place of a rank that was lost, or an additional one, in a communicator that exists: the others
        call :meth:`~aiocomms.communicator.communicator.Communicator.reconfigure` with this ``size``. None: do so if
        the launcher has started this rank anew while the others go on, as ``aiocomms run --restart on-failure`` does.
    :raises ArgumentError: an argument is wrong, or the environment is incomplete; one error lists all that is.
    :raises UnsupportedOperation: the transport is not available; says why, and what else there is.
    :raises CommTimeoutError: some rank did not come in time; says which.
    :raises CommAbortedError: another rank could not form its part, was cancelled meanwhile, or has failed before it
        came; says which.
    :raises StoreLostError: the store cannot be reached.
    :raises AuthError: some rank has not the same token; says which.
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
        """Return where the ranks meet, this rank, and how many there are, as the launcher says."""
        from aiocomms.communicator.formation import launched

        return await launched(self._name, self._timeout)


async def from_process_group(
    pg: Any, device: str | torch.device = "cpu", *, name: str = DEFAULT, timeout: Timeout = FORMING
) -> Communicator:
    """Form a communicator over a ``torch.distributed`` process group that exists already; collective.

    The group stays its owner's: it is neither closed nor aborted, and may go on being used.

    :param pg: the process group. The ranks meet over it: until this returns nothing else may use it, nor another call.
    :param device: the device of all tensors.
    :param name: the communicator's name.
    :param timeout: the deadline in seconds for forming it, and afterwards that of ops that are given none. None: these
        have no deadline, and forming has 600 s.
    :raises ArgumentTypeError: no available transport can run over it.
    """
    where, seconds = checked(device), deadline("timeout", timeout)
    await loaded(_FORMATION)
    from aiocomms.communicator.formation import adopt

    return await adopt(pg, where, label(name), seconds)


def checked(device: str | torch.device) -> str | torch.device:
    """Check the name of a device; where torch is not loaded yet, whoever has it loaded does.

    :raises ArgumentError: it names none.
    """
    return device_of(device) if "torch" in sys.modules else device
