"""How users get a communicator: through a launcher, a store, alone, or over a process group; and by its name."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import Store

from aiocomms.bootstrap import directory, early, newcomers
from aiocomms.bootstrap.directory import DEFAULT
from aiocomms.bootstrap.forming import formed
from aiocomms.bootstrap.launchers import read_environment
from aiocomms.bootstrap.registry import Selection, advice, choose, choose_adopter, open_transports
from aiocomms.bootstrap.rendezvous import FORMING, StoreRendezvous
from aiocomms.bootstrap.stores import connect_store
from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis.root_cause import tell_torchrun
from aiocomms.errors import ArgumentError, CommError, StoreLostError
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.handles import uncompiled
from aiocomms.lowlevel.stores import admitting
from aiocomms.ops import checks
from aiocomms.ops.checks import Timeout
from aiocomms.ops.numbers import as_int

_Opened = TypeVar("_Opened", bound=AbstractAsyncContextManager[Any])


class Opening(ABC, Generic[_Opened]):
    """What opens something that is used by ``async with``; it is awaited for that, or used so itself."""

    _example: str
    """Of a program that does not forget the ``await``."""
    _it: _Opened | None = None

    @abstractmethod
    async def _open(self) -> _Opened:
        """Open it."""

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._open().__await__()

    if not TYPE_CHECKING:  # which see a forgotten await by themselves, and would take any attribute for granted

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


class new_comm(Opening[Communicator]):  # noqa: N801 - it is called like a function, as asyncpg.create_pool is
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
        call :meth:`~aiocomms.communicator.communicator.Communicator.reconfigure` with this ``size``.
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
        join: bool = False,
    ) -> None:
        self._transport = transport
        self._device = device_of(device)
        rank, size = as_int(rank), as_int(size)
        self._where = (store, rank, size)
        self._name = checks.label(name)
        self._timeout = checks.deadline("timeout", timeout)
        self._options = advice(hints)
        self._join = join
        _check_place(store, rank, size)

    async def _open(self) -> Communicator:
        store, rank, size = self._where
        if rank is None or size is None:
            store, rank, size = await self._launched()
        if self._join and store is None:
            raise ArgumentError("join is True, and no store and no launcher says where the others are", rank=rank)
        plan = choose(self._transport, self._device, size, self._options)
        try:
            return await _form(plan, store, rank, size, self._name, self._device, self._timeout, self._join)
        except StoreLostError:  # another attempt finds the one that is served by then
            for where in [where for where, known in list(_launched.items()) if known is store]:
                del _launched[where]
            raise

    async def _launched(self) -> tuple[Store | None, int, int]:
        launch = read_environment(os.environ)
        if launch is None or launch.host is None or launch.port is None:
            return None, 0, 1
        host, port = launch.host, launch.port
        alone = StoreRendezvous(
            None, launch.rank, launch.size, name=self._name, device=self._device, timeout=self._timeout, seal=Seal(None)
        )
        store = _launched.get((host, port))
        if store is None:
            reach = functools.partial(connect_store, host, port, launch.rank, launch.size, timeout=alone.timeout)
            connect = functools.partial(reach, agent_store=launch.agent_store, elsewhere=launch.elsewhere)
            store = _launched[host, port] = await alone.run(f"reaching the store at {host}:{port}", connect)
        return store, launch.rank, launch.size


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
    where = device_of(device)
    plan = choose_adopter(pg, where, {})
    seconds = checks.deadline("timeout", timeout)
    return await _form(plan, None, pg.rank(), pg.size(), checks.label(name), where, seconds)


@uncompiled
def get_comm(group: Communicator | str | None = None) -> Communicator:
    """Find an open communicator.

    :param group: a communicator, which is returned as it is; its name; ``""`` or None for the default one, ``"world"``.
    :raises ArgumentError: there is none of that name, or several and this task opened none of them.
    :raises ArgumentTypeError: it is neither; where it is a process group of torch, says how to form one over it.
    """
    if isinstance(group, Communicator):
        return group
    if group is None or isinstance(group, str):
        found = directory.find(group or DEFAULT)
        assert isinstance(found, Communicator)
        return found
    wanted = "a Communicator or its name"
    if isinstance(group, (ProcessGroup, Backend)):
        wanted += ": form one over the process group with `await aiocomms.from_process_group(group)`, and give that"
    raise checks.wrong_type("group", group, wanted)


async def _form(
    plan: Selection, store: Store | None, rank: int, size: int, name: str, device: torch.device, timeout: float,
    join: bool = False,
) -> Communicator:  # fmt: skip
    tell_torchrun()
    seal = Seal(read_token(os.environ), name)
    rendezvous = StoreRendezvous(None, rank, size, name=name, device=device, timeout=timeout, seal=seal)
    try:
        with admitting(store):
            if store is not None and join:
                rendezvous = await newcomers.join(rendezvous, store)
            elif store is not None:
                await rendezvous.arrive(store)
            early.meets()
            opening = open_transports(plan, lambda cls, _: cls.open(rendezvous, plan.options))
            transports = await formed(rendezvous, opening)
        rendezvous.timeout = timeout
        return Communicator(rendezvous, plan, transports)
    except CommError as error:
        raise error.about(comm=name, rank=rank) from error.__cause__


_launched: WeakValueDictionary[tuple[str, int], Store] = WeakValueDictionary()
"""The launcher's store, which the communicators over it share and keep."""


def _check_place(store: Store | None, rank: int | None, size: int | None) -> None:
    """Check that rank, size and store fit together; one error lists all that does not."""
    if store is None and rank is None and size is None:
        return
    wrong = []
    for what, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            wrong.append(f"{what} is missing" if value is None else f"{what} is {value!r}, wanted an int")
    if type(size) is int and size < 1:
        wrong.append(f"size is {size}, wanted at least 1")
    elif type(size) is int and type(rank) is int and not 0 <= rank < size:
        wrong.append(f"rank is {rank}, wanted 0 <= rank < size = {size}")
    if store is None and size != 1:
        wrong.append("store is missing")
    elif store is not None and not isinstance(store, Store):
        wrong.append(f"store is a {type(store).__name__}, wanted a torch.distributed.Store")
    if wrong:
        raise ArgumentError(f"rank, size and store belong together: {'; '.join(wrong)}")


def device_of(value: str | torch.device) -> torch.device:
    """Return the device that an argument names.

    :raises ArgumentError: it names none.
    """
    try:
        device = torch.device(value)
    except TypeError:
        raise checks.wrong_type("device", value, "a torch.device or its name") from None
    except RuntimeError as error:
        raise ArgumentError(f"device is {value!r}, wanted a torch.device or its name: {error}") from None
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
