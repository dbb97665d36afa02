"""Rows of a table that is spread over ranks, each of them on two: it goes on while a holder is late, and without one.

Rank 0 asks. Every other rank holds a shard, and a copy of its neighbour's. A shard's holder that has not answered after
some patience is not waited for alone: its neighbour is asked, too, and who answers first has answered. What nobody has
answered in time is missing from the answer, which says so. If the communicator is lost, whoever is left forms another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import anyio
import torch
from anyio.abc import TaskGroup

from aiocomms import Communicator
from aiocomms.errors import CommAbortedError, CommTimeoutError, PeerDiedError

REQUEST = 0
"""The tag of requests; that of a reply is the number of its request."""
LOST = (CommAbortedError, CommTimeoutError, PeerDiedError)
"""What an operation raises whose communicator is lost."""


class Answer(NamedTuple):
    """The rows that were asked for."""

    rows: torch.Tensor
    missing: list[int]
    """The shards of which there was no answer; their rows are zero."""


def place(row: int, shards: int) -> tuple[int, int]:
    """The shard that a row is in, and its place there."""
    return row % shards, row // shards


def holders(shard: int, shards: int) -> tuple[int, int]:
    """The two ranks that hold a shard, the one to be asked first before the other."""
    return 1 + shard, 1 + (shard + 1) % shards


async def hold(comm: Communicator, load: Callable[[int], torch.Tensor], reply_within: float | None = None) -> None:
    """Hold the shards of a rank, and answer rank 0 until that closes.

    :param load: the rows of a shard.
    :param reply_within: seconds within which rank 0 is to have taken a reply, or else it was lost; None: any time.
    """
    shards = comm.size - 1
    parts = {shard: load(shard) for shard in range(shards) if comm.rank in holders(shard, shards)}
    try:
        while True:
            try:
                while (request := await comm.recv_object(0, REQUEST, timeout=None)) is not None:
                    number, shard, rows = request
                    await comm.send_object(parts[shard][rows], 0, number, timeout=reply_within)
                return
            except LOST:
                comm = await _without_the_dead(comm)
    finally:
        await comm.aclose()


async def _without_the_dead(comm: Communicator) -> Communicator:
    """The communicator of all ranks that are left, in their old order.

    :raises CommError: it was lost for another reason than a death or a lost message, or rank 0 has died, which asks.
    """
    reason = await comm.lost()
    dead = reason.peer if isinstance(reason, PeerDiedError) else None
    if not isinstance(reason, (PeerDiedError, CommTimeoutError)) or dead == 0:
        raise reason
    return await comm.reconfigure([rank for rank in range(comm.size) if rank != dead])


class _Reply:
    """What the first of several holders has answered."""

    def __init__(self) -> None:
        self.here = anyio.Event()
        self.rows: torch.Tensor | None = None

    def put(self, rows: torch.Tensor) -> None:
        if self.rows is None:
            self.rows = rows
            self.here.set()


class Lookup:
    """Rank 0's side; made by :func:`open_lookup`."""

    def __init__(self, comm: Communicator, asking: TaskGroup, width: int, patience: float, deadline: float) -> None:
        self.comm = comm
        self._asking, self._width, self._patience, self._deadline = asking, width, patience, deadline
        self._shards = comm.size - 1
        self._members = list(range(comm.size))  # the first ranks of those that are left
        self._numbers: Iterator[int] = itertools.count(REQUEST + 1)
        self._next = anyio.Event()

    async def rows(self, wanted: Sequence[int]) -> Answer:
        """Get rows of the table.

        :param wanted: their numbers.
        :returns: ``[len(wanted), width]`` of them, as far as their holders have answered within the deadline.
        """
        answer = Answer(torch.zeros(len(wanted), self._width), [])
        spots: dict[int, list[int]] = {}
        for spot, row in enumerate(wanted):
            spots.setdefault(place(row, self._shards)[0], []).append(spot)
        async with anyio.create_task_group() as tasks:
            for shard, its in spots.items():
                tasks.start_soon(self._fill, answer, shard, its, [place(wanted[i], self._shards)[1] for i in its])
        answer.missing.sort()
        return answer

    async def _fill(self, answer: Answer, shard: int, spots: list[int], rows: list[int]) -> None:
        reply = _Reply()
        with anyio.move_on_after(self._deadline):
            for holder in holders(shard, self._shards):
                self._asking.start_soon(self._ask, holder, shard, rows, reply)
                with anyio.move_on_after(self._patience):
                    await reply.here.wait()
                    break
            await reply.here.wait()
        if reply.rows is None:
            answer.missing.append(shard)
        else:
            answer.rows[spots] = reply.rows

    async def _ask(self, holder: int, shard: int, rows: list[int], reply: _Reply) -> None:
        """Ask a holder, and wait for what it says however late: it has nothing else to send that to.

        It is asked again by the next communicator if this one is lost meanwhile.
        """
        while holder in self._members:
            comm, renewed, rank, number = self.comm, self._next, self._members.index(holder), next(self._numbers)
            try:
                await comm.send_object((number, shard, rows), rank, REQUEST)
                reply.put(await comm.recv_object(rank, number, timeout=None))
                return
            except LOST:
                await renewed.wait()

    async def follow(self) -> None:
        """Form another communicator whenever this one is lost."""
        while True:
            comm = self.comm
            reason = await comm.lost()
            self.comm = await _without_the_dead(comm)
            if isinstance(reason, PeerDiedError):
                del self._members[reason.peer]
            self._next.set()
            self._next = anyio.Event()

    async def dismiss(self) -> None:
        """Let the holders go. If one dies meanwhile, the others hear of that, and find no rank 0 to go on with."""
        with suppress(*LOST):
            for rank in range(1, self.comm.size):
                await self.comm.send_object(None, rank, REQUEST)


@asynccontextmanager
async def open_lookup(
    comm: Communicator, width: int, *, patience: float = 0.1, deadline: float = math.inf
) -> AsyncIterator[Lookup]:
    """Look rows up, on rank 0, while every other rank runs :func:`hold`.

    :param width: the elements of a row.
    :param patience: seconds after which a shard's other holder is asked, too.
    :param deadline: seconds after which an answer goes without a shard.
    """
    asking = anyio.create_task_group()
    lookup = Lookup(comm, asking, width, patience, deadline)
    try:
        async with anyio.create_task_group() as following:
            following.start_soon(lookup.follow)
            async with asking:
                yield lookup
            await lookup.dismiss()
            following.cancel_scope.cancel()
    except BaseException as error:
        lookup.comm.abort(error)
        raise
    finally:
        await lookup.comm.aclose()
