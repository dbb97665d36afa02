"""Moves the KV cache of a sequence from the prefill rank into the decode rank's blocks: `put`, then `signal`.

The decode rank owns the blocks: its part of the window is the pool, and the prefill rank's part is empty. It tells the
prefill rank which of them a sequence gets; so the prefill rank waits while none are free: that is the back-pressure.
Blocks are given out, filled and signalled in the order of the plans on both ranks: so a signal needs no name.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .model import BLOCK, LONGEST, SHAPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiocomms import Window, Work
    from aiocomms.serving import CurrentComm

PREFILL, DECODE = 0, 1  # ranks
SIZE = torch.Size(SHAPE).numel()
MOST = LONGEST // BLOCK  # blocks of a sequence


def blocks_for(tokens: int) -> int:
    """How many blocks so many tokens take."""
    return -(-tokens // BLOCK)


class Transfer:
    """Either rank's end."""

    def __init__(self, comm: CurrentComm, window: Window) -> None:
        self.comm, self.window = comm, window
        self.pool = window.tensor.view(-1, *SHAPE)
        self.capacity = window.sizes[DECODE] // SIZE
        self.waited = 0
        """How many sequences had to wait for free blocks."""
        self.most = 0
        """Sequences that had blocks at the same time."""
        self._holders = 0
        self._free = list(range(self.capacity))
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()  # whose waiters get it in the order in which they came

    @classmethod
    async def open(cls, comm: CurrentComm, capacity: int) -> Transfer:
        """Open the window. Collective.

        :param capacity: blocks in the decode rank's pool
        """
        mine = capacity if comm.rank == DECODE else 0
        return cls(comm, await comm.current.new_window(torch.zeros(mine * SIZE, device=comm.device)))

    # ------------------------------------------------------------------------------------------------- prefill

    @asynccontextmanager
    async def filling(self, count: int) -> AsyncIterator[list[int]]:
        """Get so many blocks of the decode rank; at the end of the block they are filled, and it is told so."""
        if count > min(self.capacity, MOST):
            raise ValueError(f"a sequence of {count} blocks does not fit: {min(self.capacity, MOST)} is the most")
        async with self._turn:
            yield await self.comm.recv_object(DECODE, timeout=None)  # while it generates, none may be free
            await self.window.signal(DECODE)  # it vouches for all puts before it

    def push(self, block: Tensor, number: int) -> Work[Tensor]:
        """Write a block where the decode rank has a free one; not to be changed until the work is done."""
        return self.window.put(block, DECODE, number * SIZE)

    # ------------------------------------------------------------------------------------------------- decode

    @asynccontextmanager
    async def filled(self, count: int) -> AsyncIterator[list[int]]:
        """Give the prefill rank so many free blocks, and wait until they are filled; they are free again at the end."""
        async with self._turn:
            self.waited += len(self._free) < count
            while len(self._free) < count:
                self._freed.clear()
                await self._freed.wait()
            table = [self._free.pop() for _ in range(count)]
            arrived = self.window.wait_signal(PREFILL)
        self._holders += 1
        self.most = max(self.most, self._holders)
        try:
            await self.comm.send_object(table, PREFILL)
            await arrived
            yield table
        finally:
            self._holders -= 1
            self._free += table
            self._freed.set()
