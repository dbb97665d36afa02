"""The code that forms and closes the connections of one endpoint.

The endpoint that wants a connection calls the other endpoint. The caller opens a socket, proves that its process
belongs to the job, and sends the address of its endpoint. Once the other endpoint has agreed, the caller confirms the
call. Then both endpoints form a communicator of two ranks over the socket of the call, and close the socket. If two
endpoints call each other at the same time, the endpoint with the lower number refuses the other endpoint's call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from math import inf
from typing import Any, Final, Literal
from weakref import WeakSet

import anyio
import torch

from aiocomms.arguments import FORMING
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.communicator.communicator import Communicator
from aiocomms.endpoints.credentials import Address, expired, read_address
from aiocomms.endpoints.handovers import Counter
from aiocomms.endpoints.meeting import ANSWERS, HELLOS, EndpointAnswer, EndpointCall, Pair, seal_of
from aiocomms.endpoints.peer import End, Peer
from aiocomms.endpoints.regions import Region, all_of
from aiocomms.errors import ArgumentError, CommClosedError, CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.auth import Seal
from aiocomms.lowlevel.lines import CALLER, EndpointLine
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.driver import Bell, LoopDriver

_log = logging.getLogger("aiocomms")
_ANSWERS: Final = 10.0
"""The number of seconds within which a calling endpoint must send its address and confirm its call."""
_AT_ONCE: Final = 32
"""The largest number of calls that this endpoint answers at the same time. Further callers wait."""
_MOST_GONE: Final = 16
"""The largest number of connections that wait for :meth:`Connections.accept` although the other end has closed them."""
_PAUSE: Final = 0.01
"""The pause in seconds after a call that was given up because a call of the other endpoint takes precedence.

