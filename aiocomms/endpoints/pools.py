"""Pools of memory blocks of equal size at an endpoint, and the leases by which tasks get blocks."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
"""The largest number of pending hand-overs of an endpoint. Further hand-overs wait."""


class LentBlocks(Protocol):
    """The interface of hand-overs for leases: a lease uses only these attributes and methods."""

    @property
    def ended(self) -> bool:
        """True once the hand-over has ended. If the connection was lost, the borrower may still use the blocks."""

    async def take_back(self, why: str) -> None:
        """End the hand-over, and wait until the borrower has released the blocks or the connection is over."""


class LeaseLedger:
    """The record of one endpoint's hand-overs: their numbers, :attr:`words`, and the blocks that borrowers hold."""

    words: Tensor
    """One integer, the *word*, for each hand-over: the number of the hand-over, or 0 after the end of the hand-over.

    A borrower first reads the blocks, and then the word. The owner changes the word before another lease may get the
    blocks. So if the word is still the hand-over's number, the data that the borrower has read is valid. A sequence
    lock has the same principle (Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005).
    """
    region: Region
    """The region through which other endpoints read the words."""

    def __init__(self, driver: LoopDriver) -> None:
        """Start without hand-overs and without words."""
        self._driver = driver
        self._numbers = itertools.count(1)
        self._slots = list(range(SLOTS))
        self._free = Bell(driver)
        self._held: dict[tuple[bytes, int], _OutOfUse] = {}
        """The hand-overs whose blocks no lease may get yet, by borrower and number of the hand-over."""

    def open(self, register: Callable[..., Region]) -> None:
        """Create :attr:`words`, unless they exist already.

        :param register: :meth:`Endpoint.register`.
        """
        if not hasattr(self, "words"):
            # The opening of a region does not move memory that is shared already.
            self.words = buffers.zeros(SLOTS, dtype=torch.int64, device="cpu")
            self.words.share_memory_()  # type: ignore[no-untyped-call]
            self.region = register(self.words, write=False)

    async def take(self) -> tuple[int, int]:
        """Wait for a free slot in :attr:`words`, and return the number of a new hand-over and its slot."""
        while not self._slots:
            await self._free
        number, slot = next(self._numbers), heapq.heappop(self._slots)
        self._set(slot, number)
        return number, slot

    def wipe(self, slot: int) -> None:
        """Set the word of an ended hand-over to 0, and free its slot."""
        self._set(slot, 0)
        heapq.heappush(self._slots, slot)
        self._free.ring()

    @unaffected
    def _set(self, slot: int, number: int) -> None:
        self.words[slot] = number

    def hold(self, borrower: bytes, number: int, process: int, freed: Callable[[], object]) -> None:
        """Withhold the blocks of a hand-over until the borrower has released them, or the borrower's process has ended.

        :param borrower: the number of the borrower's endpoint.
        :param process: the id of the borrower's process; 0 if it is unknown.
        :param freed: a function to call when the blocks may be used again.
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
        """Allow the use of blocks that :meth:`hold` has withheld. Idempotent."""
        held = self._held.pop((borrower, number), None)
        if held is not None:
            self._unwatch(held)
            held.freed()

    def _unwatch(self, held: _OutOfUse) -> None:
        if held.fd is not None:
            self._driver.unwatch(held.fd)
            os.close(held.fd)

    def held_by(self, borrower: bytes) -> list[int]:
        """Return the numbers of the hand-overs whose blocks a borrower still holds."""
        return [number for by, number in self._held if by == borrower]

    def close(self) -> None:
        """Stop watching processes, because the endpoint is closed."""
        for held in self._held.values():
            self._unwatch(held)
        self._held.clear()


class _OutOfUse(NamedTuple):
    """A hand-over that has ended, but whose blocks no lease may get yet."""

    fd: int | None
    """A file descriptor that becomes readable when the borrower's process ends; None if there is no such descriptor."""
    freed: Callable[[], object]


