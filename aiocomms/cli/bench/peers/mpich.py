"""The peer MPICH, through mpi4py.

Each call blocks, and uses buffer specifications that were made before the measurement.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from aiocomms.cli.bench.cases import ROOT, BenchCase
from aiocomms.cli.bench.operations import BURST
from aiocomms.cli.bench.ours import Call
from aiocomms.communicator.communicator import Communicator


def launcher(ranks: int) -> list[str]:
    """Return the command that starts the ranks with MPI; an empty list if MPI is not installed."""
    beside = Path(sys.executable).parent / "mpiexec"
    command = str(beside) if beside.exists() else shutil.which("mpiexec")
    return [command, "-n", str(ranks)] if command is not None and find_spec("mpi4py") is not None else []


class MpichPeer:
    """One rank of MPI's world, which MPI's launcher has started."""

    blocking = True

    def __init__(self) -> None:
        self._mpi: Any = None

    def missing(self) -> str | None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        if find_spec("mpi4py") is None:
            return "mpi4py is not installed: pip install mpi4py mpich"
        try:
            self._mpi = import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            return f"mpi4py cannot be loaded: {error}"
        vendor, version = self._mpi.get_vendor()
        return None if vendor == "MPICH" else f"mpi4py is built for {vendor} {'.'.join(map(str, version))} here"

    async def open(self, comm: Communicator, host: str) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`. The import of mpi4py has already initialised MPI."""
        world = self._mpi.COMM_WORLD
        if (world.rank, world.size) != (comm.rank, comm.size):
            raise NotImplementedError(f"MPI's world has {world.size} of {comm.size} ranks: start them with its mpiexec")

    async def aclose(self) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`. mpi4py finalises MPI at the interpreter's end."""

    async def enter(self) -> None:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        await asyncio.to_thread(self._mpi.COMM_WORLD.Barrier)

    leave = enter

    @asynccontextmanager
    async def bound(self, case: BenchCase) -> AsyncIterator[Call]:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        world, into, out = self._mpi.COMM_WORLD, self._spec(case.input), self._spec(case.output)
        root = case.rank == ROOT
        here = self._mpi.IN_PLACE
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(world.Allreduce, here, out),
            "reduce": partial(world.Reduce, here if root else out, out if root else None, root=ROOT),
            "broadcast": partial(world.Bcast, out, ROOT),
            "all_gather_single": partial(world.Allgather, into, out),
            "reduce_scatter_single": partial(world.Reduce_scatter_block, into, out),
            "all_to_all_single": partial(world.Alltoall, into, out),
            "scatter": partial(world.Scatter, into if root else None, out, ROOT),
            "gather_single": partial(world.Gather, into, out if root else None, ROOT),
            "barrier": world.Barrier,
            "send": partial(_ping_pong, world, case.rank, into, out),
            "send_burst": partial(_burst, self._mpi, case.rank, into, out),
        }
        if case.op not in calls:
            raise NotImplementedError(f"{case.op} is not measured with it")
        yield calls[case.op]

    def _spec(self, tensor: Tensor) -> list[Any]:
        """Return the buffer specification that mpi4py handles fastest.

        The specification has no count. So in collectives with one part for each rank, mpi4py calculates the number of
        elements of one part.
        """
        return [tensor.numpy(), self._mpi.FLOAT]


def _ping_pong(world: Any, rank: int, into: list[Any], out: list[Any]) -> None:
    if rank == 0:
        world.Send(into, 1)
        world.Recv(out, 1)
    else:
        world.Recv(out, 0)
        world.Send(into, 0)


def _burst(mpi: Any, rank: int, into: list[Any], out: list[Any]) -> None:
    world = mpi.COMM_WORLD
    start = partial(world.Isend, into, 1) if rank == 0 else partial(world.Irecv, out, 0)
    mpi.Request.Waitall([start() for _ in range(BURST)])


PEER = MpichPeer
"""The class that the benchmark uses for this peer."""
