"""The plan of each collective. :class:`CommStream` enqueues plans on one stream of the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.cuda import Cuda, Stream
from aiocomms.errors import CommError, UnsupportedOperation
from aiocomms.lowlevel import buffers
from aiocomms.transport import Rendezvous
from aiocomms_nccl import nccl
from aiocomms_nccl.calls import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    COPY,
    NONE,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SEND,
    Call,
    CallPlan,
    Kernel,
)
from aiocomms_nccl.dtypes import Reduction, reduction
from aiocomms_nccl.nccl import Nccl, NcclComm

CAPTURED: Final = (
    "the op is part of a CUDA graph now: work.wait_stream() joins it to the capture; after graph.replay(), "
    "await aiocomms.cuda.recorded()"
)
"""The error message for the work of an op that a CUDA graph has captured."""
_MOST_CALLS: Final = 2048
"""The largest number of calls in one group of NCCL, by NCCL's documentation of ``ncclGroupEnd``."""
NOTHING: Final = CallPlan([])
"""The plan of an op with nothing to do."""


def no_memory(what: str, error: Exception) -> CommError:
    """Return the error of an op for which torch found no free GPU memory."""
    return CommError(
        f"there is no GPU memory for what {what} needs beside its tensors; nothing was sent on this rank. "
        f"Free some, and call it again: {str(error).partition(chr(10))[0]}"
    )


