"""Blocks of another endpoint's memory that this endpoint reads or fills, and then gives back."""

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
from aiocomms.endpoints.pools import Lease, LeasedBlocks, selected
from aiocomms.endpoints.regions import RemoteRegion
from aiocomms.errors import ArgumentError, CommError, LeaseError, as_reason
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.progress.work import Work

Given = TypeVar("Given")
Places = Sequence[int] | Tensor
"""The indices of the first elements of runs. A run is a sequence of adjacent elements."""


class HandedLease(Handle):
    """Blocks that another endpoint has handed over; made by :meth:`Endpoint.handed`.

    ``async with`` gives the blocks back at the end of its body. If the body raises an exception, the blocks are
    released without an answer, and the owner gets the exception's text as the reason. In both cases ``async with``
    waits until no operation on the blocks moves data, even if the task is cancelled.
    """

    def __init__(self, peer: Peer, incoming: Incoming, blocks: tuple[int, ...]) -> None:
        self._peer, self._incoming, self._blocks = peer, incoming, blocks
        self._shape = incoming.shelf.shape

    def __repr__(self) -> str:
        return f"<HandedLease of {len(self)} blocks by {self._peer.name}, {self._incoming.borrowed.state.name.lower()}>"

    def __len__(self) -> int:
        return len(self._blocks)

    def select(self, places: Sequence[int]) -> HandedLease:
        """Return a handle for the blocks at ``places``, which are indices into this lease.

        Both handles belong to one hand-over: :meth:`give_back` of either handle gives back all blocks of the hand-over.

        :raises ArgumentError: a place is out of range.
        """
        return HandedLease(self._peer, self._incoming, selected(self._blocks, places))

    @property
    def peer(self) -> Peer:
        """The endpoint that handed the blocks over."""
        return self._peer

    @property
    def meta(self) -> Any:
        """The object that the owner's program sent with the blocks."""
        return self._incoming.meta

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all blocks together: the number of blocks, then the shape of a block."""
        return (len(self), *self._shape[1:])

    @property
    def writable(self) -> bool:
        """True if this endpoint may write the blocks."""
        return self._incoming.write

    @property
    def error(self) -> CommError | None:
        """The reason why the blocks are unusable; None if they are usable or were given back.

        Possible reasons: the owner took the blocks back, this endpoint released them without an answer, or the
        connection is over.
        """
        return self._incoming.error

    async def read(self, into: Given, part: int | None = None, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Read the blocks, and check afterwards that the hand-over has not ended meanwhile.

        :param into: the destination, in one of three forms. The first form is a tensor of :attr:`shape` and of the
            blocks' dtype. The second form is a list with one tensor per block. The third form is a :class:`Lease`, or a
            selection from a lease, with the same number of blocks.
        :param part: an index into a block's first dimension, such as a layer. If ``part`` is given, the tensors in
            ``into`` do not have this dimension. If ``part`` is None, the call reads whole blocks.
        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :returns: ``into``. If this call raises an error, the content of ``into`` is undefined.
        :raises ArgumentError: an argument is wrong, or does not fit; nothing was read.
        :raises LeaseError: the owner has taken the blocks back, or this endpoint has given them back.
        :raises CommError: the connection is lost or closed.
        """
        return await self._move("read", into, part, timeout)

    async def write(self, source: Given, part: int | None = None, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Write the blocks. The owner sees the data once the blocks are given back.

        :param source: the data to write, in one of the forms of ``into`` in :meth:`read`. The program may change the
            source after the call has returned.
        :param part: as in :meth:`read`. A program can write one layer while it computes the next one.
        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :returns: ``source``.
        :raises ArgumentError: an argument is wrong, or does not fit; nothing was written.
        :raises LeaseError: the blocks are not :attr:`writable`, the owner has taken them back, or this endpoint has
            given them back.
        :raises CommError: the connection is lost or closed.
        """
        return await self._move("write", source, part, timeout)

    async def flush(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Wait until all writes so far are visible to the owner, without giving the blocks back.

        Afterwards this program may tell the owner's program, for example in a message, that a layer is complete.

        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :raises LeaseError: the owner has taken the blocks back, or this endpoint has given them back.
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
        """Give the blocks back when all pending operations on the blocks have ended.

        Even if the call is cancelled, the blocks are given back.

        :param answer: the object that the owner's :meth:`Peer.hand_over` returns. The object may have at most 256 KiB,
            and :meth:`Peer.send_object` must accept it.
        :raises ArgumentError: the answer cannot be sent; the blocks are not given back.
        :raises LeaseError: the owner has taken the blocks back, or this endpoint has already given them back.
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
        try:
            if error is not None:
                incoming.end(None, LeaseError(as_reason(error)))
            elif incoming.borrowed.state is Borrowing.OPEN or (incoming.error is not None and not incoming.told):
                await self.give_back()
        finally:
            if not isinstance(error, GeneratorExit):  # A closed coroutine cannot await.
                await shielded(self._idle)

    async def _idle(self) -> None:
        """Wait until no operation on the blocks moves data."""
        await self._incoming.idle()
        await self._peer._still()

    async def _move(self, op: str, given: Given, part: int | None, timeout: OpTimeout) -> Given:
        incoming, write = self._incoming, op == "write"
        try:
            incoming.check()
            if write and not incoming.write:
                raise LeaseError("the blocks were handed over to be read only")
            moves = self._moves("source" if write else "into", given, part)
            lease = given._lease if isinstance(given, LeasedBlocks) else None
            if lease is not None:
                lease._begin()
            incoming.begin(write=write)
            works: list[Work[Any]] = []
            try:
                blocks, left = await self._peer._attached(incoming.shelf.blocks, timeout)
                if not write:
                    words, left = await self._peer._attached(incoming.shelf.words, left)
                incoming.check()  # The owner may have taken the blocks back during the opening of their memory.
                start = blocks.put_v if write else blocks.get_v
                for move in moves:
                    work = start(*move, timeout=left)
                    works.append(work)
                for work in works:
                    await work
                if not write:
                    await self._vouched(words, left)
            finally:
                self._leave(works, lease)
        except CommError as error:
            raise error.about(comm=self._peer._where, op=op) from error.__cause__
        return given

    def _leave(self, works: list[Work[Any]], lease: Lease | None) -> None:
        """Count a call as pending until all its works are done. The works of a cancelled call continue.

        :param lease: the lease of this endpoint that is the source or the destination of the data; None without such a
            lease.
        """
        running = {work for work in works if not work.done()}

        def ended(work: Work[Any]) -> None:
            work.exception()  # This marks an error as seen, because a cancelled task does not await the work.
            running.discard(work)
            if not running:
                over()

        def over() -> None:
            self._incoming.done()
            if lease is not None:
                self._peer._when_still(lease._done)

        for work in works:
            work.add_done_callback(ended) if work in running else work.exception()
        if not running:
            over()

    async def _vouched(self, words: RemoteRegion, timeout: OpTimeout) -> None:
        """Check that the hand-over lasted during the whole read; see :attr:`LeaseLedger.words`.

        :raises LeaseError: the owner has ended the hand-over.
        """
        word = buffers.empty(1, dtype=torch.int64, device="cpu")
        await words.get(word, self._incoming.slot, timeout=timeout)
        if int(word) != self._incoming.number:
            self._incoming.check()
            raise LeaseError("the owner of the blocks has ended the hand-over while they were read")

    # -------------------------------------------------------------------------------------------------------- layout

    def _moves(self, name: str, given: Any, part: int | None) -> list[tuple[Any, Places, Places, int]]:
        """Return the transfers that move the data.

        Each transfer is a tuple: a tensor, the offset of each run in the blocks, the offset of each run in the tensor,
        and the number of elements in a run.
        """
        count, offsets = _places(self._shape, self._blocks, part)
        wanted = (len(self), *self._shape[1 if part is None else 2 :])
        if isinstance(given, LeasedBlocks):
            shape = (len(given), *given.pool._rows.shape[1:])
            if shape != self.shape:
                raise ArgumentError(f"{name} has blocks of shape {shape}, wanted {self.shape}")
            return [(given.pool._rows, offsets, _places(given.pool._rows.shape, given.blocks, part)[1], count)]
        if isinstance(given, (list, tuple)):
            if len(given) != len(self) or any(_shape(it) != wanted[1:] for it in given):
                raise ArgumentError(f"{name} is of other shapes, wanted {len(self)} tensors of shape {wanted[1:]}")
            each = zip(given, offsets.tolist(), strict=True)
            return [(it, [offset], [0], count) for it, offset in each]
        if _shape(given) != wanted:
            raise ArgumentError(f"{name} is {arguments.short(given)}, wanted a tensor of shape {wanted}")
        return [(given, offsets, _rows(len(self), count), count)]


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


@unaffected
def _places(shape: Sequence[int], blocks: Sequence[int], part: int | None) -> tuple[int, Tensor]:
    """Return the number of elements to transfer per block, and the offset of the first element for each block.

    The argument ``shape`` is the shape of the memory in which the blocks lie. If ``part`` is None, whole
    blocks are transferred.

    :raises ArgumentError: the part is out of range.
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
    """Return the offsets of a tensor's rows, which have ``count`` elements each."""
    return buffers.arange(number, device="cpu") * count


class HandedLeases(Handle):
    """An iterator of the leases that other endpoints hand over to this endpoint; made by :meth:`Endpoint.handed`."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> HandedLease:
        """Wait for the next lease.

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
