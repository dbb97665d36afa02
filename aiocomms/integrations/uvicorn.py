"""uvicorn, which ends without the loss of a request that has come to a connection."""

from __future__ import annotations

import signal
import socket
import sys
from types import FrameType
from typing import Any, Final

import anyio
import uvicorn

LINGER: Final = 1.0
"""Seconds for which connections that were accepted may send their first request, when the server ends."""
_PAUSE: Final = 0.01


class Server(uvicorn.Server):
    """A ``uvicorn.Server`` that, when it ends, first answers each connection that it has accepted.

    uvicorn by itself closes a connection whose request it has not read, and the client sees it reset. This one stops
    listening, and waits up to :data:`LINGER` until each connection has sent a request. A connection that was kept open
    behind an answer is closed, as HTTP lets a server do at any time.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second SIGINT ends at once. uvicorn would end the process by the signal when it has ended."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until SIGINT or SIGTERM.

        :raises SystemExit: the application did not start, or did not end in good order.
        """
        super().run(sockets)
        if not self.started or self.lifespan.should_exit:
            sys.exit(1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for first requests, and close the connections when all is answered."""
        for server in self.servers:
            server.close()
        with anyio.move_on_after(LINGER):
            await anyio.sleep(_PAUSE)  # in which those that have been accepted become connections of uvicorn
            # uvicorn tells of a request by no event.
            while not self.force_exit and any(map(_has_sent_nothing, self.server_state.connections)):  # noqa: ASYNC110
                await anyio.sleep(_PAUSE)
        await super().shutdown(sockets)


def _has_sent_nothing(connection: Any) -> bool:
    """Tell whether a connection, an ``HTTPProtocol`` of uvicorn, has had no request; one of a WebSocket has."""
    return getattr(connection, "cycle", connection) is None


def run(app: Any, **config: Any) -> None:
    """Serve an application until SIGINT or SIGTERM, by a :class:`Server`.

    :param app: an ASGI application.
    :param config: parameters of ``uvicorn.Config``, such as ``port`` or ``fd``.
    :raises SystemExit: the application did not start, or did not end in good order.
    """
    Server(uvicorn.Config(app, **config)).run()
