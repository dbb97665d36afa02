"""The record that every operation is, and what the records share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from torch import Tensor

from aiocomms.ops.checks import Group

Family = Literal["p2p", "collectives", "rma"]

USER, COLLECTIVE, STREAM, STREAM_DATA, OBJECT, OBJECT_DATA, RMA_REQUEST, RMA_DATA, RMA_REPLY = range(9)
"""Channels keep the messages of the library's own protocols apart from the user's tags; at most 16."""

Buffers = list[tuple[str, Tensor]]
"""Names and tensors."""


class Op(msgspec.Struct, frozen=True, eq=False):
    """What was asked of a communicator: the base of every record."""

    name: ClassVar[str]
    kind: ClassVar[str]
    family: ClassVar[Family] = "collectives"
    withdrawable: ClassVar[bool] = False
    """Whether one rank may take it back while nothing has matched it: receives and waits for signals."""
    moves: ClassVar[bool] = False
    """Whether it may move its tensors to other memory, as the opening of a window does."""

    def check(self, group: Group) -> None:
        """Check the arguments, before anything is sent.

        :raises ArgumentError: an argument is wrong.
        :raises UnsupportedOperation: no transport can do this.
        """

    def result(self) -> Any:
        """What awaiting the work returns, unless the transport completes it with a value of its own."""
        return None

    def reads(self) -> Buffers:
        """The names and tensors that the op reads."""
        return []

    def writes(self) -> Buffers:
        """The names and tensors that the op writes."""
        return []

    def signature(self) -> tuple[object, ...]:
        """What all ranks of a collective must agree on."""
        return (self.name,)


def chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """A tensor's elements as ``size`` equal flat views, one per rank."""
    flat = tensor.view(-1)
    n = flat.numel() // size
    return [flat[i * n : (i + 1) * n] for i in range(size)]


def named(name: str, tensors: Sequence[Tensor]) -> Buffers:
    """Number the tensors of a list."""
    return [(f"{name}[{i}]", t) for i, t in enumerate(tensors)]


def shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The tensors' shapes, comparable."""
    return tuple(tuple(t.shape) for t in tensors)
