"""All that the model's ranks say to each other, and nothing else: what is below this module, only this module knows.

A *group* is the ranks that the model is split over, `tp` shards of each of `pp` stages; it is a communicator. Rank 0
leads it: it gives out plans, which all ranks carry out, each plan in a lane of its own. Groups are connected by
endpoints: a rank of the prefill group with the rank of a decode group that has the same part of the model, and each
leader with the front. All ranks, the front among them, are in one more communicator, in which they do no more than
meet: at first, and whenever one of them was lost. What a group does goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch
from torch import Tensor

import aiocomms
from aiocomms import Communicator, Endpoint, HandedLease, Lease, Peer, ReduceOp
from aiocomms.errors import CommError
from aiocomms.integrations import prometheus
from aiocomms.serving import Service

from .model import Part

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Execute = Callable[[Any], Awaitable[Any]]
LOST = CommError
"""What every link raises when the other side, or a rank of the group, is lost."""
Description = bytes
"""The address at which a rank is reached."""
FORM = 60.0  # seconds in which the ranks of a group find each other, however busy the machine


class Group:
    """This rank's links with the others of its group; see `join`."""

    def __init__(self, service: Service, stage: Communicator, part: Part) -> None:
        self.part, self.rank = part, service.comm.rank
        self._service, self._comm, self._stage = service, service.comm, stage
        self._numbers = itertools.count()

    def measure(self, registry: CollectorRegistry) -> None:
        """Have a registry of Prometheus show what goes over these links."""
        for comm in (self._service.current, self._stage):
            prometheus.instrument(comm, registry)

    # --------------------------------------------------------------------------------------------------- plans

    @asynccontextmanager
    async def lead(self, execute: Execute) -> AsyncIterator[None]:
        """On rank 0: give out plans within the block; at its end the other ranks leave."""
        async with self._service.drive(partial(self._carry_out, execute)) as self._driver:
            yield

    async def follow(self, execute: Execute) -> None:
        """On the others: carry out plans until the leader has no more."""
        await self._service.work(partial(self._carry_out, execute))

    async def run(self, plan: Any) -> Any:
        """Have all ranks carry out a plan, at the same time as others; what it returns here."""
        return await self._driver.run((next(self._numbers), plan))

    @property
    def broken(self) -> bool:
        """Whether a rank is lost."""
        return self._service.current.aborted

    async def lost(self) -> None:
        """Wait until a rank is lost, and raise why."""
        raise await self._service.current.lost()

    async def _carry_out(self, execute: Execute, numbered: tuple[int, Any]) -> Any:
        number, plan = numbered
        with self._stage.lane(number):  # within that of the group, in which it is already
            return await execute(plan)

    # ------------------------------------------------------------------------------------------ within a plan

    async def sum(self, x: Tensor) -> Tensor:
        """The sum over the shards of this stage."""
        return await self._stage.all_reduce(x)

    async def receive(self, x: Tensor) -> Tensor:
        """Hidden states from the stage before, into `x`."""
        return await self.recv(x, self.rank - self.part.shards)

    async def pass_on(self, x: Tensor) -> None:
        """Hidden states to the next stage."""
        await self.send(x, self.rank + self.part.shards)

    async def recv(self, x: Tensor, rank: int) -> Tensor:
        """A tensor of another rank of the group, into `x`."""
        return await self._comm.recv(x, rank)

    async def send(self, x: Tensor, rank: int) -> None:
        """The other end."""
        await self._comm.send(x, rank)

    async def everywhere(self, there: bool) -> bool:
        """Whether something is so on all ranks."""
        return bool(await self._comm.all_reduce(torch.tensor([int(there)]), ReduceOp.MIN))

    async def gather(self, what: Any) -> list[Any] | None:
        """What each rank has, on the leader."""
        return await self._comm.gather_object(what, 0)


