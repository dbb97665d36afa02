"""The gate, which connects a rank with every other rank of its communicator, and drops all other connections.

Of two ranks, the rank with the higher number connects, and the other rank accepts. Both sides authenticate by the
dialogues of ``handshake.py``.

The gate drops a connection that does not authenticate in time. A connection is silent until its first message. If there
are too many connections, the gate drops a silent connection. The gate chooses the host with the largest number of
silent connections, and drops the host's oldest silent connection. So one host that opens many connections does not make
the gate drop connections of other hosts. The gate drops a connection that has sent a message only if no connection is
silent.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from aiocomms.errors import CommAbortedError, CommTimeoutError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handshake import (
    HANDSHAKE,
    PROOF_BYTES,
    Dialogue,
    RefusedError,
    acceptor_dialogue,
    connector_dialogue,
)
from aiocomms.lowlevel.waker import Waker

PATIENCE: Final = 5.0
"""The time in seconds within which the other end of a new connection must prove that it is a rank."""
MOST_HALF_OPEN: Final = 128
"""The largest number of connections that are not authenticated at one time.

One connection for each rank is allowed in addition.
"""
AT_ONCE: Final = 16
"""The largest number of connections that the gate accepts before it reads from the existing connections again."""

_PAUSE: Final = 0.01
"""The time in seconds until the next attempt to connect."""
_CREDENTIALS: Final = struct.Struct("iII")  # This is struct ucred.

Proved = tuple[int, socket.socket]
"""A rank, and the connection with it."""


class HalfOpen:
    """A connection that is not authenticated yet, and the dialogue that authenticates the connection."""

    got: bytes

    __slots__ = ("connection", "dialogue", "ends", "got", "peer", "source", "wanted")

    def __init__(
        self, connection: socket.socket, dialogue: Dialogue, ends: float, peer: int | None, source: str | None
    ) -> None:
        """Start the dialogue.

        :param peer: the rank to which this rank has connected; None if the other side has connected.
        :param source: the host of the other side, if the other side has connected and has not sent a message yet.
            Otherwise None.
        """
        connection.setblocking(False)
        self.connection: socket.socket = connection
        self.dialogue: Dialogue = dialogue
        self.ends: float = ends
        self.peer: int | None = peer
        self.source: str | None = source
        self.got = b""
        self.wanted: int = next(dialogue)

    def read(self) -> int | None:
        """Read the bytes that have arrived, and continue the dialogue with them.

        :returns: the peer's rank; None as long as the peer has not proved its rank.
        :raises RefusedError: the peer is not a rank of this communicator.
        :raises OSError: the connection is gone.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                data = self.connection.recv(self.wanted - len(self.got))
                if not data:
                    raise RefusedError
                self.got += data
                if len(self.got) == self.wanted:
                    message, self.got = self.got, b""
                    try:
                        self.wanted = self.dialogue.send(message)
                    except StopIteration as end:
                        return int(end.value)
        return None


