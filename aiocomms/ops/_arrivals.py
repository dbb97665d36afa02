"""Records of probes, and of receives that accept a message from any of several ranks.

Transports implement :class:`Probe` and :class:`Take`. The core builds the other ops from these two ops, see
:mod:`aiocomms.lowering.arrivals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import as_int
from aiocomms.errors import ArgumentError
from aiocomms.ops import checks
from aiocomms.ops._base import USER, AsTensor, Buffers, Family, Op
from aiocomms.ops._p2p import Recv
from aiocomms.ops.checks import CheckedComm

Source = int | Sequence[int] | None
"""The source of a message: one rank, one of several ranks, or any rank."""


class Message(NamedTuple):
    """A message that a probe has found before any receive took the message."""

    src: int
    """The rank that sent the message."""
    tag: int
    """The tag of the message."""
    nbytes: int
    """The size of the message in bytes."""
    dtype: torch.dtype
    """The dtype of the tensor that was sent."""

    @property
    def numel(self) -> int:
        """The size of the message in elements of its dtype."""
        return self.nbytes // self.dtype.itemsize


class Received(NamedTuple):
    """A received message, whose tensor has the size of the message."""

    src: int
    """The rank that sent the message."""
    tensor: Tensor
    """The content of the message."""


class Probe(Op, frozen=True, eq=False):
    """The transport's op that waits until a receive from rank ``src`` would find a message.

    A probe does not receive the message. The probe's result is the value of :meth:`message`. If no message can arrive
    any more, the probe fails with the error with which a receive would fail.
    """

    name = kind = "probe"
    family: ClassVar[Family] = "p2p"
    withdrawable = True
    src: int
    tag: int = 0
    channel: int = USER
    more: bool = False
    """True if the transport must check for a message only once.

    A single check suffices if the caller posts other probes immediately after this probe, or if the caller cannot wait.
    """

    def message(self, nbytes: int, dtype: torch.dtype) -> Message:
        """Return the value with which a transport completes the probe."""
        return Message(self.src, self.tag, nbytes, dtype)


class Take(Recv, frozen=True, eq=False):
    """The transport's op that receives a message from rank ``src`` if the message has already arrived.

    A take does not wait. If no matching message has arrived, the take receives nothing, and its result is False.
    """

    withdrawable = False


class _Sourced:
    """The base class of ops that accept a message from any of several ranks."""

    __slots__ = ()

    @property
    def parts(self: Any) -> tuple[Probe, ...]:
        """The probes for which the op waits, one for each source."""
        return tuple(Probe(src, self.tag) for src in self.sources)


class _FromAny(_Sourced, Op, frozen=True, eq=False):
    family: ClassVar[Family] = "p2p"
    withdrawable = True
    sources: tuple[int, ...]
    """The ranks whose messages the op matches."""
    tag: int

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        _sources(self.sources, group)
        checks.tagged(self.tag)


class ProbeAny(_FromAny, frozen=True, eq=False):
    """The op that waits until a receive from one of the sources would find a message."""

    name = kind = "probe"


class RecvMessage(_FromAny, frozen=True, eq=False):
    """A receive of a message of any size from one of the sources, into a new tensor or into the result of ``into``."""

    name = kind = "recv_message"
    into: Callable[[Message], Tensor] | None = None

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        super().check(group)
        if self.into is not None and not callable(self.into):
            raise arguments.wrong_type("into", self.into, "a function of the message, or None")


class RecvAny(_Sourced, Op, frozen=True, eq=False):
    """A receive of a message from one of the sources into ``tensor``."""

    name = kind = "recv_any"
    family: ClassVar[Family] = "p2p"
    withdrawable = True
    tensor: AsTensor
    sources: tuple[int, ...]
    tag: int

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        checks.writable("tensor", self.tensor, group)
        _sources(self.sources, group)
        checks.tagged(self.tag)

    def writes(self) -> Buffers:
        """See :meth:`Op.writes`."""
        return [("tensor", self.tensor)]


def sources_of(src: Source, group: checks.Members, device: torch.device) -> Any:
    """Return the ranks that ``src`` names. :meth:`Op.check` checks the ranks later.

    :param src: a rank, several ranks, or None. None means all ranks on the CPU, and all other ranks on a GPU.
    """
    if src is None:
        own = device.type == "cpu"
        return tuple(rank for rank in range(group.size) if own or rank != group.rank)
    if isinstance(src, (list, tuple, range)):
        return tuple(map(as_int, src))
    one = as_int(src)
    return (one,) if type(one) is int else one


def _sources(sources: Any, group: CheckedComm) -> None:
    if not isinstance(sources, tuple):
        raise arguments.wrong_type("src", sources, "a rank as an int, a list of ranks, or None for any rank")
    for i, rank in enumerate(sources):
        checks.end("src" if len(sources) == 1 else f"src[{i}]", rank, group)
    if len(set(sources)) != len(sources):
        raise ArgumentError(f"src is {list(sources)}, wanted each rank once")
    if not sources:
        raise ArgumentError("src is [], wanted at least one rank to receive from; None means any rank")
