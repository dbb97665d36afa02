"""The collectives. Announcements contain the data of small collectives. The group executes large collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.lowlevel import buffers
from aiocomms.ops import reductions
from aiocomms.ops.reductions import ReduceOp
from aiocomms.ops.writing import ordinary, write
from aiocomms_c10d.control import FOREVER
from aiocomms_c10d.group import C10dGroup
from aiocomms_c10d.wire import flat

Parts = Sequence[Tensor]
"""The bytes that each rank sent to this rank. This rank's own entry is empty."""


class C10dCall:
    """One call of a collective on one rank.

    A small call uses :meth:`part` and :meth:`finish`, both on the event loop's thread. A large call uses :meth:`start`,
    which may block its thread, and later :meth:`end`, on any thread.
    """

    nbytes: int = 0
    """The largest number of bytes that one rank sends to another rank, as far as this rank knows."""
    sizes: tuple[int, ...] = ()
    """The byte counts that this rank sends to each rank, followed by the byte counts expected from each rank.

    The tuple is empty if the ranks' sizes cannot differ.
    """
    spread: ClassVar[bool] = False
    """True if announcements of the op move more bytes than the group would move.

    For such an op, the limit for small calls is lower.
    """

    def __init__(self, op: Any, rank: int, size: int) -> None:
        self.op = op
        self.rank = rank
        self.size = size

    def part(self, dst: int) -> Tensor | None:
        """Return the bytes that this rank sends to rank ``dst``; None if there are none."""
        return None

    def finish(self, parts: Parts) -> None:
        """Perform the op with the bytes that the ranks have sent."""

    def start(self, group: C10dGroup) -> list[Any]:
        """Start the op on the group. Return the ``torch.distributed.Work`` of each part of the op."""
        raise NotImplementedError

    def end(self) -> None:
        """Finish the op after all parts that :meth:`start` returned are done."""


class _Barrier(C10dCall):
    """A barrier, which completes when all ranks have called it."""


class _Broadcast(C10dCall):
    """A broadcast of the root's bytes to all ranks."""

    spread = True

    def __init__(self, op: ops.Broadcast, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self.nbytes = op.tensor.nbytes

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.tensor) if self.rank == self.op.root else None

    def finish(self, parts: Parts) -> None:
        if self.rank != self.op.root:
            write(flat(self.op.tensor), parts[self.op.root])

    def start(self, group: C10dGroup) -> list[Any]:
        return [group.broadcast(flat(self.op.tensor), self.op.root)]


class _AllReduce(C10dCall):
    """A reduction of all ranks' tensors on all ranks.

    In a small call, each rank itself reduces the tensors, in rank order. In a large call, gloo reduces the tensors in
    place. If gloo would compute a wrong result, the ranks use two steps, a reduce_scatter and an all_gather.
    """

    spread = True

    def __init__(self, op: ops.AllReduce, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self.nbytes = op.tensor.nbytes
        self._whole: Tensor | None = None

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.tensor)

    def finish(self, parts: Parts) -> None:
        _reduce(self, parts, self.op.tensor, self.op.tensor)

    def start(self, group: C10dGroup) -> list[Any]:
        op = self.op
        if group.reduces(op.op, op.tensor.dtype):
            return [group.all_reduce(ordinary(op.tensor).detach(), op.op)]
        self._whole, piece = _reduce_scatter(group, op.op, op.tensor)
        return [group.all_gather(flat(self._whole), flat(piece))]

    def end(self) -> None:
        if self._whole is not None:
            write(self.op.tensor, self._whole[: self.op.tensor.numel()])


class _Reduce(_AllReduce):
    """An all_reduce that gives the result only to the root."""

    spread = False

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.tensor) if dst == self.op.root else None

    def finish(self, parts: Parts) -> None:
        if self.rank == self.op.root:
            super().finish(parts)

    def start(self, group: C10dGroup) -> list[Any]:
        op = self.op
        if group.reduces(op.op, op.tensor.dtype):
            self._whole = op.tensor.detach().view(-1).clone()  # gloo overwrites the tensor on all ranks
            return [group.reduce(self._whole, op.root, op.op)]
        self._whole, piece = _reduce_scatter(group, op.op, op.tensor)
        return [group.gather(flat(self._whole).chunk(self.size), flat(piece), op.root)]

    def end(self) -> None:
        if self.rank == self.op.root:
            super().end()


