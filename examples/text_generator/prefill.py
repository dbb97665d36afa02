"""Prefill: prompts go through the model in chunks, and their pages are handed over to a decoder."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import torch

from .links import LOST, Channel, Description, Endpoint, Group, Sender
from .pages import PAGE, Step, pages_for, table
from .worker import Leader, Rank

if TYPE_CHECKING:
    from .metrics import Measures
    from .model import Shape, Shard
    from .pages import Cache

CHUNK = 2 * PAGE
"""The tokens of one chunk of a prompt. A chunk takes some milliseconds, and its client may leave after each one."""
AT_ONCE = 4
"""The number of prompts that are computed at the same time, so that a short one need not wait for a long one."""
HELD = 2 * AT_ONCE
"""The number of prompts that have pages at the same time, with prompts that the decoder must still read."""


def pages_at_once(shape: Shape) -> int:
    """Return the number of pages that the prefill group needs."""
    return HELD * pages_for(shape.context)


class PrefillRank(Rank):
    """A rank of the prefill group. Its plans are chunks of prompts, and the transfer or release of pages."""

    description = None

    def __init__(self, group: Group, shard: Shard, cache: Cache, measures: Measures, here: Endpoint, name: str) -> None:
        super().__init__(group, shard, cache, measures)
        self._sender = Sender(here, name, cache.memory)
        self.kinds |= {"connect": self.connect, "fill": self.fill}
        self.kinds |= {"hand": self._sender.hand, "free": self._sender.free}

    async def listen(self) -> None:
        """Return at once, because no other rank connects to a prefill rank."""

    async def connect(self, decoder: str, ranks: list[Description]) -> None:
        """Connect to the rank of a decode group that has the same part of the model."""
        await self._sender.connect(decoder, ranks[self.group.rank])

    async def fill(self, key: int, count: int, tokens: torch.Tensor, begin: int) -> Any:
        """Take a chunk of a prompt through the model. This rank selects the `count` pages of the whole prompt."""
        pages = (await self._sender.pages(key, count))[: pages_for(begin + tokens.shape[1])]
        return await self.step(Step(tokens, torch.tensor([begin]), table([pages])).pack())


class PrefillLeader(Leader):
    """The leader of the prefill group. Each prompt of the front is a task, and each chunk is a plan."""

    def __init__(self, rank: PrefillRank, channel: Channel, pages: int) -> None:
        super().__init__(rank, channel)
        self._held, self._at_once = asyncio.Semaphore(HELD), asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[int, anyio.CancelScope] = {}

    def on_connect(self, decoder: str, ranks: list[Description]) -> None:
        """Connect to a new decode group."""
        self.tasks.start_soon(self._connect, decoder, ranks)

    async def _connect(self, decoder: str, ranks: list[Description]) -> None:
        try:
            await self.group.run(("connect", decoder, ranks))
        except LOST:
            return  # the decode group is gone, or this group is lost and ends
        self.channel.tell("connected", decoder)

    def on_fill(self, key: int, decoder: str, text: bytes) -> None:
        """Take a prompt through the model, and hand its pages over to a decode group."""
        self._under_way[key] = anyio.CancelScope()
        self.tasks.start_soon(self._fill, key, decoder, text)

    def on_stop(self, key: int) -> None:
        """Cancel a prompt."""
        if key in self._under_way:
            self._under_way[key].cancel()

    async def _fill(self, key: int, decoder: str, text: bytes) -> None:
        async with self._held:
            handed = False
            try:
                async with self._at_once:
                    token = await self._chunks(key, text)
                self.channel.tell("filled", key, token)
                with self._under_way[key]:
                    await self.group.run(("hand", key, decoder))
                    handed = True
            except LOST:
                if self.group.broken:
                    return  # the end of this process tells the front
                self.channel.tell("filled", key, None)  # the front must try again with another decode group
            if not handed:
                await self.group.run(("free", key))
        del self._under_way[key]

    async def _chunks(self, key: int, text: bytes) -> int | None:
        """Compute a prompt in chunks. Return the token after it, or None if the prompt is cancelled."""
        token = None
        for begin in range(0, len(text), CHUNK):
            if self._under_way[key].cancel_called:
                return None
            chunk = torch.tensor([list(text[begin : begin + CHUNK])])
            [token] = await self.choose(("fill", key, pages_for(len(text)), chunk, begin))
        return token
