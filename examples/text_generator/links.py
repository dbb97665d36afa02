"""The communication of the model's ranks. Only this module uses the library for messages.

A *group* is a communicator of the ranks with all parts of a model: `tp` shards of each of `pp` stages. Its rank 0 leads
the group. The leader makes plans, which all ranks carry out, each plan in its own lane. Endpoints connect groups. They
connect each prefill rank to the rank of a decode group with the same part of the model. They also connect each leader
to the front. All ranks, with the front, are also in one communicator for meetings. They meet at the start and after
each loss. Groups continue their work during a meeting.
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
"""The error of every link when the other side or a rank of the group is lost."""
Description = bytes
"""The address at which a rank is reached."""
FORM = 60.0  # seconds within which the ranks of a group must meet


class Group:
    """This rank's links to the other ranks of its group; see `join`."""

    def __init__(self, service: Service, stage: Communicator, part: Part) -> None:
        self.part, self.rank = part, service.comm.rank
        self._service, self._comm, self._stage = service, service.comm, stage
        self._numbers = itertools.count()

    def measure(self, registry: CollectorRegistry) -> None:
        """Add the metrics of these links to a Prometheus registry."""
        for comm in (self._service.current, self._stage):
            prometheus.instrument(comm, registry)

    # --------------------------------------------------------------------------------------------------- plans

    @asynccontextmanager
    async def lead(self, execute: Execute) -> AsyncIterator[None]:
        """Drive plans on rank 0 within the block. The other ranks end at the end of the block."""
        async with self._service.drive(partial(self._carry_out, execute)) as self._driver:
            yield

    async def follow(self, execute: Execute) -> None:
        """Carry out the leader's plans, on the other ranks, until the leader ends."""
        await self._service.work(partial(self._carry_out, execute))

    async def run(self, plan: Any) -> Any:
        """Run a plan on all ranks, concurrently with other plans, and return this rank's result."""
        return await self._driver.run((next(self._numbers), plan))

    @property
    def broken(self) -> bool:
        """True if a rank is lost."""
        return self._service.current.aborted

    async def lost(self) -> None:
        """Wait until a rank is lost, and raise the error."""
        raise await self._service.current.lost()

    async def _carry_out(self, execute: Execute, numbered: tuple[int, Any]) -> Any:
        number, plan = numbered
        with self._stage.lane(number):  # the plan is already in its lane of the group
            return await execute(plan)

    # ------------------------------------------------------------------------------------------ within a plan

    async def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the shards of this stage."""
        return await self._stage.all_reduce(x)

    async def receive(self, x: Tensor) -> Tensor:
        """Receive hidden states from the previous stage into `x`."""
        return await self.recv(x, self.rank - self.part.shards)

    async def pass_on(self, x: Tensor) -> None:
        """Send hidden states to the next stage."""
        await self.send(x, self.rank + self.part.shards)

    async def recv(self, x: Tensor, rank: int) -> Tensor:
        """Receive a tensor of another rank of the group into `x`."""
        return await self._comm.recv(x, rank)

    async def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to another rank of the group."""
        await self._comm.send(x, rank)

    async def everywhere(self, there: bool) -> bool:
        """Return whether a value is true on all ranks."""
        return bool(await self._comm.all_reduce(torch.tensor([int(there)]), ReduceOp.MIN))

    async def gather(self, what: Any) -> list[Any] | None:
        """Return the objects of all ranks on the leader; None on other ranks."""
        return await self._comm.gather_object(what, 0)


