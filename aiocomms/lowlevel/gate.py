"""Connects a rank with every other rank of its communicator, and drops everybody else's connections.

The rank with the higher number connects. Both sides authenticate before they send anything else:

    connector: magic and version, its rank, a nonce
    acceptor:  magic and version, a nonce, and a MAC
    connector: a MAC
    acceptor:  that it is accepted

A MAC covers both ranks and both nonces, and a word that differs for the two sides. Its key is known only to the ranks
of the communicator. So no message that was recorded before, elsewhere or from the other side proves anything.

A connection that has not proved itself in time is dropped. If there are more connections than allowed, the oldest one
is dropped: a rank's connection is young, because a rank proves itself at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

from aiocomms.errors import AuthError, CommTimeoutError
from aiocomms.lowlevel.auth import mac, same
from aiocomms.lowlevel.versions import HEAD_BYTES, Dialect

PATIENCE: Final = 5.0
"""Seconds in which whoever connects must prove that it is a rank."""
MOST_HALF_OPEN: Final = 128
"""Connections that may be unproved at a time, besides one for each rank."""

_GATE = Dialect("the handshake", b"aioG", 2)
_NONCE: Final = 16
_MAC: Final = 32
_HELLO: Final = struct.Struct(f"!I{_NONCE}s")
_ACCEPTED: Final = b"\x01"
_PAUSE: Final = 0.01
"""Seconds before another attempt to connect."""
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred

Dialogue = Generator[int, bytes, int]
"""A generator that yields how many bytes it wants next, and returns the peer's rank."""


class RefusedError(Exception):
    """Raised within a dialogue: the other side is not a rank of this communicator, or not one that is expected."""


