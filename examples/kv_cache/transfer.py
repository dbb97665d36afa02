"""Moves the KV cache from the prefill rank into the decode rank's blocks: `put`, then `signal`.

The decode rank owns the blocks. It hands out the free ones by writing their numbers into a ring in the prefill rank's
memory, one signal for each; so the prefill rank waits for a signal per block that it needs: that is the back-pressure.
What belongs to a sequence is told by a note in a ring in the decode rank's memory:

    blocks  (float32)  decode: the pool.                       prefill: nothing
    notes   (int64)    decode: a note per sequence on its way  prefill: numbers of free blocks

Neither ring can overflow: there are as many places as blocks, a sequence on its way holds a block at least, and one
place more is for the note that ends them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .model import BLOCK, LONGEST, SHAPE

if TYPE_CHECKING:
    from aiocomms import Communicator, Window, Work

PREFILL, DECODE = 0, 1  # ranks
SIZE = torch.Size(SHAPE).numel()
MOST = LONGEST // BLOCK  # blocks of a sequence
NOTE = 4 + MOST  # number, tokens of the prompt, tokens to generate, first token, block table


@dataclass
class Sequence:
    """A sequence whose cache moves to the decode rank. One without a prompt says that there are no more."""

    number: int
    length: int
    """Tokens of the prompt."""
    count: int
    """Tokens to generate."""
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    """Those the last token was chosen from."""


def blocks_for(tokens: int) -> int:
    """How many blocks so many tokens take."""
    return -(-tokens // BLOCK)


class Transfer:
    """Either rank's end."""

    def __init__(self, comm: Communicator, blocks: Window, notes: Window) -> None:
        self.comm, self.blocks, self.notes = comm, blocks, notes
        self.pool = blocks.tensor.view(-1, *SHAPE)
        self.capacity = blocks.sizes[DECODE] // SIZE
        self.waited = 0
        """How often a free block was not there yet."""
        self._turns = {"grant": 0, "note": 0}

    @classmethod
    async def open(cls, comm: Communicator, capacity: int) -> Transfer:
        """Open the windows. Collective.

        :param capacity: blocks in the decode rank's pool
        """
        mine = capacity if comm.rank == DECODE else 0
        blocks = await comm.new_window(torch.zeros(mine * SIZE, device=comm.device))
        ring = (capacity + 1) * (NOTE if comm.rank == DECODE else 1)
        notes = await comm.new_window(torch.zeros(ring, dtype=torch.int64, device=comm.device))
        return cls(comm, blocks, notes)

    async def aclose(self) -> None:
        """Close the windows, after both ranks' operations. Collective."""
        await self.blocks.aclose(timeout=None)  # prefill is done first, and waits until decode is
        await self.notes.aclose()

    # ------------------------------------------------------------------------------------------------- prefill

    async def claim(self, count: int) -> list[int]:
        """Wait until so many blocks of the decode rank are free, and take them."""
        if count > min(self.capacity, MOST):
            raise ValueError(f"a sequence of {count} blocks does not fit: {min(self.capacity, MOST)} is the most")
        table = []
        for _ in range(count):
            granted = self.notes.wait_signal(DECODE, timeout=None)  # while it generates, none may be free
            self.waited += not granted.done()
            await granted
            table.append(int(self.notes.tensor[self._next("grant")]))
        return table

    def push(self, block: Tensor, number: int) -> Work[Tensor]:
        """Write a block where the decode rank has a free one; not to be changed until the work is done."""
        return self.blocks.put(block, DECODE, number * SIZE)

    async def hand_over(self, sequence: Sequence) -> None:
        """Tell the decode rank that a sequence's blocks are all there."""
        await self.blocks.flush(DECODE)  # a signal vouches for the puts into its own window only
        first = sequence.tokens[0] if sequence.tokens else 0
        note = [sequence.number, sequence.length, sequence.count, first, *sequence.table]
        note += [-1] * (NOTE - len(note))
        place = self._next("note") * NOTE
        await self.notes.put(torch.tensor(note, device=self.comm.device), DECODE, place)
        await self.notes.signal(DECODE)

    # ------------------------------------------------------------------------------------------------- decode

    async def grant(self, numbers: list[int]) -> None:
        """Let the prefill rank use these blocks."""
        for number in numbers:
            free = torch.tensor([number], device=self.comm.device)
            await self.notes.put(free, PREFILL, self._next("grant"))
            await self.notes.signal(PREFILL)

    async def take_over(self) -> Sequence | None:
        """Wait for a sequence whose blocks are all there; None: there will be no more."""
        await self.notes.wait_signal(PREFILL, timeout=None)  # there may be no prompt for hours
        place = self._next("note") * NOTE
        number, length, count, first, *table = self.notes.tensor[place : place + NOTE].tolist()
        used = table[: blocks_for(length + count)]
        return Sequence(number, length, count, [first], used) if length else None

    def _next(self, ring: str) -> int:
        """The next place of a ring."""
        turn = self._turns[ring]
        self._turns[ring] = turn + 1
        return turn % (self.capacity + 1)
