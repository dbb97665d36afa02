"""MPICH through mpi4py: every call blocks, on buffer specifications made beforehand."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor
from torch.distributed import Store

from benchmarks.peers.cases import BURST, Buffers, Way


class Mpich:
    """One rank; the launcher has made it one."""

    def __init__(self, rank: int, size: int, _: str) -> None:
        self.comm = MPI.COMM_WORLD
        assert (rank, size) == (self.comm.rank, self.comm.size)
        self.rank = rank

    async def open(self, _: Store) -> None:
        """Importing mpi4py has opened it."""

    async def aclose(self) -> None:
        """End with the others."""
        MPI.Finalize()

    async def barrier(self) -> None:
        """Wait for them."""
        self.comm.Barrier()

    async def ways(self, b: Buffers) -> dict[str, Way]:
        """How each case is done; none of one-sided ones."""
        comm, out, into = self.comm, spec(b.output), spec(b.input)
        calls: dict[str, Any] = {
            "all_reduce": partial(comm.Allreduce, MPI.IN_PLACE, out),
            "broadcast": partial(comm.Bcast, out, 0),
            "all_gather": partial(comm.Allgather, into, out),
            "reduce_scatter": partial(comm.Reduce_scatter_block, into, out),
            "all_to_all": partial(comm.Alltoall, into, out),
            "ping_pong": self._ping_pong(b),
            "stream": self._stream(b),
        }
        return {"MPICH blocking": Way(calls[b.case.kind], blocking=True)} if b.case.kind in calls else {}

    def _ping_pong(self, b: Buffers) -> Any:
        comm, there, back = self.comm, spec(b.input), spec(b.output)

        def ping() -> None:
            comm.Send(there, 1)
            comm.Recv(back, 1)

        def pong() -> None:
            comm.Recv(back, 0)
            comm.Send(back, 0)

        return ping if self.rank == 0 else pong

    def _stream(self, b: Buffers) -> Any:
        comm, source, targets = self.comm, spec(b.input), [spec(target) for target in b.outputs]

        def send() -> None:
            MPI.Request.Waitall([comm.Isend(source, 1) for _ in range(BURST)])

        def receive() -> None:
            MPI.Request.Waitall([comm.Irecv(target, 0) for target in targets])

        return send if self.rank == 0 else receive


def spec(tensor: Tensor) -> list[Any]:
    """What mpi4py takes quickest for a buffer; a collective of several parts divides the count by itself."""
    return [tensor.numpy(), MPI.FLOAT]
