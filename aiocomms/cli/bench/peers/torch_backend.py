"""The backends of ``torch.distributed``, in the same processes as aiocomms.

By default, the calls block the event loop, as in most programs.

``gloo:executor``, ``gloo:polling`` and ``gloo:future`` are the usual methods of waiting for gloo in asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from aiocomms.cli.bench.cases import ROOT, BenchCase
from aiocomms.cli.bench.operations import BURST
from aiocomms.cli.bench.ours import Call
from aiocomms.communicator.communicator import Communicator

_TIMEOUT = timedelta(seconds=60)

# Torch 2.13 renamed these functions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchPeer:
    """One rank of torch's default process group."""

    def __init__(self, name: str) -> None:
        self._name, _, way = name.partition(":")
        self._awaited = WAYS[way] if way else None
        self.blocking = self._awaited is None
        self._store: dist.Store | None = None

    def missing(self) -> str | None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        if not dist.is_available() or not dist.is_backend_available(self._name):
            return "this torch is built without it"
        if "cpu" not in dist.Backend.backend_capability.get(self._name, ()):
            return "it does not carry tensors of the CPU"
        if dist.is_initialized() and self._name not in _users:
            return "this process has a default process group of torch.distributed already"
        return None

    async def open(self, comm: Communicator, host: str) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`. All peers with one backend share a process group."""
        if self._name not in _users:
            await self._form(comm, host)
        _users[self._name] = _users.get(self._name, 0) + 1

    async def _form(self, comm: Communicator, host: str) -> None:
        connect = partial(dist.TCPStore, world_size=None, timeout=_TIMEOUT, wait_for_workers=False)
        port = 0
        if comm.rank == ROOT:
            self._store = connect(host, 0, is_master=True)
            port = self._store.port
        port = await comm.broadcast_object(port, ROOT)
        if comm.rank != ROOT:
            self._store = await asyncio.to_thread(connect, host, port, is_master=False)
        form = partial(dist.init_process_group, self._name, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)
        await asyncio.to_thread(form, store=self._store)

    async def aclose(self) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        _users[self._name] -= 1
        if not _users[self._name]:
            del _users[self._name]
            dist.destroy_process_group()
            self._store = None

    async def enter(self) -> None:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        await asyncio.to_thread(dist.barrier)

    leave = enter

    @asynccontextmanager
    async def bound(self, case: BenchCase) -> AsyncIterator[Call]:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        call = _blocking(case)
        if self._awaited in (_polling, _future) and case.op not in _TOLD:
            raise NotImplementedError("its work never says by itself that it is done")
        yield call if self._awaited is None else self._awaited(call)


def _blocking(case: BenchCase) -> Callable[..., Any]:
    into, out, inputs, outputs = case.input, case.output, case.inputs, case.outputs
    rows = [len(into) // case.size] * case.size
    root = case.rank == ROOT
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(dist.all_reduce, out),
        "reduce": partial(dist.reduce, out, ROOT),
        "broadcast": partial(dist.broadcast, out, ROOT),
        "all_gather": partial(dist.all_gather, outputs, into),
        "all_gather_single": partial(_all_gather, out, into),
        "reduce_scatter": partial(dist.reduce_scatter, out, inputs),
        "reduce_scatter_single": partial(_reduce_scatter, out, into),
        "all_to_all": partial(dist.all_to_all, outputs, inputs),
        "all_to_all_single": partial(dist.all_to_all_single, out, into),
        "all_to_all_v_single": partial(dist.all_to_all_single, out, into, rows, rows),
        "scatter": partial(dist.scatter, out, inputs if root else None, ROOT),
        "gather": partial(dist.gather, into, outputs if root else None, ROOT),
        "barrier": dist.barrier,
        "send": partial(_ping_pong, case),
        "send_burst": partial(_burst, case),
    }
    if case.op not in calls:
        raise NotImplementedError(f"torch.distributed has no {case.op}")
    return calls[case.op]


def _ping_pong(case: BenchCase) -> None:
    if case.rank == 0:
        dist.send(case.input, 1)
        dist.recv(case.output, 1)
    else:
        dist.recv(case.output, 0)
        dist.send(case.input, 0)


def _burst(case: BenchCase) -> None:
    start = partial(dist.isend, case.input, 1) if case.rank == 0 else partial(dist.irecv, case.output, 0)
    for work in [start() for _ in range(BURST)]:
        assert work is not None  # This rank belongs to the group.
        work.wait()


def _in_executor(call: Callable[..., Any]) -> Call:
    """Return a function that makes the call in a thread of the executor.

    A whole ping-pong or burst is one call, to avoid thread switches.
    """
    return partial(asyncio.get_running_loop().run_in_executor, None, call)


def _polling(call: Callable[..., Any]) -> Call:
    """Return a function that makes the call, and polls the call's work in every iteration of the event loop."""

    async def poll() -> None:
        work = call(async_op=True)
        while not work.is_completed():  # noqa: ASYNC110 - this measures the usual recipe
            await asyncio.sleep(0)

    return poll


def _future(call: Callable[..., Any]) -> Call:
    """Return a function that makes the call, and awaits a callback from the backend's thread."""
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        done = loop.create_future()
        call(async_op=True).get_future().then(lambda _: loop.call_soon_threadsafe(done.set_result, None))
        await done

    return wait


_TOLD = frozenset({"all_reduce", "broadcast", "all_gather_single", "all_to_all_single"})
"""The operations whose work object has a future.

The future reports the completion of the operation. For other operations, the work object of gloo has no future.
"""
WAYS: dict[str, Callable[[Callable[..., Any]], Call]] = {
    "executor": _in_executor,
    "polling": _polling,
    "future": _future,
}
"""The methods of waiting for a backend's calls.

Each key is the text after the colon in a name, such as ``polling`` in ``gloo:polling``.
"""
_users: dict[str, int] = {}  # This counts the peers that use the default process group, by its backend.
