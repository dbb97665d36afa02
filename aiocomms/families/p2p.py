"""The point-to-point methods: ``send``, ``recv`` and ``batch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from aiocomms import ops
from aiocomms.errors import ArgumentError, CommError
from aiocomms.families.issuer import Issuer
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike
from aiocomms.ops.arrays import checked
from aiocomms.ops.checks import COMM_TIMEOUT, OpTimeout
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)


class PointToPoint(Issuer):
    """The methods ``send``, ``recv`` and ``batch``.

    Messages are matched by source, destination and tag. Messages that match the same receives arrive in the order in
    which they were sent. A send may complete before or after its receive is posted; programs must not rely on either.
    One to this rank itself never does before.
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
        """Send a tensor to a rank: another one or, if tensors are on the CPU, this one.

        :param tensor: a contiguous tensor of any shape and dtype; it must not be changed until the work is done.
        :param dst: the receiving rank.
        :param tag: the tag of the receives that the message matches: a 32-bit signed integer.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds, None for no deadline; by default the communicator's.
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
        """Receive a tensor from a rank: another one or, if tensors are on the CPU, this one.

        :param tensor: the tensor to receive into, of the message's dtype and size in bytes.
        :param src: the sending rank.
        :param tag: the tag of the messages that the receive matches: a 32-bit signed integer.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds, None for no deadline; by default the communicator's.
            A receive that nothing has matched by then fails alone, and the communicator stays usable.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.Recv(tensor, src, tag), hints, timeout)

    def batch(self) -> Batch:
        """Make a group of sends and receives that start together, and so cannot deadlock by their order.

        :returns: an empty batch.
        """
        return Batch(self)


class Batch(Handle):
    """A group of sends and receives that start together: ``comm.batch().send(x, 1).recv(y, 1).issue()``."""

    def __init__(self, comm: PointToPoint) -> None:
        self._comm = comm
        self._parts: list[ops.Send | ops.Recv] = []

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

    def issue(self, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[list[Any]]:
        """Start all sends and receives of the batch, which is empty afterwards.

        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds, None for no deadline; by default the communicator's.
        :returns: one work for the whole batch; its result is the list of the tensors, in the order added. If a part
            fails, receives that nothing has matched are withdrawn, and the work fails when all other parts have ended.
        :raises ArgumentError: the batch is empty, or two parts share memory that one of them writes; nothing was sent.
        """
        if not self._parts:
            raise ArgumentError("the batch is empty, wanted at least one send or recv", op="batch")
        work = self._comm._issue(ops.Batch(tuple(self._parts)), hints, timeout)
        self._parts = []
        return work

    def _add(self, part: ops.Send | ops.Recv) -> Self:
        try:
            checked(part, self._comm._core)
        except CommError as error:
            raise error.about(op="batch", rank=self._comm.rank) from None
        self._parts.append(part)
        return self