If the other endpoint's call has failed, this endpoint calls again after the pause.
"""


class _Forming:
    """The pending calls to one other endpoint, and the pending answers to calls of that endpoint."""

    def __init__(self, driver: LoopDriver) -> None:
        self.calls = self.answers = 0
        self.newest = 0
        """The number of the last call that this endpoint answered. A caller numbers its calls."""
        self.news = Bell(driver)
        """A bell that wakes waiting tasks when the connection is formed, or when no call or answer is pending."""
        self.answering: anyio.CancelScope | None = None
        """The cancel scope of the answer to the last call."""


class Connections:
    """All connections of one endpoint; all methods run on the event loop's thread."""

    def __init__(
        self, mine: Address, name: str, device: torch.device, plan: Selection, timeout: float,
        grant: Callable[[bytes], Region], counter: Counter,
    ) -> None:  # fmt: skip
        """Start without connections.

        :param mine: this endpoint's address.
        :param timeout: the default deadline of ops, in seconds. A connection that another endpoint asks for must form
            within this time.
        :param grant: see :class:`Attachments`.
        :param counter: the hand-over state that all connections of this endpoint share.
        """
        self._mine, self._name, self._device, self._plan, self._seconds = mine, name, device, plan, timeout
        self._grant, self._counter, self._driver = grant, counter, LoopDriver.current()
        self._home: dict[Any, Any] = {}
        """The state that the transports keep for all connections."""
        self._peers: dict[bytes, Peer] = {}
        self._left: dict[Peer, None] = {}
        """The connections that the other end has closed, but this end has not."""
        self._all: WeakSet[Peer] = WeakSet()
        self._forming: dict[bytes, _Forming] = {}
        """The connections that are being formed, by the number of the other endpoint."""
        self._scopes: dict[anyio.CancelScope, None] = {}
        """The scopes that :meth:`close` cancels."""
        self._limit = anyio.Semaphore(_AT_ONCE)
        self._arrived: dict[Peer, None] = {}
        """The connections that another endpoint has asked for, and that no task has accepted yet."""
        self._arrival, self._idle = Bell(self._driver), Bell(self._driver)
        self._tasks = 0
        self._numbers = itertools.count(1)
        self.closed: CommClosedError | None = None

    @property
    def peers(self) -> list[Peer]:
        """The connected endpoints."""
        return list(self._peers.values())

    # -------------------------------------------------------------------------------------------------------- calling

    async def connect(self, address: bytes, seconds: float) -> Peer:
        """Return the connection to an endpoint; form it if there is none."""
        there = read_address(address)
        if there.endpoint == self._mine.endpoint:
            raise ArgumentError("address is this endpoint's own, wanted another one's")
        if misfit := self._misfit(there):
            raise MismatchError(f"no connection with {there.where} is possible: {misfit}")
        with anyio.move_on_after(seconds):
            while (peer := self._peers.get(there.endpoint)) is None:
                self._check()
                forming = self._forming.get(there.endpoint)
                if forming is not None:
                    await forming.news
                    continue
                with self._until_closed():
                    called = await self._call(there, seconds)
                    if called is not None:
                        return called
                    await anyio.sleep(_PAUSE)
            return peer
        raise CommTimeoutError(f"after {seconds:g} s there was no connection with {there.where}")

    async def _call(self, there: Address, seconds: float) -> Peer | None:
        """Call another endpoint; return None if a call of that endpoint may form the connection instead."""
        with self._form(there.endpoint, "calls") as forming:
            call = EndpointCall(there, self._mine.pack(), next(self._numbers), seconds)
            try:
                line, answer = await run_in_thread(call.run)
                if answer.crossed or forming.answers or there.endpoint in self._peers:
                    return None  # Hanging up tells the other endpoint that this call does not count.
                if answer.refusal:
                    raise MismatchError(f"{there.where} refuses the connection: {answer.refusal}")
                await run_in_thread(lambda: line.tell(b""))
                return await self._meet(
                    line, CALLER, there, seal_of(self._mine, there, call.nonce, answer.nonce), seconds
                )
            finally:
                call.hang_up()

    # ------------------------------------------------------------------------------------------------- answering calls

    def let_in(self, line: EndpointLine) -> None:
        """Answer a call of another endpoint, which has proved that it belongs to the job."""
        if self.closed is not None:
            line.close()
        else:
            self._soon(lambda: self._receive(line))

    async def accept(self) -> Peer:
        """Wait for the next connection that another endpoint has asked for."""
        while not self._arrived:
            self._check()
            await self._arrival
        peer = next(iter(self._arrived))
        del self._arrived[peer]
        return peer

    async def _receive(self, line: EndpointLine) -> None:
        try:
            with contextlib.closing(line), self._until_closed():
                async with self._limit:
                    line.extend(_ANSWERS)
                    await self._answer(line)
        except (CommError, OSError) as error:  # The closed line tells the other endpoint.
            if self.closed is None:
                _log.warning("an endpoint that has connected with '%s' was lost at once: %s", self._name, error)

    async def _answer(self, line: EndpointLine) -> None:
        hello = await run_in_thread(lambda: HELLOS.decode(line.hear()))
        there, nonce = read_address(hello.address, late=True), secrets.token_bytes(16)
        forming = self._forming.get(there.endpoint)
        crossed = forming is not None and forming.calls > 0 and self._mine.endpoint < there.endpoint
        refusal = "its address has expired" if expired(self._mine.expires) else self._misfit(there)
        answer = ANSWERS.encode(EndpointAnswer(nonce, refusal, crossed))
        if crossed or refusal:
            await run_in_thread(lambda: line.tell(answer))
            return
        with self._form(there.endpoint, "answers") as forming, anyio.CancelScope() as scope:
            # The other endpoint makes a call only after it has given up its earlier ones.
            if hello.number < forming.newest:
                return
            if forming.answering is not None:
                forming.answering.cancel()
            forming.answering, forming.newest = scope, hello.number
            await run_in_thread(lambda: line.tell(answer))
            try:
                await run_in_thread(line.hear)
            except PeerDiedError:  # The other endpoint has hung up because it answers a call of this one.
                return
            seconds = FORMING if self._seconds == inf else self._seconds
            line.extend(seconds)
            peer = await self._meet(line, 1 - CALLER, there, seal_of(there, self._mine, hello.nonce, nonce), seconds)
            self._arrived[peer] = None
            self._bound_arrived()
            self._arrival.ring()

    def _bound_arrived(self) -> None:
        """Close the oldest connections that the other end has closed and no task has accepted.

        At most :data:`_MOST_GONE` of these connections remain.
        """
        over = [peer for peer in self._arrived if peer in self._left]
        for peer in over[:-_MOST_GONE]:
            del self._arrived[peer]
            self._soon(peer.aclose)

    # -------------------------------------------------------------------------------------------------------- forming

    async def _meet(self, line: EndpointLine, rank: int, there: Address, seal: Seal, seconds: float) -> Peer:
        """Form the communicator of two ranks, and return the :class:`Peer` that uses it."""
        ends = (self._mine, there) if rank == CALLER else (there, self._mine)
        name = f"endpoints {'-'.join(end.name for end in ends)}"  # The name is the same on both sides.
        pair = Pair(line, rank, name, self._device, seconds, seal, self._home)
        transports = await open_transports(self._plan, lambda cls, _: cls.open(pair, self._plan.options))
        pair.timeout = self._seconds
        comm = Communicator(pair, self._plan, transports)
        comm._guard.dismiss()  # The endpoint's own guard reports leaks.
        peer = Peer(comm, there, self._grant, self._ended, self._counter, self._earlier, self._name)
        self._all.add(peer)
        try:
            await peer._begin()
            self._check()
            if comm.aborted:
                raise await peer.lost()
        except BaseException:
            comm.abort("the connection was not formed")
            await shielded(peer.aclose)
            raise
        if (stale := self._peers.get(there.endpoint)) is not None:
            stale.abort("the other endpoint has connected anew")
        if not peer.closed:  # The other end of a closed peer has left already.
            self._peers[there.endpoint] = peer
        if (forming := self._forming.get(there.endpoint)) is not None:
            forming.news.ring()
        return peer

    async def _earlier(self, peer: Peer) -> None:
        """Wait until this endpoint has closed its end of all other connections with the endpoint of ``peer``."""
        for other in list(self._all):
            if other is not peer and other._address.endpoint == peer._address.endpoint:
                await other._released

    @contextlib.contextmanager
    def _form(self, endpoint: bytes, by: Literal["calls", "answers"]) -> Iterator[_Forming]:
        """Count a call or an answer as pending while the ``with`` body forms a connection.

        Meanwhile other tasks that want a connection with the endpoint wait for the result.
        """
        forming = self._forming.setdefault(endpoint, _Forming(self._driver))
        setattr(forming, by, getattr(forming, by) + 1)
        try:
            yield forming
        finally:
            setattr(forming, by, getattr(forming, by) - 1)
            if not forming.calls + forming.answers:
                del self._forming[endpoint]
                forming.news.ring()

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Cancel the ``with`` body when the endpoint is closed.

        :raises CommClosedError: the endpoint is closed.
        """
        self._check()
        with anyio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                yield
            finally:
                self._scopes.pop(scope, None)
        if scope.cancelled_caught:
            self._check()

    def _misfit(self, there: Address) -> str:
        """Return the reason why the two endpoints cannot communicate, or an empty string if they can."""
        mine = self._mine
        if mine.transports != there.transports:
            return f"its transports are {there.transports}, and this one's {mine.transports}"
        return "" if mine.device == there.device else f"its device is {there.device}, and this one's {mine.device}"

    # -------------------------------------------------------------------------------------------------------- the end

    def _ended(self, peer: Peer, how: End) -> None:
        """Record that a connection is over, and close a lost connection.

        If the other end has closed the connection, the program must close this end.
        """
        endpoint = peer._address.endpoint
        if self._peers.get(endpoint) is peer:
            del self._peers[endpoint]
        if how is End.LEFT:
            self._left[peer] = None
        else:
            self._left.pop(peer, None)
            self._arrived.pop(peer, None)
        if how is End.LOST:
            self._soon(peer.aclose)
        self._bound_arrived()

    async def close(self, why: CommClosedError) -> None:
        """Close all connections, and wait for all tasks."""
        self.closed = why
        self._arrival.ring()
        for scope in self._scopes:
            scope.cancel()
        try:
            await all_of([peer.aclose for peer in (*self.peers, *self._left)])
        finally:
            await shielded(self._stop)

    async def _stop(self) -> None:
        """Wait until no task is left. This wait takes no longer than closing a communicator."""
        while self._tasks:
            await self._idle

    def disown(self) -> None:
        """Mark the connections as unusable in a forked child, which must neither use nor close its parent's sockets."""
        for peer in list(self._all):
            peer._comm._disown()

    def _check(self) -> None:
        if self.closed is not None:
            raise self.closed.about()

    def _soon(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in a task; :meth:`close` waits for the task."""
        self._tasks += 1

        async def run() -> None:
            try:
                await call()
            except Exception as error:  # An exception would end a run of trio.
                self._driver.report(f"a connection of '{self._name}' could not be formed, or closed", error)
            finally:
                self._tasks -= 1
                self._idle.ring()

        self._driver.spawn(run, Context())