class _InLine:
    """A task that waits for blocks."""

    def __init__(self, count: int, served: Promise) -> None:
        self.count, self.served = count, served
        self.blocks: tuple[int, ...] = ()


class Pool(Handle):
    """A pool of memory blocks of equal size; made by :meth:`Endpoint.new_pool`.

    Tasks lease blocks of the pool, and hand the leased blocks over to other endpoints.
    """

    def __init__(self, region: Region, ledger: LeaseLedger, driver: LoopDriver, seconds: float, name: str) -> None:
        self._region, self._ledger, self._driver = region, ledger, driver
        self._seconds, self._name = seconds, name
        self._number = region._number
        self._rows: Tensor = region._memory
        self._free = list(range(len(self._rows)))  # The list is a heap: leases get the lowest, often adjacent, blocks.
        self._turns: deque[_InLine] = deque()
        self._held = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool of '{self._name}': {self.free} free, {self.leased} leased, {self.held} held>"

    @property
    def tensor(self) -> Any:
        """The memory of shape ``[blocks, ...]``: the tensor or array that was passed to :meth:`Endpoint.new_pool`."""
        return self._region.tensor

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """The number of leased blocks."""
        return len(self._rows) - len(self._free) - self._held

    @property
    def held(self) -> int:
        """The number of blocks that are in use although their lease has ended.

        Blocks are held if the connection was lost, and a borrower may still write into them. These blocks become free
        once the borrower has released them, or the borrower's process has ended. Blocks are also held while a cancelled
        :meth:`HandedLease.read` or :meth:`HandedLease.write` of this endpoint still moves data.
        """
        return self._held

    @contextlib.asynccontextmanager
    async def lease(self, count: int = 1, *, timeout: OpTimeout = COMM_TIMEOUT) -> AsyncIterator[Lease]:
        """Lease blocks for an ``async with`` body. Tasks get blocks in the order of their calls.

        At the end of the body, the lease takes back the blocks that other endpoints still have. The lease's blocks
        become free once no borrower uses them.

        :param count: the number of blocks.
        :param timeout: the seconds to wait for the blocks; None: no deadline. The default is the endpoint's timeout.
        :raises ArgumentError: the pool has fewer than ``count`` blocks.
        :raises CommTimeoutError: not enough blocks were free in time.
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
            self._put(turn.blocks)  # The blocks may have come in the same cycle of the event loop as the cancellation.
            raise
        finally:
            if turn in self._turns:
                self._turns.remove(turn)
                self._serve()  # The next tasks may want fewer blocks.
        if self._closed and not turn.blocks:
            raise CommClosedError("the endpoint is closed")
        if not turn.blocks:
            states = f"{self.free} are free, {self.leased} leased, {self.held} held"
            raise CommTimeoutError(f"{turn.count} blocks were not free within {seconds:g} s: {states}")
        return turn.blocks

    def _serve(self) -> None:
        """Give free blocks to the waiting tasks, in the order of their calls."""
        while self._turns and (self._closed or self._turns[0].count <= len(self._free)):
            turn = self._turns.popleft()
            if not self._closed:
                turn.blocks = tuple(heapq.heappop(self._free) for _ in range(turn.count))
            turn.served.set()

    def _put(self, blocks: Sequence[int]) -> None:
        """Free blocks that are no longer in use."""
        for block in blocks:
            heapq.heappush(self._free, block)
        self._serve()

    def _hold(self, change: int) -> None:
        """Add ``change`` to the number of held blocks."""
        self._held += change

    def _close(self) -> None:
        """Refuse further leases, because the endpoint is closed."""
        self._closed = True
        self._serve()


class LeasedBlocks(Handle):
    """Selected blocks of a lease, in a chosen order; made by :meth:`select`."""

    def __init__(self, pool: Pool, blocks: tuple[int, ...], lease: Lease | None = None) -> None:
        self._pool, self._blocks, self._of = pool, blocks, lease

    @property
    def _lease(self) -> Lease:
        """The lease to which the blocks belong."""
        assert self._of is not None
        return self._of

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Tensor:
        """Return a block, as a view of the pool's memory."""
        return self._pool._rows[self._blocks[index]]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The indices of the blocks in the pool."""
        return self._blocks

    @property
    def pool(self) -> Pool:
        """The pool to which the blocks belong."""
        return self._pool

    def select(self, places: Sequence[int]) -> LeasedBlocks:
        """Return the blocks at ``places``, which are indices into this selection.

        :raises ArgumentError: a place is out of range.
        """
        return LeasedBlocks(self._pool, selected(self._blocks, places), self._lease)


def selected(blocks: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of a lease at the given places.

    :param places: indices into ``blocks``.
    :raises ArgumentError: ``places`` is no sequence, or a place is out of range.
    """
    if not isinstance(places, Iterable):
        raise arguments.wrong_type("places", places, "a sequence of ints")
    places = tuple(places)
    wrong = [place for place in places if type(as_int(place)) is not int or not 0 <= place < len(blocks)]
    if wrong:
        raise ArgumentError(f"places are {arguments.short(wrong)}, wanted ints of 0 <= place < {len(blocks)}")
    return tuple(blocks[place] for place in places)


