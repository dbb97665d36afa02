"""The methods for collectives that reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from aiocomms import ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.issuer import Issuer
from aiocomms.errors import ArgumentError
from aiocomms.ops import TensorLike
from aiocomms.ops.checks import sequence
from aiocomms.ops.reductions import ReduceOp
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)


class Reducing(Issuer):
    """The methods of :class:`aiocomms.communicator.collectives.Collectives` that reduce the values of several ranks."""

    def all_reduce(
        self,
        tensor: Given,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Reduce every rank's tensor in place, and give all ranks the result.

        :param tensor: the tensor to reduce, of the same shape and dtype on all ranks.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "all_reduce", op)
        return self._issue(ops.AllReduce(tensor, op), hints, timeout)

    def reduce(
        self,
        tensor: Given,
        root: int,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Reduce every rank's tensor into the root's tensor; the other ranks' tensors do not change.

        :param tensor: the tensor to reduce, of the same shape and dtype on all ranks.
        :param root: the rank that gets the result.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "reduce", op)
        return self._issue(ops.Reduce(tensor, root, op), hints, timeout)

    def scan(
        self,
        tensor: Given,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Replace each rank's tensor by the reduction of the tensors of ranks 0 to that rank, inclusive.

        MPI's ``Scan`` does the same.

        On some transports, a rank's op completes only after higher ranks have called ``scan``.

        :param tensor: the tensor to reduce, of the same shape and dtype on all ranks.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "scan", op)
        return self._issue(ops.Scan(tensor, op), hints, timeout)

    def exscan(
        self,
        tensor: Given,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Replace each rank's tensor by the reduction of the tensors of all lower ranks, as MPI's ``Exscan`` does.

        On rank 0 the result is the operator's neutral element. (In MPI the result is undefined.) The neutral element is
        0 for SUM, PREMUL_SUM, BOR and BXOR, 1 for PRODUCT, and all bits set for BAND. The neutral element of MIN is the
        dtype's largest value (floating point: infinity). The neutral element of MAX is the dtype's smallest value
        (floating point: -infinity). AVG has no neutral element, so rank 0 gets NaN.

        :param tensor: the tensor to reduce, of the same shape and dtype on all ranks.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "exscan", op)
        return self._issue(ops.Exscan(tensor, op), hints, timeout)

    def reduce_scatter(
        self,
        output: Given,
        inputs: Sequence[TensorLike],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Reduce tensor ``r`` of every rank's list, and give the result to rank ``r``, for each ``r``.

        All tensors have the same shape.

        :param output: the tensor that receives this rank's result. ``output`` may be ``inputs[rank]`` itself.
        :param inputs: one tensor per rank.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "reduce_scatter", op)
        return self._issue(ops.ReduceScatter(output, sequence("inputs", inputs), op), hints, timeout)

    def reduce_scatter_v(
        self,
        output: Given,
        inputs: Sequence[TensorLike],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Reduce and scatter as :meth:`reduce_scatter` does; the tensors in a list may have different shapes.

        :param output: the tensor that receives this rank's result. ``output`` may be ``inputs[rank]`` itself.
        :param inputs: one tensor per rank. Tensor ``r`` has the shape of rank ``r``'s ``output``.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "reduce_scatter_v", op)
        return self._issue(ops.ReduceScatterV(output, sequence("inputs", inputs), op), hints, timeout)

    def reduce_scatter_single(
        self,
        output: Given,
        input: TensorLike,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Reduce every rank's input, and give rank ``r`` the ``r``-th of ``size`` equal chunks of the result.

        :param output: the tensor that receives this rank's chunk. ``output`` may be chunk ``rank`` of ``input``.
        :param input: a tensor with ``size`` times the elements of ``output``.
        :param op: the reduction operator, or a name that :meth:`ReduceOp.parse` accepts.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None means no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: ``op`` is not defined for the dtype.
        """
        if type(op) is not ReduceOp:
            op = parsed(self, "reduce_scatter_single", op)
        return self._issue(ops.ReduceScatterSingle(output, input, op), hints, timeout)


def parsed(comm: Issuer, name: str, op: object) -> ReduceOp:
    """Parse an operator that is not a :class:`ReduceOp`. A caller passed the operator to the method ``name``."""
    try:
        return ReduceOp.parse(op)
    except ArgumentError as error:
        raise error.about(comm=comm.name, op=name, rank=comm.rank) from None
