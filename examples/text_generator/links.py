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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch
from torch import Tensor

import aiocomms
from aiocomms import Communicator, Endpoint, Peer, ReduceOp, RemoteRegion
from aiocomms.errors import CommError
from aiocomms.integrations import prometheus
from aiocomms.serving import Service

from .model import Part

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Execute = Callable[[Any], Awaitable[Any]]
LOST = CommError
"""What every link raises when the other side, or a rank of the group, is lost."""
Description = tuple[bytes, bytes]
"""Where a rank is reached, and its pages: an address and a descriptor."""
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
    """A decode rank's end: others write into its pages."""

    def __init__(self, here: Endpoint, memory: Tensor) -> None:
        self._here, self._region = here, here.register(memory, read=False)
        self._filled: dict[str, set[int]] = {}
        """Which sequences have been filled, by who has; of those that are connected."""
        self._news = anyio.Event()

    @property
    def description(self) -> Description:
        """What a sender needs."""
        return self._here.address, self._region.descriptor

    async def listen(self) -> None:
        """Hear from whoever connects, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                tasks.start_soon(self._hear, await self._here.accept())

    async def _hear(self, peer: Peer) -> None:
        """The k-th message names the sequence that the k-th signal is for, which vouches for all puts before it."""
        name = ""
        with suppress(LOST):
            name = await peer.recv_object()
            filled = self._filled[name] = set()
            await peer.send_object(None)
            while True:
                key = await peer.recv_object(timeout=None)
                await peer.wait_signal()
                filled.add(key)
                self._tell()
        self._filled.pop(name, None)
        self._tell()
        await peer.aclose()

    async def settled(self, sender: str, key: int) -> bool:
        """Wait until a sender writes no more into a sequence's pages: it has filled them, or is gone.

        :returns: whether it has
        """
        while key not in (filled := self._filled.get(sender, set())) and sender in self._filled:
            await self._news.wait()
        there = key in filled
        filled.discard(key)
        return there

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class Sender:
    """A prefill rank's end: it writes into decoders' pages.

    :param name: of its group, by which decoders know it
    """

    def __init__(self, here: Endpoint, name: str) -> None:
        self._here, self._name = here, name
        self._decoders: dict[str, tuple[Peer, RemoteRegion, asyncio.Lock]] = {}

    async def connect(self, decoder: str, at: Description) -> None:
        """Be able to write into a decoder's pages."""
        address, descriptor = at
        peer = await self._here.connect(address)
        region = await peer.attach(descriptor)
        await peer.send_object(self._name)
        await peer.recv_object()
        self._decoders[decoder] = peer, region, asyncio.Lock()
        peer.register_abort_hook(lambda _: self._decoders.pop(decoder, None))

    async def push(self, decoder: str, pieces: Iterable[tuple[Tensor, int]]) -> None:
        """Write pieces of pages; done when they may be changed here."""
        _, region, _ = self._decoder(decoder)
        for work in [region.put(piece, offset) for piece, offset in pieces]:
            await work

    async def signal(self, decoder: str, key: int) -> None:
        """Nothing more will be written for a sequence, and all that was has arrived."""
        peer, _, turn = self._decoder(decoder)
        async with turn:  # or another's signal might come between this one and its name
            await peer.signal()
            await peer.send_object(key)

    def _decoder(self, name: str) -> tuple[Peer, RemoteRegion, asyncio.Lock]:
        if name not in self._decoders:
            raise LOST(f"{name} is gone")
        return self._decoders[name]


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
