"""The lookup of rows in a table of shards, each on two ranks. It works with a late or a lost holder.

Rank 0 sends requests. Every other rank holds a shard, and a copy of its neighbour's shard. If a holder is late, rank 0
also asks the shard's second holder, and uses the first answer. An answer names the shards that did not answer in time.
If the communicator is lost, the ranks that are left form a new one.
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
"""The tag of requests. The tag of a reply is the number of its request."""
LOST = (CommAbortedError, CommTimeoutError, PeerDiedError)
"""The errors of operations on a lost communicator."""


class Answer(NamedTuple):
    """The answer to a lookup."""

    rows: torch.Tensor
    missing: list[int]
    """The shards that did not answer. Their rows are zero."""


def place(row: int, shards: int) -> tuple[int, int]:
    """Return the shard of a row, and the row's place in the shard."""
    return row % shards, row // shards


def holders(shard: int, shards: int) -> tuple[int, int]:
    """Return the two ranks that hold a shard, in the order of the requests."""
    return 1 + shard, 1 + (shard + 1) % shards


async def hold(comm: Communicator, load: Callable[[int], torch.Tensor], reply_within: float | None = None) -> None:
    """Hold the shards of a rank, and answer rank 0 until rank 0 closes.

    :param load: returns the rows of a shard.
    :param reply_within: seconds within which rank 0 must take a reply, or the communicator is lost; None for no limit.
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
    """Return a communicator of all ranks that are left, in their old order.

    :raises CommError: rank 0 has died, or the cause is neither a death nor a lost message.
    """
    reason = await comm.lost()
    dead = reason.peer if isinstance(reason, PeerDiedError) else None
    if not isinstance(reason, (PeerDiedError, CommTimeoutError)) or dead == 0:
        raise reason
    return await comm.reconfigure([rank for rank in range(comm.size) if rank != dead])


class _Reply:
    """The first answer of several holders."""

    def __init__(self) -> None:
        self.here = anyio.Event()
        self.rows: torch.Tensor | None = None

    def put(self, rows: torch.Tensor) -> None:
        if self.rows is None:
            self.rows = rows
            self.here.set()


class Lookup:
    """Rank 0's side of the lookup, made by :func:`open_lookup`."""

    def __init__(self, comm: Communicator, asking: TaskGroup, width: int, patience: float, deadline: float) -> None:
        self.comm = comm
        self._asking, self._width, self._patience, self._deadline = asking, width, patience, deadline
        self._shards = comm.size - 1
        self._members = list(range(comm.size))  # the original numbers of the ranks that are left
        self._numbers: Iterator[int] = itertools.count(REQUEST + 1)
        self._next = anyio.Event()

    async def rows(self, wanted: Sequence[int]) -> Answer:
        """Return rows of the table.

        :param wanted: the numbers of the rows.
        :returns: the rows ``[len(wanted), width]``, with zeros for shards that did not answer within the deadline.
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
        """Ask a holder, and wait for the answer without a deadline, because the holder's send needs a receive.

        If the communicator is lost, ask the holder again on the next one.
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
        """Form a new communicator after each loss."""
        while True:
            comm = self.comm
            reason = await comm.lost()
            self.comm = await _without_the_dead(comm)
            if isinstance(reason, PeerDiedError):
                del self._members[reason.peer]
            self._next.set()
            self._next = anyio.Event()

    async def dismiss(self) -> None:
        """Tell the holders to end. If a holder dies now, the other holders end because rank 0 is gone."""
        with suppress(*LOST):
            for rank in range(1, self.comm.size):
                await self.comm.send_object(None, rank, REQUEST)


@asynccontextmanager
async def open_lookup(
    comm: Communicator, width: int, *, patience: float = 0.1, deadline: float = math.inf
) -> AsyncIterator[Lookup]:
    """Open the lookup on rank 0, while every other rank runs :func:`hold`.

    :param width: the elements of a row.
    :param patience: seconds after which rank 0 also asks a shard's second holder.
    :param deadline: seconds after which an answer omits a shard.
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
