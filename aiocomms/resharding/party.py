"""The common part of sources and targets: each rank runs state machines, and sends messages to its own side."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.expected import Expected
from aiocomms.communicator.lane import Lane
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.background import Background
from aiocomms.progress.work import Work
from aiocomms.resharding.words import WORDS, Word

if TYPE_CHECKING:
    from aiocomms.progress.inflight import StartedWork
    from aiocomms.resharding.protocol import Action

LANE = b"aiocomms.resharding "


class Party(Handle, ABC):
    """A rank of a source or of a target."""

    _lane: Lane
    _peers: Mapping[Any, Peer]
    """The connections to ranks of the other side."""

    def __init__(self, comm: Communicator, what: str) -> None:
        """Start without connections.

        :param comm: the communicator of this side.
        :param what: a phrase for this object in messages.
        """
        self._comm, self._what = comm, what
        self._rank, self._driver = comm.rank, comm._core.driver
        self._background = Background(f"{what} of '{comm.name}'")
        self._actions: deque[Action] = deque()
        self._acting = self._closed = False

    @property
    def closed(self) -> bool:
        """True if this rank is closed."""
        return self._closed

    @abstractmethod
    def _heard(self, rank: int, word: Word) -> None:
        """Handle a message of a rank of this side, perhaps of this rank itself."""

    @abstractmethod
    def _do(self, action: Action) -> None:
        """Carry out an action of a state machine."""

    @abstractmethod
    def _lost(self, error: CommError) -> None:
        """Record that the communicator is lost."""

    def _open_lane(self, token: bytes) -> None:
        """Open a lane for this side's messages, and start to receive them.

        :param token: bytes that are unique among the communicator's lanes.
        """
        self._lane = self._comm.lane(LANE + token)
        self._expected = Expected(self._comm._core.in_flight, self._what)
        self._hook = self._comm.register_abort_hook(self._lost)
        for rank in [0] if self._rank else range(1, self._comm.size):
            self._background.start(partial(self._hear, rank))

    async def _hear(self, rank: int) -> None:
        while True:
            work: Work[Any] = self._lane.recv_object(rank, timeout=None)
            self._expected.note(rank, cast("StartedWork[Any]", work))
            work.add_done_callback(Work.exception)  # No task awaits the last receive.
            self._heard(rank, WORDS.decode(await work, rank))

    def _act(self, actions: list[Action]) -> None:
        """Carry out actions in order, together with actions that follow from them."""
        self._actions += actions
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._acting = False

    def _tell(self, rank: int, word: Word) -> None:
        """Send a message to a rank of this side. The communicator reports a lost rank."""
        if rank == self._rank:
            self._heard(rank, word)
        else:
            with contextlib.suppress(CommError):
                self._lane.send_object(WORDS.encode(word), rank).add_done_callback(Work.exception)

    async def _leave(self) -> None:
        """Stop receiving messages, and close the lane."""
        self._closed = True
        await self._background.aclose()
        if hasattr(self, "_lane"):
            self._hook.remove()
            with contextlib.suppress(CommError):
                await self._lane.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close this rank's part. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:  # The other side may be waiting for this rank.
            for peer in self._peers.values():
                peer.abort(error)
        await self.aclose()


async def hear(peer: Peer) -> Word:
    """Receive the next message from the other end of a connection."""
    work = peer.recv_object(timeout=None)
    work.add_done_callback(Work.exception)  # No task awaits the last receive.
    return WORDS.decode(await work)


def say(peer: Peer, word: Word) -> None:
    """Send a message to the other end of a connection.

    If the connection is lost, this call raises no error: the connection reports the loss.
    """
    with contextlib.suppress(CommError):
        peer.send_object(WORDS.encode(word), timeout=None).add_done_callback(Work.exception)
