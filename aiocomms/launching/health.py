"""The HTTP health probes of the supervisor and its ranks: ``/healthz`` and ``/readyz``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, cast

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener, TaskStatus

from aiocomms.errors import ArgumentError
from aiocomms.launching.job import At, reason_of

_LARGEST: Final = 8192
_PATIENCE: Final = 5.0
"""The time limit, in seconds, for a client to send its request."""
_MOST: Final = 32
"""The largest number of connections at the same time. A further connection replaces the oldest connection."""
_PAUSE: Final = 0.1
"""The seconds before the next attempt to accept a connection, after an attempt has failed."""

State = Callable[[], Mapping[str, Any]]
"""A function that returns the body of an answer.

The field ``ready`` of the body is true if all ranks have a communicator.
"""


def answer(request: bytes, state: Mapping[str, Any]) -> bytes:
    """Return the HTTP/1.1 answer to a request.

    :param request: the request's first line and headers.
    :param state: the body of the answer.
    """
    method, path, *_ = (*request.split(b"\r\n")[0].split(b" "), b"", b"")
    path = path.partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif path == b"/healthz":
        status = HTTPStatus.OK
    elif path == b"/readyz":
        status = HTTPStatus.OK if state["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
    else:
        status = HTTPStatus.NOT_FOUND
    known = status in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE)
    body = json.dumps(state if known else {"error": "there are /healthz and /readyz"}).encode() + b"\n"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        head += "Allow: GET, HEAD\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if method == b"HEAD" else body)


async def serve_health(at: At, state: State, *, task_status: TaskStatus[At]) -> None:
    """Answer requests until this call is cancelled. A client can send one request on each connection.

    :param task_status: the object through which this function reports the address. If the port of ``at`` is 0, the
        system chooses the port.
    :raises ArgumentError: the address cannot be bound.
    """

    async def handle(stream: ByteStream) -> None:
        async with stream:
            request = b""
            with anyio.move_on_after(_PATIENCE), contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while b"\r\n\r\n" not in request and len(request) < _LARGEST:
                    request += await stream.receive()
                await stream.send(answer(request, state()))

    try:
        listener = await anyio.create_tcp_listener(local_host=at.host, local_port=at.port)
    except OSError as error:
        raise ArgumentError(f"health cannot be asked at {at}: {reason_of(error)}") from None
    async with listener, anyio.create_task_group() as tasks:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - this is not Django
        task_status.started(At(at.host, port))
        connections: dict[anyio.CancelScope, None] = {}
        for one in listener.listeners:
            tasks.start_soon(_accept, cast("SocketListener", one), connections, handle)


async def _accept(
    listener: SocketListener,
    connections: dict[anyio.CancelScope, None],
    handle: Callable[[ByteStream], Awaitable[None]],
) -> None:
    """Accept connections until this call is cancelled. An error of a connection does not end the supervisor.

    :param connections: the cancel scopes of all connections, the oldest first. If there are too many connections, the
        oldest is cancelled. So clients that send nothing do not delay other requests.
    """

    async def answer_one(stream: ByteStream, scope: anyio.CancelScope) -> None:
        with scope:
            await handle(stream)
        connections.pop(scope, None)

    async with anyio.create_task_group() as tasks:
        while True:
            try:
                stream = await listener.accept()
            except OSError:  # The client has left already, or too many descriptors are open.
                await anyio.sleep(_PAUSE)
                continue
            if len(connections) == _MOST:
                oldest = next(iter(connections))
                del connections[oldest]
                oldest.cancel()
            connections[scope := anyio.CancelScope()] = None
            tasks.start_soon(answer_one, stream, scope)
