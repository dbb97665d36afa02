"""The paged cache of keys and values: pages that sequences have, and a step of the model over them."""

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
"""Tokens of a page."""


def pages_for(tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // PAGE)


class Links(Protocol):
    """What a step needs of the other ranks of its group."""

    async def sum(self, x: Tensor) -> Tensor:
        """The sum over the shards of this stage."""

    async def receive(self, x: Tensor) -> Tensor:
        """Hidden states from the stage before, into `x`."""

    async def pass_on(self, x: Tensor) -> None:
        """Hidden states to the next stage."""


@dataclass
class Step:
    """Tokens of sequences that go through the model at once: as many of each.

    :param tokens: int64 `[sequences, tokens]`
    :param begins: the place of the first of each, int64 `[sequences]`; the cache has all before
    :param tables: which pages are theirs, int64 `[sequences, pages]`; what a shorter one lacks is 0
    """

    tokens: Tensor
    begins: Tensor
    tables: Tensor

    def pack(self) -> list[Tensor]:
        """As a plan has it."""
        return [self.tokens, self.begins, self.tables]


class Cache:
    """The memory of a rank's pages: the keys and values of its layers and heads.

    `layers` is float64 `[layers, keys or values, pages, PAGE, heads, head]`. A step is faster where a layer's pages lie
    side by side in memory, but only a page whose layers do so can be handed over.

    :param whole: whether pages are handed over: then `memory` has them, as `room` does
    """

    def __init__(self, shape: Shape, part: Part, pages: int, *, whole: bool = False) -> None:
        self._page = len(part.layers(shape)), 2, PAGE, shape.heads // part.shards, shape.head
        if whole:
            self.memory = self.room(pages).share_memory_()
            self.layers = self.memory.movedim(0, 2)
        else:
            self.layers = self.room(pages).movedim(0, 2).contiguous()

    def room(self, pages: int) -> Tensor:
        """Memory for whole pages: float64 `[pages, layers, keys or values, PAGE, heads, head]`."""
        return torch.zeros(pages, *self._page, dtype=DTYPE)

    def place(self, pages: list[int], whole: Tensor) -> None:
        """Copy whole pages to where these are."""
        self.layers[:, :, pages] = whole.movedim(0, 2)


async def run_step(shard: Shard, cache: Cache, links: Links, step: Step) -> tuple[Tensor, Tensor] | None:
    """Take a step on this rank; between halves of layers it waits for the others, and lets other tasks run.

    :returns: where the last stage chooses: the tokens behind each sequence's last one, and by how much they won
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
        await asyncio.sleep(0)  # a sum that is there at once lets nobody else run
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
    """A layer's attention: new keys and values go to their places in the pages, then all are gathered."""
    q, *new = layer.heads(x, cos, sin)
    gathered = []
    for part, values in zip(memory, new, strict=True):
        part[where] = values
        pages = part.index_select(0, tables.flatten())
        gathered.append(pages.view(len(x), -1, *part.shape[-2:]))
    return layer.attend(q, *gathered, visible)


class Pages:
    """Who has which pages; on the rank that leads a group, for all its ranks. Page 0 is nobody's: it fills tables."""

    def __init__(self, count: int) -> None:
        self._free = list(range(1, count))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many sequences wait for pages."""
        return len(self._waiting)

    async def take(self, count: int) -> list[int]:
        """So many pages, when they are free: first come, first served."""
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
        """They are free from now on."""
        self._free += pages
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, future = self._waiting.popleft()
            if not future.done():
                future.set_result([self._free.pop() for _ in range(count)])


def table(rows: list[list[int]]) -> Tensor:
    """Tables of several sequences as one tensor, int64 `[sequences, pages of the longest]`."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
