"""Schedules, which express collectives, batches and vectored RMA as simpler ops.

A *schedule* is a generator. A schedule yields the sends and receives of one step, and is resumed when all of them are
complete. When the generator returns, the op is done. The module :mod:`aiocomms.lowering.runs` runs schedules. Schedules
of different collectives on one communicator may overlap, because each has its own tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.lowering.runs import Poster, Steps
from aiocomms.ops import buffers, reductions
from aiocomms.ops.writing import write

OpT = TypeVar("OpT", bound=ops.Op)

RING_BYTES = 64 * 1024
"""The smallest size, in bytes, for which an all_reduce uses the ring.

For tensors of this size or more, the time depends mainly on the bandwidth.
"""


class Context:
    """The part of a communicator that a schedule uses. All sends and receives of one schedule have the same tag."""

    __slots__ = ("device", "rank", "size", "tag")

    def __init__(self, comm: Poster, tag: int) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.device: torch.device = comm.device
        self.tag: int = tag

    def send(self, tensor: Tensor, dst: int) -> ops.Op:
        """Return the op that sends a message to rank ``dst``."""
        return ops.Send(tensor, dst, self.tag, ops.COLLECTIVE)

    def recv(self, tensor: Tensor, src: int) -> ops.Op:
        """Return the op that receives a message from rank ``src``."""
        return ops.Recv(tensor, src, self.tag, ops.COLLECTIVE)


Schedule = Callable[[Context, Any], Steps]

SCHEDULES: dict[type[ops.Op], Schedule] = {}
"""The schedule of each op type that can be expressed as sends and receives."""


def schedule(*types: type[ops.Op]) -> Callable[[Callable[[Context, OpT], Steps]], Callable[[Context, OpT], Steps]]:
    """Register a generator function as the schedule of op types."""

    def register(fn: Callable[[Context, OpT], Steps]) -> Callable[[Context, OpT], Steps]:
        for cls in types:
            SCHEDULES[cls] = fn
        return fn

    return register


@schedule(ops.Batch)
def batch(g: Context, op: ops.Batch) -> Steps:
    """Post all sends and receives of the batch in one step, with the tags that the program gave."""
    yield list(op.parts)


@schedule(ops.CollectiveBatch)
def collective_batch(g: Context, op: ops.CollectiveBatch) -> Steps:
    """Run the collectives one after the other."""
    for part in op.parts:
        yield from SCHEDULES[type(part)](g, part)


@schedule(ops.PutV)
def put_v(g: Context, op: ops.PutV) -> Steps:
    """Put each run of consecutive elements by a separate op."""
    flat, window = op.tensor.view(-1), op.window
    yield [
        ops.Put(window, flat[start : start + op.count], op.dst, offset)
        for offset, start in zip(op.offsets.tolist(), op.starts.tolist(), strict=True)
    ]


@schedule(ops.GetV)
def get_v(g: Context, op: ops.GetV) -> Steps:
    """Get each run of consecutive elements by a separate op."""
    flat, window = op.tensor.view(-1), op.window
    yield [
        ops.Get(window, flat[start : start + op.count], op.src, offset)
        for offset, start in zip(op.offsets.tolist(), op.starts.tolist(), strict=True)
    ]


@schedule(ops.Barrier)
def barrier(g: Context, op: ops.Op) -> Steps:
    """Run a dissemination barrier (Hensgen, Finkel and Manber 1988): ceil(log2(n)) rounds of empty messages."""
    empty = buffers.empty(0, dtype=torch.uint8, device=g.device)
    distance = 1
    while distance < g.size:
        yield [g.send(empty, (g.rank + distance) % g.size), g.recv(empty, (g.rank - distance) % g.size)]
        distance *= 2


@schedule(ops.Broadcast)
def broadcast(g: Context, op: ops.Broadcast) -> Steps:
    """Broadcast down a binomial tree."""
    yield from broadcast_tree(g, op.tensor, op.root)


def broadcast_tree(g: Context, tensor: Tensor, root: int) -> Steps:
    """Broadcast down a binomial tree. In each round, every rank that has the data sends the data to one more rank."""
    me = (g.rank - root) % g.size
    mask = 1
    while mask < g.size and not me & mask:
        mask *= 2
    if me:
        yield [g.recv(tensor, (me - mask + root) % g.size)]
    children = []
    mask //= 2
    while mask:
        if me + mask < g.size:
            children.append(g.send(tensor, (me + mask + root) % g.size))
        mask //= 2
    if children:
        yield children


@schedule(ops.Reduce)
def reduce(g: Context, op: ops.Reduce) -> Steps:
    """Reduce along a binomial tree towards the root."""
    accumulator = reductions.lift(op.op, op.tensor)
    me = (g.rank - op.root) % g.size
    mask = 1
    while mask < g.size:
        if me & mask:
            yield [g.send(accumulator, (me - mask + op.root) % g.size)]
            return
        if me + mask < g.size:
            received = torch.empty_like(accumulator)
            yield [g.recv(received, (me + mask + op.root) % g.size)]
            reductions.combine(op.op, accumulator, received)
        mask *= 2
    reductions.lower(op.op, accumulator, g.size, op.tensor)


@schedule(ops.AllReduce)
def all_reduce(g: Context, op: ops.AllReduce) -> Steps:
    """Use recursive doubling for small tensors and the ring for large tensors.

    All ranks get bitwise identical results.
    """
    accumulator = reductions.lift(op.op, op.tensor).view(-1)
    if accumulator.nbytes < RING_BYTES or accumulator.numel() < g.size:
        yield from _doubling(g, op.op, accumulator)
    else:
        segments = list(accumulator.tensor_split(g.size))
        yield from _ring_reduce(g, op.op, segments)
        yield from ring_gather(g, [[segment] for segment in segments])
    reductions.lower(op.op, accumulator, g.size, op.tensor)


@schedule(ops.Scan, ops.Exscan)
def scan(g: Context, op: ops.Scan) -> Steps:
    """Scan by doubling (Hillis and Steele 1986).

    Before step k, each rank holds the reduction of its own tensor and the tensors of the 2^k - 1 ranks before it.
    """
    # Later ranks receive the first partial. An exscan adds a second one, which lacks this rank's own tensor.
    partials = [reductions.lift(op.op, op.tensor)]
    received = torch.empty_like(partials[0])
    distance = 1
    while distance < g.size:
        sends = [g.send(partials[0], g.rank + distance)] if g.rank + distance < g.size else []
        recvs = [g.recv(received, g.rank - distance)] if g.rank >= distance else []
        yield sends + recvs
        if recvs:
            for partial in partials:
                reductions.combine(op.op, partial, received)
            if not op.own and distance == 1:
                partials.append(received.clone())
        distance *= 2
    if op.own or g.rank:
        reductions.lower(op.op, partials[-1], g.rank + op.own, op.tensor)
    else:
        reductions.reduce(op.op, [], op.tensor)


def _doubling(g: Context, op: reductions.ReduceOp, accumulator: Tensor) -> Steps:
    """Reduce by recursive doubling (Thakur et al. 2005, 4.5).

    Let p be the largest power of two that is not larger than the number of ranks. The ranks below p run the doubling.
    Each other rank first sends its tensor to one of these ranks, and receives the result at the end.
    """
    received = torch.empty_like(accumulator)
    power = 1 << (g.size.bit_length() - 1)
    extra = g.size - power
    if g.rank >= power:
        yield [g.send(accumulator, g.rank - power)]
        yield [g.recv(accumulator, g.rank - power)]
        return
    if g.rank < extra:
        yield [g.recv(received, g.rank + power)]
        reductions.combine(op, accumulator, received)
    mask = 1
    while mask < power:
        yield [g.send(accumulator, g.rank ^ mask), g.recv(received, g.rank ^ mask)]
        reductions.combine(op, accumulator, received)
        mask *= 2
    if g.rank < extra:
        yield [g.send(accumulator, g.rank + power)]


def _ring_reduce(g: Context, op: reductions.ReduceOp, segments: list[Tensor]) -> Steps:
    """Reduce-scatter around the ring (Patarasuk and Yuan 2009). Afterwards only ``segments[rank]`` is fully reduced."""
    received = torch.empty_like(max(segments, key=Tensor.numel))
    for step in range(1, g.size):
        out = segments[(g.rank - step) % g.size]
        mine = segments[(g.rank - step - 1) % g.size]
        into = received[: mine.numel()]
        yield [g.send(out, (g.rank + 1) % g.size), g.recv(into, (g.rank - 1) % g.size)]
        reductions.combine(op, mine, into)


def ring_gather(g: Context, segments: Sequence[Sequence[Tensor]]) -> Steps:
    """Gather around the ring: each rank sends the tensors of ``segments[rank]``, and receives all other segments."""
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    for step in range(g.size - 1):
        out = segments[(g.rank - step) % g.size]
        into = segments[(g.rank - step - 1) % g.size]
        yield [*(g.send(tensor, right) for tensor in out), *(g.recv(tensor, left) for tensor in into)]


@schedule(ops.ReduceScatter, ops.ReduceScatterV, ops.ReduceScatterSingle)
def reduce_scatter(g: Context, op: ops.ReduceScatter) -> Steps:
    """Reduce and scatter around the ring."""
    segments = [reductions.lift(op.op, t).view(-1) for t in op.ins(g.size)]
    yield from _ring_reduce(g, op.op, segments)
    reductions.lower(op.op, segments[g.rank], g.size, op.output)


@schedule(ops.AllGather, ops.AllGatherV, ops.AllGatherSingle)
def all_gather(g: Context, op: ops.AllGather) -> Steps:
    """Gather around the ring."""
    outs = [t.view(-1) for t in op.outs(g.size)]
    write(outs[g.rank], op.input)
    yield from ring_gather(g, [[out] for out in outs])


@schedule(ops.AllToAll, ops.AllToAllSingle, ops.AllToAllVSingle)
def all_to_all(g: Context, op: ops.AllToAll) -> Steps:
    """Exchange tensors pairwise: in step k, each rank sends to rank + k, and receives from rank - k."""
    ins, outs = op.ins(g.size), op.outs(g.size)
    write(outs[g.rank], ins[g.rank])
    for k in range(1, g.size):
        dst, src = (g.rank + k) % g.size, (g.rank - k) % g.size
        yield [g.send(ins[dst], dst), g.recv(outs[src], src)]


@schedule(ops.Gather, ops.GatherSingle)
def gather(g: Context, op: ops.Gather) -> Steps:
    """Send every rank's tensor directly to the root, so that each byte crosses the network once."""
    if g.rank != op.root:
        yield [g.send(op.input, op.root)]
        return
    outs = op.outs(g.size)
    write(outs[g.rank], op.input)
    yield [g.recv(out, r) for r, out in enumerate(outs) if r != g.rank]


@schedule(ops.Scatter)
def scatter(g: Context, op: ops.Scatter) -> Steps:
    """Send each rank its tensor directly from the root."""
    if g.rank != op.root:
        yield [g.recv(op.output, op.root)]
        return
    ins = op.ins(g.size)
    write(op.output, ins[g.rank])
    yield [g.send(t, r) for r, t in enumerate(ins) if r != g.rank]
