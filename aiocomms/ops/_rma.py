"""Records of one-sided operations."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from aiocomms.errors import ArgumentError, CommClosedError, UnsupportedOperation
from aiocomms.ops import checks
from aiocomms.ops._base import Buffers, Op
from aiocomms.ops.checks import Group

ATOMIC_DTYPES = (torch.int32, torch.int64)


class WindowInfo(msgspec.Struct, eq=False):
    """One window as the records of operations on it see it; :class:`aiocomms.Window` and the transports share it."""

    handle: Any
    """The value with which the transport completed ``WindowOpen``."""
    tensor: Tensor
    """This rank's part."""
    sizes: list[int]
    """Each rank's number of elements."""
    closed: bool = False
    """Whether this rank has closed the window."""


class _Rma(Op, frozen=True, eq=False):
    family = "rma"


class _OnWindow(_Rma, frozen=True, eq=False):
    window: WindowInfo

    def _check_target(self, name: str, rank: int, group: Group, offset: int = 0, count: int = 0) -> None:
        """Check the window, the rank, and that ``count`` elements from ``offset`` on lie within that rank's part."""
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
                raise checks.wrong_type(name, value, "an int")
            if not info.min <= value <= info.max:
                raise ArgumentError(f"{name} is {value}, wanted {info.min} <= {name} <= {info.max}")


class WindowOpen(_Rma, frozen=True, eq=False):
    """Open ``tensor`` to the other ranks; collective; completed with the transport's handle."""

    name = kind = "new_window"
    moves = True
    tensor: Tensor

    def check(self, group: Group) -> None:
        checks.writable("tensor", self.tensor, group)


class WindowClose(_OnWindow, frozen=True, eq=False):
    """Close a window, after everybody's operations on it; collective."""

    name = kind = "close_window"


class Put(_OnWindow, frozen=True, eq=False):
    """Write ``tensor`` into rank ``dst``'s window, from element ``offset`` on."""

    name = kind = "put"
    tensor: Tensor
    dst: int
    offset: int = 0

    def check(self, group: Group) -> None:
        checks.readable("tensor", self.tensor, group)
        self._check_target("dst", self.dst, group, self.offset, self.tensor.numel())
        self._check_dtype(self.tensor)

    def result(self) -> Tensor:
        return self.tensor

    def reads(self) -> Buffers:
        return [("tensor", self.tensor)]


class Get(_OnWindow, frozen=True, eq=False):
    """Read rank ``src``'s window, from element ``offset`` on, into ``tensor``."""

    name = kind = "get"
    tensor: Tensor
    src: int
    offset: int = 0

    def check(self, group: Group) -> None:
        checks.writable("tensor", self.tensor, group)
        self._check_target("src", self.src, group, self.offset, self.tensor.numel())
        self._check_dtype(self.tensor)

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


class FetchAdd(_OnWindow, frozen=True, eq=False):
    """Add ``value`` to an element of rank ``dst``'s window, atomically; completed with what was there before."""

    name = kind = "fetch_add"
    dst: int
    offset: int
    value: int

    def check(self, group: Group) -> None:
        self._check_target("dst", self.dst, group, self.offset, 1)
        self._check_atomic(value=self.value)


class CompareSwap(_OnWindow, frozen=True, eq=False):
    """Write ``value`` if the element equals ``expected``, atomically; completed with what was there before."""

    name = kind = "compare_swap"
    dst: int
    offset: int
    expected: int
    value: int

    def check(self, group: Group) -> None:
        self._check_target("dst", self.dst, group, self.offset, 1)
        self._check_atomic(expected=self.expected, value=self.value)


class Signal(_OnWindow, frozen=True, eq=False):
    """Tell rank ``dst`` that all puts to it so far are there to be seen."""

    name = kind = "signal"
    dst: int

    def check(self, group: Group) -> None:
        self._check_target("dst", self.dst, group)


class WaitSignal(_OnWindow, frozen=True, eq=False):
    """Wait for one signal of rank ``src`` and consume it."""

    name = kind = "wait_signal"
    withdrawable = True
    src: int

    def check(self, group: Group) -> None:
        self._check_target("src", self.src, group)


class Flush(_OnWindow, frozen=True, eq=False):
    """Wait until all puts to rank ``dst`` so far, or to every rank, are there to be seen."""

    name = kind = "flush"
    dst: int | None = None

    def check(self, group: Group) -> None:
        self._check_target("dst", group.rank if self.dst is None else self.dst, group)


class MapRemoteTensor(_OnWindow, frozen=True, eq=False):
    """Completed with a tensor that is rank ``rank``'s window itself, for ranks that share memory."""

    name = kind = "map_remote_tensor"
    rank: int

    def check(self, group: Group) -> None:
        self._check_target("rank", self.rank, group)
