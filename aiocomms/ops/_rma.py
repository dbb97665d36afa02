"""Records of the one-sided operations (RMA), and the state of a window that these records share."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.errors import ArgumentError, CommClosedError, UnsupportedOperation
from aiocomms.ops import buffers, checks
from aiocomms.ops._base import AsTensor, Buffers, Family, Op
from aiocomms.ops.checks import CheckedComm
from aiocomms.ops.modes import unaffected

ATOMIC_DTYPES = (torch.int32, torch.int64)


class WindowInfo(msgspec.Struct, eq=False, weakref=True):
    """The state of one window, shared by :class:`aiocomms.Window`, the records of operations and the transports."""

    handle: Any
    """The result of the op ``WindowOpen``: an object by which the transport identifies the window."""
    tensor: Tensor
    """This rank's part of the window."""
    sizes: list[int]
    """The number of elements in each rank's part."""
    closed: bool = False
    """True once this rank has closed the window."""
    name: str = ""
    """The window's name in reports, such as ``window 2``; empty for a window of the library itself."""


class _Rma(Op, frozen=True, eq=False):
    family: ClassVar[Family] = "rma"


class _OnWindow(_Rma, frozen=True, eq=False):
    window: WindowInfo

    def _check_target(self, name: str, rank: int, group: CheckedComm, offset: int = 0, count: int = 0) -> None:
        """Check that the window is open, and that the rank exists and has ``count`` elements from ``offset`` on."""
        if self.window.closed:
            raise CommClosedError("the window is closed")
        checks.index(name, rank, group)
        checks.offset(offset)
        if offset + count > self.window.sizes[rank]:
            raise ArgumentError(
                f"offset is {offset} for {count} elements, and the window of rank {rank} has {self.window.sizes[rank]}"
            )

    def _check_dtype(self, tensor: Tensor) -> None:
        if tensor.dtype != self.window.tensor.dtype:
            raise ArgumentError(f"tensor has dtype {tensor.dtype}, wanted {self.window.tensor.dtype}, the window's")

    def _check_atomic(self, **values: int) -> None:
        dtype = self.window.tensor.dtype
        if dtype not in ATOMIC_DTYPES:
            raise UnsupportedOperation(f"atomics need a window of int32 or int64; this one's is {dtype}")
        info = torch.iinfo(dtype)
        for name, value in values.items():
            if type(value) is not int:
                raise arguments.wrong_type(name, value, "an int")
            if not info.min <= value <= info.max:
                raise ArgumentError(f"{name} is {value}, wanted {info.min} <= {name} <= {info.max}")


class WindowOpen(_Rma, frozen=True, eq=False):
    """The opening of ``tensor`` to the other ranks. Collective.

    The transport completes the op with the transport's own handle of the window.

    The handle's attribute ``mapped`` holds the ranks whose parts ``MapRemoteTensor`` can map. If the handle has no such
    attribute, ``MapRemoteTensor`` can map no part.
    """

    name = kind = "new_window"
    moves = True
    tensor: AsTensor

    def check(self, group: CheckedComm) -> None:
        tensor = self.tensor
        checks.writable("tensor", tensor, group)
        # A processor changes a value that lies across two words in two steps. On aarch64 it ends the process.
        if tensor.dtype in ATOMIC_DTYPES and tensor.data_ptr() % tensor.element_size():
            raise ArgumentError(
                f"tensor begins at {tensor.data_ptr():#x}, wanted a multiple of its {tensor.element_size()} bytes "
                "an element, or there can be no atomics; give a clone()"
            )


class WindowClose(_OnWindow, frozen=True, eq=False):
    """The closing of a window, after all ranks' operations on the window have ended. Collective."""

    name = kind = "close_window"


class Put(_OnWindow, frozen=True, eq=False):
    """A write of ``tensor`` into rank ``dst``'s part of the window, from element ``offset`` on."""

    name = kind = "put"
    tensor: AsTensor
    dst: int
    offset: int = 0

    def check(self, group: CheckedComm) -> None:
        checks.readable("tensor", self.tensor, group)
        self._check_target("dst", self.dst, group, self.offset, self.tensor.numel())
        self._check_dtype(self.tensor)

    def result(self) -> Tensor:
        return self.tensor

    def reads(self) -> Buffers:
        return [("tensor", self.tensor)]


class PutSignal(Put, frozen=True, eq=False):
    """A :class:`Put`, followed by a :class:`Signal`."""

    name = kind = "put_signal"
    if TYPE_CHECKING:  # mypy takes no descriptor from a base
        tensor: AsTensor


class Get(_OnWindow, frozen=True, eq=False):
    """A read of rank ``src``'s part of the window, from element ``offset`` on, into ``tensor``."""

    name = kind = "get"
    tensor: AsTensor
    src: int
    offset: int = 0

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        self._check_target("src", self.src, group, self.offset, self.tensor.numel())
        self._check_dtype(self.tensor)

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


NOTHING = buffers.empty(0, dtype=torch.int64, device="cpu")


@unaffected
def places(name: str, values: object) -> Tensor:
    """Return the indices of the runs' first elements as a one-dimensional int64 tensor on the CPU.

    :param name: the argument's name, for the error.
    :param values: a list or tuple of ints, or a one-dimensional int64 tensor on the CPU, which is returned unchanged.
    :raises ArgumentTypeError: ``values`` has another type.
    """
    if isinstance(values, Tensor) and values.dtype is torch.int64 and values.dim() == 1 and values.is_contiguous():
        if values.is_cpu:
            return values
    elif isinstance(values, (list, tuple)):
        try:  # torch.tensor() takes ten times as long.
            return torch.frombuffer(array("q", values), dtype=torch.int64) if values else NOTHING
        except (TypeError, OverflowError):
            pass
    raise arguments.wrong_type(name, values, "ints, in elements, as a list or an int64 tensor of one dimension")