class HalfOpen:
    """A connection that is not proved yet, and its dialogue."""

    __slots__ = ("connection", "dialogue", "ends", "got", "peer", "wanted")

    def __init__(self, connection: socket.socket, dialogue: Dialogue, ends: float, peer: int | None) -> None:
        """Start the dialogue.

        :param peer: the rank to which this rank has connected; None if the other side has connected.
        """
        connection.setblocking(False)
        self.connection = connection
        self.dialogue = dialogue
        self.ends = ends
        self.peer = peer
        self.got = b""
        self.wanted = next(dialogue)

    def read(self) -> int | None:
        """Read what has arrived, and continue the dialogue with it.

        :returns: the peer's rank, once it is proved; None before.
        :raises RefusedError: the peer is not a rank of this communicator.
        :raises OSError: the connection is gone.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError):
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


class Gate:
    """Opens and authenticates the connections of one rank. One thread uses it, and is blocked meanwhile."""

    def __init__(self, rank: int, key: bytes, connectors: Mapping[int, Callable[[], socket.socket]], size: int) -> None:
        """Start without connections.

        :param key: a key that only the ranks of this communicator know, such as a secret of the rendezvous.
        :param connectors: for every lower rank, a function that connects to it.
        """
        self._rank = rank
        self._size = size
        self._key = key
        self._connectors = connectors
        self._unconnected = set(connectors)
        self._missing = set(range(size)) - {rank}
        self._most = size + MOST_HALF_OPEN
        self._half_open: dict[socket.socket, HalfOpen] = {}  # in the order in which they were opened
        self._proved: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self.dropped = 0
        """How many connections of strangers were dropped."""
        self._versions: set[int] = set()  # which those had that were of another version

    def run(self, listeners: Sequence[socket.socket], seconds: float) -> dict[int, socket.socket]:
        """Connect to all lower ranks, and accept connections from all higher ranks.

        :returns: a connection to each rank.
        :raises CommTimeoutError: it took longer. The message names the ranks that are missing.
        :raises AuthError: whoever answers in a rank's place does not prove to be that rank.
        """
        ends = time.monotonic() + seconds
        retry = 0.0
        try:
            for listener in listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
            while self._missing:
                now = time.monotonic()
                if now >= ends:
                    raise self._late(seconds)
                if self._unconnected and now >= retry:
                    self._connect_missing(ends)
                    retry = now + _PAUSE
                self._wait(
                    min(ends, retry if self._unconnected else ends, *(h.ends for h in self._half_open.values())) - now
                )
        except BaseException:
            for connection in self._proved.values():
                connection.close()
            raise
        finally:
            for half in self._half_open.values():
                half.connection.close()
            self._selector.close()
        return self._proved

    def _late(self, seconds: float) -> CommTimeoutError:
        versions = "".join(
            f"; {_GATE.differs('somebody who connected', other)}" for other in sorted(self._versions)[:3]
        )
        return CommTimeoutError(f"these ranks did not connect within {seconds:g} s: {sorted(self._missing)}{versions}")

    # ------------------------------------------------------------------------------------------------- connections

    def _connect_missing(self, ends: float) -> None:
        """Connect to the lower ranks to which this rank has not connected yet."""
        for peer in list(self._unconnected):
            with contextlib.suppress(OSError):  # the peer's queue of connections is full, perhaps of strangers'
                connection = self._connectors[peer]()
                try:
                    self._add(connection, self._connector_dialogue(connection, peer), ends, peer)
                except OSError:
                    connection.close()
                    raise
                self._unconnected.discard(peer)

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            half = self._half_open.get(key.fileobj)  # type: ignore[call-overload]
            if half is not None:
                self._read(half)
            elif key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        now = time.monotonic()
        for half in [half for half in self._half_open.values() if now >= half.ends]:
            self._drop(half)

    def _accept(self, listener: socket.socket) -> None:
        """Accept some of the waiting connections. Not all at once, so that the accepted ones make progress."""
        for _ in range(16):
            try:
                connection, _ = listener.accept()
            except OSError:  # no connection waits, or it is gone already, or there is no descriptor left
                return
            if connection.family == socket.AF_UNIX and not same_user(connection):
                connection.close()
                self.dropped += 1
                continue
            if len(self._half_open) >= self._most:
                self._drop(next(iter(self._half_open.values())))
            self._add(connection, self._acceptor_dialogue(connection), time.monotonic() + PATIENCE)

    def _add(self, connection: socket.socket, dialogue: Dialogue, ends: float, peer: int | None = None) -> None:
        half = self._half_open[connection] = HalfOpen(connection, dialogue, ends, peer)
        self._selector.register(connection, selectors.EVENT_READ, half)

    def _read(self, half: HalfOpen) -> None:
        try:
            peer = half.read()
        except (RefusedError, OSError):
            self._drop(half)
            return
        if peer is not None:
            self._remove(half)
            half.connection.setblocking(True)
            self._missing.discard(peer)
            if peer in self._proved:  # the peer has abandoned its first connection
                self._proved[peer].close()
            self._proved[peer] = half.connection

    def _remove(self, half: HalfOpen) -> None:
        del self._half_open[half.connection]
        self._selector.unregister(half.connection)

    def _drop(self, half: HalfOpen) -> None:
        self._remove(half)
        half.dialogue.close()
        half.connection.close()
        if half.peer is None:
            self.dropped += 1
        else:
            self._unconnected.add(half.peer)  # connect again: the peer had too many connections

    # ------------------------------------------------------------------------------------------------------- dialogues

    def _connector_dialogue(self, connection: socket.socket, peer: int) -> Dialogue:
        """Authenticate as the side that connects."""
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_GATE.head + _HELLO.pack(self._rank, nonce))
        _GATE.check((yield HEAD_BYTES), f"who answers in the place of rank {peer}", peer)
        message = yield _NONCE + _MAC
        pair = (self._rank, peer, nonce, message[:_NONCE])
        if not same(message[_NONCE:], mac(self._key, "acceptor", *pair)):
            raise AuthError(f"who answers in the place of rank {peer} does not prove to be that rank", peer=peer)
        connection.sendall(mac(self._key, "connector", *pair))
        if (yield len(_ACCEPTED)) != _ACCEPTED:
            raise RefusedError
        return peer

    def _acceptor_dialogue(self, connection: socket.socket) -> Dialogue:
        """Authenticate as the side that accepts."""
        head = yield HEAD_BYTES
        if head != _GATE.head:
            other = _GATE.other_version(head)
            if (
                other is not None
            ):  # it learns this rank's version; anybody may say this, so it is an error to nobody here
                self._versions.add(other)
                connection.sendall(_GATE.head)
            raise RefusedError
        peer, peer_nonce = _HELLO.unpack((yield _HELLO.size))
        if not self._rank < peer < self._size:
            raise RefusedError
        nonce = secrets.token_bytes(_NONCE)
        pair = (peer, self._rank, peer_nonce, nonce)
        connection.sendall(_GATE.head + nonce + mac(self._key, "acceptor", *pair))
        if not same((yield _MAC), mac(self._key, "connector", *pair)):
            raise RefusedError
        connection.sendall(_ACCEPTED)
        return int(peer)


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a unix socket belongs to this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
