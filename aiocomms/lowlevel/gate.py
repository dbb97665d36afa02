"""Connects a rank with every other rank of its communicator, and lets nobody else in.

A connection is made by the rank with the higher number, and proved by both sides before anything else is said:

    connector: magic, its rank, a nonce
    acceptor:  a nonce, and a MAC of it
    connector: a MAC
    acceptor:  that it is accepted

The MACs are over both ranks and both nonces, each side's with a word of its own, by a key that only these ranks
know: nothing that was said before, elsewhere or by the other side proves anything. Whoever is not done in time is
dropped, and of more connections than there may be the oldest: those of ranks are young, for a rank proves itself at
once.
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

PATIENCE: Final = 5.0
"""Seconds in which somebody who connects proves who it is."""
MOST_HALF_OPEN: Final = 128
"""Connections that may be at it at a time, besides one for each rank."""

_MAGIC: Final = b"aioG1\0"
_NONCE: Final = 16
_MAC: Final = 32
_HELLO: Final = struct.Struct(f"!6sI{_NONCE}s")
_ACCEPTED: Final = b"\x01"
_PAUSE: Final = 0.01
"""Seconds before another attempt to connect."""
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred

Dialogue = Generator[int, bytes, int]
"""Yields how many bytes it wants next, and returns the peer's rank."""


class RefusedError(Exception):
    """Raised within a dialogue: the other side is no rank of this communicator, or none that is expected."""


class HalfOpen:
    """A connection that is not proved yet."""

    __slots__ = ("connection", "dialogue", "ends", "got", "peer", "wanted")

    def __init__(self, connection: socket.socket, dialogue: Dialogue, ends: float, peer: int | None) -> None:
        """Begin.

        :param peer: whom this rank has called; None: somebody has called it.
        """
        connection.setblocking(False)
        self.connection = connection
        self.dialogue = dialogue
        self.ends = ends
        self.peer = peer
        self.got = b""
        self.wanted = next(dialogue)

    def read(self) -> int | None:
        """Go on with what has come.

        :returns: the peer's rank, when that is proved.
        :raises RefusedError: it is nobody of ours.
        :raises OSError: it is gone.
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
    """The connections of one rank. Used by one thread, which it blocks."""

    def __init__(self, rank: int, key: bytes, connectors: Mapping[int, Callable[[], socket.socket]], size: int) -> None:
        """Begin.

        :param key: what only these ranks know, such as a secret of the rendezvous.
        :param connectors: for every rank below this one, what connects to it.
        """
        self._rank = rank
        self._size = size
        self._key = key
        self._connectors = connectors
        self._unconnected = set(connectors)
        self._missing = set(range(size)) - {rank}
        self._most = size + MOST_HALF_OPEN
        self._half_open: dict[socket.socket, HalfOpen] = {}  # in the order in which they came
        self._proved: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self.dropped = 0
        """Connections of strangers."""

    def run(self, listeners: Sequence[socket.socket], seconds: float) -> dict[int, socket.socket]:
        """Connect to the ranks below this one, and let those above connect.

        :returns: a connection for each rank.
        :raises CommTimeoutError: it took longer; says who is missing.
        :raises AuthError: who answers in a rank's place does not prove to be that rank.
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
                    raise CommTimeoutError(f"these ranks did not connect within {seconds:g} s: {sorted(self._missing)}")
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

    # ------------------------------------------------------------------------------------------------- connections

    def _connect_missing(self, ends: float) -> None:
        """Connect to whom this rank is not connected yet."""
        for peer in list(self._unconnected):
            with contextlib.suppress(OSError):  # its queue is full, of strangers perhaps
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
        """Take some of those who wait: not all at once, for those who are in should get on."""
        for _ in range(16):
            try:
                connection, _ = listener.accept()
            except OSError:  # nobody waits, or it is gone already, or there is no descriptor left
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
            if peer in self._proved:  # it has given up on the first one
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
            self._unconnected.add(half.peer)  # it had too much to do

    # -------------------------------------------------------------------------------------------------- what is said

    def _connector_dialogue(self, connection: socket.socket, peer: int) -> Dialogue:
        """The connector's side."""
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_HELLO.pack(_MAGIC, self._rank, nonce))
        message = yield _NONCE + _MAC
        pair = (self._rank, peer, nonce, message[:_NONCE])
        if not same(message[_NONCE:], mac(self._key, "acceptor", *pair)):
            raise AuthError(f"who answers in the place of rank {peer} does not prove to be that rank", peer=peer)
        connection.sendall(mac(self._key, "connector", *pair))
        if (yield len(_ACCEPTED)) != _ACCEPTED:
            raise RefusedError
        return peer

    def _acceptor_dialogue(self, connection: socket.socket) -> Dialogue:
        """The acceptor's side."""
        magic, peer, peer_nonce = _HELLO.unpack((yield _HELLO.size))
        if magic != _MAGIC or not self._rank < peer < self._size:
            raise RefusedError
        nonce = secrets.token_bytes(_NONCE)
        pair = (peer, self._rank, peer_nonce, nonce)
        connection.sendall(nonce + mac(self._key, "acceptor", *pair))
        if not same((yield _MAC), mac(self._key, "connector", *pair)):
            raise RefusedError
        connection.sendall(_ACCEPTED)
        return int(peer)


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a unix socket belongs to this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
