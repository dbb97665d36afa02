"""The handshake by which two ranks prove to each other who they are, at the beginning of a connection.

Both sides authenticate before they send anything else:

    connector: magic and version, its rank, a nonce, and a MAC
    acceptor:  magic and version, a nonce, and a MAC
    connector: a MAC
    acceptor:  that it is accepted

A MAC covers both ranks and all nonces so far, and a word that differs for each step. Its key is known only to the ranks
of the communicator. So no message that was recorded before, elsewhere or from the other side proves anything. The first
MAC only tells who may be a rank from who cannot be one, at the first bytes: it may be a recorded one.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Container, Generator
from typing import Final

from aiocomms.errors import AuthError
from aiocomms.lowlevel.auth import mac, same
from aiocomms.lowlevel.versions import HEAD_BYTES, Dialect

HANDSHAKE: Final = Dialect("the handshake", b"aioG", 2)
PROOF_BYTES: Final = 32
"""The size of a MAC. The acceptor wants as many bytes once it has heard the first message, and only then."""

_NONCE: Final = 16
_HELLO: Final = struct.Struct(f"!I{_NONCE}s{PROOF_BYTES}s")
_ACCEPTED: Final = b"\x01"

Dialogue = Generator[int, bytes, int]
"""A generator that yields how many bytes it wants next, and returns the peer's rank."""


class RefusedError(Exception):
    """The error within a dialogue: the other side is not a rank of this communicator, or not one that is expected."""

    def __init__(self, version: int | None = None) -> None:
        """Begin.

        :param version: the version that the other side speaks, if that is not this rank's.
        """
        super().__init__()
        self.version = version


def connector_dialogue(connection: socket.socket, key: bytes, rank: int, peer: int | str) -> Dialogue:
    """Authenticate as the side that connects.

    :param key: the key that only ranks of this communicator know.
    :param peer: the rank that accepts, or the name of a server.
    :raises AuthError: the other side does not prove to be that one.
    :raises ProtocolError: the other side speaks another version, or no version at all.
    """
    who, number = (f"rank {peer}", peer) if isinstance(peer, int) else (peer, None)
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(HANDSHAKE.head + _HELLO.pack(rank, nonce, mac(key, "hello", rank, peer, nonce)))
    HANDSHAKE.check((yield HEAD_BYTES), f"who answers in the place of {who}", number)
    message = yield _NONCE + PROOF_BYTES
    pair = (rank, peer, nonce, message[:_NONCE])
    if not same(message[_NONCE:], mac(key, "acceptor", *pair)):
        raise AuthError(f"who answers in the place of {who} does not prove to be that rank", peer=number)
    connection.sendall(mac(key, "connector", *pair))
    if (yield len(_ACCEPTED)) != _ACCEPTED:
        raise RefusedError
    return rank if isinstance(peer, str) else peer


def acceptor_dialogue(connection: socket.socket, key: bytes, rank: int | str, peers: Container[int]) -> Dialogue:
    """Authenticate as the side that accepts.

    :param rank: this rank, or the name of this server.
    :param peers: the ranks that may connect.
    """
    head = yield HEAD_BYTES
    if head != HANDSHAKE.head:
        version = HANDSHAKE.other_version(head)
        # The connector learns this rank's version. A stranger may send the same bytes, so no rank here takes it for an
        # error.
        if version is not None:
            connection.sendall(HANDSHAKE.head)
        raise RefusedError(version)
    peer, peer_nonce, proof = _HELLO.unpack((yield _HELLO.size))
    if peer not in peers:
        raise RefusedError
    nonce = secrets.token_bytes(_NONCE)
    pair = (peer, rank, peer_nonce, nonce)
    connection.sendall(HANDSHAKE.head + nonce + mac(key, "acceptor", *pair))
    if not same(proof, mac(key, "hello", peer, rank, peer_nonce)):
        raise RefusedError  # A rank with another key learns that from the answer.
    if not same((yield PROOF_BYTES), mac(key, "connector", *pair)):
        raise RefusedError
    connection.sendall(_ACCEPTED)
    return int(peer)