class _Scan(_AllReduce):
    """A prefix reduction: a rank's result combines the tensors of the ranks up to this rank, in rank order.

    In a large call, rank ``r`` computes piece ``r`` of every rank's result, and sends each piece to the rank of the
    result.
    """

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.tensor) if dst > self.rank else None

    def finish(self, parts: Parts) -> None:
        _reduce(self, parts[: self.rank + self.op.own], self.op.tensor, self.op.tensor)

    def start(self, group: C10dGroup) -> list[Any]:
        self._whole, pieces = _pieces(group, self.op.tensor)
        results = torch.empty_like(pieces)
        for rank, result in enumerate(results):
            reductions.reduce(self.op.op, pieces[: rank + self.op.own].unbind(), result)
        even = [results[0].nbytes] * self.size
        return [group.exchange(flat(self._whole), flat(results), even, even)]


class _SendAllGather(C10dCall):
    """An all_gather of every rank's bytes."""

    def __init__(self, op: Any, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self._outs = [flat(out) for out in op.outs(size)]
        self.nbytes = max(out.numel() for out in self._outs)

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.input)

    def finish(self, parts: Parts) -> None:
        _fill(self._outs, parts, self.rank, self.op.input)

    def start(self, group: C10dGroup) -> list[Any]:
        mine = flat(self.op.input)
        if isinstance(self.op, ops.AllGatherSingle):
            return [group.all_gather(flat(self.op.output), mine)]
        if not isinstance(self.op, ops.AllGatherV):
            return [group.all_gather_list(self._outs, mine)]
        _fill(self._outs[self.rank : self.rank + 1], [mine], 0, mine)
        return [group.broadcast(out, root) for root, out in enumerate(self._outs) if out.numel()]