class Lease(LeasedBlocks):
    """Blocks of a pool that one task holds; made by :meth:`Pool.lease`, and valid within its ``async with`` body."""

    def __init__(self, pool: Pool, blocks: tuple[int, ...]) -> None:
        super().__init__(pool, blocks)
        self._ending = self._ended = False
        self._out: dict[LentBlocks, None] = {}
        """The hand-overs that are pending, or that have ended although the borrower may still use the blocks."""
        self._busy = 0
        """The number of this endpoint's operations on the blocks."""

    @property
    def _lease(self) -> Lease:
        return self

    def __repr__(self) -> str:
        return f"<Lease of {len(self)} blocks{' (ended)' * self._ended}>"

    @property
    def ended(self) -> bool:
        """True once the lease has ended. After its end, the blocks may belong to another lease."""
        return self._ended

    def _check(self) -> None:
        """Check that the blocks belong to this lease.

        :raises LeaseError: the lease has ended.
        """
        if self._ending:
            raise LeaseError("the lease has ended: its blocks may belong to another lease")

    def _lend(self, out: LentBlocks) -> None:
        """Register a hand-over. :meth:`_settled` removes the hand-over.

        :raises LeaseError: the lease has ended.
        """
        self._check()
        self._out[out] = None

    def _settled(self, out: LentBlocks) -> None:
        """Record that a hand-over no longer uses the blocks."""
        del self._out[out]
        self._free_held()

    def _begin(self) -> None:
        """Count an operation of this endpoint on the blocks. :meth:`_done` records the end of the operation.

        :raises LeaseError: the lease has ended.
        """
        self._check()
        self._busy += 1

    def _done(self) -> None:
        """Record that an operation of this endpoint moves no more data."""
        self._busy -= 1
        self._free_held()

    @property
    def _in_use(self) -> bool:
        return bool(self._out or self._busy)

    def _free_held(self) -> None:
        if self._ended and not self._in_use:
            self._pool._hold(-len(self))
            self._pool._put(self._blocks)

    async def _end(self, why: str) -> None:
        """Take the blocks back from all borrowers, and free the blocks unless a borrower or operation uses them."""
        self._ending = True
        try:
            # The hand-over itself raises the error.
            with anyio.CancelScope(shield=True), contextlib.suppress(CommError):
                await all_of([functools.partial(out.take_back, why) for out in self._out if not out.ended])
        finally:  # No scope shields a task from asyncio's own cancel(), which gets here once all hand-overs have ended.
            self._ended = True
            if self._in_use:
                self._pool._hold(len(self))
            else:
                self._pool._put(self._blocks)
