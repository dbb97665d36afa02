"""The uvicorn server of ``aiocomms.integrations.uvicorn`` answers all accepted connections before it ends."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest
import uvicorn
from concurrency import until

from aiocomms.integrations.uvicorn import Server

pytestmark = [pytest.mark.real, pytest.mark.search]

REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"


async def app(scope, receive, send):
    """Answer with two bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def answers_of_a_server_that_is_told_to_end(path: str) -> list[bytes]:
    """Return the answers to two clients that connected before a signal; the second sends its request later."""
    server = Server(uvicorn.Config(app, uds=path, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    early, late = [await asyncio.open_unix_connection(path) for _ in range(2)]
    await until(lambda: len(server.server_state.connections) == 2)
    signal.raise_signal(signal.SIGTERM)
    early[1].write(REQUEST)
    await until(lambda: not socket_is_open(path))
    late[1].write(REQUEST)
    answers = await asyncio.gather(*(asyncio.wait_for(client[0].read(), 10) for client in (early, late)))
    for _, writer in (early, late):
        writer.close()
    await serving
    return answers


def socket_is_open(path: str) -> bool:
    """Tell whether a server accepts connections there."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def test_connection_that_was_accepted_is_answered_by_a_server_that_ends(tmp_path):
    answers = asyncio.run(answers_of_a_server_that_is_told_to_end(str(tmp_path / "s")))
    assert all(answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok") for answer in answers)
