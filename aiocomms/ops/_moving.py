"""Records of the collectives that move data without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.errors import ArgumentError
from aiocomms.ops import checks
from aiocomms.ops._base import AsTensor, Buffers, Op, chunks, named, shapes
from aiocomms.ops.checks import CheckedComm


class _AllGather(Op, frozen=True, eq=False):
    """The kind ``all_gather``: each rank ``r`` sends its ``input`` into every rank's ``outs(size)[r]``."""

    kind = "all_gather"

    def outs(self, size: int) -> Sequence[Tensor]:
        raise NotImplementedError


class AllGather(_AllGather, frozen=True, eq=False):
    """The op in which each rank ``r`` sends its ``input`` into every rank's ``outputs[r]``.

    All tensors have the same shape.
    """

    name = "all_gather"
    equal: ClassVar[bool] = True
    outputs: tuple[Tensor, ...]
    input: AsTensor

    def check(self, group: CheckedComm) -> None:
        checks.readable("tensor", self.input, group)
        checks.listed("outputs", self.outputs, group, write=True, equal=self.equal)
        checks.same(f"outputs[{group.rank}]", self.outputs[group.rank], "tensor", self.input)
        mine = self.outputs[group.rank]
        inside = self.input.data_ptr() == mine.data_ptr()
        checks.disjoint(self.writes(), [] if inside else self.reads())

    def outs(self, size: int) -> Sequence[Tensor]:
        return self.outputs

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def reads(self) -> Buffers:
        return [("tensor", self.input)]

    def writes(self) -> Buffers:
        return named("outputs", self.outputs)

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.input.dtype, shapes(self.outputs))


class AllGatherV(AllGather, frozen=True, eq=False):
    """The op :class:`AllGather`, for tensors whose shapes may differ between ranks."""

    name = "all_gather_v"
    equal = False


class AllGatherSingle(_AllGather, frozen=True, eq=False):
    """The op in which each rank ``r`` sends its ``input`` into chunk ``r`` of every rank's ``output``.

    All chunks are equal in size.
    """

    name = "all_gather_single"
    output: AsTensor
    input: AsTensor

    def check(self, group: CheckedComm) -> None:
        checks.readable("input", self.input, group)
        checks.writable("output", self.output, group)
        checks.multiple("output", self.output, "input", self.input, group.size)
        if self.input.data_ptr() != self.output.data_ptr() + group.rank * self.input.nbytes:
            checks.apart("output", self.output, "input", self.input)

    def outs(self, size: int) -> Sequence[Tensor]:
        return chunks(self.output, size)

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.input.dtype, tuple(self.input.shape))


class _Gather(Op, frozen=True, eq=False):
    """The kind ``gather``: each rank ``r`` sends its ``input`` into the root's ``outs(size)[r]``."""

    kind = "gather"

    def outs(self, size: int) -> Sequence[Tensor]:
        raise NotImplementedError


class Gather(_Gather, frozen=True, eq=False):
    """The op in which each rank ``r`` sends its ``input`` into the root's ``outputs[r]``.

    On ranks other than the root, ``outputs`` is None.
    """

    name = "gather"
    outputs: tuple[Tensor, ...] | None
    input: AsTensor
    root: int

    def check(self, group: CheckedComm) -> None:
        checks.readable("input", self.input, group)
        checks.index("root", self.root, group)
        if group.rank != self.root:
            return
        if self.outputs is None:
            raise ArgumentError(f"outputs is None on the root {self.root}, wanted a tensor per rank")
        checks.listed("outputs", self.outputs, group, write=True, equal=True)
        checks.same("outputs[0]", self.outputs[0], "input", self.input)
        inside = self.outputs[group.rank].data_ptr() == self.input.data_ptr()
        checks.disjoint(self.writes(), [] if inside else self.reads())

    def outs(self, size: int) -> Sequence[Tensor]:
        return self.outputs or ()

    def result(self) -> list[Tensor] | None:
        return list(self.outputs) if self.outputs else None

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return named("outputs", self.outputs or ())

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.root, self.input.dtype, tuple(self.input.shape))


class GatherSingle(_Gather, frozen=True, eq=False):
    """The op in which each rank ``r`` sends its ``input`` into chunk ``r`` of the root's ``output``.

    All chunks are equal in size. On ranks other than the root, ``output`` is None.
    """

    name = "gather_single"
    output: Tensor | None
    input: AsTensor
    root: int

    def check(self, group: CheckedComm) -> None:
        checks.readable("input", self.input, group)
        checks.index("root", self.root, group)
        if group.rank != self.root:
            return
        if self.output is None:
            raise ArgumentError(f"output is None on the root {self.root}, wanted a tensor")
        checks.writable("output", self.output, group)
        checks.multiple("output", self.output, "input", self.input, group.size)
        if self.input.data_ptr() != self.output.data_ptr() + group.rank * self.input.nbytes:
            checks.apart("output", self.output, "input", self.input)

    def outs(self, size: int) -> Sequence[Tensor]:
        return () if self.output is None else chunks(self.output, size)

    def result(self) -> Tensor | None:
        return self.output

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return [] if self.output is None else [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.root, self.input.dtype, tuple(self.input.shape))


