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
"""Tokens of a prompt that go through the model at once: some milliseconds, after which a client may have left."""
AT_ONCE = 4
"""Prompts that are computed at the same time, so that a short one need not wait for a long one."""
HELD = 2 * AT_ONCE
"""Prompts that have pages at the same time, those included that the decoder has yet to read."""


def pages_at_once(shape: Shape) -> int:
    """How many pages the group needs itself."""
    return HELD * pages_for(shape.context)


class PrefillRank(Rank):
    """Its part of a plan: a chunk, and what becomes of the pages of a prompt."""

    description = None

    def __init__(self, group: Group, shard: Shard, cache: Cache, measures: Measures, here: Endpoint, name: str) -> None:
        super().__init__(group, shard, cache, measures)
        self._sender = Sender(here, name, cache.memory)
        self.kinds |= {"connect": self.connect, "fill": self.fill}
        self.kinds |= {"hand": self._sender.hand, "free": self._sender.free}

    async def listen(self) -> None:
        """Nobody connects with it."""

    async def connect(self, decoder: str, ranks: list[Description]) -> None:
        """Get to know a decoder: this rank connects with the one that has the same part of the model."""
        await self._sender.connect(decoder, ranks[self.group.rank])

    async def fill(self, key: int, count: int, tokens: torch.Tensor, begin: int) -> Any:
        """Take a chunk of a prompt through the model, over pages of this rank's own choice: so many for all of it."""
        pages = (await self._sender.pages(key, count))[: pages_for(begin + tokens.shape[1])]
        return await self.step(Step(tokens, torch.tensor([begin]), table([pages])).pack())


class PrefillLeader(Leader):
    """Takes prompts from the front; each is a task, whose chunks are plans."""

    def __init__(self, rank: PrefillRank, channel: Channel, pages: int) -> None:
        super().__init__(rank, channel)
        self._held, self._at_once = asyncio.Semaphore(HELD), asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[int, anyio.CancelScope] = {}

    def on_connect(self, decoder: str, ranks: list[Description]) -> None:
        """There is another decoder."""
        self.tasks.start_soon(self._connect, decoder, ranks)

    async def _connect(self, decoder: str, ranks: list[Description]) -> None:
        try:
            await self.group.run(("connect", decoder, ranks))
        except LOST:
            return  # it is gone already; if it is this group, its loss ends it
        self.channel.tell("connected", decoder)

    def on_fill(self, key: int, decoder: str, text: bytes) -> None:
        """A prompt is to be taken through the model, and its pages to be handed over to a decoder."""
        self._under_way[key] = anyio.CancelScope()
        self.tasks.start_soon(self._fill, key, decoder, text)

    def on_stop(self, key: int) -> None:
        """Nobody waits for it any more."""
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
                    return  # this process ends, which tells the front
                self.channel.tell("filled", key, None)  # it has to be done again, with another decoder
            if not handed:
                await self.group.run(("free", key))
        del self._under_way[key]

    async def _chunks(self, key: int, text: bytes) -> int | None:
        """Chunk by chunk; the token behind it, unless nobody waits for it any more."""
        token = None
        for begin in range(0, len(text), CHUNK):
            if self._under_way[key].cancel_called:
                return None
            chunk = torch.tensor([list(text[begin : begin + CHUNK])])
            [token] = await self.choose(("fill", key, pages_for(len(text)), chunk, begin))
        return token
