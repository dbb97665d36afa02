"""Links of the text generator's ranks by ``torch.distributed`` and gloo; see ``text_generator.links``.

It is written as one writes it today. All ranks are one job, rank by rank the front, the prefill group's and then those
of each decode group, and form all process groups at its start. Every call of gloo's blocks, so each process group has a
thread of its own for them, and carries them in one order: so the ranks of a group carry out one plan after the other.
The pages of a prompt go as a message, and a thread of the decode rank waits for the next one. Leaders talk to the front
over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import signal
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch
import torch.distributed as dist
from text_generator.model import DTYPE, Part
from text_generator.pages import Pages
from torch import Tensor

from benchmarks.serve import gloo

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class LostError(Exception):
    """The other side, or a rank, is lost."""


Execute = Callable[[Any], Awaitable[Any]]
LOST = LostError
Description = int
"""The place at which a rank is reached: its number in the job."""
new_group = partial(gloo.Group, lost=LOST)


class Job:
    """The process groups that this rank is in. All ranks form all of them, in one order."""

    def __init__(self, tp: int, pp: int) -> None:
        here, size, world = dist.get_rank(), tp * pp, dist.get_world_size()
        self.rank = here
        groups = [new_group(list(range(first, first + size))) for first in range(1, world, size)]
        stages = [new_group(list(range(first, first + tp))) for first in range(1, world, tp)]
        # By a decode rank, what connects it with the prefill rank that has the same part of the model.
        self.ways = {there: new_group([1 + (there - 1) % size, there]) for there in range(1 + size, world)}
        if here:
            self.group, self.stage = groups[(here - 1) // size], stages[(here - 1) // tp]


_job: Job


class World:
    """All ranks, which meet once."""

    turn = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def __init__(self, tp: int, pp: int) -> None:
        global _job
        self.comm = new_group(list(range(dist.get_world_size())))
        self.comm.rank, self._met = dist.get_rank(), False
        _job = Job(tp, pp)

    async def meet(self, told: Any) -> list[Any]:
        """See `text_generator.links`."""
        if self._met:
            await anyio.sleep_forever()
        self._met = True
        return await self.comm.call(_gather_all, told)


def _gather_all(told: Any, group: dist.ProcessGroup) -> list[Any]:
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, told, group)
    return found


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """See there. Only the command line says how a group is split, and all ranks form all groups."""
    await asyncio.to_thread(gloo.meet)
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    given, _ = parser.parse_known_args()
    yield World(given.tp, given.pp)


class Group:
    """This rank's links with the others of its group; see `join`."""

    broken = False

    def __init__(self, part: Part) -> None:
        self.part = part
        self._group, self._stage = _job.group, _job.stage
        self._first = self._group.ranks[0]
        self.rank = _job.rank - self._first
        self._turn = asyncio.Lock()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def measure(self, registry: CollectorRegistry) -> None:
        """Gloo shows nothing."""

    @asynccontextmanager
    async def lead(self, execute: Execute) -> AsyncIterator[None]:
        """See `text_generator.links`."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is to be tidied up
        self._execute = execute
        yield
        await self._group.call(_broadcast, None)

    async def follow(self, execute: Execute) -> None:
        """See there."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (plan := await self._group.call(_broadcast, None)) is not None:
            await execute(plan)

    async def run(self, plan: Any) -> Any:
        """See there. One plan after the other."""
        async with self._turn:
            try:
                await self._group.call(_broadcast, plan)
                return await self._execute(plan)
            except LostError as error:
                self.broken = True
                if not self._lost.done():
                    self._lost.set_exception(error)
                raise

    async def lost(self) -> None:
        """See there. Gloo says so when it is called the next time."""
        await self._lost

    async def sum(self, x: Tensor) -> Tensor:
        """See there."""
        await self._stage.call(dist.all_reduce, x)
        return x

    async def receive(self, x: Tensor) -> Tensor:
        """See there."""
        return await self.recv(x, self.rank - self.part.shards)

    async def pass_on(self, x: Tensor) -> None:
        """See there."""
        await self.send(x, self.rank + self.part.shards)

    async def recv(self, x: Tensor, rank: int) -> Tensor:
        """See there."""
        await self._group.call(dist.recv, x, self._first + rank)
        return x

    async def send(self, x: Tensor, rank: int) -> None:
        """See there."""
        await self._group.call(dist.send, x, self._first + rank)

    async def everywhere(self, there: bool) -> bool:
        """See there."""
        all_ = torch.tensor([int(there)])
        await self._group.call(dist.all_reduce, all_, dist.ReduceOp.MIN)
        return bool(all_)

    async def gather(self, what: Any) -> list[Any] | None:
        """See there."""
        found: list[Any] | None = [None] * len(self._group.ranks) if self.rank == 0 else None
        await self._group.call(dist.gather_object, what, found, self._first)
        return found


