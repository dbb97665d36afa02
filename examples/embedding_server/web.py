"""The common code of HTTP servers: the process, a body of bounded size, and a sentence for each error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from aiocomms.integrations.uvicorn import Server as DrainingServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

    from starlette.applications import Starlette
    from starlette.requests import Request

MAX_BODY = 2**20  # bytes


class Server(DrainingServer):
    """A uvicorn server that prints its address, and drains before it stops listening.

    :param drain: returns when all running requests have an answer or are given up
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Before the server has started, exit at once."""
        if not self.started:
            os._exit(0)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: Any = None) -> None:
        """Begin to serve, and print the address."""
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        print(f"serving on http://{host}:{port}", flush=True)

    async def main_loop(self) -> None:
        """Serve until a signal arrives and the server is drained."""
        await super().main_loop()
        await self._drain()

    async def shutdown(self, sockets: Any = None) -> None:
        """Close connections with incomplete requests. Other connections close after their answers."""
        for connection in self.server_state.connections:
            if connection.cycle is not None and connection.cycle.more_body:
                connection.transport.close()
        await super().shutdown(sockets)


def serve(app: Starlette, drain: Callable[[], Awaitable[None]], host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C on the launcher's socket, or on a new socket at `host` and `port`.

    :raises SystemExit: the application failed to start or to end
    """
    place: dict[str, Any] = {"fd": 3} if "LISTEN_FDS" in os.environ else {"host": host, "port": port}
    config = uvicorn.Config(app, **place, loop="asyncio", log_level="warning", limit_concurrency=1000)
    Server(config, drain).run()


async def read_body(request: Request) -> bytes:
    """Read the whole body, because a client that still sends reads no answer. Keep only the allowed size."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        raise HTTPException(413, f"The body has {size} bytes; at most {MAX_BODY} are taken.")
    return bytes(body)


def unavailable(reason: str) -> Response:
    """Return a 503 with its reason."""
    return JSONResponse({"error": reason}, status_code=503)


async def explain(_: Request, error: Exception) -> Response:
    """Answer a refused request with its sentence as JSON."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def ignore(_request: Request, _error: Exception) -> Response:
    """Answer a client that has left before the end of its request. The client does not read the answer."""
    return Response(status_code=499)
