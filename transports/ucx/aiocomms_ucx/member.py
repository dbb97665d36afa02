"""The interface through which the transport's parts use the transport of one rank.

The interface covers this rank, its peers, posts to the engine, and the outcomes of ops.
"""

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
    """The attributes and methods of a rank's transport that lanes, windows and the side channel use."""

    engine: Engine
    shared: SharedEngine
    group: int
    """The communicator's number in the engine."""
    rank: int
    size: int
    pids: list[int]
    """The process id of each rank."""
    gone: set[int]
    """The ranks that have closed the communicator, and the ranks to which the connection has broken."""

    @property
    def failure(self) -> CommError | None:
        """The error because of which the communicator is lost; None if the communicator is not lost."""

    def on_failure(self, error: CommError) -> None:
        """Report that the communicator is lost."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""

    def ends_soon(self, peer: int | None) -> bool:
        """Return whether the communicator will soon end because of a peer on this host.

        The communicator ends soon if that peer has died or has lost the communicator.
        """

    def hand_over(self, op: ops.Op, work: Completion) -> float | None:
        """Post an op to the engine at once."""

    def follow(self, work: Completion, done: bool) -> None:
        """Complete an op of the engine if the op is already done.

        Otherwise, keep a reference to the op until the op is done.
        """

    def hold(self, whether: bool) -> None:
        """Choose whether shortcuts (native code that starts ops) pass new collectives to Python code or to the engine.

        :param whether: True for Python code, False for the engine.
        """

    def follow_collective(self, work: Completion, done: bool) -> None:
        """Give a number to a collective of the engine, and then handle the collective as in :meth:`follow`."""

    def tell_all(self, frame: Callable[[int], wire.Frame]) -> None:
        """Send a frame to all ranks.

        :param frame: a function that makes the frame for one rank. The argument is the communicator's number in the
            engine of that rank.
        """


class FormingMember(Member, Protocol):
    """The attributes and methods of a rank's transport that are used while its communicator forms."""

    peers: list[int]
    hosts: list[str]
    proves: bool
    """True if ranks exchange test messages while an engine's first communicator forms."""
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