class Scatter(Op, frozen=True, eq=False):
    """The op in which the root sends its ``inputs[r]`` into each rank ``r``'s ``output``.

    On ranks other than the root, ``inputs`` is None.
    """

    name = kind = "scatter"
    output: AsTensor
    inputs: tuple[Tensor, ...] | None
    root: int

    def check(self, group: CheckedComm) -> None:
        checks.writable("output", self.output, group)
        checks.index("root", self.root, group)
        if group.rank != self.root:
            return
        if self.inputs is None:
            raise ArgumentError(f"inputs is None on the root {self.root}, wanted a tensor per rank")
        checks.listed("inputs", self.inputs, group, write=False, equal=True)
        checks.same("inputs[0]", self.inputs[0], "output", self.output)
        inside = self.inputs[group.rank].data_ptr() == self.output.data_ptr()
        checks.disjoint([] if inside else self.writes(), self.reads())

    def ins(self, size: int) -> Sequence[Tensor]:
        """Return one chunk per rank on the root, and an empty sequence on other ranks."""
        return self.inputs or ()

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return named("inputs", self.inputs or ())

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.root, self.output.dtype, tuple(self.output.shape))


class _AllToAll(Op, frozen=True, eq=False):
    """The kind ``all_to_all``: each rank ``r`` sends its ``ins(size)[s]`` into rank ``s``'s ``outs(size)[r]``."""

    kind = "all_to_all"

    def ins(self, size: int) -> Sequence[Tensor]:
        raise NotImplementedError

    def outs(self, size: int) -> Sequence[Tensor]:
        raise NotImplementedError


class AllToAll(_AllToAll, frozen=True, eq=False):
    """The op in which each rank ``r`` sends its ``inputs[s]`` into rank ``s``'s ``outputs[r]``.

    The shape may differ between pairs of ranks.
    """

    name = "all_to_all"
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]

    def check(self, group: CheckedComm) -> None:
        checks.listed("outputs", self.outputs, group, write=True, equal=False)
        checks.listed("inputs", self.inputs, group, write=False, equal=False)
        mine = self.outputs[group.rank]
        checks.same(f"outputs[{group.rank}]", mine, f"inputs[{group.rank}]", self.inputs[group.rank])
        checks.disjoint(self.writes(), self.reads())

    def ins(self, size: int) -> Sequence[Tensor]:
        return self.inputs

    def outs(self, size: int) -> Sequence[Tensor]:
        return self.outputs

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def reads(self) -> Buffers:
        return named("inputs", self.inputs)

    def writes(self) -> Buffers:
        return named("outputs", self.outputs)

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.inputs[0].dtype)


class AllToAllSingle(_AllToAll, frozen=True, eq=False):
    """The op in which each rank ``r`` sends chunk ``s`` of its ``input`` into chunk ``r`` of rank ``s``'s ``output``.

    All chunks are equal in size.
    """

    name = "all_to_all_single"
    output: AsTensor
    input: AsTensor

    def check(self, group: CheckedComm) -> None:
        checks.writable("output", self.output, group)
        checks.readable("input", self.input, group)
        checks.same("output", self.output, "input", self.input)
        if not self.input.dim() or self.input.shape[0] % group.size:
            raise ArgumentError(
                f"input is {arguments.describe(self.input)}, wanted dimension 0 divisible by the {group.size} ranks"
            )
        checks.apart("output", self.output, "input", self.input)

    def ins(self, size: int) -> Sequence[Tensor]:
        return chunks(self.input, size)

    def outs(self, size: int) -> Sequence[Tensor]:
        return chunks(self.output, size)

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.input.dtype, tuple(self.input.shape))


class AllToAllVSingle(_AllToAll, frozen=True, eq=False):
    """The op :class:`AllToAllSingle`, except that the number of rows in a chunk may differ between pairs of ranks."""

    name = "all_to_all_v_single"
    output: AsTensor
    input: AsTensor
    output_split_sizes: tuple[int, ...]
    input_split_sizes: tuple[int, ...]

    def check(self, group: CheckedComm) -> None:
        checks.writable("output", self.output, group)
        checks.readable("input", self.input, group)
        checks.same("output", self.output, "input", self.input, shape=False)
        for name, tensor in (("output", self.output), ("input", self.input)):
            if not tensor.dim():
                raise ArgumentError(f"{name} has no dimension to split, wanted at least one")
        if self.output.shape[1:] != self.input.shape[1:]:
            raise ArgumentError(
                f"output has rows of shape {list(self.output.shape[1:])}, "
                f"wanted {list(self.input.shape[1:])} as in input"
            )
        checks.splits("output_split_sizes", self.output_split_sizes, self.output.shape[0], group)
        checks.splits("input_split_sizes", self.input_split_sizes, self.input.shape[0], group)
        checks.apart("output", self.output, "input", self.input)

    def ins(self, size: int) -> Sequence[Tensor]:
        return torch.split(self.input, list(self.input_split_sizes))

    def outs(self, size: int) -> Sequence[Tensor]:
        return torch.split(self.output, list(self.output_split_sizes))

    def result(self) -> Tensor:
        return self.output

    def reads(self) -> Buffers:
        return [("input", self.input)]

    def writes(self) -> Buffers:
        return [("output", self.output)]

    def signature(self) -> tuple[object, ...]:
        return (self.name, self.input.dtype, tuple(self.input.shape[1:]))
