"""What every rank that lives through a fault is held to, whatever the fault is.

Its errors name the communicator, the rank, the op and the peer; an unrelated communicator of the same process passes
traffic during the fault and after it, with right data; and descriptors, threads, memory shared with others and tasks
are back where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import LARGE, PATIENCE, Rank, empty, held, numbers
from torch.distributed import Store

from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError
from aiocomms.lowlevel import clock

FULL = os.environ.get("AIOCOMMS_FAULTS") == "full"
"""All victims, delays and loops (make faults), or one of each (make test)."""

PAUSE = 0.001
"""Seconds between two rounds of traffic."""


class Stuck(logging.Handler):
    """Counts the groups of which gloo has lost a send. What it keeps of them nobody can make it let go."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.groups += record.getMessage().startswith("gloo waits without end for a send")

    def kept(self) -> Counter[str]:
        """At most; and the thread that releases each group."""
        threads = {"thread gloo_tcp_loop": 1, "thread pt_gloo_runloop": 2, "thread python": 1}
        files = {"anon_inode:[eventpoll]": 1, "pipe:[]": 2}
        return Counter({it: n * self.groups for it, n in (threads | files).items()})


stuck = Stuck()
logging.getLogger("aiocomms").addHandler(stuck)


class Watch:
    """What the other communicator does meanwhile."""

    def __init__(self) -> None:
        self.rounds = 0
        self.stop = False

    async def pass_traffic(self, comm: Communicator) -> None:
        """Collectives and messages, checked, until every rank has had enough."""
        rank, size = comm.rank, comm.size
        while True:
            count = LARGE if self.rounds % 8 == 0 else 5
            ready = comm.all_reduce(torch.tensor([int(self.stop)]))
            whole = comm.all_reduce(numbers(count, rank, self.rounds))
            if size > 1:
                given = comm.send(numbers(count, rank, self.rounds), (rank + 1) % size, 7)
                got = await comm.recv(empty(count), (rank - 1) % size, 7)
                await given
                assert torch.equal(got, numbers(count, (rank - 1) % size, self.rounds))
            assert torch.equal(await whole, sum(numbers(count, r, self.rounds) for r in range(size)))
            self.rounds += 1
            if int(await ready) == size:
                return
            await asyncio.sleep(PAUSE if clock.simulation is None else 50 * PAUSE)  # there each round is computed


def holdings() -> Counter[str]:
    """What this process has of its machine: threads, descriptors, mappings that are shared; and tasks.

    What gloo keeps does not count. A simulated process has tasks alone.
    """
    if clock.simulation is not None:
        return Counter({"tasks": len(asyncio.all_tasks())})
    threads, links = held()
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    shared = sum(row[1].endswith("s") for row in rows)
    if any(it.name == "aiocomms deadlines" for it in threading.enumerate()):
        threads.remove("python")  # it comes with the first op that has to wait, and goes with the last communicator
    names = [re.sub("posix_[0-9a-f]*", "posix_", link) for link in links]
    own = Counter({"shared mappings": shared, "tasks": len(asyncio.all_tasks())})
    return Counter([f"thread {name}" for name in threads] + names) + own - stuck.kept()


@contextlib.asynccontextmanager
async def oracle(place: Rank, *victims: int, reported: str | None = None, **options: Any) -> AsyncIterator[Watch]:
    """Hold a rank to all that, from before the fault until it is over; a victim is held to nothing.

    :param reported: a pattern of what may be told to the loop's exception handler; nothing else may.
    :param options: of the communicators that it opens.
    """
    watch = Watch()
    if place.rank in victims:
        yield watch
        return
    if not place.simulated:
        gc.freeze()  # what torch brings need not be looked through each time
    survivors = [rank for rank in range(place.size) if rank not in victims]
    async with place.open("once", survivors, **options) as once:  # what the first one loads stays
        await once.all_reduce(torch.zeros(LARGE))
    async with place.open("healthy", survivors, **options) as healthy:
        contexts: list[str] = []  # as texts: an error would keep what its frames have
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(repr(context)))
        traffic = asyncio.create_task(watch.pass_traffic(healthy))
        try:
            await go_on(watch, traffic)
            before = holdings()
            yield watch
            await go_on(watch, traffic)
            watch.stop = True
            await traffic
        finally:
            traffic.cancel()
        del traffic
        await settled(before)
        assert not [it for it in contexts if not reported or not re.search(reported, it)], contexts


async def go_on(watch: Watch, traffic: asyncio.Task[None]) -> None:
    rounds, ends = watch.rounds, clock.now() + PATIENCE
    while watch.rounds < rounds + 3 and not traffic.done():
        assert clock.now() < ends, "the other communicator does not go on"
        await asyncio.sleep(0.001)
    if traffic.done():
        traffic.result()


@contextlib.contextmanager
def left_after_meeting(place: Rank, seconds: float) -> Iterator[None]:
    """In this process, so many seconds are left to form in when all ranks have come, however long that took."""
    arrive = StoreRendezvous.arrive

    async def arrives(self: StoreRendezvous, root: Store) -> None:
        await arrive(self, root)
        self._ends = clock.now() + seconds

    place.replace(StoreRendezvous, "arrive", arrives)
    try:
        yield
    finally:
        place.replace(StoreRendezvous, "arrive", arrive)


async def settled(before: Counter[str]) -> None:
    """Wait until this process holds no more than it held."""
    ends = clock.now() + PATIENCE
    while more := holdings() - before:
        assert clock.now() < ends, f"more than before: {dict(more)}"
        await asyncio.sleep(0.01)
        gc.collect()


async def forgotten(kept: weakref.ref[Any]) -> None:
    """Wait until nothing keeps a buffer: what ops were doing is put into words on another thread, and may be later."""
    ends = clock.now() + PATIENCE
    while kept() is not None:
        assert clock.now() < ends, "the buffer is kept for ever"
        await asyncio.sleep(0.01)
        gc.collect()


async def end(ops: Awaitable[Any], comm: Communicator, peers: Iterable[int]) -> CommError:
    """The death of one of some ranks that ends ops without end; the next call may already be refused for it."""
    with pytest.raises((PeerDiedError, CommAbortedError)) as caught:
        await ops
    error: CommError = caught.value
    died = error if isinstance(error, PeerDiedError) else error.__cause__
    assert isinstance(died, PeerDiedError), repr(error)
    assert died.peer in peers, repr(error)
    named(error, comm, peers)
    return error


def named(error: CommError, comm: Communicator, peers: Iterable[int] = ()) -> None:
    """The error says whose it is, and whose fault. A call that was refused has no number."""
    about = f"{error!r}: {error}"
    assert error.comm == comm.name, about
    assert error.rank == comm.rank, about
    assert error.op is not None, about
    assert error.seq is not None or "the communicator is lost" in error.message, about
    peers = list(peers)
    assert not peers or any(f"rank {peer}" in error.message for peer in peers), about
    assert not peers or error.peer in (*peers, None), about
