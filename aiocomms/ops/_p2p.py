"""Records of the point-to-point operations: ``send``, ``recv`` and ``batch``."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from aiocomms.ops import checks
from aiocomms.ops._base import USER, AsTensor, Buffers, Family, Op
from aiocomms.ops.checks import CheckedComm


class Send(Op, frozen=True, eq=False):
    """A send of ``tensor`` to rank ``dst``.

    A receive matches a message with the same source, channel and tag. If several messages and receives match, the
    transport pairs them in the order in which they were posted.

    :param tag: a signed 64-bit integer. Tags in the user's messages have only 32 bits.
    :param channel: the number of the channel, 0 to 15. Each channel is for messages of one purpose.
    """

    name = kind = "send"
    family: ClassVar[Family] = "p2p"
    sends = True
    tensor: AsTensor
    dst: int
    tag: int = 0
    channel: int = USER

    def check(self, group: CheckedComm) -> None:
        checks.readable("tensor", self.tensor, group)
        checks.end("dst", self.dst, group)
        checks.tagged(self.tag)

    def result(self) -> Tensor:
        return self.tensor

    def reads(self) -> Buffers:
        return [("tensor", self.tensor)]


class Recv(Op, frozen=True, eq=False):
    """A receive of a message from rank ``src`` into ``tensor``."""

    name = kind = "recv"
    family: ClassVar[Family] = "p2p"
    withdrawable = True
    tensor: AsTensor
    src: int
    tag: int = 0
    channel: int = USER

    def check(self, group: CheckedComm) -> None:
        checks.writable("tensor", self.tensor, group)
        checks.end("src", self.src, group)
        checks.tagged(self.tag)

    def result(self) -> Tensor:
        return self.tensor

    def writes(self) -> Buffers:
        return [("tensor", self.tensor)]


class Batch(Op, frozen=True, eq=False):
    """Sends and receives that start together. The transport may match these operations in any order."""

    name = kind = "batch"
    family: ClassVar[Family] = "p2p"
    parts: tuple[Send | Recv, ...]

    def check(self, group: CheckedComm) -> None:
        for part in self.parts:
            part.check(group)
        checks.disjoint(self.writes(), self.reads())

    def result(self) -> list[Tensor]:
        return [part.tensor for part in self.parts]

    def reads(self) -> Buffers:
        return [(f"part {i}'s tensor", p.tensor) for i, p in enumerate(self.parts) if isinstance(p, Send)]

    def writes(self) -> Buffers:
        return [(f"part {i}'s tensor", p.tensor) for i, p in enumerate(self.parts) if isinstance(p, Recv)]
