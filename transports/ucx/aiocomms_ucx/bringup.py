"""Ranks become a family: who shares a host, a control connection for each pair, and an engine."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from aiocomms.errors import ArgumentError, CommTimeoutError, ProtocolError
from aiocomms.hosts import host_id, reachable_address
from aiocomms.transport import Rendezvous
from aiocomms_ucx import wire
from aiocomms_ucx._engine import Engine
from aiocomms_ucx.family import Family

_TOKEN: Final = 16
_HELLO: Final = struct.Struct(f"!I{_TOKEN}s")  # a rank, and the listener's token
_PATIENCE: Final = 5.0
"""Seconds in which somebody who connects says who it is."""


class Hello(msgspec.Struct, array_like=True):
    """What each rank tells the others first."""

    version: int
    byte_order: str
    host: str
    name: str
    pid: int
    cores: list[int]
    path: str
    """Of the abstract socket at which ranks of this host connect."""
    token: bytes
    """What they have to say there."""


class Place(msgspec.Struct, array_like=True):
    """What each rank tells the others when it knows who is where."""

    address: bytes
    """The UCX worker's."""
    endpoint: tuple[str, int] | None
    """Where ranks of other hosts connect."""


async def open_family(rendezvous: Rendezvous) -> tuple[Family, list[str], list[int]]:
    """Meet the other ranks. Collective.

    :returns: the family, and each rank's host and process.
    :raises CommTimeoutError: a rank did not come, or did not connect.
    """
    rank, size = rendezvous.rank, rendezvous.size
    path, token = f"\0aiocomms-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN)
    cores = sorted(os.sched_getaffinity(0))
    mine = Hello(
        wire.VERSION, sys.byteorder, f"{host_id('net', 'pid')}/{os.getuid()}", socket.gethostname(), os.getpid(),
        cores, path, token,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_listen_here(path, size))]
        hellos = await _hellos(rendezvous, mine)
        hosts = [hello.host for hello in hellos]
        outside = None
        if len(set(hosts)) > 1:
            names = [hello.name for hello in hellos if hello.host != mine.host]
            outside = reachable_address((hellos[0].name, *names), rendezvous.store)
            listeners.append(stack.enter_context(socket.create_server((outside, 0), backlog=size)))
        engine = await rendezvous.run("opening UCX", lambda: Engine(rank, size, _options(outside)))
        places = await _places(
            rendezvous, Place(engine.address(), listeners[-1].getsockname()[:2] if outside else None)
        )
        sockets = await rendezvous.run(
            "connecting to the other ranks", lambda: _connect_all(rendezvous, listeners, hellos, places)
        )
    pids = [hello.pid for hello in hellos]
    here = [hello for hello in hellos if hello.host == mine.host]
    crowded = len(here) > len({core for hello in here for core in hello.cores})
    engine.start([place.address for place in places], sockets, [it.pid if it in here else 0 for it in hellos], crowded)
    return Family(engine, rank), hosts, pids


def _options(outside: str | None) -> list[tuple[str, str]]:
    """UCX's settings. The user's environment variables win.

    sysv's segments can be read by the group. On one host there is no use for a network, and nothing then listens. On
    several UCX listens at the address of each interface, or of the one alone that ``AIOCOMMS_IFACE`` names.
    """
    if outside is None:
        return [("TLS", "^sysv,tcp")]
    interface = os.environ.get("AIOCOMMS_IFACE")
    devices = [("NET_DEVICES", interface)] if interface else []
    return [("TLS", "^sysv"), *devices]


async def _hellos(rendezvous: Rendezvous, mine: Hello) -> list[Hello]:
    raw_hellos = await rendezvous.exchange("ucx", msgspec.msgpack.encode(mine))
    return [_hello(peer, raw) for peer, raw in enumerate(raw_hellos)]


async def _places(rendezvous: Rendezvous, mine: Place) -> list[Place]:
    raw_places = await rendezvous.exchange("ucx places", msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(raw, type=Place) for raw in raw_places]


def _hello(rank: int, raw: bytes) -> Hello:
    try:
        hello = msgspec.msgpack.decode(raw, type=Hello)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"rank {rank} does not introduce itself as this version does: {error}") from None
    for what, theirs, ours in (
        ("version", hello.version, wire.VERSION),
        ("byte order", hello.byte_order, sys.byteorder),
    ):
        if theirs != ours:
            raise ProtocolError(f"rank {rank} has {what} {theirs} of the ucx transport, this rank {ours}")
    return hello


def _listen_here(path: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(backlog)
    return listener


def _connect_all(
    rendezvous: Rendezvous, listeners: Sequence[socket.socket], hellos: Sequence[Hello], places: Sequence[Place]
) -> list[int]:
    """Connect to every rank below this one, and let those above connect; blocks.

    :returns: a descriptor for each rank, -1 for this one.
    """
    rank = rendezvous.rank
    ends = time.monotonic() + rendezvous.timeout
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            near = hellos[peer].host == hellos[rank].host
            sockets[peer] = _connect(hellos[peer].path if near else places[peer].endpoint, ends)
            sockets[peer].sendall(_HELLO.pack(rank, hellos[peer].token))
        waiting = {peer: hellos[peer].host == hellos[rank].host for peer in range(rank + 1, rendezvous.size)}
        for listener, near in zip(listeners, (True, False), strict=False):
            while any(where == near for where in waiting.values()):
                peer, connection = _accept(listener, hellos[rank].token, ends)
                if waiting.pop(peer, None) is None:
                    connection.close()
                else:
                    sockets[peer] = connection
    except TimeoutError:
        for connection in sockets.values():
            connection.close()
        absent = [peer for peer in range(rendezvous.size) if peer != rank and peer not in sockets]
        raise CommTimeoutError(f"these ranks did not connect within {rendezvous.timeout} s: {absent}") from None
    return [-1 if peer == rank else sockets[peer].detach() for peer in range(rendezvous.size)]


def _prompt(connection: socket.socket) -> socket.socket:
    """Have a connection to another host send at once, and notice within seconds that the host is gone."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
    return connection


def _connect(where: str | tuple[str, int] | None, ends: float) -> socket.socket:
    if where is None:
        raise ArgumentError("a rank on another host takes no connections: the ranks disagree on who shares a host")
    left = max(0.001, ends - time.monotonic())
    if isinstance(where, tuple):
        connection = _prompt(socket.create_connection(where, timeout=left))
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(left)
        connection.connect(where)
    return connection


def _accept(listener: socket.socket, token: bytes, ends: float) -> tuple[int, socket.socket]:
    """The next connection of somebody who knows the token, and its rank."""
    while True:
        listener.settimeout(max(0.001, ends - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(min(_PATIENCE, max(0.001, ends - time.monotonic())))
        with contextlib.suppress(OSError):
            said = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(said) == _HELLO.size:
                rank, theirs = _HELLO.unpack(said)
                if secrets.compare_digest(theirs, token):
                    return rank, _prompt(connection)
        connection.close()
