"""The point-to-point methods: sends, receives from one rank, from several ranks or from any rank, and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from torch import Tensor

from aiocomms import ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.issuer import Issuer
from aiocomms.communicator.reducing import parsed
from aiocomms.errors import ArgumentError, CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import Message, Received, TensorLike
from aiocomms.ops._arrivals import Source, sources_of
from aiocomms.ops.arrays import checked
from aiocomms.ops.reductions import ReduceOp
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)


class PointToPoint(Issuer):
    """The methods ``send``, ``recv``, ``recv_any``, ``recv_message``, ``probe`` and ``batch``.

    Messages are matched by source, destination and tag. Messages with equal source, destination and tag are received
    in the order of the sends. A send may complete before or after the matching receive is posted; programs must not
    rely on either order. A send to this rank itself never completes before the matching receive is posted.

    A receive from one rank has priority over a receive from several ranks or from any rank, whichever of the two was
    called first. Receives from several ranks or from any rank get messages in the order of the calls. These receives
    take messages from the sources in round-robin order.
    """

    def send(
        self,
        tensor: Given,
        dst: int,
        tag: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Send a tensor to another rank or, if the communicator's device is the CPU, to this rank.

        :param tensor: a contiguous tensor of any shape and dtype; it must not be changed until the work is done.
        :param dst: the receiving rank.
        :param tag: the message's tag, a 32-bit signed integer. Only a receive with this tag matches the message.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.Send(tensor, dst, tag), hints, timeout)

    def recv(
        self,
        tensor: Given,
        src: int,
        tag: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Receive a tensor from another rank or, if the communicator's device is the CPU, from this rank.

        :param tensor: the tensor to receive into. Its dtype and size in bytes must be those of the message.
        :param src: the sending rank.
        :param tag: a 32-bit signed integer. The receive matches only messages with this tag.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout. If
            no message has arrived at the deadline, only the receive fails, and the communicator stays usable.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; the receive was not started.
        """
        return self._issue(ops.Recv(tensor, src, tag), hints, timeout)

    def recv_any(
        self,
        tensor: TensorLike,
        src: Source = None,
        tag: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[int]:
        """Receive a tensor from any rank, or from any of the given ranks.

        The receive does not wait for a rank that has closed its communicator. The work fails when all other ranks of
        ``src`` have closed their communicators.

        :param tensor: the tensor to receive into. Its dtype and size in bytes must be those of the message.
        :param src: a list of the ranks that may send the message, or one rank. None: every other rank may send the
            message, and so may this rank if the communicator's device is the CPU.
        :param tag: a 32-bit signed integer. The receive matches only messages with this tag.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: see :meth:`recv`.
        :returns: the work; its result is the sender's rank.
        :raises ArgumentError: an argument is wrong; the receive was not started.
        :raises UnsupportedOperation: the transport cannot probe for messages.
        """
        return self._issue(ops.RecvAny(tensor, sources_of(src, self, self.device), tag), hints, timeout)

    def recv_message(
        self,
        src: Source = None,
        tag: int = 0,
        *,
        into: Callable[[Message], Tensor] | None = None,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Received]:
        """Receive a message of any size and dtype, from any rank or from any of the given ranks.

        :param src: see :meth:`recv_any`.
        :param tag: a 32-bit signed integer. The receive matches only messages with this tag.
        :param into: a function that returns the tensor to receive the message into. The event loop calls the function
            when the message has arrived. No other receive on this event loop can take the message during this call.
            If the function raises an exception or returns an unsuitable tensor, the work fails, and the next receive
            gets the message. None: the message is received into a new flat tensor on the communicator's device.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: see :meth:`recv`.
        :returns: the work; its result is the sender's rank and the tensor.
        :raises ArgumentError: an argument is wrong; the receive was not started.
        :raises UnsupportedOperation: the transport cannot probe for messages.
        """
        return self._issue(ops.RecvMessage(sources_of(src, self, self.device), tag, into), hints, timeout)

    def probe(
        self,
        src: Source = None,
        tag: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Message]:
        """Wait until a matching message has arrived. The message stays available for a receive.

        Another receive may take the message before the program resumes. :meth:`recv_message` has no such race.

        :param src: see :meth:`recv_any`.
        :param tag: a 32-bit signed integer. The probe matches only messages with this tag.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: see :meth:`recv`.
        :returns: the work, which is done at once if a message has already arrived. The work's result contains the
            message's sender and size.
        :raises ArgumentError: an argument is wrong.
        :raises UnsupportedOperation: the transport cannot probe for messages.
        """
        return self._issue(ops.ProbeAny(sources_of(src, self, self.device), tag), hints, timeout)

    def batch(self) -> Batch:
        """Make a batch of messages, or of collectives, that start together.

        The order of a batch's messages cannot cause a deadlock. ``nccl`` starts a batch of collectives as one group. On
        other transports, separate collectives take less time than a batch.

        :returns: an empty batch.
        """
        return Batch(self)


class Batch(Handle):
    """A group of operations that start together: ``comm.batch().send(x, 1).recv(y, 1).issue()``.

    A batch contains either messages or collectives. All ranks must add the same collectives in the same order.
    """

    def __init__(self, comm: PointToPoint) -> None:
        self._comm = comm
        self._parts: list[ops.Op] = []

    def send(self, tensor: TensorLike, dst: int, tag: int = 0) -> Self:
        """Add a send, with the arguments of :meth:`Communicator.send`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        """
        return self._add(ops.Send(tensor, dst, tag))

    def recv(self, tensor: TensorLike, src: int, tag: int = 0) -> Self:
        """Add a receive, with the arguments of :meth:`Communicator.recv`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        """
        return self._add(ops.Recv(tensor, src, tag))

    def broadcast(self, tensor: TensorLike, root: int) -> Self:
        """Add a broadcast, with the arguments of :meth:`Communicator.broadcast`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        """
        return self._add(ops.Broadcast(tensor, root))

    def all_reduce(self, tensor: TensorLike, op: ReduceOp | str = ReduceOp.SUM) -> Self:
        """Add an all_reduce, with the arguments of :meth:`Communicator.all_reduce`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype; nothing was added.
        """
        return self._add(ops.AllReduce(tensor, parsed(self._comm, "batch", op)))

    def reduce(self, tensor: TensorLike, root: int, op: ReduceOp | str = ReduceOp.SUM) -> Self:
        """Add a reduce, with the arguments of :meth:`Communicator.reduce`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype; nothing was added.
        """
        return self._add(ops.Reduce(tensor, root, parsed(self._comm, "batch", op)))

    def all_gather_single(self, output: TensorLike, input: TensorLike) -> Self:
        """Add an all_gather_single, with the arguments of :meth:`Communicator.all_gather_single`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        """
        return self._add(ops.AllGatherSingle(output, input))

    def reduce_scatter_single(self, output: TensorLike, input: TensorLike, op: ReduceOp | str = ReduceOp.SUM) -> Self:
        """Add a reduce_scatter_single, with the arguments of :meth:`Communicator.reduce_scatter_single`.

        :raises ArgumentError: an argument is wrong; nothing was added.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype; nothing was added.
        """
        return self._add(ops.ReduceScatterSingle(output, input, parsed(self._comm, "batch", op)))

    def issue(self, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[list[Any]]:
        """Start all operations of the batch, which is empty afterwards.

        If one message fails, the batch withdraws its unmatched receives. The work fails when all other messages of
        the batch have ended. If one collective fails, the communicator is lost.

        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: one work for the whole batch. The work's result is the list of the tensors, in the order in which
            they were added.
        :raises ArgumentError: the batch is empty, or two operations of the batch share memory that one of them writes;
            nothing was started.
        """
        if not self._parts:
            raise ArgumentError("the batch is empty, wanted at least one operation", op="batch")
        parts: Any = tuple(self._parts)
        batch = ops.Batch(parts) if self._parts[0].family == "p2p" else ops.CollectiveBatch(parts)
        work = self._comm._issue(batch, hints, timeout)
        self._parts = []
        return work

    def _add(self, part: ops.Op) -> Self:
        try:
            if self._parts and part.family != self._parts[0].family:
                first = self._parts[0].name
                raise ArgumentError(f"{part.name} follows {first} in a batch, wanted only messages or only collectives")
            checked(part, self._comm._core)
        except CommError as error:
            raise error.about(op="batch", rank=self._comm.rank) from None
        self._parts.append(part)
        return self
