"""The interface of the transport for its parts: this rank, the peers, posts to the engine, and outcomes."""

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
    """The interface of one rank for lanes, windows and the side channel."""

    engine: Engine
    shared: SharedEngine
    group: int
    """The communicator's number in the engine."""
    rank: int
    size: int
    pids: list[int]
    """The process id of each rank."""
    gone: set[int]
    """The ranks that have closed, or whose connection has broken."""

    @property
    def failure(self) -> CommError | None:
        """The error that has lost the communicator, or None."""

    def on_failure(self, error: CommError) -> None:
        """Report that the communicator is lost."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""

    def ends_soon(self, peer: int | None) -> bool:
        """Return whether the communicator will soon end, because a peer on this host has died or lost it."""

    def hand_over(self, op: ops.Op, work: Completion) -> float | None:
        """Post an op to the engine at once."""

    def follow(self, work: Completion, done: bool) -> None:
        """Complete an op that the engine has got, if the op is done; otherwise keep the op until it is done."""

    def hold(self, whether: bool) -> None:
        """Keep new collectives in Python, or pass collectives to the engine again."""

    def follow_collective(self, work: Completion, done: bool) -> None:
        """Do the same as :meth:`follow` for a collective, which gets a number."""

    def tell_all(self, frame: Callable[[int], wire.Frame]) -> None:
        """Send a frame to all ranks.

        ``frame`` makes the frame for a rank from that rank's number of this communicator.
        """


class FormingMember(Member, Protocol):
    """The interface of one rank while its communicator forms."""

    peers: list[int]
    hosts: list[str]
    proves: bool
    """True if ranks exchange messages while an engine's first communicator forms."""
    in_place: bool
    """True if the ranks of this host read large parts directly from other ranks' tensors."""
    segment: int
    """The size in bytes of the memory that the ranks of this host share."""

    def named(self, numbers: Sequence[int]) -> None:
        """Store the number that each rank's engine gives to this communicator."""

    def post(self, op: ops.Op, work: Completion) -> float | None:
        """See :meth:`Transport.post`."""

    def progress(self) -> bool | None:
        """See :meth:`Transport.progress`."""

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
