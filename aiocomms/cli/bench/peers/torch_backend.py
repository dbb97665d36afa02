"""A backend of ``torch.distributed``, in the same processes; each call blocks, as most programs call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from aiocomms.cli.bench.cases import ROOT, BenchCase
from aiocomms.cli.bench.ours import Call
from aiocomms.communicator.communicator import Communicator

_TIMEOUT = timedelta(seconds=60)

# The names of torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchPeer:
    """One rank of its default process group."""

    blocking = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._store: dist.Store | None = None

    def missing(self) -> str | None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        if not dist.is_available() or not dist.is_backend_available(self._name):
            return "this torch is built without it"
        if "cpu" not in dist.Backend.backend_capability.get(self._name, ()):
            return "it does not carry tensors of the CPU"
        if dist.is_initialized():
            return "this process has a default process group of torch.distributed already"
        return None

    async def open(self, comm: Communicator, host: str) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
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
        dist.destroy_process_group()
        self._store = None

    async def enter(self) -> None:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        await asyncio.to_thread(dist.barrier)

    leave = enter

    @asynccontextmanager
    async def bound(self, case: BenchCase) -> AsyncIterator[Call]:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
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
        }
        if case.op not in calls:
            raise NotImplementedError(f"torch.distributed has no {case.op}")
        yield calls[case.op]


def _ping_pong(case: BenchCase) -> None:
    if case.rank == 0:
        dist.send(case.input, 1)
        dist.recv(case.output, 1)
    else:
        dist.recv(case.output, 0)
        dist.send(case.input, 0)


PEER = TorchPeer
"""The class that the benchmark looks for."""