class World:
    """All ranks of the job; see `open_world`."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._met = False

    @property
    def turn(self) -> int:
        """The number of this meeting, or of one before it that was broken off."""
        return int(self.comm.name.partition("@")[2] or 1)

    async def meet(self, told: Any) -> list[Any]:
        """Wait for the next meeting, and say there what the others are to know.

        :returns: what each rank has said
        :raises CommError: nobody has taken the place of a rank that was lost
        """
        while True:
            if self._met:
                await self._lost()
                self.comm = await self.comm.reconfigure(size=self.comm.size, timeout=FORM)
            self._met = True
            with suppress(CommError):
                return await self.comm.all_gather_object(told)

    async def _lost(self) -> None:
        """Wait until a rank is lost; one that was only stopped is noticed by those who wait for a message from it."""
        others = [0] if self.comm.rank else range(1, self.comm.size)
        never = (self.comm.recv(torch.empty(1), rank, timeout=None) for rank in others)
        with suppress(CommError):  # the communicator is lost already
            await asyncio.gather(*never, return_exceptions=True)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """Find the other ranks, as the launcher says: all at first, later those that are left."""
    world = World(await aiocomms.new_comm(timeout=FORM))
    try:
        yield world
    except BaseException as error:
        world.comm.abort(error)  # a rank that leaves in good order is not missed
        raise
    finally:
        await world.comm.aclose()


@asynccontextmanager
async def join(world: World, ranks: Sequence[int], name: str, tp: int, pp: int) -> AsyncIterator[Group]:
    """Form a group with its other ranks, after a meeting."""
    async with Service(await world.comm.create_group(ranks, name, timeout=FORM)) as service:
        comm = service.current
        stage, shard = divmod(comm.rank, tp)
        async with await comm.split(range(stage * tp, (stage + 1) * tp), f"{name} stage {stage}") as own:
            yield Group(service, own, Part(stage, pp, shard, tp))


# ------------------------------------------------------------------------------------------------ between groups


class Receiver:
    """A decode rank's end: it reads pages that prefill ranks hand over."""

    def __init__(self, here: Endpoint) -> None:
        self._here = here
        self._handed: dict[int, HandedLease] = {}
        """What was handed over and not read yet, by the sequence."""
        self._senders: set[str] = set()
        self._news = anyio.Event()

    @property
    def description(self) -> Description:
        """Return what a sender needs."""
        return self._here.address

    async def listen(self) -> None:
        """Hear from whoever connects, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collect)
            while True:
                tasks.start_soon(self._know, await self._here.accept())

    async def _know(self, peer: Peer) -> None:
        name = ""
        with suppress(LOST):
            name = await peer.recv_object()
            self._senders.add(name)
            await peer.send_object(None)
            await peer.lost()
        self._senders.discard(name)
        self._tell()
        await peer.aclose()

    async def _collect(self) -> None:
        async for handed in self._here.handed():
            self._handed = {key: it for key, it in self._handed.items() if it.error is None}
            self._handed[handed.meta] = handed
            self._tell()

    async def read(self, sender: str, key: int, pages: Tensor) -> bool:
        """Read the pages of a sequence, and give them back; whether they were there: the sender may be gone."""
        while key not in self._handed and sender in self._senders:
            await self._news.wait()
        with suppress(LOST, KeyError):
            async with self._handed.pop(key) as handed:
                await handed.read(pages)
            return True
        return False

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class Sender:
    """A prefill rank's end: it leases its pages to sequences, and hands them over to decoders.

    :param name: of its group, by which decoders know it
    """

    def __init__(self, here: Endpoint, name: str, memory: Tensor) -> None:
        self._here, self._name, self._pool = here, name, here.new_pool(memory)
        self._decoders: dict[str, Peer] = {}
        self._leases: dict[int, tuple[Lease, AsyncExitStack]] = {}

    async def connect(self, decoder: str, at: Description) -> None:
        """Be able to hand pages over to a decoder."""
        peer = await self._here.connect(at)
        await peer.send_object(self._name)
        await peer.recv_object()
        self._decoders[decoder] = peer
        peer.register_abort_hook(lambda _: self._decoders.pop(decoder, None))

    async def pages(self, key: int, count: int) -> list[int]:
        """Take so many pages for a sequence, unless it has them; which they are."""
        if key not in self._leases:
            kept = AsyncExitStack()
            self._leases[key] = await kept.enter_async_context(self._pool.lease(count)), kept
        return list(self._leases[key][0].blocks)

    async def hand(self, key: int, decoder: str) -> None:
        """Hand a sequence's pages over, wait until the decoder has read them, and give them back."""
        if decoder not in self._decoders:
            raise LOST(f"{decoder} is gone")
        lease, kept = self._leases.pop(key)
        async with kept:
            await self._decoders[decoder].hand_over(lease, key, timeout=None)

    async def free(self, key: int) -> None:
        """Give back the pages of a sequence that was not handed over."""
        if key in self._leases:
            await self._leases.pop(key)[1].aclose()


# ---------------------------------------------------------------------------------------------- with the front


class Channel:
    """Messages between the front and the leader of a group: tuples of what objects may hold."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @classmethod
    async def open(cls, here: Endpoint, address: bytes) -> Channel:
        """Connect with the front."""
        return cls(await here.connect(address))

    @classmethod
    async def accept(cls, here: Endpoint) -> Channel:
        """Wait for a leader to connect, at the front."""
        return cls(await here.accept())

    def tell(self, *message: Any) -> None:
        """Send. That the other side is gone is heard of by `hear`."""
        with suppress(LOST):
            self._peer.send_object(message).add_done_callback(lambda work: work.exception())

    async def hear(self) -> tuple[Any, ...]:
        """The next message; raises `LOST` when the other side is gone."""
        return await self._peer.recv_object(timeout=None)

    async def aclose(self) -> None:
        """Part from the other side."""
        await self._peer.aclose()


def open_endpoint() -> Any:
    """Where this process is reached: an `Endpoint`, by `async with`."""
    return aiocomms.open_endpoint(timeout=FORM)