@unaffected
def _ends(values: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of some numbers."""
    if not len(values):
        return 0, 0
    least, greatest = torch.aminmax(values)
    return int(least), int(greatest)


class _Runs(_OnWindow, frozen=True, eq=False):
    """The base class of ops on runs (sequences of consecutive elements). All runs of an op have the same length.

    Each run has its own source offset and its own target offset.
    """

    def _check_runs(self, op: PutV | GetV, rank_name: str, rank: int, group: CheckedComm) -> None:
        self._check_target(rank_name, rank, group)
        self._check_dtype(op.tensor)
        if type(op.count) is not int or not 0 <= op.count < 2**63:
            raise ArgumentError(
                f"count is {arguments.short(op.count)}, wanted the elements of a run: an int from 0 to 2**63 - 1"
            )
        places = (("offsets", op.offsets, self.window.sizes[rank]), ("starts", op.starts, op.tensor.numel()))
        for name, values, room in places:
            first, last = _ends(values)
            if op.count > room and len(values):
                raise ArgumentError(f"count is {op.count}, wanted at most {room}, as {name} are of {room} elements")
            if not 0 <= first <= last <= room - op.count and len(values):
                raise ArgumentError(
                    f"{name} are from {first} to {last} for runs of {op.count} elements, wanted 0 to "
                    f"{room - op.count}, as there are {room} elements"
                )
        if len(op.offsets) != len(op.starts):
            raise ArgumentError(f"offsets are {len(op.offsets)} and starts {len(op.starts)}, wanted as many of both")


class PutV(_Runs, frozen=True, eq=False):
    """A :class:`Put` that writes several runs, each of ``count`` consecutive elements.

    Run ``i`` is copied from ``starts[i]`` in ``tensor`` to ``offsets[i]`` in rank ``dst``'s part of the window.
    """

    name = kind = "put_v"
    tensor: AsTensor
    dst: int
    offsets: Tensor
    """The index of each run's first element in rank ``dst``'s part of the window; see :func:`places`."""
    starts: Tensor
    """The index of each run's first element in ``tensor``."""
    count: int
    """The number of elements in a run."""

    def check(self, group: CheckedComm) -> None:
        checks.readable("tensor", self.tensor, group)
        self._check_runs(self, "dst", self.dst, group)

    def result(self) -> Tensor:
        return self.tensor

    def reads(self) -> Buffers:
        return [("tensor", self.tensor)]


class GetV(_Runs, frozen=True, eq=False):
    """A :class:`Get` that reads several runs, each of ``count`` consecutive elements.

    Run ``i`` is copied from ``offsets[i]`` in rank ``src``'s part of the window to ``starts[i]`` in ``tensor``.
    """

    name = kind = "get_v"
    tensor: AsTensor
    src: int
    offsets: Tensor
    """The index of each run's first element in rank ``src``'s part of the window; see :func:`places`."""
    starts: Tensor
    """The index of each run's first element in ``tensor``."""
    count: int
    """The number of elements in a run."""

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        self._check_runs(self, "src", self.src, group)

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


class FetchAdd(_OnWindow, frozen=True, eq=False):
    """An atomic addition of ``value`` to an element of rank ``dst``'s part of the window.

    The result is the element's old value.
    """

    name = kind = "fetch_add"
    dst: int
    offset: int
    value: int

    def check(self, group: CheckedComm) -> None:
        self._check_target("dst", self.dst, group, self.offset, 1)
        self._check_atomic(value=self.value)


class CompareSwap(_OnWindow, frozen=True, eq=False):
    """An atomic write of ``value`` to an element of rank ``dst``'s window part, if the element equals ``expected``.

    The result is the element's old value.
    """

    name = kind = "compare_swap"
    dst: int
    offset: int
    expected: int
    value: int

    def check(self, group: CheckedComm) -> None:
        self._check_target("dst", self.dst, group, self.offset, 1)
        self._check_atomic(expected=self.expected, value=self.value)


class Signal(_OnWindow, frozen=True, eq=False):
    """A notice to rank ``dst`` that all earlier puts of this rank to ``dst`` are visible in the memory of ``dst``."""

    name = kind = "signal"
    dst: int

    def check(self, group: CheckedComm) -> None:
        self._check_target("dst", self.dst, group)


class WaitSignal(_OnWindow, frozen=True, eq=False):
    """A wait for one signal of rank ``src``. The wait consumes the signal."""

    name = kind = "wait_signal"
    withdrawable = True
    src: int

    def check(self, group: CheckedComm) -> None:
        self._check_target("src", self.src, group)


class Flush(_OnWindow, frozen=True, eq=False):
    """A wait until all earlier puts of this rank are visible at rank ``dst``, or at every rank if ``dst`` is None."""

    name = kind = "flush"
    dst: int | None = None

    def check(self, group: CheckedComm) -> None:
        self._check_target("dst", group.rank if self.dst is None else self.dst, group)


class MapRemoteTensor(_OnWindow, frozen=True, eq=False):
    """The mapping of rank ``rank``'s part of the window. The result is a tensor in the shared memory of that part."""

    name = kind = "map_remote_tensor"
    rank: int

    def check(self, group: CheckedComm) -> None:
        self._check_target("rank", self.rank, group)