def _broadcast(plan: Any, group: dist.ProcessGroup) -> Any:
    """A plan, from the group's first rank to all."""
    box = [plan]
    dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
    return box[0]


@asynccontextmanager
async def join(world: World, ranks: Sequence[int], name: str, tp: int, pp: int) -> AsyncIterator[Group]:
    """See there: its group is there already."""
    stage, shard = divmod(ranks.index(_job.rank), tp)
    yield Group(Part(stage, pp, shard, tp))


# ------------------------------------------------------------------------------------------------ between groups


class Receiver:
    """A decode rank's end: a thread waits for the pages that the prefill rank sends."""

    def __init__(self, here: Endpoint) -> None:
        self.description = _job.rank
        self._way = _job.ways[_job.rank]
        self._sent: dict[int, Tensor] = {}
        self._news = anyio.Event()

    async def listen(self) -> None:
        """Hear from it, until cancelled."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._hear, args=(loop, lost), daemon=True).start()
        await lost

    def _hear(self, loop: asyncio.AbstractEventLoop, lost: asyncio.Future[None]) -> None:
        head = torch.empty(3, dtype=torch.int64)  # the key of a sequence, how many pages follow, and their size
        sender = self._way.ranks[0]
        try:
            while True:
                dist.recv(head, sender, self._way.group)
                key, *shape = head.tolist()
                pages = torch.empty(shape, dtype=DTYPE)
                dist.recv(pages, sender, self._way.group)
                loop.call_soon_threadsafe(self._have, key, pages)
        except RuntimeError as error:
            why = LostError(f"gloo has failed: {error}")
            loop.call_soon_threadsafe(lambda: lost.done() or lost.set_exception(why))

    def _have(self, key: int, pages: Tensor) -> None:
        self._sent[key] = pages
        self._news.set()
        self._news = anyio.Event()

    async def read(self, sender: str, key: int, pages: Tensor) -> bool:
        """See `text_generator.links`."""
        while key not in self._sent:
            await self._news.wait()
        pages.flatten(1).copy_(self._sent.pop(key))
        return True


class Sender:
    """A prefill rank's end."""

    def __init__(self, here: Endpoint, name: str, memory: Tensor) -> None:
        self._memory, self._pages = memory, Pages(len(memory))
        self._taken: dict[int, list[int]] = {}
        self._ways: dict[str, gloo.Group] = {}

    async def connect(self, decoder: str, at: Description) -> None:
        """Get to know a decoder."""
        self._ways[decoder] = _job.ways[at]

    async def pages(self, key: int, count: int) -> list[int]:
        """See `text_generator.links`."""
        if key not in self._taken:
            self._taken[key] = await self._pages.take(count)
        return self._taken[key]

    async def hand(self, key: int, decoder: str) -> None:
        """See there. What nobody reads stays at the decoder."""
        await self._ways[decoder].call(_push, key, self._memory[self._taken[key]].flatten(1))
        await self.free(key)

    async def free(self, key: int) -> None:
        """See there."""
        self._pages.give_back(self._taken.pop(key, []))


def _push(key: int, pages: Tensor, group: dist.ProcessGroup) -> None:
    for part in (torch.tensor([key, *pages.shape]), pages):
        dist.send(part, dist.get_global_rank(group, 1), group)


# ---------------------------------------------------------------------------------------------- with the front


class Channel:
    """Messages between the front and the leader of a group: pickled tuples over TCP."""

    def __init__(self, ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = ends

    @classmethod
    async def open(cls, here: Endpoint, address: bytes) -> Channel:
        """Connect with the front."""
        return cls(await asyncio.open_connection("127.0.0.1", int(address)))

    @classmethod
    async def accept(cls, here: Endpoint) -> Channel:
        """Wait for a leader to connect, at the front."""
        return cls(await here.callers.get())

    def tell(self, *message: Any) -> None:
        """See `text_generator.links`."""
        data = pickle.dumps(message)
        self._writer.write(struct.pack("<Q", len(data)) + data)

    async def hear(self) -> tuple[Any, ...]:
        """See there."""
        try:
            (size,) = struct.unpack("<Q", await self._reader.readexactly(8))
            message: tuple[Any, ...] = pickle.loads(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LostError(f"the other side is gone: {error}") from error
        return message

    async def aclose(self) -> None:
        """Part from the other side."""
        self._writer.close()


class Endpoint:
    """The place at which the front is reached."""

    def __init__(self) -> None:
        self.callers: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.address = b""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        self.callers.put_nowait((reader, writer))


@asynccontextmanager
async def open_endpoint() -> AsyncIterator[Endpoint]:
    """Open the place at which this process is reached; only the front listens."""
    here = Endpoint()
    if os.environ["RANK"] != "0":
        yield here
        return
    async with await asyncio.start_server(here.take, "127.0.0.1", 0) as server:
        here.address = str(server.sockets[0].getsockname()[1]).encode()
        yield here
