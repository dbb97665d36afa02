"""Records of one-sided operations; ``window`` is whatever the transport made of ``WindowOpen``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aiocomms import checks
from aiocomms.checks import Group
from aiocomms.ops._base import Buffers, Op


class _Rma(Op, frozen=True, eq=False):
    family = "rma"


class WindowOpen(_Rma, frozen=True, eq=False):
    """Open ``tensor`` to the other ranks; collective; completed with the transport's handle."""

    name = kind = "new_window"
    tensor: Tensor

    def check(self, group: Group) -> None:
        checks.writable("tensor", self.tensor, group)


class WindowClose(_Rma, frozen=True, eq=False):
    """Close a window, after everybody's operations on it; collective."""

    name = kind = "close_window"
    window: Any


class Put(_Rma, frozen=True, eq=False):
    """Write ``tensor`` into rank ``dst``'s window, from element ``offset`` on."""

    name = kind = "put"
    window: Any
    tensor: Tensor
    dst: int
    offset: int = 0

    def check(self, group: Group) -> None:
        checks.readable("tensor", self.tensor, group)

    def result(self) -> Tensor:
        return self.tensor

    def reads(self) -> Buffers:
        return [("tensor", self.tensor)]


class Get(_Rma, frozen=True, eq=False):
    """Read rank ``src``'s window, from element ``offset`` on, into ``tensor``."""

    name = kind = "get"
    window: Any
    tensor: Tensor
    src: int
    offset: int = 0

    def check(self, group: Group) -> None:
        checks.writable("tensor", self.tensor, group)

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


class FetchAdd(_Rma, frozen=True, eq=False):
    """Add ``value`` to an element of rank ``dst``'s window, atomically; completed with what was there before."""

    name = kind = "fetch_add"
    window: Any
    dst: int
    offset: int
    value: int


class CompareSwap(_Rma, frozen=True, eq=False):
    """Write ``value`` if the element equals ``expected``, atomically; completed with what was there before."""

    name = kind = "compare_swap"
    window: Any
    dst: int
    offset: int
    expected: int
    value: int


class Signal(_Rma, frozen=True, eq=False):
    """Tell rank ``dst`` that all puts to it so far are there to be seen."""

    name = kind = "signal"
    window: Any
    dst: int


class WaitSignal(_Rma, frozen=True, eq=False):
    """Wait for one signal of rank ``src`` and consume it."""

    name = kind = "wait_signal"
    withdrawable = True
    window: Any
    src: int


class Flush(_Rma, frozen=True, eq=False):
    """Wait until all puts to rank ``dst`` so far, or to every rank, are there to be seen."""

    name = kind = "flush"
    window: Any
    dst: int | None = None


class MapRemoteTensor(_Rma, frozen=True, eq=False):
    """Completed with a tensor that is rank ``rank``'s window itself, for ranks that share memory."""

    name = kind = "map_remote_tensor"
    window: Any
    rank: int
