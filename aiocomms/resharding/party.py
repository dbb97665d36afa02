"""The base class of sources and targets.

Each rank runs state machines, and exchanges messages with the ranks of its own side.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakKeyDictionary

import anyio

from aiocomms.arguments import TIMEOUT_MAX, OpTimeout, op_deadline, wrong_type
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.expected import Expected
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.endpoints.endpoint import Endpoint
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import ArgumentError, CommError, MoveLostError, as_reason
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.background import Background
from aiocomms.progress.driver import Bell, Promise
from aiocomms.progress.work import Work
from aiocomms.resharding.words import WORDS, RankClosed, Word

if TYPE_CHECKING:
    from aiocomms.progress.inflight import StartedWork
    from aiocomms.resharding.protocol import Action, Side

Left = Callable[[], float | None]
"""A function that returns the seconds until a deadline, or None if there is no deadline."""
_SOON = 0.001
"""The number of seconds that a :data:`Left` function returns after the deadline."""
_opened: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
"""The number of sources and targets opened so far on each communicator. All ranks count the same number."""


class Party(Handle, ABC):
    """A rank of a source or of a target.

    In each side, rank 0 exchanges messages with all other ranks, in a separate lane. Each rank has one receive pending
    for each rank with which it exchanges messages. A send does not end before the other rank receives the message. So a
    closed rank continues to receive the other rank's messages, and ignores them, until the other rank is closed.
    """

    _peers: Mapping[Any, Peer]
    """The connections to the ranks of the other side."""

    def __init__(self, comm: Communicator, side: Side) -> None:
        """Start without connections.

        :param comm: the communicator of this side.
        """
        self._comm, self._side = comm, side
        self._rank, self._driver = comm.rank, comm._core.driver
        self._background = Background(f"a {side} of '{comm.name}'")
        self._lasting = Background(f"a {side} of '{comm.name}'")
        """The tasks that continue after this rank is closed, because other ranks wait for these tasks."""
        number = _opened[comm] = _opened.get(comm, 0) + 1
        self._lane = comm.lane(b"aiocomms.resharding %d" % number)
        self._actions: deque[Action] = deque()
        self._acting = self._closed = self._abandoned = self._hears = False
        self._calling: anyio.CancelScope | None = None
        """The cancel scope around a function that :meth:`_together` runs on this rank; None while no function runs."""
        self._called = Bell(self._driver)

    @property
    def closed(self) -> bool:
        """True if this rank is closed."""
        return self._closed

    @abstractmethod
    def _heard(self, rank: int, word: Word) -> None:
        """Handle a message of a rank of this side. The sender may be this rank itself."""

    @abstractmethod
    def _do(self, action: Action) -> None:
        """Carry out an action of a state machine."""

    @abstractmethod
    def _lost(self, error: CommError) -> None:
        """Record that the communicator is lost."""

    async def _run_open(self, meet: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``meet``. In ``meet``, all ranks make the same calls of :meth:`_together`.

        If the task is cancelled, ``meet`` continues in the background, because the other ranks wait for this rank.
        """
        over, errors = Promise(self._driver), list[Exception]()

        async def run() -> None:
            try:
                await meet()
            except Exception as error:
                errors.append(error)
            finally:
                over.set()

        async def close_after() -> None:
            await over
            await self.aclose()

        self._lasting.start(run)
        try:
            await over
        except BaseException:
            self._abandoned = True
            self._lasting.start(close_after)
            await shielded(self._stop_call)
            raise
        if errors:
            await self.aclose()
            raise errors.pop()

    async def _stop_call(self) -> None:
        """Cancel the function that :meth:`_together` runs on this rank, and free this rank's connections and memory."""
        while self._calling is not None:
            self._calling.cancel()
            await self._called
        await self._free()

    async def _free(self) -> None:
        """Release this rank's connections and memory. Idempotent."""
        for peer in list(self._peers.values()):
            await peer.aclose()

    async def _meet_sides(self, timeout: OpTimeout) -> None:
        """Wait for the other ranks, and raise an error if some ranks open a source and others a target.

        Without this check, a source rank would wait for the target, and the target rank would wait for the source rank.
        """
        for rank, side in enumerate(await self._lane.all_gather_object(self._side, timeout=timeout)):
            if side != self._side:
                text = f"comm opens a {self._side} on this rank, wanted a {side} as on rank {rank}"
                raise ArgumentError(text, comm=self._comm.name, rank=self._rank)

    async def _together(self, call: Callable[[Left], Coroutine[Any, Any, Any]], timeout: OpTimeout) -> list[Any]:
        """Call a function on each rank, and return the results of all ranks.

        :param call: the function. If it is not finished at the deadline, it must raise an error. After the function,
            each rank waits for the results of the other ranks, for at most ``timeout`` plus 5 seconds.
        :raises MoveLostError: the function has failed on another rank.
        :raises Exception: the function has failed on this rank. The other ranks then raise MoveLostError.
        """
        seconds = op_deadline(timeout, self._comm._seconds)
        ends = clock.now() + seconds
        result, failures = await self._outcome(
            call(lambda: None if ends == math.inf else max(ends - clock.now(), _SOON))
        )
        why = as_reason(failures[0]) if failures else ""
        longer = None if ends == math.inf else min(seconds + CLOSE_GRACE, TIMEOUT_MAX)
        told = await self._lane.all_gather_object((why, result), timeout=longer)
        if failures:
            raise failures.pop()
        for rank, (why, _) in enumerate(told):
            if why:
                raise MoveLostError(f"{self._side} rank {rank}: {why}", comm=self._comm.name, rank=self._rank)
        return [result for _, result in told]

    async def _outcome(self, call: Coroutine[Any, Any, Any]) -> tuple[Any, list[Exception]]:
        """Run a function for :meth:`_together`, and return the result and a list.

        The list contains the function's error; if there is no error, the list is empty.
        """
        failures: list[Exception] = [CommError("its task was cancelled")]  # An error in a variable keeps its frames.
        result = None
        try:
            with anyio.CancelScope() as self._calling:
                if self._abandoned:
                    self._calling.cancel()
                try:
                    result = await call
                    failures.clear()
                except Exception as error:
                    failures[0] = error
        finally:  # The event loop may end, and cancel all tasks.
            self._calling = None
            self._called.ring()
        return result, failures

    def _others(self) -> Iterable[int]:
        """Return the ranks of this side with which this rank exchanges messages."""
        return [0] if self._rank else range(1, self._comm.size)

    def _start_hearing(self) -> None:
        """Start to receive this side's messages."""
        self._expected = Expected(self._comm._core.in_flight, f"a {self._side}")
        self._hook = self._comm.register_abort_hook(self._lost)
        self._hears = True
        for rank in self._others():
            self._lasting.start(partial(self._hear, rank))

    async def _hear(self, rank: int) -> None:
        word: Word | None = None
        while not isinstance(word, RankClosed):
            work: Work[Any] = self._lane.recv_object(rank, timeout=None)
            self._expected.note(rank, cast("StartedWork[Any]", work))
            work.add_done_callback(Work.exception)  # No task awaits the last receive.
            word = WORDS.decode(await work, rank)
            if not self._closed:
                self._heard(rank, word)

    def _act(self, actions: list[Action]) -> None:
        """Carry out actions in order, and then the further actions that result from these actions."""
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
        """Send a message to a rank of this side. If the rank is lost, the communicator reports the loss.

        The message itself has no deadline, because the deadline of the move limits the wait.
        """
        if rank == self._rank:
            self._heard(rank, word)
        elif self._hears:
            with contextlib.suppress(CommError):
                self._lane.send_object(WORDS.encode(word), rank, timeout=None).add_done_callback(Work.exception)

    async def _leave(self) -> None:
        """End this rank's tasks, and tell the other ranks of this side that this rank is closed."""
        self._closed = True
        await self._background.aclose()
        if self._hears:
            self._hook.remove()
            for rank in self._others():
                self._tell(rank, RankClosed())
            self._hears = False

    async def aclose(self) -> None:
        """Close this rank of the source or target, even if the task is cancelled. A pending move fails. Idempotent."""
        await shielded(self._close)

    @abstractmethod
    async def _close(self) -> None:
        """Close this rank of the source or target."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:  # The other side may be waiting for this rank.
            for peer in self._peers.values():
                peer.abort(error)
        await self.aclose()


def check_open(comm: Any, here: Any, timeout: OpTimeout) -> None:
    """Check the arguments of ``open`` before this rank counts the call. All ranks must count the same calls."""
    if not isinstance(comm, Communicator):
        raise wrong_type("comm", comm, "a Communicator")
    if not isinstance(here, Endpoint):
        raise wrong_type("here", here, "an Endpoint")
    comm._core.demand("open")
    op_deadline(timeout, comm._seconds)


async def hear(peer: Peer) -> Word:
    """Receive the next message from the other end of a connection."""
    work = peer.recv_object(timeout=None)
    work.add_done_callback(Work.exception)  # No task awaits the last receive.
    return WORDS.decode(await work)


def say(peer: Peer, word: Word) -> None:
    """Send a message to the other end of a connection.

    If the connection is lost, this call raises no error, because the connection reports the loss.
    """
    with contextlib.suppress(CommError):
        peer.send_object(WORDS.encode(word), timeout=None).add_done_callback(Work.exception)