class CommStream:
    """One rank's NCCL communicator, and the stream on which all calls of this communicator are enqueued."""

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
        self.line: Any = None
        """The value by which the launcher identifies this communicator."""
        self._given = scratch[:1].data_ptr()
        self._got = scratch[1:].data_ptr()
        self._scratch = scratch
        self._high = high
        self.meeting: Final = CallPlan([(ALL_REDUCE, self._given, self._got, 1, nccl.UINT8, nccl.SUM, NONE)])
        """The plan of a barrier. On the GPU, each rank's stream waits for the streams of all other ranks.

        The barrier reduces one byte, because NCCL ignores empty collectives.
        """

    def like(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return a stream for another communicator of this rank, with the same options."""
        return CommStream(self.cuda, self.nccl, comm, rank, size, self._scratch, self._high)

    # ------------------------------------------------------------------------------------------------- carrying out

    def carry_out(self, plan: CallPlan) -> None:
        """Enqueue a plan on the stream: call NCCL, CUDA's copy and torch's kernels on this thread."""
        if len(plan.calls) == 1 and plan.calls[0][0] != COPY and not plan.before and not plan.after:
            self._call(*plan.calls[0])  # most plans have a single call
            return
        for kernel in plan.before:
            self.cuda.enqueue(self.stream, kernel)
        calls = []
        for call in plan.calls:
            if call[0] == COPY:
                self.cuda.copy(self.stream, call[2], call[1], call[3])
            else:
                calls.append(call)
        if len(calls) == 1:
            self._call(*calls[0])
        elif calls:
            self._call_group(calls)
        for kernel in plan.after:
            self.cuda.enqueue(self.stream, kernel)

    def _call_group(self, calls: Sequence[Call]) -> None:
        self.nccl.group_start()
        try:
            for call in calls:
                self._call(*call)
        finally:
            self.nccl.group_end()

    def _call(self, what: int, send: int, recv: int, count: int, dtype: int, op: int, peer: int) -> None:
        comm, stream = self.comm, self.handle
        if what == ALL_REDUCE:
            comm.allReduce(send, recv, count, dtype, op, stream)
        elif what == REDUCE:
            comm.reduce(send, recv, count, dtype, op, peer, stream)
        elif what == BROADCAST:
            comm.broadcast(send, recv, count, dtype, peer, stream)
        elif what == ALL_GATHER:
            comm.allGather(send, recv, count, dtype, stream)
        elif what == REDUCE_SCATTER:
            comm.reduceScatter(send, recv, count, dtype, op, stream)
        elif what == SEND:
            comm.send(send, count, dtype, peer, stream)
        else:
            comm.recv(recv, count, dtype, peer, stream)

    def warm(self, sends: bool | None = None) -> None:
        """Open all of NCCL's connections in this blocking call.

        Without this call, NCCL's first operations would open the connections, and would block meanwhile.

        :param sends: whether this rank is the sender of a :class:`Direction`; None if every rank sends to every rank.
        """
        if sends is None:
            self.carry_out(self.meeting)
        calls: list[Call] = []
        for peer in range(self.size):
            if peer != self.rank and sends is not False:
                calls.append((SEND, self._given, NONE, 1, nccl.UINT8, NONE, peer))
            if peer != self.rank and sends is not True:
                calls.append((RECV, NONE, self._got, 1, nccl.UINT8, NONE, peer))
        self.carry_out(CallPlan(calls))
        event = self.cuda.event()
        event.record(self.stream)
        event.synchronize()

    # ----------------------------------------------------------------------------------------------- parts of plans

    def copies(self, out: Tensor, source: Tensor) -> list[Call]:
        """Return a list with the call that copies one tensor to another; empty if there is nothing to copy."""
        given, taken, nbytes = source.data_ptr(), out.data_ptr(), out.nbytes
        return [(COPY, given, taken, nbytes, NONE, NONE, NONE)] if nbytes and given != taken else []

    def send(self, tensor: Tensor, peer: int) -> Call:
        """Return the NCCL call that sends a tensor to a rank.

        An empty tensor is sent as one byte, so that its send also waits for the matching receive.
        """
        pointer, nbytes = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() else (self._given, 1)
        return SEND, pointer, NONE, nbytes, nccl.UINT8, NONE, peer

    def recv(self, tensor: Tensor, peer: int) -> Call:
        """Return the NCCL call that receives a tensor from a rank."""
        pointer, nbytes = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() else (self._got, 1)
        return RECV, NONE, pointer, nbytes, nccl.UINT8, NONE, peer

    def scaled(self, how: Reduction, factor: float, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Kernel]]:
        """Return the tensors that NCCL reads, and the kernels that write these tensors.

        The returned tensors are the given tensors, or the products of the given tensors with the factor. The products
        are in temporary memory of the stream.

        :raises torch.OutOfMemoryError: no GPU memory is free. No kernel was enqueued.
        """
        if not how.scaled:
            return tensors, []
        temporary = [self.cuda.empty_like(self.stream, tensor) for tensor in tensors]
        pairs = zip(temporary, tensors, strict=True)
        return temporary, [functools.partial(torch.mul, tensor, factor, out=out) for out, tensor in pairs]


def reducing(
    how: Reduction, calls: list[Call], given: Sequence[Tensor], before: list[Kernel], out: Tensor | None
) -> CallPlan:
    """Return the plan of a reduction. The plan also turns NCCL's result into the operator's result.

    :param given: the tensors that NCCL reads.
    :param before: the kernels that write these tensors; empty if the tensors are the caller's.
    :param out: the tensor of the result; None if the result is on another rank.
    """
    if not how.scaled and not how.odd:
        return CallPlan(calls)
    after = [] if out is None or not how.odd else [functools.partial(_keep_lowest_bit, out)]
    return CallPlan(calls, before, after, given if before else ())


def _keep_lowest_bit(out: Tensor) -> None:
    out.view(torch.uint8).bitwise_and_(1)


def open_comm_stream(
    cuda: Cuda, library: Nccl, form: Callable[[], NcclComm], rendezvous: Rendezvous, high: bool
) -> CommStream:
    """Form NCCL's communicator and open its connections. This function blocks."""
    scratch = buffers.zeros(2, dtype=torch.uint8, device=rendezvous.device)
    comm_stream = CommStream(cuda, library, form(), rendezvous.rank, rendezvous.size, scratch, high)
    comm_stream.warm()
    return comm_stream


Start = Callable[[CommStream, Any], CallPlan]
"""A function that plans a collective and enqueues no call. The function may raise ``torch.OutOfMemoryError``."""


def barrier(cs: CommStream, op: ops.Op) -> CallPlan:
    """Plan an all_reduce of one byte."""
    return cs.meeting


def broadcast(cs: CommStream, op: ops.Broadcast) -> CallPlan:
    """Plan NCCL's broadcast of bytes."""
    pointer = op.tensor.data_ptr()
    if not op.tensor.nbytes:
        return NOTHING
    return CallPlan([(BROADCAST, pointer, pointer, op.tensor.nbytes, nccl.UINT8, NONE, op.root)])


def all_reduce(cs: CommStream, op: ops.AllReduce) -> CallPlan:
    """Plan NCCL's all-reduce."""
    tensor = op.tensor
    count = tensor.numel()
    if not count:
        return cs.meeting
    how = reduction(op.op, tensor.dtype)
    given, before = cs.scaled(how, op.op.factor, [tensor])
    call = (ALL_REDUCE, given[0].data_ptr(), tensor.data_ptr(), count * how.parts, how.dtype, how.op, NONE)
    return reducing(how, [call], given, before, tensor)


def reduce(cs: CommStream, op: ops.Reduce) -> CallPlan:
    """Plan NCCL's reduce. Only the root passes memory for the result."""
    tensor = op.tensor
    if not tensor.numel():
        return NOTHING
    how = reduction(op.op, tensor.dtype)
    given, before = cs.scaled(how, op.op.factor, [tensor])
    out = tensor if cs.rank == op.root else None
    target = NONE if out is None else out.data_ptr()
    call = (REDUCE, given[0].data_ptr(), target, tensor.numel() * how.parts, how.dtype, how.op, op.root)
    return reducing(how, [call], given, before, out)


def all_gather_single(cs: CommStream, op: ops.AllGatherSingle) -> CallPlan:
    """Plan NCCL's all-gather of bytes."""
    if not op.input.numel():
        return cs.meeting
    return CallPlan([(ALL_GATHER, op.input.data_ptr(), op.output.data_ptr(), op.input.nbytes, nccl.UINT8, NONE, NONE)])


def all_gather(cs: CommStream, op: ops.AllGather) -> CallPlan:
    """Plan a group of broadcasts, one from each rank."""
    calls: list[Call] = []
    for root, out in enumerate(op.outputs):
        given = op.input if root == cs.rank else out
        if out.numel():
            calls.append((BROADCAST, given.data_ptr(), out.data_ptr(), out.nbytes, nccl.UINT8, NONE, root))
    return CallPlan(calls) if calls else cs.meeting


def reduce_scatter_single(cs: CommStream, op: ops.ReduceScatterSingle) -> CallPlan:
    """Plan NCCL's reduce-scatter."""
    out = op.output
    if not out.numel():
        return cs.meeting
    how = reduction(op.op, out.dtype)
    given, before = cs.scaled(how, op.op.factor, [op.input])
    count = out.numel() * how.parts
    call = (REDUCE_SCATTER, given[0].data_ptr(), out.data_ptr(), count, how.dtype, how.op, NONE)
    return reducing(how, [call], given, before, out)


def reduce_scatter(cs: CommStream, op: ops.ReduceScatter) -> CallPlan:
    """Plan a group of reductions, one to each rank."""
    if not any(part.numel() for part in op.inputs):
        return cs.meeting
    how = reduction(op.op, op.output.dtype)
    given, before = cs.scaled(how, op.op.factor, op.inputs)
    calls: list[Call] = []
    for root, part in enumerate(given):
        if part.numel():
            out = op.output.data_ptr() if root == cs.rank else NONE
            calls.append((REDUCE, part.data_ptr(), out, part.numel() * how.parts, how.dtype, how.op, root))
    return reducing(how, calls, given, before, op.output)


def all_to_all(cs: CommStream, op: ops.AllToAll) -> CallPlan:
    """Plan a group with one send and one receive for each peer. This rank's own part is copied."""
    ins, outs = op.ins(cs.size), op.outs(cs.size)
    calls = cs.copies(outs[cs.rank], ins[cs.rank])
    for peer in range(cs.size):
        if peer != cs.rank:
            calls += cs.send(ins[peer], peer), cs.recv(outs[peer], peer)
    return CallPlan(calls)


def gather(cs: CommStream, op: ops.Gather) -> CallPlan:
    """Plan a group of receives on the root, and a send on the other ranks."""
    if not op.input.numel():
        return NOTHING
    if cs.rank != op.root:
        return CallPlan([cs.send(op.input, op.root)])
    outs = op.outs(cs.size)
    received = [cs.recv(outs[peer], peer) for peer in range(cs.size) if peer != cs.rank]
    return CallPlan([*cs.copies(outs[cs.rank], op.input), *received])


def scatter(cs: CommStream, op: ops.Scatter) -> CallPlan:
    """Plan a group of sends on the root, and a receive on the other ranks."""
    if not op.output.numel():
        return NOTHING
    if cs.rank != op.root:
        return CallPlan([cs.recv(op.output, op.root)])
    ins = op.ins(cs.size)
    sent = [cs.send(ins[peer], peer) for peer in range(cs.size) if peer != cs.rank]
    return CallPlan([*cs.copies(op.output, ins[cs.rank]), *sent])


def batch(cs: CommStream, op: ops.CollectiveBatch) -> CallPlan:
    """Plan one group of all calls of the batch's collectives.

    :raises UnsupportedOperation: the batch needs more calls than NCCL permits in one group.
    """
    plans = [START[type(part)](cs, part) for part in op.parts]
    calls = [call for plan in plans for call in plan.calls]
    if len(calls) > _MOST_CALLS:
        raise UnsupportedOperation(f"the batch needs {len(calls)} calls of NCCL, wanted at most {_MOST_CALLS}")
    before = [kernel for plan in plans for kernel in plan.before]
    after = [kernel for plan in plans for kernel in plan.after]
    return CallPlan(calls, before, after, [tensor for plan in plans for tensor in plan.kept])


START: Final[dict[type[ops.Op], Start]] = {
    ops.Barrier: barrier,
    ops.Broadcast: broadcast,
    ops.CollectiveBatch: batch,
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
"""A dictionary from each type of collective to the function that plans it."""
