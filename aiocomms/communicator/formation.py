"""The code that forms a communicator: the ranks find each other, and each rank chooses and opens the transports."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import Store

from aiocomms import arguments
from aiocomms.arguments import DEFAULT, device_of
from aiocomms.bootstrap import crowding, directory, early, newcomers
from aiocomms.bootstrap.forming import Transports, formed
from aiocomms.bootstrap.launchers import read_environment
from aiocomms.bootstrap.registry import Selection, choose, choose_adopter, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.bootstrap.stores import connect_store
from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis.root_cause import tell_torchrun
from aiocomms.errors import ArgumentError, CommError, StoreLostError
from aiocomms.lowlevel import clock, run_in_thread
from aiocomms.lowlevel.auth import Seal, job_token
from aiocomms.lowlevel.handles import uncompiled
from aiocomms.lowlevel.stores import admitting
from aiocomms.lowlevel.threads import call_in_thread


async def form(
    transport: str | Mapping[str, str], device: str | torch.device, store: Store | None, rank: int, size: int,
    name: str, timeout: float, hints: Mapping[str, Any], join: bool,
) -> Communicator:  # fmt: skip
    """Form a communicator with the arguments of :class:`aiocomms.new_comm`."""
    if clock.simulation is not None and store is not None:
        clock.simulation.check_store(store)
    where = await settled(device)
    if join and store is None:
        raise ArgumentError("join is True, and store is None: give the store of the other ranks", rank=rank)
    plan = await run_in_thread(functools.partial(choose, transport, where, size, hints), anyhow=True)
    try:
        return await _form(plan, store, rank, size, name, where, timeout, join)
    except StoreLostError:  # The next attempt connects to the store that is served by then.
        for place in [place for place, known in list(_launched.items()) if known is store]:
            del _launched[place]
        raise


async def adopt(pg: Any, device: str | torch.device, name: str, timeout: float) -> Communicator:
    """Form a communicator over a process group of torch.

    The arguments are those of :func:`aiocomms.from_process_group`.
    """
    where = await settled(device)
    plan = await run_in_thread(functools.partial(choose_adopter, pg, where, {}), anyhow=True)
    return await _form(plan, None, pg.rank(), pg.size(), name, where, timeout)


async def settled(value: str | torch.device) -> torch.device:
    """Return the device that an argument names.

    If the argument is "cuda" without a number, and there is a GPU, return the current CUDA device of this thread.

    :raises ArgumentError: the argument names no device.
    """
    device = device_of(value)
    if device.type != "cuda" or device.index is not None:
        return device
    if await run_in_thread(_starts_cuda, anyhow=True):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _starts_cuda() -> bool:
    """Initialize CUDA, and return whether there is a GPU. The initialization takes some tenths of a second."""
    if not torch.cuda.is_available():
        return False
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return True


async def launched(name: str, timeout: float) -> tuple[Store | None, int, int]:
    """Connect to the launcher's store, and return the store, this rank and the number of ranks."""
    if clock.simulation is not None:
        return clock.simulation.launched()
    launch = await run_in_thread(lambda: read_environment(os.environ), anyhow=True)
    if launch is None or launch.host is None or launch.port is None:
        return None, 0, 1
    host, port = launch.host, launch.port
    cpu, seal = torch.device("cpu"), Seal(None)
    alone = StoreRendezvous(None, launch.rank, launch.size, name=name, device=cpu, timeout=timeout, seal=seal)
    store = _launched.get((host, port))
    if store is None:
        reach = functools.partial(connect_store, host, port, launch.rank, launch.size, timeout=alone.timeout)
        connect = functools.partial(reach, agent_store=launch.agent_store, elsewhere=launch.elsewhere)
        store = _launched[host, port] = await alone.run(f"reaching the store at {host}:{port}", connect)
    return store, launch.rank, launch.size


async def _form(
    plan: Selection, store: Store | None, rank: int, size: int, name: str, device: torch.device, timeout: float,
    join: bool = False,
) -> Communicator:  # fmt: skip
    tell_torchrun()
    seal = await run_in_thread(lambda: Seal(job_token(), name), anyhow=True)
    rendezvous = StoreRendezvous(None, rank, size, name=name, device=device, timeout=timeout, seal=seal)

    async def open_at(met: StoreRendezvous) -> Transports:
        early.meets()
        return await open_transports(plan, lambda cls, _: cls.open(met, plan.options))

    try:
        async with admitting(store):
            if store is not None and join:
                rendezvous, transports = await newcomers.join(rendezvous, store, open_at)
            else:
                if store is not None:
                    await rendezvous.arrive(store)
                crowd = await _counted(rendezvous)
                transports = await formed(rendezvous, open_at(rendezvous))
                if crowd is not None:
                    call_in_thread(crowd, lambda _: None)
        rendezvous.timeout = timeout
        return Communicator(rendezvous, plan, transports)
    except CommError as error:
        raise error.about(comm=name, rank=rank) from error.__cause__


async def _counted(rendezvous: StoreRendezvous) -> Callable[[], None] | None:
    """Add the number of this process's torch threads to the counter of this host in the store.

    :returns: a function on one of the ranks that share a counter, and None on the other ranks. The function warns if
        these ranks have too many threads.
    """
    store = rendezvous.store
    if store is None or not crowding.may_crowd(rendezvous.size):
        return None
    key = await rendezvous.run("counting torch's threads", functools.partial(crowding.count, store))
    return functools.partial(crowding.warn, store, key) if key else None


_launched: WeakValueDictionary[tuple[str, int], Store] = WeakValueDictionary()
"""The launchers' stores to which this process is connected.

The keys of the dict are the hosts and ports. A store stays alive as long as a communicator uses the store.
"""


@uncompiled
def get_comm(group: Communicator | str | None = None) -> Communicator:
    """Return an open communicator.

    :param group: a communicator, which is returned unchanged, or the name of a communicator. ``""`` and None stand for
        the default name ``"world"``.
    :raises ArgumentError: no open communicator has the name, or several communicators have the name and the calling
        task opened none of them.
    :raises ArgumentTypeError: ``group`` is neither a communicator nor a name. If ``group`` is a process group of torch,
        the message explains how to form a communicator over the process group.
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
    raise arguments.wrong_type("group", group, wanted)
