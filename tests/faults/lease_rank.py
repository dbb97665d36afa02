"""The processes of ``test_many_leases.py``: lenders, and the borrowers to which they hand blocks over.

A word of a block is a lease's number. Its last four bits say who wrote it: 0 for the lender, or the slot of the
borrower. Blocks that are free hold another word. So a write that comes too late is seen, whoever has the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import random
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import aiocomms
from aiocomms.endpoints import handovers
from aiocomms.errors import CommError

LENDERS: Final = (1, 2)
BORROWERS: Final = (3, 4, 5)
"""The slots, of which each has a process, and another one when that is killed."""
FREE: Final = -1
"""The word of blocks that are free."""
POOLS: Final = ((96, 256), (12, 2**16))
"""Blocks of each pool of a lender, and words of a block: 2 KiB, and 512 KiB, amid whose copies processes stop."""
AT_ONCE: Final = 24
"""The leases that a lender makes at once."""
GRACE: Final = 0.15
"""Seconds until a lender gives up a borrower that does not let go."""
PATIENCE: Final = 120.0
COUNTS: Final = (
    "leases", "answered", "cancelled", "failed", "reads", "writes", "reads cancelled", "reads refused",
    "reads refused with bytes of another lease in hand", "late", "left", "connections", "blocks held",
)  # fmt: skip


class Counts:
    """The counts of all processes, in a file that outlives them; and the words by which they are told to end."""

    WORDS: Final = 16 * (1 + max(BORROWERS))

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * self.WORDS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * self.WORDS)
        with memoryview(self._memory) as octets:
            self._words = octets.cast("q")

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def add(self, slot: int, name: str, count: int = 1) -> None:
        self._words[16 * slot + COUNTS.index(name)] += count

    def total(self, name: str) -> int:
        return sum(self._words[16 * slot + COUNTS.index(name)] for slot in (*LENDERS, *BORROWERS))

    def end(self, slots: Sequence[int]) -> None:
        """Have processes end."""
        for slot in slots:
            self._words[slot] = 1

    def ends(self, slot: int) -> bool:
        """Return whether a process is to end. The first words are nobody's counts."""
        return bool(self._words[slot])


class Place(NamedTuple):
    """The place of a process."""

    slot: int
    incarnation: int
    folder: Path
    seed: int


def main(place: Place) -> None:
    """Run a process until it is told to end or killed; write its exception to a file."""
    try:
        os.environ["AIOCOMMS_HEARTBEAT"] = "0"  # A lender learns from its deadlines alone who stands still.
        os.environ["AIOCOMMS_RECORDER_DIR"] = ""
        handovers.CLOSE_GRACE = GRACE  # type: ignore[misc]
        torch.set_num_threads(1)
        asyncio.run((lend if place.slot in LENDERS else borrow)(place))
    except BaseException:
        (place.folder / f"failed {place.slot}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


class Draws:
    """The choices of a process, and the counts of what came of them."""

    def __init__(self, place: Place) -> None:
        self.place, self.draw = place, random.Random(f"{place.seed} {place.slot} {place.incarnation}")
        self._counts = Counts(place.folder / "counts")

    def count(self, name: str, count: int = 1) -> None:
        self._counts.add(self.place.slot, name, count)

    @property
    def ends(self) -> bool:
        return self._counts.ends(self.place.slot)

    def begin(self, call: Awaitable[Any], share: float) -> asyncio.Future[Any]:
        """Start a task, and cancel such a share of them: at any of their awaits, or after a while."""
        task, loop = asyncio.ensure_future(call), asyncio.get_running_loop()
        if self.draw.random() < share:
            if self.draw.random() < 0.5:
                loop.call_later(self.draw.expovariate(200), task.cancel)
            else:
                self._cancel_after(self.draw.randrange(24), task)
        return task

    def _cancel_after(self, turns: int, task: asyncio.Future[Any]) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._cancel_after, turns - 1, task)
        else:
            task.cancel()


# ----------------------------------------------------------------------------------------------------------- a lender


