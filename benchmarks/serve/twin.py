"""The embedding server with ``torch.distributed`` and gloo in the place of aiocomms; all else is shared.

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 2 -m benchmarks.serve.twin --port 8000

It is written as one writes it today. Every call of gloo's blocks, so each group has a thread of its own for them.
Groups carry their calls in one order: plans are broadcast in turn, a stage sends on in that order, and its sums are one
micro-batch's and then the next one's. A group cannot be mended: when a rank dies torchrun starts all anew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import torch
import torch.distributed as dist
from embedding_server.links import Place
from embedding_server.rank import EmbeddingServer, Shape
from embedding_server.server import create_app
from embedding_server.web import serve
from torch import Tensor

from aiocomms.errors import PlanLostError  # by which the server is told that a rank is lost
from aiocomms.integrations import asgi
from benchmarks.serve import gloo

WIDTH = 384
new_group = partial(gloo.Group, lost=PlanLostError)


class Turn(AbstractContextManager["Turn"]):
    """A plan on one rank: its shape, and, from its first sum on, the right to have the parts add up."""

    def __init__(self, texts: int, tokens: int, sums: asyncio.Lock) -> None:
        self.texts, self.tokens = texts, tokens
        self._sums, self._held = sums, False

    async def take(self) -> None:
        """The parts of a stage come to their sums in one order: that of the plans."""
        if not self._held:
            await self._sums.acquire()
            self._held = True

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._sums.release()


TURN: ContextVar[Turn] = ContextVar("turn")
"""The turn of the plan which this task carries out."""


class GlooLinks:
    """The links of :class:`embedding_server.links.Links`, by gloo."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sums = asyncio.Lock()
        rank, tp, size = place.rank, place.tp, place.tp * place.pp
        # All ranks form all groups, in one order.
        self._parts = [new_group(list(range(first, first + tp))) for first in range(0, size, tp)][place.stage]
        ahead = {(low, low + tp): new_group([low, low + tp]) for low in range(size - tp)}
        home = new_group([0, place.home]) if place.pp > 1 else None
        self._next = home if place.last else ahead[rank, rank + tp]
        self._before = home if rank == 0 else ahead.get((rank - tp, rank))

    def plan(self, number: int) -> Turn:
        """See Links."""
        return TURN.get()

    async def part(self) -> None:
        """See Links."""

    async def sum(self, partial: Tensor) -> Tensor:
        """See Links."""
        await TURN.get().take()
        await self._parts.call(dist.all_reduce, partial)
        return partial

    async def send(self, data: Tensor, spent: list[float]) -> None:
        """See Links. What receives it knows the shape by the plan."""
        assert self._next is not None
        to = 0 if self.place.last else self.place.rank + self.place.tp
        await self._next.call(send_both, data.contiguous(), torch.tensor(spent), to)

    async def receive(self) -> tuple[Tensor, list[float]]:
        """See Links."""
        assert self._before is not None
        turn, place = TURN.get(), self.place
        if place.rank == 0:
            return await self._before.call(receive_both, (turn.texts, WIDTH), place.home)
        return await self._before.call(receive_both, (turn.texts, turn.tokens, WIDTH), place.rank - place.tp)


def send_both(data: Tensor, spent: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send the tensor, and what it has cost."""
    dist.send(data, to, group)
    dist.send(spent, to, group)


def receive_both(shape: tuple[int, ...], source: int, group: dist.ProcessGroup) -> tuple[Tensor, list[float]]:
    """Receive them."""
    data, spent = torch.empty(shape), torch.empty(2)
    dist.recv(data, source, group)
    dist.recv(spent, source, group)
    return data, spent.tolist()


def give(plan: tuple[int, Tensor, Tensor] | None, group: dist.ProcessGroup) -> None:
    """Broadcast a plan from rank 0; None is the end."""
    number, ids, lengths = plan or (-1, torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    dist.broadcast(torch.tensor([number, *ids.shape]), 0, group)
    if plan is not None:
        dist.broadcast(torch.cat([ids.flatten(), lengths]), 0, group)


def take(group: dist.ProcessGroup) -> tuple[int, Tensor, Tensor] | None:
    """Take what rank 0 broadcasts."""
    head = torch.empty(3, dtype=torch.int64)
    dist.broadcast(head, 0, group)
    number, texts, tokens = head.tolist()
    if number < 0:
        return None
    both = torch.empty(texts * tokens + texts, dtype=torch.int64)
    dist.broadcast(both, 0, group)
    return number, both[: texts * tokens].view(texts, tokens), both[texts * tokens :]


class GlooService:
    """The service of :class:`aiocomms.serving.Service` for the server: rank 0 gives out plans, all carry them out."""

    failure: PlanLostError | None = None

    def __init__(self, links: GlooLinks) -> None:
        self._links = links
        self.current = None
        self._plans = new_group(list(range(dist.get_world_size())))
        self._execute: Callable[[Any], Awaitable[Any]]

    async def __aenter__(self) -> None:
        """Enter; see Service."""

    async def __aexit__(self, *_: object) -> None:
        """Leave; see Service."""

    @asynccontextmanager
    async def drive(self, execute: Callable[[Any], Awaitable[Any]], *_: None) -> AsyncIterator[GlooService]:
        """See Service: this is its own driver."""
        self._execute = execute
        yield self
        if self.failure is None:  # after a failure no rank is there to be told
            await self._plans.call(give, None)

    async def run(self, plan: tuple[int, Tensor, Tensor]) -> Any:
        """See Driver. The broadcasts are in the order of the calls, and so are the plans on all ranks."""
        try:
            await self._plans.call(give, plan)
            return await self._carry_out(plan)
        except PlanLostError as error:
            self.failure = error
            raise

    async def work(self, execute: Callable[[Any], Awaitable[Any]]) -> None:
        """See Service. torchrun ends a worker at once: it has nothing to tidy up."""
        self._execute = execute
        async with anyio.create_task_group() as plans:
            while (plan := await self._plans.call(take)) is not None:
                plans.start_soon(self._carry_out, plan)

    async def _carry_out(self, plan: tuple[int, Tensor, Tensor]) -> Any:
        TURN.set(Turn(*plan[1].shape, self._links.sums))
        return await self._execute(plan)


async def open_links(tp: int) -> tuple[GlooService, GlooLinks]:
    """Meet the other ranks, where torchrun says."""
    await asyncio.to_thread(gloo.meet)
    links = GlooLinks(Place(dist.get_rank(), tp, dist.get_world_size() // tp))
    return GlooService(links), links


def main() -> None:
    """Be one rank, until the job ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    print(f"rank {os.environ['RANK']} is process {os.getpid()}", flush=True)
    asgi._measure = asgi._end_with = lambda *_: anyio.sleep_forever()  # type: ignore[assignment] - Gloo shows nothing
    server = EmbeddingServer(Shape(options.tp), open_links)
    code = 1
    try:
        server.main(lambda: serve(create_app(server), server.drain, "127.0.0.1", options.port))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # a thread may be blocked in gloo for ever


if __name__ == "__main__":
    main()