class World:
    """All ranks of the job; see `open_world`."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._met = False

    @property
    def turn(self) -> int:
        """The number of this meeting. Meetings that failed also have numbers."""
        return int(self.comm.name.partition("@")[2] or 1)

    async def meet(self, told: Any) -> list[Any]:
        """Wait for the next meeting, and exchange objects there.

        :param told: the object for the other ranks
        :returns: the object of each rank
        :raises CommError: no process has replaced a lost rank
        """
        while True:
            if self._met:
                await self._lost()
                self.comm = await self.comm.reconfigure(size=self.comm.size, timeout=FORM)
            self._met = True
            with suppress(CommError):
                return await self.comm.all_gather_object(told)

    async def _lost(self) -> None:
        """Wait until a rank is lost. Only a pending receive from a rank notices that the rank is stopped."""
        others = [0] if self.comm.rank else range(1, self.comm.size)
        never = (self.comm.recv(torch.empty(1), rank, timeout=None) for rank in others)
        with suppress(CommError):  # the communicator may already be lost
            await asyncio.gather(*never, return_exceptions=True)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """Meet the other ranks of the job."""
    world = World(await aiocomms.new_comm(timeout=FORM))
    try:
        yield world
    except BaseException as error:
        world.comm.abort(error)  # after a clean close, the other ranks would not notice
        raise
    finally:
        await world.comm.aclose()


@asynccontextmanager
async def join(world: World, ranks: Sequence[int], name: str, tp: int, pp: int) -> AsyncIterator[Group]:
    """Form a group of some ranks after a meeting."""
    async with Service(await world.comm.create_group(ranks, name, timeout=FORM)) as service:
        comm = service.current
        stage, shard = divmod(comm.rank, tp)
        async with await comm.split(range(stage * tp, (stage + 1) * tp), f"{name} stage {stage}") as own:
            yield Group(service, own, Part(stage, pp, shard, tp))


# ------------------------------------------------------------------------------------------------ between groups


class Receiver:
    """A decode rank's end of the links, which reads pages that prefill ranks hand over."""

    def __init__(self, here: Endpoint) -> None:
        self._here = here
        self._handed: dict[int, HandedLease] = {}
        """The pages that were handed over and are not read yet, by sequence."""
        self._senders: set[str] = set()
        self._news = anyio.Event()

    @property
    def description(self) -> Description:
        """The address for senders."""
        return self._here.address

    async def listen(self) -> None:
        """Accept connections and pages until the task is cancelled."""
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
        """Read the pages of a sequence, and give them back. Return False if the sender is gone."""
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
    """A prefill rank's end of the links, which leases pages to sequences, and hands pages over to decoders.

    :param name: the name of the rank's group
    """

    def __init__(self, here: Endpoint, name: str, memory: Tensor) -> None:
        self._here, self._name, self._pool = here, name, here.new_pool(memory)
        self._decoders: dict[str, Peer] = {}
        self._leases: dict[int, tuple[Lease, AsyncExitStack]] = {}

    async def connect(self, decoder: str, at: Description) -> None:
        """Connect to a decoder."""
        peer = await self._here.connect(at)
        await peer.send_object(self._name)
        await peer.recv_object()
        self._decoders[decoder] = peer
        peer.register_abort_hook(lambda _: self._decoders.pop(decoder, None))

    async def pages(self, key: int, count: int) -> list[int]:
        """Lease pages for a sequence, unless it has pages already, and return their numbers."""
        if key not in self._leases:
            kept = AsyncExitStack()
            self._leases[key] = await kept.enter_async_context(self._pool.lease(count)), kept
        return list(self._leases[key][0].blocks)

    async def hand(self, key: int, decoder: str) -> None:
        """Hand a sequence's pages over, wait until the decoder has read them, and give them back."""
        if decoder not in self._decoders:
            raise LOST(f"{decoder} is lost")
        lease, kept = self._leases.pop(key)
        async with kept:
            await self._decoders[decoder].hand_over(lease, key, timeout=None)

    async def free(self, key: int) -> None:
        """Give back the pages of a sequence that was not handed over."""
        if key in self._leases:
            await self._leases.pop(key)[1].aclose()


# ---------------------------------------------------------------------------------------------- with the front


class Channel:
    """The messages between the front and the leader of a group. A message is a tuple."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @classmethod
    async def open(cls, here: Endpoint, address: bytes) -> Channel:
        """Connect to the front."""
        return cls(await here.connect(address))

    @classmethod
    async def accept(cls, here: Endpoint) -> Channel:
        """Wait, on the front, until a leader connects."""
        return cls(await here.accept())

    def tell(self, *message: Any) -> None:
        """Send a message. `hear` reports a loss of the other side."""
        with suppress(LOST):
            self._peer.send_object(message).add_done_callback(lambda work: work.exception())

    async def hear(self) -> tuple[Any, ...]:
        """Return the next message.

        :raises LOST: the other side is gone
        """
        return await self._peer.recv_object(timeout=None)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._peer.aclose()


def open_endpoint() -> Any:
    """Return an `Endpoint` of this process, for `async with`."""
    return aiocomms.open_endpoint(timeout=FORM)
