"""The connections of one endpoint: how each is formed, by whichever of the two asks for it, and what ends it.

Whoever wants one calls: it connects, proves to be of the job, says which endpoint it is, and, once the other one has
agreed, that it means it. Of two calls that cross, that of the endpoint with the lower number counts, and the other one
is told so. Both then form a communicator of two over that connection, and close it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from math import inf
from typing import Any, Final

import anyio
import msgspec
import torch

from aiocomms.bootstrap.registry import Plan, open_transports
from aiocomms.bootstrap.rendezvous import FORMING
from aiocomms.communicator import Communicator
from aiocomms.endpoints.credentials import Address, read_address
from aiocomms.endpoints.meeting import CALLER, Answer, Hello, Line, Pair, call, heard, seal_of
from aiocomms.endpoints.peer import End, Peer
from aiocomms.endpoints.regions import Region
from aiocomms.errors import ArgumentError, CommClosedError, CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.auth import Seal
from aiocomms.progress.driver import Driver, Promise

_log = logging.getLogger("aiocomms")
_ANSWERS: Final = 10.0
"""Seconds in which whoever has connected must say who it is."""
_AT_ONCE: Final = 32
"""Endpoints that form a connection with this one at once, on their own account; others wait."""
_PAUSE: Final = 0.01
"""Seconds before another call, where the other endpoint has said that it calls this one: it may have given up."""


class Connections:
    """All of one endpoint, on the loop's thread."""

    def __init__(
        self, mine: Address, name: str, device: torch.device, plan: Plan, timeout: float,
        grant: Callable[[bytes], Region],
    ) -> None:  # fmt: skip
        """Begin without any.

        :param mine: this endpoint's address.
        :param timeout: the seconds that ops have which are given no deadline, and that forming a connection may take
            which another endpoint asks for.
        :param grant: see :class:`Attachments`.
        """
        self._mine, self._name, self._device, self._plan, self._seconds = mine, name, device, plan, timeout
        self._grant, self._driver = grant, Driver.current()
        self._peers: dict[bytes, Peer] = {}
        self._left: set[Peer] = set()
        """Those that the other end has closed, until they are closed here."""
        self._forming: dict[bytes, Promise] = {}
        """The endpoints with which a connection is being formed, by whichever of the two."""
        self._calling: set[bytes] = set()
        self._answering: set[bytes] = set()
        """Those whose call was answered, and counts."""
        self._limit = anyio.Semaphore(_AT_ONCE)
        self._arrived: dict[Peer, None] = {}
        """Those that another endpoint has asked for, and that nobody has been handed."""
        self._arrival = Promise(self._driver)
        self._tasks, self._idle = 0, Promise(self._driver)
        self.closed: CommClosedError | None = None

    @property
    def peers(self) -> list[Peer]:
        """Those that are there."""
        return list(self._peers.values())

    # -------------------------------------------------------------------------------------------------------- calling

    async def connect(self, address: bytes, seconds: float) -> Peer:
        """Form a connection, or find it."""
        there = read_address(address)
        if there.endpoint == self._mine.endpoint:
            raise ArgumentError("address is this endpoint's own, wanted another one's")
        if misfit := self._misfit(there):
            raise MismatchError(f"the endpoint {there.name} cannot be connected with: {misfit}")
        with anyio.move_on_after(seconds):
            while there.endpoint not in self._peers:
                self._check()
                if there.endpoint in self._forming:
                    await self._forming[there.endpoint]
                elif not await self._call(there, seconds):
                    await anyio.sleep(_PAUSE)
            return self._peers[there.endpoint]
        raise CommTimeoutError(f"after {seconds:g} s there was no connection with the endpoint {there.name}")

    async def _call(self, there: Address, seconds: float) -> bool:
        """Call another endpoint. False: its own call counts, or may."""
        with self._form(there.endpoint, self._calling):
            line, answer, nonce = await run_in_thread(lambda: call(there, self._mine.pack(), seconds))
            with contextlib.closing(line):
                if answer.crossed or there.endpoint in self._answering or there.endpoint in self._peers:
                    return False  # to hang up now tells the other one that this call does not count
                if answer.refusal:
                    raise MismatchError(f"the endpoint {there.name} refuses the connection: {answer.refusal}")
                await run_in_thread(lambda: line.tell(b""))
                await self._meet(line, CALLER, there, seal_of(self._mine, there, nonce, answer.nonce), seconds)
                return True

    # ---------------------------------------------------------------------------------------------------- being called

    def let_in(self, connection: socket.socket) -> None:
        """Another endpoint has called, and proved to be of the job."""
        if self.closed is not None:
            connection.close()
        else:
            self._soon(lambda: self._receive(connection))

    async def accept(self) -> Peer:
        """Wait for the next one that another endpoint has asked for."""
        while not self._arrived:
            self._check()
            await self._arrival
        peer = next(iter(self._arrived))
        del self._arrived[peer]
        return peer

    async def _receive(self, connection: socket.socket) -> None:
        try:
            async with self._limit:
                with contextlib.closing(Line(connection, _ANSWERS)) as line:
                    await self._answer(line)
        except (CommError, OSError) as error:  # the other endpoint is told by what it sees
            _log.warning("an endpoint that has connected with '%s' was lost at once: %s", self._name, error)

    async def _answer(self, line: Line) -> None:
        hello = await run_in_thread(lambda: heard(line, Hello))
        there, nonce = read_address(hello.address), secrets.token_bytes(16)
        crossed = there.endpoint in self._calling and self._mine.endpoint < there.endpoint
        refusal = self._misfit(there)
        answer = msgspec.msgpack.encode(Answer(nonce, refusal, crossed))
        if crossed or refusal:
            await run_in_thread(lambda: line.tell(answer))
            return
        with self._form(there.endpoint, self._answering):
            await run_in_thread(lambda: line.tell(answer))
            try:
                await run_in_thread(line.hear)
            except PeerDiedError:  # it has hung up: it answers a call of this endpoint's
                return
            if (stale := self._peers.get(there.endpoint)) is not None:
                stale.abort("the other endpoint has connected anew")
            seconds = FORMING if self._seconds == inf else self._seconds
            line.extend(seconds)
            peer = await self._meet(line, 1 - CALLER, there, seal_of(there, self._mine, hello.nonce, nonce), seconds)
        self._arrived[peer] = None
        self._wake_acceptors()

    # -------------------------------------------------------------------------------------------------------- forming

    async def _meet(self, line: Line, rank: int, there: Address, seal: Seal, seconds: float) -> Peer:
        """Form the communicator of two, and the peer that is made of it."""
        ends = (self._mine, there) if rank == CALLER else (there, self._mine)
        name = f"endpoints {'-'.join(end.name for end in ends)}"  # the same on both
        pair = Pair(line, rank, name, self._device, seconds, seal)
        transports = await open_transports(self._plan, lambda cls, _: cls.open(pair, self._plan.options))
        pair.timeout = self._seconds
        comm = Communicator(pair, self._plan, transports)
        peer = Peer(comm, there, self._grant, self._ended)
        try:
            await peer._begin()
            self._check()
        except BaseException:
            comm.abort("the connection was not formed")
            with anyio.CancelScope(shield=True):
                await peer.aclose()
            raise
        self._peers[there.endpoint] = peer
        return peer

    @contextlib.contextmanager
    def _form(self, endpoint: bytes, how: set[bytes]) -> Iterator[None]:
        """While a connection with an endpoint is being formed; who wants one, too, waits for that.

        :param how: by whose call.
        """
        formed = self._forming.setdefault(endpoint, Promise(self._driver))
        how.add(endpoint)
        try:
            yield
        finally:
            how.discard(endpoint)
            if self._forming.get(endpoint) is formed:
                del self._forming[endpoint]
            formed.set()

    def _misfit(self, there: Address) -> str:
        """Why the two cannot communicate; empty: they can."""
        mine = self._mine
        if mine.transports != there.transports:
            return f"its transports are {there.transports}, and this one's {mine.transports}"
        return "" if mine.device == there.device else f"its device is {there.device}, and this one's {mine.device}"

    # -------------------------------------------------------------------------------------------------------- the end

    def _ended(self, peer: Peer, how: End) -> None:
        """A connection is over. One that was lost is closed here, one that the other end has closed by the program."""
        endpoint = peer._address.endpoint
        if self._peers.get(endpoint) is peer:
            del self._peers[endpoint]
        if how is End.LEFT:
            self._left.add(peer)
        else:
            self._left.discard(peer)
            self._arrived.pop(peer, None)
        if how is End.LOST:
            self._soon(peer.aclose)

    async def close(self, why: CommClosedError) -> None:
        """End all, and wait for what is under way."""
        self.closed = why
        self._wake_acceptors()
        async with anyio.create_task_group() as tasks:
            for peer in (*self.peers, *self._left):
                tasks.start_soon(peer.aclose)
        with anyio.CancelScope(shield=True):
            while self._tasks:
                self._idle = Promise(self._driver)
                await self._idle

    def _wake_acceptors(self) -> None:
        arrival, self._arrival = self._arrival, Promise(self._driver)
        arrival.set()

    def _check(self) -> None:
        if self.closed is not None:
            raise self.closed.about()

    def _soon(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in a task, for which the end waits."""
        self._tasks += 1

        async def run() -> None:
            try:
                await call()
            except CommError as error:
                self._driver.report(f"a connection of '{self._name}' could not be closed", error)
            finally:
                self._tasks -= 1
                if not self._tasks:
                    self._idle.set()

        self._driver.spawn(run, Context())
