"""How each collective is carried out: as calls of NCCL, enqueued on one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.cuda import Cuda, Stream
from aiocomms.errors import CommError
from aiocomms.lowlevel import buffers
from aiocomms.transport import Rendezvous
from aiocomms_nccl import nccl
from aiocomms_nccl.dtypes import Reduction, reduction
from aiocomms_nccl.nccl import Nccl, NcclComm

CAPTURED: Final = (
    "it is part of a CUDA graph now: work.wait_stream() joins it to the capture; behind graph.replay(), "
    "await aiocomms.cuda.recorded()"
)
"""What the work of a captured op says."""


def no_memory(what: str, error: Exception) -> CommError:
    """Return the error of an op that needs memory of the GPU beside its tensors, and gets none."""
    return CommError(
        f"there is no GPU memory for what {what} needs beside its tensors; nothing was sent on this rank. "
        f"Free some, and call it again: {str(error).partition(chr(10))[0]}"
    )


class CommStream:
    """One rank's NCCL communicator and the stream on which all its calls are enqueued."""

    def __init__(
        self, cuda: Cuda, library: Nccl, comm: NcclComm, rank: int, size: int, scratch: Tensor, high: bool
    ) -> None:
        """Make a stream for a communicator.

        :param scratch: 2 bytes of this rank's device memory, whose contents do not matter.
        :param high: whether the stream has high priority.
        """
        self.cuda = cuda
        self.nccl = library
        self.comm = comm
        self.rank = rank
        self.size = size
        self.stream: Stream = cuda.stream(-1 if high else 0)
        self.handle = self.stream.cuda_stream
        self._given = scratch[:1].data_ptr()
        self._got = scratch[1:].data_ptr()
        self._scratch = scratch
        self._high = high
        self._kept: list[Tensor] = []

    def like(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return the same for another communicator of this rank, with a stream of its own."""
        return CommStream(self.cuda, self.nccl, comm, rank, size, self._scratch, self._high)

    def taken(self) -> list[Tensor]:
        """Return the temporary memory that the last op has allocated. The caller keeps it until the op is done."""
        kept, self._kept = self._kept, []
        return kept

    # ---------------------------------------------------------------------------------- parts of collectives

    def meet(self) -> None:
        """Make the stream wait for all ranks' streams. NCCL ignores empty collectives, so this one moves a byte."""
        self.comm.allReduce(self._given, self._got, 1, nccl.UINT8, nccl.SUM, self.handle)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Make the calls within the block one NCCL group."""
        self.nccl.group_start()
        try:
            yield
        finally:
            self.nccl.group_end()

    def warm(self, sends: bool | None = None) -> None:
        """Open all of NCCL's connections. Blocks, off the loop. NCCL would else do it in its first calls and block.

        :param sends: on one end of a lane, whether it is the sender's end; None: every rank sends to every rank.
        """
        if sends is None:
            self.meet()
        with self.group():
            for peer in range(self.size):
                if peer != self.rank and sends is not False:
                    self.comm.send(self._given, 1, nccl.UINT8, peer, self.handle)
                if peer != self.rank and sends is not True:
                    self.comm.recv(self._got, 1, nccl.UINT8, peer, self.handle)
        event = self.cuda.event()
        event.record(self.stream)
        event.synchronize()

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the stream."""
        if out.numel() and out.data_ptr() != source.data_ptr():
            self.cuda.enqueue(self.stream, lambda: out.view(-1).copy_(source.detach().view(-1), non_blocking=True))

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send to a rank, within a group. An empty tensor is sent as one byte, so that it synchronises too."""
        pointer, nbytes = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() else (self._given, 1)
        self.comm.send(pointer, nbytes, nccl.UINT8, peer, self.handle)

    def recv(self, tensor: Tensor, peer: int) -> None:
        """Receive from a rank, within a group."""
        pointer, nbytes = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() else (self._got, 1)
        self.comm.recv(pointer, nbytes, nccl.UINT8, peer, self.handle)

    def scaled(self, how: Reduction, factor: float, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that NCCL reads: the ones given, or their products in temporary memory of the stream.

        :raises torch.OutOfMemoryError: there is no memory. Nothing was enqueued.
        """
        if not how.scaled:
            return tensors
        temporary = [self.cuda.empty_like(self.stream, tensor) for tensor in tensors]
        for out, tensor in zip(temporary, tensors, strict=True):
            self.cuda.enqueue(self.stream, lambda out=out, tensor=tensor: torch.mul(tensor, factor, out=out))  # type: ignore[misc]
        self._kept = temporary
        return temporary

    def finish(self, how: Reduction, out: Tensor) -> None:
        """Turn NCCL's result into the operator's result."""
        if how.odd and out.numel():
            self.cuda.enqueue(self.stream, lambda: out.view(torch.uint8).bitwise_and_(1))


def open_comm_stream(
    cuda: Cuda, library: Nccl, form: Callable[[], NcclComm], rendezvous: Rendezvous, high: bool
) -> CommStream:
    """Form NCCL's communicator and open its connections. Blocks."""
    scratch = buffers.zeros(2, dtype=torch.uint8, device=rendezvous.device)
    comm_stream = CommStream(cuda, library, form(), rendezvous.rank, rendezvous.size, scratch, high)
    comm_stream.warm()
    return comm_stream


Start = Callable[[CommStream, Any], None]
"""A function that enqueues a collective. It raises before it has enqueued anything, or what NCCL raises."""


def barrier(cs: CommStream, op: ops.Op) -> None:
    """Enqueue an all_reduce of one byte."""
    cs.meet()


def broadcast(cs: CommStream, op: ops.Broadcast) -> None:
    """Native, as bytes."""
    pointer = op.tensor.data_ptr()
    if op.tensor.nbytes:
        cs.comm.broadcast(pointer, pointer, op.tensor.nbytes, nccl.UINT8, op.root, cs.handle)


def all_reduce(cs: CommStream, op: ops.AllReduce) -> None:
    """Native."""
    tensor = op.tensor
    if not tensor.numel():
        return cs.meet()
    how = reduction(op.op, tensor.dtype)
    (given,) = cs.scaled(how, op.op.factor, [tensor])
    count = tensor.numel() * how.parts
    cs.comm.allReduce(given.data_ptr(), tensor.data_ptr(), count, how.dtype, how.op, cs.handle)
    return cs.finish(how, tensor)


def reduce(cs: CommStream, op: ops.Reduce) -> None:
    """Native. Only the root passes memory for the result."""
    tensor = op.tensor
    if not tensor.numel():
        return
    how = reduction(op.op, tensor.dtype)
    (given,) = cs.scaled(how, op.op.factor, [tensor])
    out = tensor.data_ptr() if cs.rank == op.root else 0
    cs.comm.reduce(given.data_ptr(), out, tensor.numel() * how.parts, how.dtype, how.op, op.root, cs.handle)
    if cs.rank == op.root:
        cs.finish(how, tensor)


def all_gather_single(cs: CommStream, op: ops.AllGatherSingle) -> None:
    """Native, as bytes."""
    if not op.input.numel():
        return cs.meet()
    cs.comm.allGather(op.input.data_ptr(), op.output.data_ptr(), op.input.nbytes, nccl.UINT8, cs.handle)
    return None


def all_gather(cs: CommStream, op: ops.AllGather) -> None:
    """Enqueue a group of broadcasts, one from each rank."""
    if not any(out.numel() for out in op.outputs):
        return cs.meet()
    with cs.group():
        for root, out in enumerate(op.outputs):
            given = op.input if root == cs.rank else out
            if out.numel():
                cs.comm.broadcast(given.data_ptr(), out.data_ptr(), out.nbytes, nccl.UINT8, root, cs.handle)
    return None


def reduce_scatter_single(cs: CommStream, op: ops.ReduceScatterSingle) -> None:
    """Native."""
    out = op.output
    if not out.numel():
        return cs.meet()
    how = reduction(op.op, out.dtype)
    (given,) = cs.scaled(how, op.op.factor, [op.input])
    cs.comm.reduceScatter(given.data_ptr(), out.data_ptr(), out.numel() * how.parts, how.dtype, how.op, cs.handle)
    return cs.finish(how, out)


def reduce_scatter(cs: CommStream, op: ops.ReduceScatter) -> None:
    """Enqueue a group of reductions, one to each rank."""
    if not any(part.numel() for part in op.inputs):
        return cs.meet()
    how = reduction(op.op, op.output.dtype)
    given = cs.scaled(how, op.op.factor, op.inputs)
    with cs.group():
        for root, part in enumerate(given):
            if part.numel():
                out = op.output.data_ptr() if root == cs.rank else 0
                cs.comm.reduce(part.data_ptr(), out, part.numel() * how.parts, how.dtype, how.op, root, cs.handle)
    return cs.finish(how, op.output)


def all_to_all(cs: CommStream, op: ops.AllToAll) -> None:
    """Enqueue a group of sends and receives, one of each per peer. This rank's own part is copied."""
    ins, outs = op.ins(cs.size), op.outs(cs.size)
    cs.copy(outs[cs.rank], ins[cs.rank])
    with cs.group():
        for peer in range(cs.size):
            if peer != cs.rank:
                cs.send(ins[peer], peer)
                cs.recv(outs[peer], peer)


def gather(cs: CommStream, op: ops.Gather) -> None:
    """Enqueue a group of receives on the root, and a send on the other ranks."""
    if not op.input.numel():
        return
    if cs.rank != op.root:
        cs.send(op.input, op.root)
        return
    outs = op.outs(cs.size)
    cs.copy(outs[cs.rank], op.input)
    with cs.group():
        for peer in range(cs.size):
            if peer != cs.rank:
                cs.recv(outs[peer], peer)


def scatter(cs: CommStream, op: ops.Scatter) -> None:
    """Enqueue a group of sends on the root, and a receive on the other ranks."""
    if not op.output.numel():
        return
    if cs.rank != op.root:
        cs.recv(op.output, op.root)
        return
    ins = op.ins(cs.size)
    cs.copy(op.output, ins[cs.rank])
    with cs.group():
        for peer in range(cs.size):
            if peer != cs.rank:
                cs.send(ins[peer], peer)


START: Final[dict[type[ops.Op], Start]] = {
    ops.Barrier: barrier,
    ops.Broadcast: broadcast,
    ops.AllReduce: all_reduce,
    ops.Reduce: reduce,
    ops.AllGather: all_gather,
    ops.AllGatherV: all_gather,
    ops.AllGatherSingle: all_gather_single,
    ops.ReduceScatter: reduce_scatter,
    ops.ReduceScatterV: reduce_scatter,
    ops.ReduceScatterSingle: reduce_scatter_single,
    ops.AllToAll: all_to_all,
    ops.AllToAllSingle: all_to_all,
    ops.AllToAllVSingle: all_to_all,
    ops.Gather: gather,
    ops.GatherSingle: gather,
    ops.Scatter: scatter,
}
"""The function that starts each collective."""
