"""Pools of equal blocks of an endpoint's memory, and the leases by which its tasks take them."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import anyio
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int
from aiocomms.endpoints.regions import Region, all_of
from aiocomms.errors import ArgumentError, CommClosedError, CommError, CommTimeoutError, LeaseError, as_reason
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.hosts import process_descriptor
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.progress.driver import Bell, LoopDriver, Promise

SLOTS: Final = 1024
"""Hand-overs of an endpoint that are under way at once; others wait for their turn."""


class LentBlocks(Protocol):
    """A hand-over of a lease, as the lease sees it."""

    @property
    def ended(self) -> bool:
        """True once the program goes on behind it."""

    async def take_back(self, why: str) -> None:
        """End it, and wait until the borrower has let go or the connection is over."""


class LeaseLedger:
    """The hand-overs of one endpoint: their numbers, the words that vouch for them, and those that are held."""

    words: Tensor
    """A word for each hand-over: its number, as long as what is read is the lease's.

    The reader gets the word after the bytes. The owner changes it before the blocks may be leased again, so a number
    that is still there vouches for the bytes, as in a sequence lock (Lameter, "Effective Synchronization on Linux/NUMA
    Systems", 2005).
    """
    region: Region
    """The words, as other endpoints read them."""

    def __init__(self, driver: LoopDriver) -> None:
        """Begin without any hand-over, and without words."""
        self._driver = driver
        self._numbers = itertools.count(1)
        self._slots = list(range(SLOTS))
        self._free = Bell(driver)
        self._held: dict[tuple[bytes, int], _OutOfUse] = {}
        """The hand-overs that are held, by borrower and number."""

    def open(self, register: Callable[..., Region]) -> None:
        """Make the words, unless they are there.

        :param register: :meth:`Endpoint.register`.
        """
        if not hasattr(self, "words"):
            # Memory that is shared already is not moved when the region is opened.
            self.words = buffers.zeros(SLOTS, dtype=torch.int64, device="cpu")
            self.words.share_memory_()  # type: ignore[no-untyped-call]
            self.region = register(self.words, write=False)

    async def take(self) -> tuple[int, int]:
        """Return a new hand-over's number, and the slot of its word."""
        while not self._slots:
            await self._free
        number, slot = next(self._numbers), heapq.heappop(self._slots)
        self._set(slot, number)
        return number, slot

    def wipe(self, slot: int) -> None:
        """Vouch for a hand-over no more."""
        self._set(slot, 0)
        heapq.heappush(self._slots, slot)
        self._free.ring()

    @unaffected
    def _set(self, slot: int, number: int) -> None:
        self.words[slot] = number

    def hold(self, borrower: bytes, number: int, process: int, freed: Callable[[], object]) -> None:
        """Keep a hand-over until the borrower says that it has let go, or its process has ended.

        :param borrower: its endpoint.
        :param process: the number of its process; 0: it is not known.
        :param freed: called then.
        """
        try:
            fd = process_descriptor(process)
        except ProcessLookupError:
            freed()
            return
        self._held[borrower, number] = _OutOfUse(fd, freed)
        if fd is not None:
            self._driver.watch(fd, lambda: self.let_go(borrower, number))

    def let_go(self, borrower: bytes, number: int) -> None:
        """Free a hand-over that is held. Idempotent."""
        held = self._held.pop((borrower, number), None)
        if held is not None:
            self._unwatch(held)
            held.freed()

    def _unwatch(self, held: _OutOfUse) -> None:
        if held.fd is not None:
            self._driver.unwatch(held.fd)
            os.close(held.fd)

    def held_by(self, borrower: bytes) -> list[int]:
        """Return the numbers of those that a borrower holds."""
        return [number for by, number in self._held if by == borrower]

    def close(self) -> None:
        """Watch no process any more: the endpoint is closed."""
        for held in self._held.values():
            self._unwatch(held)
        self._held.clear()


class _OutOfUse(NamedTuple):
    """A hand-over whose blocks are out of circulation."""

    fd: int | None
    """The descriptor of the borrower's process, if it is known."""
    freed: Callable[[], object]


class _InLine:
    """A task that waits for blocks."""

    def __init__(self, count: int, served: Promise) -> None:
        self.count, self.served = count, served
        self.blocks: tuple[int, ...] = ()


class Pool(Handle):
    """Equal blocks of this endpoint's memory, which tasks lease, and hand over; made by :meth:`Endpoint.new_pool`."""

    def __init__(self, region: Region, ledger: LeaseLedger, driver: LoopDriver, seconds: float, name: str) -> None:
        self._region, self._ledger, self._driver = region, ledger, driver
        self._seconds, self._name = seconds, name
        self._number = region._number
        self._rows: Tensor = region._memory
        self._free = list(range(len(self._rows)))  # a heap: leases get the first, which are adjacent if they can be
        self._turns: deque[_InLine] = deque()
        self._held = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool of '{self._name}': {self.free} free, {self.leased} leased, {self.held} held>"

    @property
    def tensor(self) -> Any:
        """The memory: the tensor or array that was given, ``[blocks, ...]``."""
        return self._region.tensor

    @property
    def free(self) -> int:
        """The number of blocks that nobody has."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """The number of blocks that leases have."""
        return len(self._rows) - len(self._free) - self._held

    @property
    def held(self) -> int:
        """The number of blocks of ended leases into which a borrower may still write.

        Its connection was lost, and its process may be alive. They are free once it has said that it let go, or its
        process has ended.
        """
        return self._held

    @contextlib.asynccontextmanager
    async def lease(self, count: int = 1, *, timeout: OpTimeout = COMM_TIMEOUT) -> AsyncIterator[Lease]:
        """Take blocks for the length of an ``async with`` block; tasks wait for them in the order of their calls.

        At the end of the block its hand-overs are taken back, and the blocks are free once nobody uses them any more.

        :param count: the number of blocks.
        :param timeout: the seconds for which to wait for them, None for no deadline; by default the endpoint's.
        :raises ArgumentError: the pool has fewer blocks.
        :raises CommTimeoutError: so many were not free in time.
        :raises CommClosedError: the endpoint is closed.
        """
        lease = Lease(self, await self._take(count, timeout))
        why = "its lease has ended"
        try:
            yield lease
        except BaseException as error:
            why = as_reason(error)
            raise
        finally:
            await lease._end(why)

    async def _take(self, count: int, timeout: OpTimeout) -> tuple[int, ...]:
        try:
            count = as_int(count)
            if type(count) is not int:
                raise arguments.wrong_type("count", count, "an int")
            if not 1 <= count <= len(self._rows):
                raise ArgumentError(f"count is {count}, wanted 1 to {len(self._rows)}, the blocks of the pool")
            seconds = arguments.op_deadline(timeout, self._seconds)
            return await self._wait(_InLine(count, Promise(self._driver)), seconds)
        except CommError as error:
            raise error.about(comm=self._name, op="lease") from None

    async def _wait(self, turn: _InLine, seconds: float) -> tuple[int, ...]:
        self._turns.append(turn)
        self._serve()
        try:
            with anyio.move_on_after(seconds):
                await turn.served
        except BaseException:
            self._put(turn.blocks)  # Perhaps they came in the turn of the loop in which the task was cancelled.
            raise
        finally:
            if turn in self._turns:
                self._turns.remove(turn)
                self._serve()  # The next ones may want fewer.
        if self._closed and not turn.blocks:
            raise CommClosedError("the endpoint is closed")
        if not turn.blocks:
            states = f"{self.free} are free, {self.leased} leased, {self.held} held"
            raise CommTimeoutError(f"{turn.count} blocks were not free within {seconds:g} s: {states}")
        return turn.blocks

    def _serve(self) -> None:
        """Give blocks to those whose turn it is."""
        while self._turns and (self._closed or self._turns[0].count <= len(self._free)):
            turn = self._turns.popleft()
            if not self._closed:
                turn.blocks = tuple(heapq.heappop(self._free) for _ in range(turn.count))
            turn.served.set()

    def _put(self, blocks: Sequence[int]) -> None:
        """Take blocks back that nobody uses any more."""
        for block in blocks:
            heapq.heappush(self._free, block)
        self._serve()

    def _hold(self, change: int) -> None:
        """Count blocks that are held, or not any more."""
        self._held += change

    def _close(self) -> None:
        """Give out nothing more: the endpoint is closed."""
        self._closed = True
        self._serve()


class LeasedBlocks(Handle):
    """Blocks of a lease, in an order of their own; made by :meth:`select`."""

    def __init__(self, pool: Pool, blocks: tuple[int, ...]) -> None:
        self._pool, self._blocks = pool, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Tensor:
        """Return a block, as a view of the pool's memory."""
        return self._pool._rows[self._blocks[index]]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The indices of its blocks in the pool."""
        return self._blocks

    @property
    def pool(self) -> Pool:
        """The pool that it is of."""
        return self._pool

    def select(self, places: Sequence[int]) -> LeasedBlocks:
        """Return some of the blocks, by their places in here.

        :raises ArgumentError: there is no such place.
        """
        return LeasedBlocks(self._pool, selected(self._blocks, places))


def selected(blocks: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    """Return some of the blocks of a lease.

    :param places: their places among those blocks.
    :raises ArgumentError: there is no such place.
    """
    wrong = [place for place in places if type(as_int(place)) is not int or not 0 <= place < len(blocks)]
    if wrong:
        raise ArgumentError(f"places are {arguments.short(wrong)}, wanted ints of 0 <= place < {len(blocks)}")
    return tuple(blocks[place] for place in places)


class Lease(LeasedBlocks):
    """Blocks of a pool that one task has; made by :meth:`Pool.lease`, whose ``async with`` block is its life."""

    def __init__(self, pool: Pool, blocks: tuple[int, ...]) -> None:
        super().__init__(pool, blocks)
        self._ending = self._ended = False
        self._out: dict[LentBlocks, None] = {}
        """The hand-overs by which others may use the blocks: under way, or held."""

    def __repr__(self) -> str:
        return f"<Lease of {len(self)} blocks{' (ended)' * self._ended}>"

    @property
    def ended(self) -> bool:
        """True once the blocks may be another lease's."""
        return self._ended

    def _lend(self, out: LentBlocks) -> None:
        """Note a hand-over, until :meth:`_settled`.

        :raises LeaseError: the lease has ended.
        """
        if self._ending:
            raise LeaseError("the lease has ended: its blocks may be another one's")
        self._out[out] = None

    def _settled(self, out: LentBlocks) -> None:
        """Note that nobody uses the blocks any more by way of a hand-over."""
        del self._out[out]
        if self._ended and not self._out:
            self._pool._hold(-len(self))
            self._pool._put(self._blocks)

    async def _end(self, why: str) -> None:
        """Take every hand-over back, and give the blocks back unless they are held."""
        self._ending = True
        try:
            # The hand-over itself raises the error.
            with anyio.CancelScope(shield=True), contextlib.suppress(CommError):
                await all_of([functools.partial(out.take_back, why) for out in self._out if not out.ended])
        finally:  # No scope shields a task from asyncio's own cancel(), which comes here once all of it has ended.
            self._ended = True
            if self._out:
                self._pool._hold(len(self))
            else:
                self._pool._put(self._blocks)
