"""The sockets of connections between two ranks: their listeners and their options."""

from __future__ import annotations

import socket


def listen_at(address: str, backlog: int = socket.SOMAXCONN, *, port: int = 0) -> socket.socket:
    """Return a listener at one address of this host, IPv4 or IPv6.

    :param port: the port; 0: the kernel chooses a free port.
    :raises OSError: ``address`` is not an address of this host, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def tune(connection: socket.socket, seconds: int = 5) -> socket.socket:
    """Make a connection send data without delay, and make the connection end if the other host no longer answers.

    :param seconds: the time in seconds without an answer after which the connection ends; at least 5.
    :returns: the connection. The options of a unix socket are not changed.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * seconds // 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds // 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    return connection


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes from a blocking connection.

    :raises OSError: the connection ended before the last byte, or the socket's timeout has passed.
    """
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("it has closed the connection")
        data += piece
    return bytes(data)
