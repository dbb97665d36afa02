"""Prefill: prompts go through the model in chunks, and their pages into a decoder's memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from .links import LOST, Channel, Description, Endpoint, Group, Sender
from .pages import PAGE, Pages, Step, pages_for, table
from .worker import Leader, Rank

if TYPE_CHECKING:
    from .metrics import Measures
    from .model import Shape, Shard
    from .pages import Cache

CHUNK = 2 * PAGE
"""Tokens of a prompt that go through the model at once: some milliseconds, after which a client may have left."""
AT_ONCE = 4
"""Prompts that are under way at the same time, so that a short one need not wait for a long one."""


def pages_at_once(shape: Shape) -> int:
    """How many pages the group needs itself."""
    return 1 + AT_ONCE * pages_for(shape.context)


class PrefillRank(Rank):
    """Its part of a plan: a chunk, whose pages it writes where a decoder wants them."""

    description = None

    def __init__(self, group: Group, shard: Shard, cache: Cache, measures: Measures, here: Endpoint, name: str) -> None:
        super().__init__(group, shard, cache, measures)
        self._sender = Sender(here, name)
        self._pages: dict[str, int] = {}
        self.kinds |= {"connect": self.connect, "fill": self.fill, "signal": self._sender.signal}

    async def listen(self) -> None:
        """Nobody connects with it."""

    async def connect(self, decoder: str, ranks: list[Description], pages: int) -> None:
        """Get to know a decoder: this rank connects with the one that has the same part of the model."""
        self._pages[decoder] = pages
        await self._sender.connect(decoder, ranks[self.group.rank])

    async def fill(self, packed: list[torch.Tensor], decoder: str, pairs: list[tuple[int, int]]) -> Any:
        """Take a chunk through the model, and write pages of it: from which of these to which of the decoder's."""
        chosen = await self.step(packed)
        pieces = (self.cache.pieces(own, self._pages[decoder], target) for own, target in pairs)
        await self._sender.push(decoder, [piece for page in pieces for piece in page])
        return chosen


class PrefillLeader(Leader):
    """Takes prompts from the front; each is a task, whose chunks are plans."""

    def __init__(self, rank: PrefillRank, channel: Channel, pages: int) -> None:
        super().__init__(rank, channel)
        self._pages = Pages(pages)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._under_way: set[int] = set()

    def on_connect(self, decoder: str, ranks: list[Description], pages: int) -> None:
        """There is another decoder."""
        self.tasks.start_soon(self._connect, decoder, ranks, pages)

    async def _connect(self, decoder: str, ranks: list[Description], pages: int) -> None:
        try:
            await self.group.run(("connect", decoder, ranks, pages))
        except LOST:
            return  # it is gone already; if it is this group, its loss ends it
        self.channel.tell("connected", decoder)

    def on_fill(self, key: int, decoder: str, pages: list[int], text: bytes) -> None:
        """A prompt is to be taken through the model, and its pages to be written into those of a decoder."""
        self._under_way.add(key)
        self.tasks.start_soon(self._fill, key, decoder, pages, text)

    def on_stop(self, key: int) -> None:
        """Nobody waits for it any more."""
        self._under_way.discard(key)

    async def _fill(self, key: int, decoder: str, targets: list[int], text: bytes) -> None:
        token = None
        try:
            async with self._at_once:
                own = await self._pages.take(pages_for(len(text)))
                with self._pages.kept(own):
                    token = await self._fill_from(key, decoder, own, targets, text)
        except LOST:
            if self.group.broken:
                return  # this process ends, which tells the front
            token = None  # it has to be done again, with another decoder
        self._under_way.discard(key)
        self.channel.tell("filled", key, token)

    async def _fill_from(self, key: int, decoder: str, own: list[int], targets: list[int], text: bytes) -> int | None:
        """Chunk by chunk; whatever happens, the decoder is told that nothing more comes."""
        token = None
        try:
            for begin in range(0, len(text), CHUNK):
                if key not in self._under_way:
                    return None
                end = min(begin + CHUNK, len(text))
                pages = slice(begin // PAGE, pages_for(end))
                step = Step(torch.tensor([list(text[begin:end])]), torch.tensor([begin]), table([own[: pages.stop]]))
                pairs = list(zip(own[pages], targets[pages], strict=True))
                [token] = await self.choose(("fill", step.pack(), decoder, pairs))
        finally:
            await self.group.run(("signal", decoder, key))
        return token
