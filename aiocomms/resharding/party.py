"""The common part of both sides: state machines on each rank, and words of the side's own ranks."""

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
from aiocomms.progress.work import Work
from aiocomms.resharding.background import Background
from aiocomms.resharding.words import WORDS, Word

if TYPE_CHECKING:
    from aiocomms.progress.inflight import StartedWork
    from aiocomms.resharding.protocol import Action

LANE = b"aiocomms.resharding "


class Party(Handle, ABC):
    """A rank of a source or of a target."""

    _lane: Lane
    _peers: Mapping[Any, Peer]
    """The connections with ranks of the other side."""

    def __init__(self, comm: Communicator, what: str) -> None:
        """Begin alone.

        :param what: what it is, in words.
        """
        self._comm, self._what = comm, what
        self._rank, self._driver = comm.rank, comm._core.driver
        self._background = Background(f"{what} of '{comm.name}'")
        self._actions: deque[Action] = deque()
        self._acting = self._closed = False

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self._closed

    @abstractmethod
    def _heard(self, rank: int, word: Word) -> None:
        """Take in what a rank of this side has said, perhaps this one."""

    @abstractmethod
    def _do(self, action: Action) -> None:
        """Do what a state machine asks for."""

    @abstractmethod
    def _lost(self, error: CommError) -> None:
        """Note that the communicator is lost."""

    def _open_lane(self, token: bytes) -> None:
        """Hear from now on what the others of this side say.

        :param token: what no other lane of the communicator has.
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
            work.add_done_callback(Work.exception)  # No task waits for it at the end.
            self._heard(rank, WORDS.decode(await work, rank))

    def _act(self, actions: list[Action]) -> None:
        """Do what is asked for, and what follows from it, one after the other."""
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
        """Notify a rank of this side. That it is lost is heard from the communicator."""
        if rank == self._rank:
            self._heard(rank, word)
        else:
            with contextlib.suppress(CommError):
                self._lane.send_object(WORDS.encode(word), rank).add_done_callback(Work.exception)

    async def _leave(self) -> None:
        """Hear nothing any more."""
        self._closed = True
        await self._background.aclose()
        if hasattr(self, "_lane"):
            self._hook.remove()
            with contextlib.suppress(CommError):
                await self._lane.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close it on this rank. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:  # The other side may be waiting for what this rank will never do.
            for peer in self._peers.values():
                peer.abort(error)
        await self.aclose()


async def hear(peer: Peer) -> Word:
    """Wait for what the other end of a connection says next."""
    work = peer.recv_object(timeout=None)
    work.add_done_callback(Work.exception)  # No task waits for it at the end.
    return WORDS.decode(await work)


def say(peer: Peer, word: Word) -> None:
    """Notify the other end of a connection. That it is lost is heard from the connection."""
    with contextlib.suppress(CommError):
        peer.send_object(WORDS.encode(word), timeout=None).add_done_callback(Work.exception)
