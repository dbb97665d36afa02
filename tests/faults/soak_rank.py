"""The body of one rank of ``make soak``: checked ops until the order ends or a peer dies; then a new communicator."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from oracle import holdings, settled
from processes import Rank, empty, numbers

from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.rma import Window
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError, WorkCancelledError

COUNTS = (1, 7, 400, 5_000, 60_013)
"""Elements of int64: from within a slot to the larger schedules."""
PATIENCE = 10.0
"""Seconds for forming a communicator, and for each op."""
WARM = 2
"""The number of closes after which a process has loaded all that it keeps."""


class Order(NamedTuple):
    """The parent's order to a rank: how to form, how long to work, how to end."""

    folder: str
    """The folder of the store."""
    rank: int
    size: int
    seed: int
    steps: int | None
    """The number of steps; None: until a peer dies."""
    joins: bool
    """True if newcomers take part: this rank is one, or has to admit them."""
    aborts: bool
    """True if the communicator ends by an abort, after which newcomers join."""


class Heard(NamedTuple):
    """The report of a rank when it has formed, and when it has ended."""

    at: float
    peer: int | None = None
    """The rank that died."""
    counts: dict[str, int] | None = None
    memory: int | None = None
    """The bytes that the process holds with no communicator open."""


# ------------------------------------------------------------------------------------------------------------ the ops