class _SendGather(C10dCall):
    """A gather of every rank's bytes on the root."""

    def __init__(self, op: Any, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self._outs = [flat(out) for out in op.outs(size)]
        self.nbytes = op.input.nbytes

    def part(self, dst: int) -> Tensor | None:
        return flat(self.op.input) if dst == self.op.root else None

    def finish(self, parts: Parts) -> None:
        if self.rank == self.op.root:
            _fill(self._outs, parts, self.rank, self.op.input)

    def start(self, group: C10dGroup) -> list[Any]:
        return [group.gather(self._outs, flat(self.op.input), self.op.root)]


class _Scatter(C10dCall):
    """A scatter of the root's bytes, one chunk to each rank."""

    def __init__(self, op: ops.Scatter, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self._ins = [flat(tensor) for tensor in op.ins(size)]
        self.nbytes = op.output.nbytes

    def part(self, dst: int) -> Tensor | None:
        return self._ins[dst] if self._ins else None

    def finish(self, parts: Parts) -> None:
        mine = self._ins[self.rank] if self._ins else parts[self.op.root]
        _fill([flat(self.op.output)], [mine], 0, mine)

    def start(self, group: C10dGroup) -> list[Any]:
        return [group.scatter(flat(self.op.output), self._ins, self.op.root)]


class _SendAllToAll(C10dCall):
    """An all_to_all of each rank's bytes, one chunk to each rank."""

    def __init__(self, op: Any, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self._ins = [flat(tensor) for tensor in op.ins(size)]
        self._outs = [flat(tensor) for tensor in op.outs(size)]
        self._gives = [tensor.numel() for tensor in self._ins]
        self._gets = [tensor.numel() for tensor in self._outs]
        self._got: Tensor | None = None
        self.nbytes = max(self._gives)
        self.sizes = (*self._gives, *self._gets)

    def part(self, dst: int) -> Tensor | None:
        return self._ins[dst]

    def finish(self, parts: Parts) -> None:
        _fill(self._outs, parts, self.rank, self._ins[self.rank])

    def start(self, group: C10dGroup) -> list[Any]:
        if isinstance(self.op, ops.AllToAll):
            self._got = buffers.empty(sum(self._gets), dtype=torch.uint8, device="cpu")
            return [group.exchange(self._got, torch.cat(self._ins), self._gets, self._gives)]
        return [group.exchange(flat(self.op.output), flat(self.op.input), self._gets, self._gives)]

    def end(self) -> None:
        if self._got is not None:
            for out, got in zip(self._outs, torch.split(self._got, self._gets), strict=True):
                write(out, got)


class _SendReduceScatter(C10dCall):
    """An exchange in which each rank gets its chunk from all ranks, and reduces these chunks in rank order."""

    def __init__(self, op: Any, rank: int, size: int) -> None:
        super().__init__(op, rank, size)
        self._ins = op.ins(size)
        self._got: Tensor | None = None
        self.nbytes = max(tensor.nbytes for tensor in self._ins)

    def part(self, dst: int) -> Tensor | None:
        return flat(self._ins[dst])

    def finish(self, parts: Parts) -> None:
        _reduce(self, parts, self._ins[self.rank], self.op.output)

    def start(self, group: C10dGroup) -> list[Any]:
        single = isinstance(self.op, ops.ReduceScatterSingle)
        given = flat(self.op.input) if single else torch.cat([flat(tensor) for tensor in self._ins])
        mine = self.op.output.nbytes
        self._got = buffers.empty(self.size * mine, dtype=torch.uint8, device="cpu")
        return [group.exchange(self._got, given, [mine] * self.size, [tensor.nbytes for tensor in self._ins])]

    def end(self) -> None:
        assert self._got is not None
        _reduce(self, self._got.chunk(self.size) if self._got.numel() else [], None, self.op.output)


PLANS: dict[str, type[C10dCall]] = {
    "all_gather": _SendAllGather,
    "all_reduce": _AllReduce,
    "all_to_all": _SendAllToAll,
    "barrier": _Barrier,
    "broadcast": _Broadcast,
    "gather": _SendGather,
    "reduce": _Reduce,
    "reduce_scatter": _SendReduceScatter,
    "scan": _Scan,
    "exscan": _Scan,
    "scatter": _Scatter,
}
"""The subclass of :class:`C10dCall` for each kind of op."""


def _fill(outs: Sequence[Tensor], parts: Parts, rank: int, own: Tensor) -> None:
    for src, out in enumerate(outs):
        part = flat(own) if src == rank else parts[src]
        if out.data_ptr() != part.data_ptr():
            write(out, part)


def _reduce(plan: C10dCall, parts: Parts, own: Tensor | None, out: Tensor) -> None:
    """Reduce all ranks' bytes into ``out``. The tensor ``own``, if given, replaces this rank's bytes."""
    given = [
        own if own is not None and src == plan.rank else part.view(out.dtype).view(out.shape)
        for src, part in enumerate(parts)
    ]
    if out.numel():
        reductions.reduce(plan.op.op, given, out)


def _pieces(group: C10dGroup, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange pieces: each rank gets one piece of every rank's tensor. This function blocks.

    :returns: a copy of the tensor's elements, padded to equal pieces; and the pieces that this rank got, one row from
        each rank.
    """
    n = tensor.numel()
    length = -(-n // group.size)
    whole = buffers.zeros(length * group.size, dtype=tensor.dtype, device="cpu")
    whole[:n].copy_(tensor.detach().view(-1))
    pieces = torch.empty_like(whole).view(group.size, length)
    even = [length * tensor.element_size()] * group.size
    group.exchange(flat(pieces), flat(whole), even, even).wait(FOREVER)
    return whole, pieces


def _reduce_scatter(group: C10dGroup, op: ReduceOp, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce one piece of the tensor on each rank. This function blocks.

    :returns: memory for the whole result, padded to equal pieces; and a view of this rank's piece of the result.
    """
    whole, pieces = _pieces(group, tensor)
    piece = whole.view(group.size, -1)[group.rank]
    reductions.reduce(op, pieces.unbind(), piece)
    return whole, piece
