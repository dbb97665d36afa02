"""Settings of a connection between two ranks."""

from __future__ import annotations

import socket


def tune(connection: socket.socket) -> socket.socket:
    """Have a connection send at once, and notice within seconds that the other host is gone.

    :returns: the connection. One within a host, over a unix socket, stays as it is.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
    return connection
