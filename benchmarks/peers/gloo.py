"""torch.distributed with gloo: blocking, and awaited in each of the usual ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from benchmarks.peers.cases import BURST, Buffers, Way

# The names of torch 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gloo:
    """One rank."""

    def __init__(self, rank: int, size: int, _: str) -> None:
        self.rank, self.size = rank, size

    async def open(self, store: Store) -> None:
        """Meet the other ranks."""
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    async def aclose(self) -> None:
        """Part from them."""
        dist.destroy_process_group()

    async def barrier(self) -> None:
        """Wait for them."""
        dist.barrier()

    async def ways(self, b: Buffers) -> dict[str, Way]:
        """How each case is done.

        Only an executor awaits sends, receives and reduce_scatter: their works have no future, and never say by
        themselves that they are completed.
        """
        ops: dict[str, Callable[..., Any]] = {
            "all_reduce": partial(dist.all_reduce, b.output),
            "broadcast": partial(dist.broadcast, b.output, 0),
            "all_gather": partial(all_gather, b.output, b.input),
            "reduce_scatter": partial(reduce_scatter, b.output, b.input),
            "all_to_all": partial(dist.all_to_all_single, b.output, b.input),
            "ping_pong": self._ping_pong(b),
            "stream": self._stream(b),
        }
        op = ops.get(b.case.kind)
        if op is None:
            return {}
        ways = {"gloo blocking": Way(op, blocking=True), "gloo awaited by executor": Way(in_executor(op))}
        if b.case.kind in ("all_reduce", "broadcast", "all_gather", "all_to_all"):
            ways["gloo awaited by polling"] = Way(polling(op))
            ways["gloo awaited by future"] = Way(future(op))
        return ways

    def _ping_pong(self, b: Buffers) -> Callable[[], None]:
        there, back = b.input, b.output

        def ping() -> None:
            dist.send(there, 1)
            dist.recv(back, 1)

        def pong() -> None:
            dist.recv(back, 0)
            dist.send(back, 0)

        return ping if self.rank == 0 else pong

    def _stream(self, b: Buffers) -> Callable[[], None]:
        source, targets = b.input, b.outputs

        def send() -> None:
            for work in [dist.isend(source, 1) for _ in range(BURST)]:
                work.wait()

        def receive() -> None:
            for work in [dist.irecv(target, 0) for target in targets]:
                work.wait()

        return send if self.rank == 0 else receive


def in_executor(op: Callable[[], Any]) -> Callable[[], Any]:
    """A thread waits; of a ping-pong and of a burst for all its parts, which spares hops."""
    return partial(asyncio.get_running_loop().run_in_executor, None, op)


def polling(op: Callable[..., Any]) -> Callable[[], Any]:
    """Ask at every turn of the loop."""

    async def call() -> None:
        work = op(async_op=True)
        while not work.is_completed():  # noqa: ASYNC110 - the usual recipe is what is measured
            await asyncio.sleep(0)

    return call


def future(op: Callable[..., Any]) -> Callable[[], Any]:
    """gloo's thread calls back."""
    loop = asyncio.get_running_loop()

    async def call() -> None:
        done = loop.create_future()
        op(async_op=True).get_future().then(lambda _: loop.call_soon_threadsafe(done.set_result, None))
        await done

    return call
