"""UCXX's asyncio interface in polling mode, its quickest: sends and receives, all that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ucxx
from torch.distributed import Store

from benchmarks.peers.cases import BURST, Buffers, Way


class Ucxx:
    """One of two ranks: the first listens, the second connects."""

    def __init__(self, rank: int, size: int, _: str) -> None:
        assert size == 2
        self.rank = rank
        self.endpoint: Any
        self._listener: Any = None

    async def open(self, store: Store) -> None:
        """Meet the other rank."""
        ucxx.init(progress_mode="polling")
        if self.rank == 0:
            came: asyncio.Queue[Any] = asyncio.Queue()
            self._listener = ucxx.create_listener(came.put)
            store.set("ucxx", str(self._listener.port))
            self.endpoint = await came.get()
        else:
            self.endpoint = await ucxx.create_endpoint("127.0.0.1", int(store.get("ucxx")))

    async def aclose(self) -> None:
        """Part from it."""
        await self.endpoint.close()
        if self._listener is not None:
            self._listener.close()

    async def barrier(self) -> None:
        """Wait for it."""
        mine, theirs = bytearray(1), bytearray(1)
        await asyncio.gather(self.endpoint.send(mine), self.endpoint.recv(theirs))

    async def ways(self, b: Buffers) -> dict[str, Way]:
        """How each case is done; ``await`` of its request polls by ``sleep(0)``, as its users do."""
        calls = {"ping_pong": self._ping_pong, "stream": self._stream}
        return {"UCXX asyncio": Way(calls[b.case.kind](b))} if b.case.kind in calls else {}

    def _ping_pong(self, b: Buffers) -> Callable[[], Any]:
        endpoint, there, back = self.endpoint, b.input.numpy(), b.output.numpy()

        async def ping() -> None:
            await endpoint.send(there)
            await endpoint.recv(back)

        async def pong() -> None:
            await endpoint.recv(back)
            await endpoint.send(back)

        return ping if self.rank == 0 else pong

    def _stream(self, b: Buffers) -> Callable[[], Any]:
        endpoint, source, targets = self.endpoint, b.input.numpy(), [target.numpy() for target in b.outputs]

        async def send() -> None:
            await asyncio.gather(*(endpoint.send(source) for _ in range(BURST)))

        async def receive() -> None:
            await asyncio.gather(*(endpoint.recv(target) for target in targets))

        return send if self.rank == 0 else receive
