"""Blocks of another endpoint's memory that it hands over, to be read or filled, until they are given back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from aiocomms import arguments, ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int
from aiocomms.endpoints.handovers import Counter, Incoming, encoded
from aiocomms.endpoints.lending import Borrowing
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.pools import LeasedBlocks, selected
from aiocomms.endpoints.regions import RemoteRegion
from aiocomms.errors import ArgumentError, CommError, LeaseError, as_reason
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.progress.work import Work

Given = TypeVar("Given")
Places = Sequence[int] | Tensor
"""The first elements of runs."""


class HandedLease(Handle):
    """Blocks that another endpoint has handed over; given by :meth:`Endpoint.handed`.

    ``async with`` gives them back, or, if its body raises, tells the owner why they are dropped.
    """

    def __init__(self, peer: Peer, incoming: Incoming, blocks: tuple[int, ...]) -> None:
        self._peer, self._incoming, self._blocks = peer, incoming, blocks
        self._shape = incoming.shelf.shape

    def __repr__(self) -> str:
        return f"<HandedLease of {len(self)} blocks by {self._peer.name}, {self._incoming.borrowed.state.name.lower()}>"

    def __len__(self) -> int:
        return len(self._blocks)

    def select(self, places: Sequence[int]) -> HandedLease:
        """Return some of the blocks, by their places in here, to read or write these alone. It is one hand-over.

        :raises ArgumentError: there is no such place.
        """
        return HandedLease(self._peer, self._incoming, selected(self._blocks, places))

    @property
    def peer(self) -> Peer:
        """The endpoint that has handed them over."""
        return self._peer

    @property
    def meta(self) -> Any:
        """The object that its program has sent with them."""
        return self._incoming.meta

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of them: how many there are, and what a block is."""
        return (len(self), *self._shape[1:])

    @property
    def writable(self) -> bool:
        """True if they are to be filled."""
        return self._incoming.write

    @property
    def error(self) -> CommError | None:
        """The reason why the blocks may be used no more: taken back, dropped, or the connection is over. None: none."""
        return self._incoming.error

    async def read(self, into: Given, part: int | None = None, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Read the blocks. What is returned was theirs during the whole of it.

        :param into: a tensor of :attr:`shape` and of their dtype; or a tensor for each block; or a lease of as many
            blocks, of a pool of this endpoint's, or some of a larger one.
        :param part: the index in a block's first dimension, such as a layer; without it they are read whole. ``into``
            has one dimension less then.
        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :returns: ``into``. If this raises, it may hold anything.
        :raises ArgumentError: an argument is wrong, or does not fit; nothing was read.
        :raises LeaseError: the owner has taken them back, or they were given back.
        :raises CommError: the connection is lost or closed.
        """
        return await self._move("read", into, part, timeout)

    async def write(self, source: Given, part: int | None = None, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Write the blocks. The owner sees what was written once they are given back.

        :param source: as ``into`` of :meth:`read`. It may be changed again when this returns.
        :param part: as in :meth:`read`: a layer can be written while the next one is computed.
        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :returns: ``source``.
        :raises ArgumentError: an argument is wrong, or does not fit; nothing was written.
        :raises LeaseError: they are not to be filled; or as :meth:`read`.
        :raises CommError: the connection is lost or closed.
        """
        return await self._move("write", source, part, timeout)

    async def flush(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Wait until all that was written is visible to the owner, without giving the blocks back.

        So its program can be told of a layer by a message.

        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :raises LeaseError: the owner has taken the blocks back, or they were given back.
        :raises CommError: the connection is lost or closed.
        """
        incoming = self._incoming
        try:
            incoming.check()
            incoming.begin()
            try:
                blocks, left = await self._peer._attached(incoming.shelf.blocks, timeout)
                await blocks.flush(timeout=left)
            finally:
                incoming.done()
        except CommError as error:
            raise error.about(comm=self._peer._where, op="flush") from error.__cause__

    async def give_back(self, answer: Any = None) -> None:
        """Give the blocks back, when all that is under way has ended. A call that is cancelled goes on.

        :param answer: what :meth:`Peer.hand_over` returns to the owner; as objects are sent, 256 KiB at most.
        :raises ArgumentError: the answer cannot be sent; the blocks are not given back.
        :raises LeaseError: the owner has taken them back, or they were given back already.
        :raises CommError: the connection is lost or closed.
        """
        try:
            body = encoded("answer", [answer])
            self._incoming.check()
            self._incoming.end(body, None)
            await self._incoming.ended
            if self._incoming.error is not None:
                self._incoming.check()
        except CommError as error:
            raise error.about(comm=self._peer._where, op="give_back") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        incoming = self._incoming
        if error is not None:
            incoming.end(None, LeaseError(as_reason(error)))
        elif incoming.borrowed.state is Borrowing.OPEN or (incoming.error is not None and not incoming.told):
            await self.give_back()

    async def _move(self, op: str, given: Given, part: int | None, timeout: OpTimeout) -> Given:
        incoming, write = self._incoming, op == "write"
        try:
            incoming.check()
            if write and not incoming.write:
                raise LeaseError("they were handed over to be read")
            moves = self._moves("source" if write else "into", given, part)
            incoming.begin(write=write)
            try:
                blocks, left = await self._peer._attached(incoming.shelf.blocks, timeout)
                if not write:
                    words, left = await self._peer._attached(incoming.shelf.words, left)
                incoming.check()  # The owner may have taken them back while their memory was opened.
                works = [self._start(blocks, write, *move, left) for move in moves]
                for work in works:
                    await work
                if not write:
                    await self._vouched(words, left)
            finally:
                incoming.done()
        except CommError as error:
            raise error.about(comm=self._peer._where, op=op) from error.__cause__
        return given

    def _start(
        self, region: RemoteRegion, write: bool, tensor: Any, offsets: Places, starts: Places,
        count: int, timeout: OpTimeout,
    ) -> Work[Any]:  # fmt: skip
        """Start an operation on the blocks, which counts as under way until the wire has let go of it."""
        move = region.put_v if write else region.get_v
        work = move(tensor, offsets, starts, count, timeout=timeout)
        if not work.done():
            self._incoming.begin(write=write)

            def ended(work: Work[Any]) -> None:
                work.exception()  # The one who awaits it hears of an error; a task that was cancelled does not.
                self._incoming.done()

            work.add_done_callback(ended)
        return work

    async def _vouched(self, words: RemoteRegion, timeout: OpTimeout) -> None:
        """Check that the blocks were the lease's as long as they were read; see :attr:`LeaseLedger.words`."""
        word = buffers.empty(1, dtype=torch.int64, device="cpu")
        await words.get(word, self._incoming.slot, timeout=timeout)
        if int(word) != self._incoming.number:
            self._incoming.check()
            raise LeaseError("its owner has ended the hand-over while it was read")

    # ----------------------------------------------------------------------------------------------- what lies where

    def _moves(self, name: str, given: Any, part: int | None) -> list[tuple[Any, Places, Places, int]]:
        """Return what is moved: a tensor, and where runs of so many elements lie in the blocks and in it."""
        count, offsets = _places(self._shape, self._blocks, part)
        wanted = (len(self), *self._shape[1 if part is None else 2 :])
        if isinstance(given, LeasedBlocks):
            shape = (len(given), *given.pool._rows.shape[1:])
            if shape != self.shape:
                raise ArgumentError(f"{name} has blocks of shape {shape}, wanted {self.shape}")
            return [(given.pool._rows, offsets, _places(given.pool._rows.shape, given.blocks, part)[1], count)]
        if isinstance(given, (list, tuple)):
            if len(given) != len(self) or any(tuple(it.shape) != wanted[1:] for it in given):
                raise ArgumentError(f"{name} is of other shapes, wanted {len(self)} tensors of shape {wanted[1:]}")
            each = zip(given, offsets.tolist(), strict=True)
            return [(it, [offset], [0], count) for it, offset in each]
        if tuple(getattr(given, "shape", ())) != wanted:
            raise ArgumentError(f"{name} is {arguments.short(given)}, wanted a tensor of shape {wanted}")
        return [(given, offsets, _rows(len(self), count), count)]


@unaffected
def _places(shape: Sequence[int], blocks: Sequence[int], part: int | None) -> tuple[int, Tensor]:
    """Return how many elements of each block are meant, and the first one of each in memory of a shape.

    :raises ArgumentError: there is no such part.
    """
    size, indices = math.prod(shape[1:]), ops.places("blocks", blocks)
    if part is None:
        return size, indices * size
    part = as_int(part)
    if type(part) is not int:
        raise arguments.wrong_type("part", part, "an int")
    if not 0 <= part < shape[1]:
        raise ArgumentError(f"part is {part}, wanted 0 <= part < {shape[1]}, the first dimension of a block")
    count = size // shape[1]
    return count, indices * size + part * count


@unaffected
def _rows(number: int, count: int) -> Tensor:
    """Return where the rows of a tensor begin that have ``count`` elements each."""
    return buffers.arange(number, device="cpu") * count


class HandedLeases(Handle):
    """The leases that other endpoints hand over to this one, as they arrive; made by :meth:`Endpoint.handed`."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> HandedLease:
        """Wait for the next one.

        :raises StopAsyncIteration: the endpoint is closed.
        """
        counter = self._counter
        while True:
            for incoming, peer in counter.came.items():
                del counter.came[incoming]
                return HandedLease(peer, incoming, incoming.blocks)
            if counter.closed:
                raise StopAsyncIteration
            await counter.arrival
