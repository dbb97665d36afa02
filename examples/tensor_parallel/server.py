"""Handlers that await a split model: requests gather on rank 0, and every rank takes them through its part."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .model import TensorParallelModel

MOST = 8
"""Requests that go through the model together."""


class Server:
    """Rank 0: `embed` may be awaited by any number of handlers at a time."""

    def __init__(self, model: TensorParallelModel) -> None:
        self._model = model
        self._waiting: list[tuple[list[list[int]], asyncio.Future[Tensor]]] = []
        self._news = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._serve())

    async def embed(self, texts: list[list[int]]) -> Tensor:
        """Return a unit vector for each text, `[texts, WIDTH]`.

        :param texts: token ids
        :raises CommError: another rank is gone, or has failed
        """
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((texts, answer))
        self._news.set()
        await asyncio.wait([answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self._task.result()  # raises what ended it
            raise RuntimeError("the server is closed")
        return answer.result()

    async def aclose(self) -> None:
        """End `assist` on the other ranks when the requests so far are answered."""
        self._closing = True
        self._news.set()
        await self._task

    async def _serve(self) -> None:
        """Take whatever waits, up to a limit, through the model together, again and again."""
        while self._waiting or not self._closing:
            group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            if not group:
                self._news.clear()
                await self._news.wait()
                continue
            requests = [texts for texts, _ in group]
            await self._model.comm.broadcast_object(requests, root=0)
            for (_, answer), vectors in zip(group, await self._model.embed(requests), strict=True):
                answer.set_result(vectors)
        await self._model.comm.broadcast_object(None, root=0)


async def assist(model: TensorParallelModel) -> None:
    """Every other rank: take part in what rank 0 serves, until it closes."""
    while (requests := await model.comm.broadcast_object(None, root=0, timeout=None)) is not None:  # idle, for hours
        await model.embed(requests)
