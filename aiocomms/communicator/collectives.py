"""The methods for collectives, the operations in which every rank of a communicator takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from aiocomms import ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.reducing import Reducing
from aiocomms.ops import TensorLike
from aiocomms.ops.checks import integers, optional, sequence
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)


class Collectives(Reducing):
    """The methods for collectives. All ranks must call the same collectives in the same order, with matching arguments.

    Collectives match in the order of the *calls*; the order of the awaits has no effect. Several collectives may be
    pending at the same time. Each call returns immediately. Tensors must be contiguous and on the communicator's
    device. Tensors may be empty, and may have any dtype in :data:`aiocomms.ops.checks.DTYPES`. A tensor that an op
    writes must not share memory with another tensor of the op, unless the description of a parameter allows shared
    memory.
    """

    def broadcast(
        self,
        tensor: Given,
        root: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Copy the root's tensor to every rank.

        :param tensor: the tensor, read on the root and written on other ranks; its shape and dtype are the same on all
            ranks.
        :param root: the rank whose tensor is copied.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.Broadcast(tensor, root), hints, timeout)

    def all_gather(
        self,
        outputs: Sequence[Given],
        tensor: TensorLike,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Given]]:
        """Gather every rank's tensor on every rank; all tensors have the same shape.

        :param outputs: the tensors to write, one per rank.
        :param tensor: this rank's tensor; may be ``outputs[rank]`` itself.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``outputs``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.AllGather(sequence("outputs", outputs), tensor), hints, timeout)

    def all_gather_v(
        self,
        outputs: Sequence[Given],
        tensor: TensorLike,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Given]]:
        """Gather every rank's tensor on every rank; the shape may differ from rank to rank.

        :param outputs: the tensors to write, one per rank. The shape of ``outputs[r]`` is the shape of ``tensor`` on
            rank ``r``.
        :param tensor: this rank's tensor; may be ``outputs[rank]`` itself.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``outputs``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.AllGatherV(sequence("outputs", outputs), tensor), hints, timeout)

    def all_gather_single(
        self,
        output: Given,
        input: TensorLike,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Gather every rank's tensor, in rank order, into one tensor on every rank.

        :param output: the tensor to write, with ``size`` times the elements of ``input``.
        :param input: this rank's tensor; may be chunk ``rank`` of ``output``.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.AllGatherSingle(output, input), hints, timeout)

    def all_to_all(
        self,
        outputs: Sequence[Given],
        inputs: Sequence[TensorLike],
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Given]]:
        """Send ``inputs[r]`` to each rank ``r``, and receive ``outputs[r]`` from rank ``r``.

        The shapes may differ for each pair of ranks.

        :param outputs: the tensors to write, one per rank.
        :param inputs: one tensor per rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``outputs``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.AllToAll(sequence("outputs", outputs), sequence("inputs", inputs)), hints, timeout)

    def all_to_all_single(
        self,
        output: Given,
        input: TensorLike,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Send chunk ``r`` of ``input`` to each rank ``r``, and receive one chunk from each rank, in rank order.

        The chunks are the ``size`` equal parts of dimension 0.

        :param output: the tensor to write, of the shape of ``input``.
        :param input: a tensor whose dimension 0 is divisible by ``size``.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.AllToAllSingle(output, input), hints, timeout)

    def all_to_all_v_single(
        self,
        output: Given,
        input: TensorLike,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Exchange rows as :meth:`all_to_all_single` does; the number of rows may differ for each pair of ranks.

        :param output: the tensor to write: the received rows, in rank order.
        :param input: the tensor with the rows to send, in rank order.
        :param output_split_sizes: the number of rows to receive from each rank.
        :param input_split_sizes: the number of rows to send to each rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        given = integers("output_split_sizes", output_split_sizes), integers("input_split_sizes", input_split_sizes)
        return self._issue(ops.AllToAllVSingle(output, input, *given), hints, timeout)

    def scatter(
        self,
        output: Given,
        inputs: Sequence[TensorLike] | None,
        root: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Send ``inputs[r]`` from the root to each rank ``r``.

        :param output: the tensor to write on this rank; on the root it may be ``inputs[root]`` itself.
        :param inputs: one tensor per rank on the root; ignored on other ranks.
        :param root: the rank that has the inputs.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(
            ops.Scatter(output, optional("inputs", _of_root(inputs, root, self.rank)), root), hints, timeout
        )

    def gather(
        self,
        outputs: Sequence[Given] | None,
        input: TensorLike,
        root: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Given] | None]:
        """Gather every rank's tensor on the root; all tensors have the same shape.

        :param outputs: the tensors to write on the root, one per rank; ignored on other ranks.
        :param input: this rank's tensor; on the root it may be ``outputs[root]`` itself.
        :param root: the rank that gets the tensors.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``outputs``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(
            ops.Gather(optional("outputs", _of_root(outputs, root, self.rank)), input, root), hints, timeout
        )

    def gather_single(
        self,
        output: Given | None,
        input: TensorLike,
        root: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given | None]:
        """Gather every rank's tensor, in rank order, into one tensor on the root.

        :param output: the tensor to write on the root, with ``size`` times the elements of ``input``; ignored
            on other ranks.
        :param input: this rank's tensor; on the root it may be chunk ``root`` of ``output``.
        :param root: the rank that gets the tensors.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``output``.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(ops.GatherSingle(_of_root(output, root, self.rank), input, root), hints, timeout)

    def barrier(self, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        """Wait until every rank has called ``barrier``.

        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is None.
        """
        return self._issue(ops.Barrier(), hints, timeout)


def _of_root(given: Any, root: int, rank: int) -> Any:
    """Return the argument on the root. Return None on other ranks, because MPI and torch ignore the argument there."""
    return None if type(root) is int and root != rank else given
