"""The paged cache of keys and values: the pages of sequences, and a step of the model over them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .model import DTYPE

if TYPE_CHECKING:
    from .model import Layer, Part, Shape, Shard

PAGE = 16
"""The number of tokens of a page."""


def pages_for(tokens: int) -> int:
    """Return the number of pages for a number of tokens."""
    return -(-tokens // PAGE)


class Links(Protocol):
    """The interface of a step to the other ranks of its group."""

    async def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the shards of this stage."""

    async def receive(self, x: Tensor) -> Tensor:
        """Receive hidden states from the previous stage into `x`."""

    async def pass_on(self, x: Tensor) -> None:
        """Send hidden states to the next stage."""


@dataclass
class Step:
    """Tokens of sequences that go through the model together, the same number of each sequence.

    :param tokens: the tokens, int64 `[sequences, tokens]`
    :param begins: the place of each sequence's first token, int64 `[sequences]`; the cache has all earlier ones
    :param tables: the pages of the sequences, int64 `[sequences, pages]`, padded with 0
    """

    tokens: Tensor
    begins: Tensor
    tables: Tensor

    def pack(self) -> list[Tensor]:
        """Return the step as the tensors of a plan."""
        return [self.tokens, self.begins, self.tables]


class Cache:
    """The memory of a rank's pages: the keys and values of its layers and heads.

    `layers` is float64 `[layers, keys or values, pages, PAGE, heads, head]`. A step is faster if a layer's pages are
    contiguous in memory. A page can be handed over only if its layers are contiguous.

    :param whole: whether pages are handed over; then `memory` has them in the layout of `room`
    """

    def __init__(self, shape: Shape, part: Part, pages: int, *, whole: bool = False) -> None:
        self._page = len(part.layers(shape)), 2, PAGE, shape.heads // part.shards, shape.head
        if whole:
            self.memory = self.room(pages).share_memory_()
            self.layers = self.memory.movedim(0, 2)
        else:
            self.layers = self.room(pages).movedim(0, 2).contiguous()

    def room(self, pages: int) -> Tensor:
        """Return memory for whole pages: float64 `[pages, layers, keys or values, PAGE, heads, head]`."""
        return torch.zeros(pages, *self._page, dtype=DTYPE)

    def place(self, pages: list[int], whole: Tensor) -> None:
        """Copy whole pages into the given pages of the cache."""
        self.layers[:, :, pages] = whole.movedim(0, 2)


async def run_step(shard: Shard, cache: Cache, links: Links, step: Step) -> tuple[Tensor, Tensor] | None:
    """Run a step on this rank. After each half of a layer, wait for other ranks, and let other tasks run.

    :returns: on the last stage the tokens after each sequence, and their margins; None on other stages
    """
    count = step.tokens.shape[1]
    places = step.begins[:, None] + torch.arange(count)
    x = functional.embedding(step.tokens, shard.embedding)
    if not shard.part.first:
        x = await links.receive(x)
    cos, sin = shard.cos[places], shard.sin[places]
    where = step.tables.gather(1, places // PAGE), places % PAGE
    visible = (torch.arange(step.tables.shape[1] * PAGE) <= places[:, :, None])[:, None]
    for layer, memory in zip(shard.layers, cache.layers, strict=True):
        x = x + await links.sum(_attend(layer, memory, x, cos, sin, where, step.tables, visible))
        await asyncio.sleep(0)  # a sum that is complete at once lets no other task run
        x = x + await links.sum(layer.feed(x))
        await asyncio.sleep(0)
    if not shard.part.last:
        await links.pass_on(x)
        return None
    return shard.choose(x[:, -1])


def _attend(
    layer: Layer, memory: Tensor, x: Tensor, cos: Tensor, sin: Tensor, where: tuple[Tensor, ...], tables: Tensor,
    visible: Tensor,
) -> Tensor:  # fmt: skip
    """Return a layer's attention. Write new keys and values into the pages, and gather all keys and values."""
    q, *new = layer.heads(x, cos, sin)
    gathered = []
    for part, values in zip(memory, new, strict=True):
        part[where] = values
        pages = part.index_select(0, tables.flatten())
        gathered.append(pages.view(len(x), -1, *part.shape[-2:]))
    return layer.attend(q, *gathered, visible)


class Pages:
    """The allocation of pages for all ranks of a group, on its leader. Page 0 has no owner, because it pads tables."""

    def __init__(self, count: int) -> None:
        self._free = list(range(1, count))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for pages."""
        return len(self._waiting)

    async def take(self, count: int) -> list[int]:
        """Wait for a number of pages, and return them. Requests are served in order."""
        place = count, asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._serve()
        try:
            return await place[1]
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not place[1].cancelled():
                self._free += place[1].result()
            self._serve()
            raise

    def give_back(self, pages: list[int]) -> None:
        """Free pages."""
        self._free += pages
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, future = self._waiting.popleft()
            if not future.done():
                future.set_result([self._free.pop() for _ in range(count)])


def table(rows: list[list[int]]) -> Tensor:
    """Return the tables of several sequences as one tensor, int64 `[sequences, pages of the longest]`."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
