"""Decode: continuous batching over a paged cache. The prefill group computes the first pages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import torch

from .links import Channel, Endpoint, Group, Receiver
from .pages import Pages, Step, pages_for, table
from .worker import Leader, Rank

if TYPE_CHECKING:
    from .metrics import Measures
    from .model import Shard
    from .pages import Cache

AT_ONCE = 16
"""The most sequences of a step. A layer of a step blocks the event loop for at most a few milliseconds."""


class DecodeRank(Rank):
    """A rank of a decode group. Its plans are steps of a batch, and reads of pages from the prefill group."""

    def __init__(self, group: Group, shard: Shard, cache: Cache, measures: Measures, here: Endpoint, name: str) -> None:
        super().__init__(group, shard, cache, measures)
        self._receiver = Receiver(here)
        self.description, self.listen = self._receiver.description, self._receiver.listen
        self.kinds["read"] = self.read

    async def read(self, sender: str, key: int, pages: list[int]) -> bool:
        """Read a sequence's pages. Return whether all ranks have got theirs."""
        room = self.cache.room(len(pages))
        read = await self._receiver.read(sender, key, room)
        if read:
            self.cache.place(pages, room)
        return await self.group.everywhere(read)


@dataclass(eq=False)
class Sequence:
    """A sequence that has pages or waits for them."""

    key: int
    pages: int
    filler: str = ""
    """The prefill group with the first pages."""
    left: float | None = None
    """The time at which the client left; None before."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    go: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    table: list[int] = field(default_factory=list)
    token: int = 0
    place: int = 0
    missing: int = 0


class Batch:
    """Sequences that take their steps together. They join and leave between two steps."""

    def __init__(self) -> None:
        self.live: list[Sequence] = []
        self._news = anyio.Event()
        self._stepping: list[Sequence] = []
        self._stepped = anyio.Event()

    def join(self, sequence: Sequence) -> None:
        """Add a sequence to the next step."""
        self.live.append(sequence)
        self._news.set()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from later steps."""
        if sequence in self.live:
            self.live.remove(sequence)

    async def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, and wait for the running step, which still uses the sequence's pages."""
        self.remove(sequence)
        while sequence in self._stepping:
            await self._stepped.wait()

    async def next(self) -> list[Sequence]:
        """Wait for sequences, and return those of the next step."""
        while not self.live:
            self._news = anyio.Event()
            await self._news.wait()
        self._stepping = self.live[:AT_ONCE]
        return self._stepping

    def end_step(self) -> None:
        """End the step."""
        self._stepping = []
        self._stepped.set()
        self._stepped = anyio.Event()


class DecodeLeader(Leader):
    """The leader of a decode group. Each sequence is a task. Each stage needs its own batch to be busy."""

    def __init__(self, rank: DecodeRank, channel: Channel, pages: int) -> None:
        super().__init__(rank, channel)
        self._pages = Pages(pages)
        self._sequences: dict[int, Sequence] = {}
        self._batches = [Batch() for _ in range(rank.group.part.stages)]
        self._step_seconds = rank.measures.histogram("step_seconds", "Time of a decode step.")
        self._waited = rank.measures.counter("waited", "Sequences that had to wait for pages.")
        self._wasted = rank.measures.counter("wasted_tokens", "Tokens computed for a client that had left by then.")

    def begin(self) -> None:
        """Start the batches."""
        for batch in self._batches:
            self.tasks.start_soon(self._step, batch)

    def on_take(self, key: int, pages: int) -> None:
        """Handle a sequence that needs pages."""
        sequence = self._sequences[key] = Sequence(key, pages)
        self.tasks.start_soon(self._live, sequence)

    def on_go(self, key: int, filler: str, token: int, place: int, missing: int) -> None:
        """Continue a sequence after its prompt, from `token` at `place`, until `missing` tokens are done."""
        sequence = self._sequences[key]
        sequence.filler, sequence.token, sequence.place, sequence.missing = filler, token, place, missing
        sequence.go.set()

    def on_drop(self, key: int, left: float | None) -> None:
        """Drop a sequence whose tokens are no longer wanted.

        :param left: the time at which its client left, by this host's monotonic clock
        """
        if key in self._sequences:  # a sequence that has just ended is not there
            sequence = self._sequences[key]
            sequence.left = left
            for batch in self._batches:
                batch.remove(sequence)  # the task is cancelled only in the loop's next turn
            sequence.scope.cancel()

    async def _live(self, sequence: Sequence) -> None:
        """Run a sequence from its first page to its last token."""
        with sequence.scope:
            self._waited.inc(self._pages.free < sequence.pages)
            sequence.table = await self._pages.take(sequence.pages)
            self.channel.tell("room", sequence.key, self._pages.free)
            await sequence.go.wait()
            await self._decode(sequence)
        self._pages.give_back(sequence.table)
        del self._sequences[sequence.key]
        late = None if sequence.left is None else time.monotonic() - sequence.left
        self.channel.tell("freed", sequence.key, late, self._pages.free)

    async def _decode(self, sequence: Sequence) -> None:
        with anyio.CancelScope(shield=True):  # a read must end before its pages have a new owner
            pages = sequence.table[: pages_for(sequence.place)]
            there = await self.group.run(("read", sequence.filler, sequence.key, pages))
        if not there:
            self.channel.tell("lost", sequence.key)
            return
        batch = min(self._batches, key=lambda batch: len(batch.live))
        try:
            if sequence.missing:
                batch.join(sequence)
                await sequence.done.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await batch.leave(sequence)

    async def _step(self, batch: Batch) -> None:
        """Run the steps of a batch, one after the other."""
        while True:
            rows = await batch.next()
            began = time.perf_counter()
            step = Step(
                torch.tensor([[row.token] for row in rows]),
                torch.tensor([row.place for row in rows]),
                table([row.table[: pages_for(row.place + 1)] for row in rows]),
            )
            try:
                tokens = await self.choose(("step", step.pack()))
            finally:
                batch.end_step()
            self._wasted.inc(sum(row.left is not None for row in rows))
            self.channel.tell("tokens", [(row.key, token) for row, token in zip(rows, tokens, strict=True)])
            for row, row.token in zip(rows, tokens, strict=True):
                row.place, row.missing = row.place + 1, row.missing - 1
                if not row.missing:
                    batch.remove(row)
                    row.done.set()
            self._step_seconds.observe(time.perf_counter() - began)
