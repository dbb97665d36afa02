"""A uvicorn server that answers the requests of all accepted connections before it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import anyio
import uvicorn

from aiocomms.errors import ArgumentError

LINGER: Final = 1.0
"""The largest number of seconds for which an ending server waits for the first request of an accepted connection."""
_PAUSE: Final = 0.01


class Server(uvicorn.Server):
    """A ``uvicorn.Server`` that answers a request of each accepted connection before the server ends.

    When uvicorn's own server ends, it also closes connections with a request that the server has not read.
    Then the client gets a connection reset. When this server ends, it stops listening, and waits up to :data:`LINGER`
    seconds until each connection has sent a request. Then this server closes each connection after the answer to the
    request. HTTP permits a server to close a connection after any answer.
    """

    _abandon_start: Callable[[], object] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown. If the server has not completed its start, cancel the start.

        A SIGINT after an earlier signal ends the server at once. After its shutdown, uvicorn's own server sends the
        received signal to its process again. This class sends no signal.
        """
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True
        if self._abandon_start is not None:
            self._abandon_start()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until SIGINT or SIGTERM.

        :raises SystemExit: the application failed at its start or end.
        """
        super().run(sockets)
        if not (self.started or self.should_exit) or self.lifespan.should_exit:
            sys.exit(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen. A signal during the start cancels the start.

        uvicorn's own server does not handle a signal until the start is complete. But the start may take long, for
        example because it loads a model or waits for other ranks. After a cancelled start, the application's lifespan
        task is cancelled when the event loop ends.
        """
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            self._abandon_start = lambda: loop.call_soon_threadsafe(scope.cancel)
            if self.should_exit:
                scope.cancel()
            try:
                await super().startup(sockets)
            finally:
                self._abandon_start = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for each connection's first request, and close the connections after all answers."""
        for server in self.servers:
            server.close()
        with anyio.move_on_after(LINGER):
            await anyio.sleep(_PAUSE)  # In this time accepted sockets become connections of uvicorn.
            # uvicorn has no event for a request.
            while not self.force_exit and any(map(_has_sent_nothing, self.server_state.connections)):  # noqa: ASYNC110
                await anyio.sleep(_PAUSE)
        await super().shutdown(sockets)


def _has_sent_nothing(connection: Any) -> bool:
    """Return whether a connection has sent no request. A WebSocket connection has already sent a request."""
    return getattr(connection, "cycle", connection) is None


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def run(app: Any, **config: Any) -> None:
    """Serve an application with a :class:`Server` until SIGINT or SIGTERM.

    :param app: an ASGI application.
    :param config: parameters of ``uvicorn.Config``, such as ``port`` or ``fd``.
    :raises ArgumentError: ``fd`` is not a socket.
    :raises SystemExit: the application failed at its start or end.
    """
    fd = config.get("fd")
    if fd is not None and not _is_socket(fd):
        raise ArgumentError(
            f"fd is {fd}, wanted a listening socket: start with 'aiocomms run --listen HOST:PORT', or pass port="
        )
    Server(uvicorn.Config(app, **config)).run()