class Watched:
    """A pool whose blocks are checked whenever they are taken, filled, given back and freed."""

    def __init__(self, here: aiocomms.Endpoint, draws: Draws, blocks: int, words: int) -> None:
        self.rows = torch.full((blocks, words), FREE, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.pool = here.new_pool(self.rows)
        self.out: dict[int, int] = {}
        """The numbers of leases by the blocks that they have."""
        self.taken = self.freed = 0
        self._draws = draws
        self._put: Callable[[Sequence[int]], None] = self.pool._put
        self._hold = self.pool._hold
        self.pool._put, self.pool._hold = self.free, self.hold  # type: ignore[method-assign]

    def take(self, blocks: Sequence[int], number: int) -> None:
        """Note that a lease has blocks, and fill them."""
        again = [block for block in blocks if block in self.out]
        assert not again, f"blocks {again} are leased twice"
        self.out |= dict.fromkeys(blocks, number)
        self.taken += 1
        assert self.rows[list(blocks)].eq(FREE).all(), f"blocks {blocks} were written after they were freed"
        self.rows[list(blocks)] = number

    def check(self, blocks: Sequence[int], number: int, who: int | None) -> None:
        """Check who has written to a lease's blocks.

        :param who: the slot; None: the lender and its borrower may have.
        """
        found = self.rows[list(blocks)]
        right = found.eq(number | who) if who is not None else (found | 15).eq(number | 15)
        assert right.all(), f"blocks {blocks} hold {found.unique().tolist()[:8]}, wanted {number} by {who}"

    def free(self, blocks: Sequence[int]) -> None:
        """Check blocks, and then free them as the pool does."""
        again = [block for block in blocks if block in self.pool._free]
        assert not again, f"blocks {again} are freed twice"
        leased = [block for block in blocks if block in self.out]  # No task has got the others yet.
        if leased:
            self.check(leased, self.out[leased[0]], None)
            self.freed += 1
            self.rows[leased] = FREE
        for block in leased:
            del self.out[block]
        self._put(blocks)

    def hold(self, change: int) -> None:
        """Count blocks that are held."""
        self._draws.count("blocks held", max(change, 0))
        self._hold(change)

    async def is_whole(self) -> None:
        """Wait until nobody has a block any more, and look at all of them."""
        async with asyncio.timeout(PATIENCE):
            while self.pool.held:  # noqa: ASYNC110 - the kernel tells of a death, or the borrower says it
                await asyncio.sleep(0.001)
        blocks = list(range(len(self.rows)))
        assert sorted(self.pool._free) == blocks, f"{self.pool} has {self.pool._free}"
        assert not self.out, self.out
        assert self.taken == self.freed, f"{self.taken} leases were taken, {self.freed} freed"
        await asyncio.sleep(0.2)
        assert self.rows.eq(FREE).all(), "blocks were written after they were freed"


class Lender:
    """A process that has blocks."""

    def __init__(self, here: aiocomms.Endpoint, place: Place) -> None:
        self.here, self.draws = here, Draws(place)
        self.pools = [Watched(here, self.draws, *size) for size in POOLS]
        self.peers: dict[aiocomms.Peer, None] = {}
        self.came = asyncio.Event()
        begin = (place.slot << 16 | place.incarnation) << 28
        self.numbers = itertools.count(begin + 16, 16)

    async def accept(self) -> None:
        """Get to know whoever connects."""
        while True:
            self.peers[await self.here.accept()] = None
            self.came.set()

    async def lend_over_and_over(self) -> None:
        draws = self.draws
        while not draws.ends:
            for peer in [peer for peer in self.peers if peer.closed]:
                del self.peers[peer]
            if not self.peers:
                self.came.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.came.wait(), 0.1)
                continue
            task = draws.begin(self.lend(draws.draw.choice(list(self.peers))), 0.15)
            await asyncio.wait([task])
            if task.cancelled():
                draws.count("cancelled")
            else:
                task.result()

    async def lend(self, peer: aiocomms.Peer) -> None:
        """Take some blocks, hand them over and look at them."""
        draw, number = self.draws.draw, next(self.numbers)
        watched = self.pools[draw.random() < 0.04]
        write, timeout = draw.random() < 0.5, draw.choice((0.01, 0.1, 5.0, 5.0, 5.0, 5.0))
        try:
            async with watched.pool.lease(draw.randint(1, 4), timeout=30) as lease:
                blocks = lease.blocks
                watched.take(blocks, number)
                self.draws.count("leases")
                try:
                    who = await peer.hand_over(lease, number, write=write, timeout=timeout)
                finally:
                    watched.check(blocks, number, None if write else 0)
                watched.check(blocks, number, who)
            self.draws.count("answered")
        except CommError:
            self.draws.count("failed")


