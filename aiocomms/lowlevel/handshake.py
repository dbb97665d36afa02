"""The handshake by which two ranks authenticate each other at the beginning of a connection.

Both sides authenticate before they send anything else:

    connector: magic and version, its rank, a nonce, and a MAC
    acceptor:  magic and version, a nonce, and a MAC
    connector: a MAC
    acceptor:  the acceptance

A MAC covers both ranks, all nonces that were exchanged before it, and a text that differs for each step. Only the ranks
of the communicator know the key of the MAC. So a process without the key cannot reuse a MAC from another connection or
from another step. The only exception is the first MAC. A process can reuse a recorded first MAC, because the acceptor
sends its nonce only afterwards. So the first MAC shows early that the connector may be a rank, but does not prove this.
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
"""The size of a MAC in bytes.

If an acceptor waits for exactly this number of bytes, the acceptor has already read the connector's first message.
"""

_NONCE: Final = 16
_HELLO: Final = struct.Struct(f"!I{_NONCE}s{PROOF_BYTES}s")
_ACCEPTED: Final = b"\x01"

Dialogue = Generator[int, bytes, int]
"""A generator that yields the number of bytes that the generator must receive next.

The return value of the generator is the peer's rank.
"""


class RefusedError(Exception):
    """The error of a dialogue if the other side does not prove that it is an expected rank, or refuses this rank."""

    def __init__(self, version: int | None = None) -> None:
        """Create the error.

        :param version: the version of the other side, if the version differs from this rank's version.
        """
        super().__init__()
        self.version = version


def connector_dialogue(connection: socket.socket, key: bytes, rank: int, peer: int | str) -> Dialogue:
    """Authenticate as the side that connects.

    :param key: the key that only ranks of this communicator know.
    :param peer: the rank that accepts, or the name of a server.
    :raises AuthError: the other side does not prove that it is ``peer``.
    :raises ProtocolError: the other side uses another version, or another protocol.
    :raises RefusedError: the other side does not accept this rank.
    """
    who, number = (f"rank {peer}", peer) if isinstance(peer, int) else (peer, None)
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(HANDSHAKE.head + _HELLO.pack(rank, nonce, mac(key, "hello", rank, peer, nonce)))
    HANDSHAKE.check((yield HEAD_BYTES), f"the process in the place of {who}", number)
    message = yield _NONCE + PROOF_BYTES
    pair = (rank, peer, nonce, message[:_NONCE])
    if not same(message[_NONCE:], mac(key, "acceptor", *pair)):
        raise AuthError(f"the process in the place of {who} does not prove to be that rank; check tokens", peer=number)
    connection.sendall(mac(key, "connector", *pair))
    if (yield len(_ACCEPTED)) != _ACCEPTED:
        raise RefusedError
    return rank if isinstance(peer, str) else peer


def acceptor_dialogue(connection: socket.socket, key: bytes, rank: int | str, peers: Container[int]) -> Dialogue:
    """Authenticate as the side that accepts.

    :param rank: this rank, or the name of this server.
    :param peers: the ranks that may connect.
    :raises RefusedError: the other side does not prove that it is one of ``peers``.
    """
    head = yield HEAD_BYTES
    if head != HANDSHAKE.head:
        version = HANDSHAKE.other_version(head)
        # The connector learns this rank's version from the head. A stranger may send the same bytes, so this rank
        # raises no error to its user.
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
        raise RefusedError  # A rank with another key detects that in the answer.
    if not same((yield PROOF_BYTES), mac(key, "connector", *pair)):
        raise RefusedError
    connection.sendall(_ACCEPTED)
    return int(peer)
