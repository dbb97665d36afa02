"""The checks of every rank that survives a fault, whatever the fault is.

Its errors name the communicator, the rank, the op and the peer. An unrelated communicator of the same process passes
traffic with right data during the fault and after it. No descriptor, thread, shared memory or task is leaked.
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
    """A counter of the groups in which gloo has lost a send. Nobody can make gloo release what it keeps of them."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.groups += record.getMessage().startswith("gloo waits without end for a send")

    def kept(self) -> Counter[str]:
        """Return the most that gloo keeps of these groups, and for each group the thread that releases it."""
        threads = {"thread gloo_tcp_loop": 1, "thread pt_gloo_runloop": 2, "thread python": 1}
        files = {"anon_inode:[eventpoll]": 1, "pipe:[]": 2}
        return Counter({it: n * self.groups for it, n in (threads | files).items()})


stuck = Stuck()
logging.getLogger("aiocomms").addHandler(stuck)


class Watch:
    """The traffic of the unrelated communicator during a fault."""

    def __init__(self) -> None:
        self.rounds = 0
        self.stop = False

    async def pass_traffic(self, comm: Communicator) -> None:
        """Run collectives and messages, and check them, until every rank is to stop."""
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
            await asyncio.sleep(PAUSE if clock.simulation is None else 50 * PAUSE)  # A simulation computes each round.


def holdings() -> Counter[str]:
    """Count what this process holds: threads, descriptors, shared mappings and tasks.

    The threads and files that gloo keeps do not count. A simulated process has only tasks.
    """
    if clock.simulation is not None:
        return Counter({"tasks": len(asyncio.all_tasks())})
    threads, links = held()
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    shared = sum(row[1].endswith("s") for row in rows)
    if any(it.name == "aiocomms deadlines" for it in threading.enumerate()):
        threads.remove("python")  # The thread starts with the first op that waits, and ends with the last communicator.
    names = [re.sub("posix_[0-9a-f]*", "posix_", link) for link in links]
    own = Counter({"shared mappings": shared, "tasks": len(asyncio.all_tasks())})
    return Counter([f"thread {name}" for name in threads] + names) + own - stuck.kept()


@contextlib.asynccontextmanager
async def oracle(place: Rank, *victims: int, reported: str | None = None, **options: Any) -> AsyncIterator[Watch]:
    """Check a rank from before the fault until after it; a victim is not checked.

    :param reported: a pattern of what the loop's exception handler may get; it may get nothing else.
    :param options: the options of the communicators that this opens.
    """
    watch = Watch()
    if place.rank in victims:
        yield watch
        return
    if not place.simulated:
        gc.freeze()  # The collector need not look through torch's objects.
    survivors = [rank for rank in range(place.size) if rank not in victims]
    async with place.open("once", survivors, **options) as once:  # The first one loads what stays.
        await once.all_reduce(torch.zeros(LARGE))
    async with place.open("healthy", survivors, **options) as healthy:
        contexts: list[str] = []  # Texts: an error would keep its frames.
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
    """Leave so many seconds for forming, in this process, once all ranks have come, however long that took."""
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
    """Wait until nothing keeps a buffer: another thread describes what ops were doing, perhaps later."""
    ends = clock.now() + PATIENCE
    while kept() is not None:
        assert clock.now() < ends, "the buffer is kept for ever"
        await asyncio.sleep(0.01)
        gc.collect()


async def end(ops: Awaitable[Any], comm: Communicator, peers: Iterable[int]) -> CommError:
    """Return the error by which the death of a rank ends an endless series of ops: it may also refuse the next call."""
    with pytest.raises((PeerDiedError, CommAbortedError)) as caught:
        await ops
    error: CommError = caught.value
    died = error if isinstance(error, PeerDiedError) else error.__cause__
    assert isinstance(died, PeerDiedError), repr(error)
    assert died.peer in peers, repr(error)
    named(error, comm, peers)
    return error


def named(error: CommError, comm: Communicator, peers: Iterable[int] = ()) -> None:
    """Check that an error names its communicator, rank, op and peer. A refused call has no number."""
    about = f"{error!r}: {error}"
    assert error.comm == comm.name, about
    assert error.rank == comm.rank, about
    assert error.op is not None, about
    assert error.seq is not None or "the communicator is lost" in error.message, about
    peers = list(peers)
    assert not peers or any(f"rank {peer}" in error.message for peer in peers), about
    assert not peers or error.peer in (*peers, None), about
