"""Endpoints for synchronous programs, and for frameworks that call the library from their own threads."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import torch

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.blocking.loop_thread import LoopThread, Use, blocking
from aiocomms.blocking.peer import BlockingPeer, BlockingRegion
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.works import close, run
from aiocomms.endpoints import endpoint as endpoints
from aiocomms.endpoints import opening
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import CommClosedError, CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike

_T = TypeVar("_T")


class _Inside:
    """The owner of an endpoint's :class:`Door`, which is the queue of calls from other threads.

    See :class:`aiocomms.communicator.portal.door.DoorOwner`.
    """

    rank = marks = None

    def __init__(self, endpoint: endpoints.Endpoint) -> None:
        self._endpoint = endpoint
        self.name, self.driver, self.thread = endpoint.name, endpoint._driver, endpoint._thread

    @property
    def closed(self) -> bool:
        return self._endpoint.closed

    refusing = closed

    def worded(self, error: CommError) -> CommError:
        return error

    def refusal(self) -> CommError | None:
        return CommClosedError("the endpoint is closed") if self.closed else None

    def lose(self, error: CommError) -> None:
        for peer in self._endpoint.peers:
            peer.abort(error)


class Endpoint(Handle):
    """An endpoint whose methods block. The function :func:`open_endpoint` makes it, and any thread may use it.

    Each method has the arguments, the result and the errors of the method of :class:`aiocomms.Endpoint` with the same
    name. Ctrl-C cancels a blocking call.
    """

    name: str
    address: bytes
    device: torch.device

    def __init__(self, endpoint: endpoints.Endpoint, thread: LoopThread) -> None:
        endpoint._guard.opened("use `with`, or call its close()")
        self.name, self.device, self.address = endpoint.name, endpoint.device, endpoint.address
        self._endpoint = endpoint
        self._door = Door(_Inside(endpoint))
        self._views: dict[Peer, BlockingPeer] = {}
        """The blocking objects of the open connections, by connection. Only the loop's thread uses this dict."""
        self._use = Use(thread)

    def __repr__(self) -> str:
        return repr(self._endpoint)

    @property
    def peers(self) -> Sequence[BlockingPeer]:
        """The connections to other endpoints; an empty sequence after this endpoint has been closed."""

        async def views() -> Sequence[BlockingPeer]:
            return [self._view(peer) for peer in self._endpoint.peers]

        with contextlib.suppress(CommClosedError):
            return self._run("peers", views)
        return []

    @property
    def closed(self) -> bool:
        """True after the endpoint has been closed."""
        return self._endpoint.closed

    def connect(self, address: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> BlockingPeer:
        """Connect to another endpoint, or return the existing connection; see :meth:`aiocomms.Endpoint.connect`."""

        async def view() -> BlockingPeer:
            return self._view(await self._endpoint.connect(address, timeout=timeout))

        return self._run("connect", view)

    def accept(self, *, timeout: Timeout = None) -> BlockingPeer:
        """Wait for the next endpoint that connects to this one; see :meth:`aiocomms.Endpoint.accept`.

        :param timeout: the seconds to wait; None means no limit.
        :raises TimeoutError: no endpoint connected in time. If an endpoint connects after that, the next call returns
            its connection.
        """

        async def view() -> BlockingPeer:
            return self._view(await self._endpoint.accept())

        return self._run("accept", view, timeout)

    def register(
        self, tensor: TensorLike, *, read: bool = True, write: bool = True, lifetime: Timeout = None
    ) -> BlockingRegion:
        """Let other endpoints access memory of this process; see :meth:`aiocomms.Endpoint.register`."""

        async def region() -> BlockingRegion:
            opened = self._endpoint.register(tensor, read=read, write=write, lifetime=lifetime)
            return BlockingRegion(self._door, opened)

        return self._run("register", region)

    def close(self) -> None:
        """Close all connections of the endpoint, and stop listening. See :meth:`aiocomms.Endpoint.aclose`.

        Idempotent: a second caller waits until the first call has ended.

        :raises RuntimeError: the caller runs on the event loop's thread.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def closing() -> None:
            try:
                await self._endpoint.__aexit__(kind, error, trace)
            finally:
                self._door.close()

        with self._use.ending(self._door):
            if not self.closed:
                close(self._door, "close", closing)

    def _run(self, what: str, call: Callable[[], Awaitable[_T]], timeout: Timeout = None) -> _T:
        if self.closed:  # A forked child's endpoint is closed, too: no thread serves its door.
            raise CommClosedError("the endpoint is closed", comm=self.name, op=what)
        return run(self._door, what, call, timeout)

    def _view(self, peer: Peer) -> BlockingPeer:
        """Return the blocking object of a connection. All calls with the same connection return the same object.

        Only the loop's thread calls this method.
        """
        view = self._views.get(peer)
        if view is None:
            self._views = {it: of for it, of in self._views.items() if not it._comm.closed}
            view = self._views[peer] = BlockingPeer(self._door, peer)
        return view


open_endpoint: Final = blocking(
    opening.open_endpoint,
    Endpoint,
    "Open an endpoint, with an event loop in a thread of its own. ``with`` closes it.",
)
