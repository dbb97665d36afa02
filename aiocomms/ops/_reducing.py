"""Records of the reducing collectives, of ``broadcast`` and of ``barrier``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from aiocomms.errors import UnsupportedOperation
from aiocomms.ops import checks
from aiocomms.ops._base import AsTensor, Buffers, Op, chunks, named, shapes
from aiocomms.ops.checks import CheckedComm
from aiocomms.ops.reductions import SUPPORTED, ReduceOp


def _reducible(op: ReduceOp, tensor: Tensor) -> None:
    """Check that an operator is defined for a tensor's dtype.

    ``op`` is already a :class:`ReduceOp`. The method that created the record has parsed the caller's argument.
    """
    if tensor.dtype not in SUPPORTED[op.kind]:
        wanted = ", ".join(sorted(map(str, SUPPORTED[op.kind])))
        raise UnsupportedOperation(f"op {op} is not defined for dtype {tensor.dtype}, wanted one of {wanted}")


class InPlace(Op, frozen=True, eq=False):
    """The base class of ops that read and write one ``tensor``. The root of a broadcast only reads the tensor."""

    tensor: AsTensor

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


class _OnAll(InPlace, frozen=True, eq=False):
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor
    op: ReduceOp

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        _reducible(self.op, self.tensor)

    def signature(self) -> tuple[object, ...]:
        return (self.name, str(self.op), self.tensor.dtype, tuple(self.tensor.shape))


class AllReduce(_OnAll, frozen=True, eq=False):
    """The op in which every rank's ``tensor`` receives the reduction of all ranks' tensors."""

    name = kind = "all_reduce"
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor


class Scan(_OnAll, frozen=True, eq=False):
    """The op in which rank ``r``'s ``tensor`` receives the reduction of the tensors of ranks 0 to ``r``."""

    name = kind = "scan"
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor
    own: ClassVar[bool] = True
    """True if the reduction on a rank includes the rank's own tensor."""


class Exscan(Scan, frozen=True, eq=False):
    """The op in which rank ``r``'s ``tensor`` receives the reduction of the tensors of ranks 0 to ``r - 1``.

    Rank 0's ``tensor`` receives the reduction of no tensors: the operator's neutral value, or NaN for AVG.
    """

    name = kind = "exscan"
    own = False


class Reduce(InPlace, frozen=True, eq=False):
    """The op in which the root's ``tensor`` receives the reduction of all ranks' tensors.

    The tensors of other ranks do not change.
    """

    name = kind = "reduce"
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor
    root: int
    op: ReduceOp

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        checks.index("root", self.root, group)
        _reducible(self.op, self.tensor)

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.root, str(self.op), self.tensor.dtype, tuple(self.tensor.shape))


class Broadcast(InPlace, frozen=True, eq=False):
    """The op in which every rank's ``tensor`` receives a copy of the root's ``tensor``."""

    name = kind = "broadcast"
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor
    root: int

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        checks.index("root", self.root, group)

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.root, self.tensor.dtype, tuple(self.tensor.shape))


class Barrier(Op, frozen=True, eq=False):
    """The op that completes on a rank only after every rank has called it."""

    name = kind = "barrier"


class _ReduceScatter(Op, frozen=True, eq=False):
    """The kind ``reduce_scatter``: rank ``r``'s ``output`` receives the reduction of all ranks' ``ins(size)[r]``."""

    kind = "reduce_scatter"

    def ins(self, size: int) -> Sequence[Tensor]:
        raise NotImplementedError


class ReduceScatter(_ReduceScatter, frozen=True, eq=False):
    """The op in which rank ``r``'s ``output`` receives the reduction of all ranks' ``inputs[r]``.

    All tensors have the same shape.
    """

    name = "reduce_scatter"
    equal: ClassVar[bool] = True
    output: AsTensor
    inputs: tuple[Tensor, ...]
    op: ReduceOp

    def check(self, group: CheckedComm) -> None:
        checks.writable("output", self.output, group)
        checks.listed("inputs", self.inputs, group, write=False, equal=self.equal)
        checks.same(f"inputs[{group.rank}]", self.inputs[group.rank], "output", self.output)
        _reducible(self.op, self.output)
        inside = self.inputs[group.rank].data_ptr() == self.output.data_ptr()
        checks.disjoint([] if inside else self.writes(), self.reads())

    def ins(self, size: int) -> Sequence[Tensor]:
        return self.inputs

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return named("inputs", self.inputs)

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, str(self.op), self.output.dtype, shapes(self.inputs))


class ReduceScatterV(ReduceScatter, frozen=True, eq=False):
    """The op :class:`ReduceScatter`, for tensors whose shapes may differ between ranks."""

    name = "reduce_scatter_v"
    equal = False


class ReduceScatterSingle(_ReduceScatter, frozen=True, eq=False):
    """The op in which rank ``r``'s ``output`` receives the reduction of chunk ``r`` of all ranks' ``input``."""

    name = "reduce_scatter_single"
    output: AsTensor
    input: AsTensor
    op: ReduceOp

    def check(self, group: CheckedComm) -> None:
        checks.writable("output", self.output, group)
        checks.readable("input", self.input, group)
        checks.multiple("input", self.input, "output", self.output, group.size)
        _reducible(self.op, self.output)
        if self.output.data_ptr() != self.input.data_ptr() + group.rank * self.output.nbytes:
            checks.apart("output", self.output, "input", self.input)

    def ins(self, size: int) -> Sequence[Tensor]:
        return chunks(self.input, size)

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, str(self.op), self.output.dtype, tuple(self.input.shape))