class Entrance:
    """The connections that are not authenticated yet.

    Even if one host opens many connections, the entrance does not drop the connections of other hosts.
    """

    dropped: int

    def __init__(self, selector: selectors.BaseSelector, most: int) -> None:
        """Begin without connections.

        :param most: the largest number of connections at a time.
        """
        self._selector = selector
        self._most = most
        self._half_open: dict[socket.socket, HalfOpen] = {}  # The oldest comes first.
        # These connections have sent nothing yet, by source.
        self._silent: dict[str, dict[socket.socket, HalfOpen]] = {}
        self.dropped = 0
        """The number of connections that were dropped."""
        self.versions: set[int] = set()
        """The versions that dropped connections used in the handshake, except this rank's own version."""

    def __len__(self) -> int:
        return len(self._half_open)

    def accept(self, listener: socket.socket, dialogue: Callable[[socket.socket], Dialogue]) -> list[Proved]:
        """Accept some of the waiting connections.

        The remaining connections stay in the queue, so that the accepted connections make progress.

        :returns: the connections that are already authenticated.
        """
        proved = []
        for _ in range(AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError:  # No connection waits, or the connection is gone, or no descriptor is left.
                break
            if connection.family == socket.AF_UNIX and not same_user(connection):
                connection.close()
                self.dropped += 1
                continue
            if len(self._half_open) >= self._most:
                self._make_room()
            half = self.add(connection, dialogue(connection), clock.now() + PATIENCE, source=_source(address))
            # A rank speaks as soon as it is connected, so its first message may have come with it.
            done = self.read(half)
            if done is not None:
                proved.append(done)
        return proved

    def add(
        self,
        connection: socket.socket,
        dialogue: Dialogue,
        ends: float,
        *,
        peer: int | None = None,
        source: str | None = None,
    ) -> HalfOpen:
        """Begin a dialogue."""
        half = self._half_open[connection] = HalfOpen(connection, dialogue, ends, peer, source)
        if source is not None:
            self._silent.setdefault(source, {})[connection] = half
        self._selector.register(connection, selectors.EVENT_READ, half)
        return half

    def read(self, half: HalfOpen) -> Proved | None:
        """Continue a dialogue, and drop the connection if the dialogue fails."""
        if half.connection not in self._half_open:
            return None
        try:
            peer = half.read()
        except (RefusedError, OSError) as error:
            if isinstance(error, RefusedError) and error.version is not None:
                self.versions.add(error.version)
            self.drop(half)
            return None
        if half.wanted == PROOF_BYTES:
            self._heard(half)
        if peer is None:
            return None
        self._remove(half)
        return peer, half.connection

    def expired(self) -> list[HalfOpen]:
        """Drop the connections whose deadline has passed, and return these connections."""
        now = clock.now()
        late = [half for half in self._half_open.values() if now >= half.ends]
        for half in late:
            self.drop(half)
        return late

    def next_end(self) -> float:
        """Return the earliest time at which a connection expires; infinity if there are no connections."""
        return min((half.ends for half in self._half_open.values()), default=math.inf)

    def drop(self, half: HalfOpen) -> None:
        """Close a connection that has not authenticated."""
        self._remove(half)
        half.dialogue.close()
        half.connection.close()
        self.dropped += half.peer is None

    def drop_all(self) -> None:
        """Drop all connections."""
        for half in list(self._half_open.values()):
            self.drop(half)

    def close(self) -> None:
        """Close all connections. Connections that this method closes do not count as dropped."""
        for half in self._half_open.values():
            half.connection.close()
        self._half_open.clear()
        self._silent.clear()

    def _make_room(self) -> None:
        if self._silent:
            self.drop(next(iter(max(self._silent.values(), key=len).values())))
        else:  # No connection is silent. The oldest one has had the most time for its proof.
            self.drop(next(half for half in self._half_open.values() if half.peer is None))

    def _heard(self, half: HalfOpen) -> None:
        """Record that a connection is no longer silent."""
        if half.source is not None:
            others = self._silent[half.source]
            del others[half.connection]
            if not others:
                del self._silent[half.source]
            half.source = None

    def _remove(self, half: HalfOpen) -> None:
        self._heard(half)
        del self._half_open[half.connection]
        self._selector.unregister(half.connection)


class Gate:
    """The gate of one rank, which opens and authenticates the connections of the rank.

    Its methods block the calling thread.
    """

    def __init__(self, rank: int, key: bytes, connectors: Mapping[int, Callable[[], socket.socket]], size: int) -> None:
        """Begin without connections.

        :param key: a key that only the ranks of this communicator know, such as a secret of the rendezvous.
        :param connectors: for every lower rank, a function that connects to that rank.
        """
        self._rank = rank
        self._size = size
        self._key = key
        self._connectors = connectors
        self._unconnected = set(connectors)
        self._missing = set(range(size)) - {rank}
        self._proved: dict[int, socket.socket] = {}
        self._lock, self._waker = threading.Lock(), cast("Waker | None", None)
        self._ended = self._given_up = False
        self._selector = selectors.DefaultSelector()
        self.entrance: Entrance = Entrance(self._selector, size + MOST_HALF_OPEN)

    @property
    def dropped(self) -> int:
        """The number of connections that were dropped."""
        return self.entrance.dropped

    def run(self, listeners: Sequence[socket.socket], seconds: float) -> dict[int, socket.socket]:
        """Connect to all lower ranks, and accept connections from all higher ranks.

        :returns: a connection to each rank.
        :raises CommTimeoutError: the deadline has passed. The message names the ranks that did not connect.
        :raises AuthError: the process at the address of a rank does not prove its rank.
        :raises CommAbortedError: :meth:`give_up` was called.
        """
        with contextlib.closing(Waker()) as self._waker:
            try:
                self._meet(listeners, seconds)
                with self._lock:
                    self._check()
                    self._ended = True
                return self._proved
            except BaseException:
                self._close_proved()
                raise
            finally:
                self.entrance.close()
                self._selector.close()

    def give_up(self) -> None:
        """End the call of :meth:`run`, and close the connections that the call has opened. Any thread may call this."""
        with self._lock:
            self._given_up = True
            if self._ended:
                self._close_proved()
        if self._waker is not None:
            self._waker.wake()

    def _meet(self, listeners: Sequence[socket.socket], seconds: float) -> None:
        ends = clock.now() + seconds
        retry = 0.0
        self._selector.register(cast("Waker", self._waker), selectors.EVENT_READ, self._waker)
        self._check()  # A later call of give_up finds the waker.
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        while self._missing:
            now = clock.now()
            if now >= ends:
                raise self._late(seconds)
            if self._unconnected and now >= retry:
                self._connect_missing(ends)
                retry = now + _PAUSE
            self._wait(min(ends, retry if self._unconnected else ends, self.entrance.next_end()) - now)
            self._check()

    def _check(self) -> None:
        if self._given_up:
            raise CommAbortedError("this rank has given up the connecting")

    def _close_proved(self) -> None:
        for connection in self._proved.values():
            connection.close()

    def _late(self, seconds: float) -> CommTimeoutError:
        message = f"these ranks did not connect within {seconds:g} s: {sorted(self._missing)}"
        if self.dropped:
            message += f"; {self.dropped} connections were dropped that did not prove to be a rank's"
        for version in sorted(self.entrance.versions)[:3]:
            message += f"; {HANDSHAKE.differs('a process that connected', version)}"
        return CommTimeoutError(message, late=sorted(self._missing))

    def _connect_missing(self, ends: float) -> None:
        """Connect to the lower ranks to which this rank has not connected yet."""
        for peer in list(self._unconnected):
            with contextlib.suppress(OSError):  # The peer's queue of connections is full.
                connection = self._connectors[peer]()
                try:
                    dialogue = connector_dialogue(connection, self._key, self._rank, peer)
                    self.entrance.add(connection, dialogue, ends, peer=peer)
                except OSError:
                    connection.close()
                    raise
                self._unconnected.discard(peer)

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            half = key.data
            if half is self._waker:
                continue
            if half is None:
                for proved in self.entrance.accept(key.fileobj, self._acceptor):  # type: ignore[arg-type]
                    self._keep(*proved)
                continue
            done = self.entrance.read(half)
            if done is not None:
                self._keep(*done)
            elif half.peer is not None and half.connection.fileno() < 0:
                self._unconnected.add(half.peer)  # The peer had too many connections, so this rank connects again.
        self.entrance.expired()

    def _acceptor(self, connection: socket.socket) -> Dialogue:
        return acceptor_dialogue(connection, self._key, self._rank, range(self._rank + 1, self._size))

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._missing.discard(peer)
        if peer in self._proved:  # The peer has abandoned its first connection.
            self._proved[peer].close()
        self._proved[peer] = connection


def _source(address: object) -> str:
    """Return the source of a connection: an IPv4 address, or an IPv6 network.

    One host can use all addresses of an IPv6 network.
    """
    if not isinstance(address, tuple):
        return ""  # A unix socket has no host address, and belongs to this user.
    host = str(address[0]).partition("%")[0]
    return host if "." in host else socket.inet_pton(socket.AF_INET6, host)[:8].hex()


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a unix socket belongs to this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