class Work:
    """A generation's ops on one rank; every rank draws the same ones from its seed."""

    def __init__(self, comm: Communicator, window: Window, seed: int, counts: Counter[str]) -> None:
        self.comm, self.window = comm, window
        self.rng = random.Random(seed)
        self.counts = counts
        self.turn = 0
        self.added = 0

    async def step(self) -> None:
        """Run some ops at once, now and then with a cancellation."""
        self.turn += 1
        kinds: list[Callable[[int], Awaitable[int]]] = [
            self.reduce, self.broadcast, self.gather, self.exchange, self.ring, self.objects, self.put, self.cancel
        ]  # fmt: skip
        chosen = [(self.rng.choice(kinds), self.rng.choice(COUNTS)) for _ in range(self.rng.randrange(1, 5))]
        for done in await asyncio.gather(*(kind(count) for kind, count in chosen)):
            self.counts["ops"] += done

    def mine(self, count: int, rank: int | None = None) -> torch.Tensor:
        return numbers(count, self.comm.rank if rank is None else rank, self.turn)

    def expect(self, got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        if not torch.equal(got, wanted):
            raise AssertionError(f"wrong data: {what} in turn {self.turn}: {difference(got, wanted)}")

    async def reduce(self, count: int) -> int:
        total = sum((self.mine(count, r) for r in range(self.comm.size)), empty(count))
        self.expect(await self.comm.all_reduce(self.mine(count)), total, "all_reduce")
        return 1

    async def broadcast(self, count: int) -> int:
        root = self.turn % self.comm.size
        self.expect(await self.comm.broadcast(self.mine(count), root), self.mine(count, root), "broadcast")
        return 1

    async def gather(self, count: int) -> int:
        row = torch.cat([self.mine(count, r) for r in range(self.comm.size)])
        work = self.comm.reduce_scatter_single(empty(count), row.clone())
        self.expect(
            await self.comm.all_gather_single(empty(self.comm.size * count), self.mine(count)), row, "all_gather"
        )
        self.expect(await work, self.comm.size * self.mine(count), "reduce_scatter")
        return 2

    async def exchange(self, count: int) -> int:
        row = torch.cat([self.mine(count, r) for r in range(self.comm.size)])
        work = self.comm.all_to_all_single(empty(self.comm.size * count), self.mine(count).repeat(self.comm.size))
        await self.comm.barrier()
        self.expect(await work, row, "all_to_all")
        return 2

    async def ring(self, count: int) -> int:
        left, right = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        given = self.comm.send(self.mine(count), right)
        self.expect(await self.comm.recv(empty(count), left), self.mine(count, left), "recv")
        await given
        return 2

    async def objects(self, count: int) -> int:
        got = await self.comm.all_gather_object({"rank": self.comm.rank, "turn": self.turn})
        assert got == [{"rank": rank, "turn": self.turn} for rank in range(self.comm.size)], f"wrong data: {got}"
        return 1

    async def put(self, count: int) -> int:
        """Add to one element of the next rank; the sums are checked at the generation's end."""
        await self.window.fetch_add((self.comm.rank + 1) % self.comm.size, 0, 1)
        self.added += 1
        return 1

    async def cancel(self, count: int) -> int:
        """Withdraw a receive that nothing matches, and cancel the awaiter of a collective, which still completes."""
        reduced = self.comm.all_reduce(self.mine(count))  # All ranks call collectives in one order.
        work = self.comm.recv(empty(count), (self.comm.rank + 1) % self.comm.size, 99)
        withdrawn = await work.cancel()
        with contextlib.suppress(WorkCancelledError):
            await work  # This raises the death of a peer, if that came first.
            withdrawn = False
        assert withdrawn, "wrong data: a receive that nothing matches has come off"
        total = sum((self.mine(count, r) for r in range(self.comm.size)), empty(count))
        task = asyncio.ensure_future(wait(reduced))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.expect(await reduced, total, "all_reduce, awaited again")
        self.counts["cancellations"] += 2
        return 2


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return where and how two tensors differ."""
    wrong = (got != wanted).nonzero().flatten().tolist()
    shown = ", ".join(f"{got[at]} for {wanted[at]} at {at}" for at in (wrong[0], wrong[-1]))
    return f"{len(wrong)} of {len(got)} numbers: {shown}"


async def wait(work: Any) -> None:
    await work


# ----------------------------------------------------------------------------------------------------------- a rank


class Member:
    """A process and its communicators, one after the other."""

    def __init__(self, transport: str, say: Callable[[Heard], None]) -> None:
        self.transport, self.say = transport, say
        self.comm: Communicator | None = None
        self.counts: Counter[str] = Counter()
        self.closes = 0
        self.before: Counter[str] | None = None

    async def obey(self, order: Order) -> None:
        """Form, work, and end."""
        self.comm = comm = await self.form(order)
        total = await comm.all_reduce(torch.full((3,), comm.rank + 1.0))
        assert total.tolist() == 3 * [order.size * (order.size + 1) / 2], f"wrong data: {total}"
        self.say(Heard(time.monotonic()))
        try:
            await self.work(comm, order)
        except (PeerDiedError, CommAbortedError) as error:
            self.say(Heard(time.monotonic(), self.died(error, order), self.counted()))
        else:
            ended = time.monotonic()
            del comm
            self.say(Heard(ended, None, self.counted(), None if order.aborts else await self.close()))

    async def form(self, order: Order) -> Communicator:
        """Form a communicator: as a survivor, as a newcomer, or with all ranks at once."""
        if self.comm is not None:
            return await self.comm.reconfigure(size=order.size if order.joins else None, timeout=PATIENCE)
        place = Rank(self.transport, order.rank, order.size, order.folder)
        comm: Communicator = await place.open("soak", timeout=PATIENCE, join=order.joins)
        return comm

    async def work(self, comm: Communicator, order: Order) -> None:
        window = await comm.new_window(torch.zeros(8, dtype=torch.int64))
        work = Work(comm, window, order.seed, self.counts)
        while order.steps is None or work.turn < order.steps:
            await work.step()
        # A rank that aborts is a step ahead of a rank that is still in the last barrier.
        with contextlib.suppress(*([CommAbortedError] if order.aborts else [])):
            await comm.barrier()
            added = int(window.tensor[0])
            assert added == work.added, f"wrong data: {added} of {work.added}"
            await window.aclose()
        if order.aborts:
            comm.abort("to grow")

    def died(self, error: CommError, order: Order) -> int:
        """Return the rank that died; raise any error but an expected death."""
        cause = error if isinstance(error, PeerDiedError) else error.__cause__
        if order.steps is not None or not isinstance(cause, PeerDiedError) or cause.peer is None:
            raise error
        error.__traceback__ = None
        return cause.peer

    def counted(self) -> dict[str, int]:
        counts = dict(self.counts)
        self.counts.clear()
        return counts

    async def close(self) -> int:
        """Close the communicator, check that nothing is left, and return the bytes that this process holds then."""
        assert self.comm is not None
        await self.comm.aclose()
        self.comm = None
        self.closes += 1
        memory = anonymous()
        if self.closes == WARM:
            self.before = holdings()
        elif self.before is not None:
            await settled(self.before)
        return memory


def anonymous() -> int:
    """Return the bytes that no file backs, after a garbage collection and malloc_trim.

    Free memory that the C library keeps is no leak. The kernel's own counter is only roughly right; this one is exact.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = [row.split() for row in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return 1024 * sum(int(row[1]) for row in rows if row[0] in ("Anonymous:", "Pss_Shmem:"))


async def rank_main(pipe: Connection, transport: str) -> None:
    """Run a rank, as the parent orders."""
    loop = asyncio.get_running_loop()
    complaints: list[str] = []

    def complain(_: object, context: dict[str, Any]) -> None:
        # A death ends several ops of one task, which hears of the first of them.
        if not isinstance(context.get("exception"), (PeerDiedError, CommAbortedError)):
            complaints.append(str(context))

    loop.set_exception_handler(complain)
    member = Member(transport, pipe.send)
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    while True:
        while not pipe.poll():
            asked.clear()
            await asked.wait()
        await member.obey(pipe.recv())
        assert not complaints, complaints


def child(pipe: Connection, transport: str) -> None:
    """Run a forked process to its end."""
    torch.set_num_threads(1)
    try:
        asyncio.run(rank_main(pipe, transport))
    except EOFError:
        pass  # The parent has closed the pipe.
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)
