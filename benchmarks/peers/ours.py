"""aiocomms with a transport of its choice, awaited from plain asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from torch.distributed import Store

import aiocomms
from aiocomms import Communicator, Window
from benchmarks.peers.cases import BURST, Buffers, Way


class Ours:
    """One rank."""

    def __init__(self, rank: int, size: int, transport: str) -> None:
        self.rank, self.size, self.transport = rank, size, transport
        self.comm: Communicator
        self._windows: list[Window] = []

    async def open(self, store: Store) -> None:
        """Meet the other ranks."""
        self.comm = await aiocomms.new_comm(self.transport, store=store, rank=self.rank, size=self.size, timeout=60)

    async def aclose(self) -> None:
        """Part from them."""
        await self.comm.aclose()

    async def barrier(self) -> None:
        """Wait for them."""
        await self.comm.barrier()

    async def ways(self, b: Buffers) -> dict[str, Way]:
        """How each case is done; one way, except that put and signal are measured against send and receive."""
        await self._drop_windows()
        comm, name = self.comm, f"aiocomms {self.transport}"
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "all_reduce": partial(comm.all_reduce, b.output),
            "broadcast": partial(comm.broadcast, b.output, 0),
            "all_gather": partial(comm.all_gather_single, b.output, b.input),
            "reduce_scatter": partial(comm.reduce_scatter_single, b.output, b.input),
            "all_to_all": partial(comm.all_to_all_single, b.output, b.input),
        }
        if b.case.kind in calls:
            return {name: Way(calls[b.case.kind])}
        if b.case.kind == "ping_pong":
            return {name: self._ping_pong(b)}
        if b.case.kind == "stream":
            return {name: self._stream(b)}
        if b.case.kind == "put_signal":
            ways = await self._put_signal(b)
            return {name: ways[0], f"{name} put, then signal": ways[1], f"{name} send/recv": self._exchange(b)}
        assert b.case.kind == "get"
        return {name: await self._get(b)}

    async def _drop_windows(self) -> None:
        while self._windows:
            await self._windows.pop().aclose()

    def _ping_pong(self, b: Buffers) -> Way:
        comm, there, back = self.comm, b.input, b.output

        async def ping() -> None:
            await comm.send(there, 1)
            await comm.recv(back, 1)

        async def pong() -> None:
            await comm.recv(back, 0)
            await comm.send(back, 0)

        return Way(ping if self.rank == 0 else pong)

    def _exchange(self, b: Buffers) -> Way:
        """A ping-pong whose two messages are each rank's own, as those of :meth:`_put_signal` are."""
        comm, mine, theirs, peer = self.comm, b.input, b.output, 1 - self.rank

        async def first() -> None:
            await comm.send(mine, peer)
            await comm.recv(theirs, peer)

        async def second() -> None:
            await comm.recv(theirs, peer)
            await comm.send(mine, peer)

        return Way(first if self.rank == 0 else second)

    def _stream(self, b: Buffers) -> Way:
        comm, source, targets = self.comm, b.input, b.outputs

        async def send() -> None:
            for work in [comm.send(source, 1) for _ in range(BURST)]:
                await work

        async def receive() -> None:
            for work in [comm.recv(target, 0) for target in targets]:
                await work

        return Way(send if self.rank == 0 else receive)

    async def _put_signal(self, b: Buffers) -> list[Way]:
        """In one call, and in two."""
        window = await self.comm.new_window(b.output)
        self._windows.append(window)
        source, peer = b.input, 1 - self.rank

        def put_and_signal() -> Awaitable[Any]:
            window.put(source, peer)
            return window.signal(peer)

        def way(give: Callable[[], Awaitable[Any]]) -> Way:
            async def first() -> None:
                await give()
                await window.wait_signal(peer)

            async def second() -> None:
                await window.wait_signal(peer)
                await give()

            return Way(first if self.rank == 0 else second)

        return [way(partial(window.put_signal, source, peer)), way(put_and_signal)]

    async def _get(self, b: Buffers) -> Way:
        window = await self.comm.new_window(b.input)
        self._windows.append(window)
        return Way(partial(window.get, b.output, 1) if self.rank == 0 else None)
