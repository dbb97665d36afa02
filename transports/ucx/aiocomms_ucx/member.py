"""The interface of the transport for its parts: rank, peers, the handing over of ops, and reports of outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.transport import Completion
from aiocomms_ucx import wire
from aiocomms_ucx._engine import Engine
from aiocomms_ucx.shared_engine import SharedEngine


class Member(Protocol):
    """One rank of a communicator, as lanes, windows and the side channel see it."""

    engine: Engine
    shared: SharedEngine
    group: int
    """The engine's number of the communicator."""
    rank: int
    size: int
    pids: list[int]
    """The process of each rank."""
    gone: set[int]
    """The ranks that have closed, or whose connection has broken."""

    @property
    def failure(self) -> CommError | None:
        """The error by which the communicator is lost; None: it is not."""

    def on_failure(self, error: CommError) -> None:
        """Report that the communicator is lost."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""

    def ends_soon(self, peer: int | None) -> bool:
        """Return whether the communicator is about to end, because a rank of this host has died or has lost it."""

    def hand_over(self, op: ops.Op, work: Completion) -> float | None:
        """Post an op to the engine at once."""

    def follow(self, work: Completion, done: bool) -> None:
        """Complete an op that was handed to the engine if it is done; else keep it until it is done."""

    def hold(self, whether: bool) -> None:
        """Keep collectives from the engine, or do so no more: they wait in Python."""

    def follow_collective(self, work: Completion, done: bool) -> None:
        """Do the same for a collective."""

    def tell_all(self, frame: Callable[[int], wire.Frame]) -> None:
        """Send all ranks a frame that is made of their number of this communicator."""


class FormingMember(Member, Protocol):
    """One rank of a communicator that forms."""

    peers: list[int]
    hosts: list[str]
    proves: bool
    """True if messages are exchanged while the first communicator forms."""
    in_place: bool
    """True if the ranks of this host read each other's large parts in place."""
    segment: int
    """Bytes of the memory that the ranks of this host share."""

    def named(self, numbers: Sequence[int]) -> None:
        """Note what the other ranks' engines call this communicator."""

    def post(self, op: ops.Op, work: Completion) -> float | None:
        """See :meth:`Transport.post`."""

    def progress(self) -> bool | None:
        """See :meth:`Transport.progress`."""

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
