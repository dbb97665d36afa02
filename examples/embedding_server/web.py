"""What an HTTP side has whatever it serves: a body of bounded size, and a sentence for everything that is wrong."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from collections.abc import Generator

    from starlette.requests import Request

MAX_BODY = 2**20  # bytes


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal is for the whole process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def close_half_requests(server: uvicorn.Server) -> None:
    """Close connections whose requests have not come to their end; uvicorn closes the others when they are answered."""
    for connection in server.server_state.connections:
        if connection.cycle is not None and connection.cycle.more_body:
            connection.transport.close()


async def read_body(request: Request) -> bytes:
    """Read the whole body, but keep no more of it than is allowed: who still sends does not listen."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        raise HTTPException(413, f"The body has {size} bytes; at most {MAX_BODY} are taken.")
    return bytes(body)


def unavailable(reason: str) -> Response:
    """Return the answer of a server whose model cannot answer."""
    return JSONResponse({"error": reason}, status_code=503)


async def explain(_: Request, error: Exception) -> Response:
    """Answer a refused request with its sentence, as JSON."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def ignore(_request: Request, _error: Exception) -> Response:
    """Answer a client that left in the middle of its request: nobody reads it."""
    return Response(status_code=499)