async def lend(place: Place) -> None:
    """Lend blocks until told to end; then all of them are free."""
    async with aiocomms.open_endpoint("ucx", timeout=10) as here:
        lender = Lender(here, place)
        announce(place, here.address)
        accepts = asyncio.ensure_future(lender.accept())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(lender.lend_over_and_over())
        for watched in lender.pools:
            await watched.is_whole()
        assert not accepts.done(), accepts
        accepts.cancel()


def announce(place: Place, address: bytes) -> None:
    """Say where a lender is reached, in place of the one before."""
    made = place.folder / f"new {place.slot}"
    made.write_bytes(address)
    made.replace(place.folder / f"address {place.slot}")


# --------------------------------------------------------------------------------------------------------- a borrower


class Borrower:
    """A process that uses what it is lent."""

    def __init__(self, here: aiocomms.Endpoint, place: Place) -> None:
        self.here, self.draws = here, Draws(place)
        self.tasks: set[asyncio.Future[Any]] = set()

    async def stay_connected(self, slot: int) -> None:
        """Be connected with whichever process is a lender's at the moment."""
        path = self.draws.place.folder / f"address {slot}"
        while True:
            try:
                peer = await self.here.connect(path.read_bytes())
                self.draws.count("connections")
                await peer.lost()
            except (CommError, FileNotFoundError):
                await asyncio.sleep(0.02)

    async def borrow(self) -> None:
        """Use each lease in a task of its own."""
        async for handed in self.here.handed():
            task = self.draws.begin(self.use(handed), 0.1)
            self.tasks.add(task)
            task.add_done_callback(self.used)

    def used(self, task: asyncio.Future[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (CommError, ZeroDivisionError)):
            (self.draws.place.folder / f"failed {self.draws.place.slot}").write_text(
                "".join(traceback.format_exception(error))
            )
            os._exit(1)

    async def use(self, handed: aiocomms.HandedLease) -> None:
        """Read or write what was lent, in one of the ways that there are."""
        draw, who = self.draws.draw, 0
        async with handed:
            if draw.random() < 0.05:
                self.draws.count("late")
                await asyncio.sleep(draw.choice((0.01, 0.1, 0.15)))  # The lender's deadline may pass.
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                if handed.writable:
                    who = await self.write(handed)
                else:
                    await self.read(handed)
            if draw.random() < 0.02:
                raise ZeroDivisionError("it was drawn")
            if draw.random() < 0.0005:
                self.draws.count("left")
                handed.peer.abort("it was drawn") if draw.random() < 0.5 else await handed.peer.aclose()
            await handed.give_back(who)

    async def write(self, handed: aiocomms.HandedLease) -> int:
        """Write to all blocks, perhaps to some of them before."""
        slot, draw = self.draws.place.slot, self.draws.draw
        source = torch.full(handed.shape, handed.meta | slot)
        if draw.random() < 0.1:
            await handed.select([0]).write(source[:1])
            if draw.random() < 0.5:
                await handed.flush()
        await handed.write(source)
        self.draws.count("writes")
        return slot

    async def read(self, handed: aiocomms.HandedLease) -> None:
        """Read, and look at what came."""
        into = torch.zeros(handed.shape, dtype=torch.int64)
        try:
            await handed.read(into)
        except CommError:
            self.draws.count("reads refused")
            foreign = not (into.eq(handed.meta) | into.eq(0)).all()
            self.draws.count("reads refused with bytes of another lease in hand", foreign)
            raise
        except asyncio.CancelledError:
            self.draws.count("reads cancelled")
            raise
        assert into.eq(handed.meta).all(), f"{into.unique().tolist()[:8]} were read, wanted {handed.meta}"
        self.draws.count("reads")


async def borrow(place: Place) -> None:
    """Use what is lent until told to end; then nothing is in use."""
    async with aiocomms.open_endpoint("ucx", timeout=10) as here:
        borrower = Borrower(here, place)
        async with asyncio.TaskGroup() as tasks:
            begun = [
                tasks.create_task(borrower.borrow()),
                *map(tasks.create_task, map(borrower.stay_connected, LENDERS)),
            ]
            while not borrower.draws.ends:  # noqa: ASYNC110 - another process sets it
                await asyncio.sleep(0.05)
            async with asyncio.timeout(PATIENCE):
                while borrower.tasks:
                    await asyncio.wait(borrower.tasks)
            for task in begun:
                task.cancel()
