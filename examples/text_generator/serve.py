"""The front's process, from its first message to its last."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
from typing import TYPE_CHECKING

import anyio
import torch
import uvicorn

from .front import Front
from .links import open_endpoint
from .model import read_shape
from .parts import Server, close_half_requests
from .server import create_app

if TYPE_CHECKING:
    import socket
    from multiprocessing.connection import Connection
    from pathlib import Path

LINGER = 1.0  # seconds after SIGTERM in which health checks get a 503, at least, so that a balancer hears of it
DRAIN = 30.0  # seconds that streams have to end after SIGTERM


async def run(listener: socket.socket, model: Path, decoders: int, news: Connection) -> None:
    """Serve HTTP until SIGTERM or Ctrl-C; then until the streams under way have ended.

    :param decoders: how many there will be
    :param news: tells the supervisor where groups find this process, and which of them is lost
    """
    gc.freeze()
    torch.set_num_threads(1)
    stopping = on_signals()
    async with open_endpoint() as here:
        front = Front(here, read_shape(model), news.send)
        config = uvicorn.Config(create_app(front), lifespan="off", log_level="warning", limit_concurrency=1000)
        server = Server(config)
        news.send(here.address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(front.run)
            tasks.start_soon(front.measures.beat)
            tasks.start_soon(stop, server, front, stopping)
            await front.ready(decoders)
            print(f"serving on http://{listener.getsockname()[0]}:{listener.getsockname()[1]}", flush=True)
            await server.serve(sockets=[listener])
            front.end()
            tasks.cancel_scope.cancel()


async def stop(server: uvicorn.Server, front: Front, stopping: anyio.Event) -> None:
    """When it is time to stop, answer what is under way, and refuse what comes."""
    await stopping.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, LINGER)
        tasks.start_soon(front.drain, "The server is stopping.", DRAIN)
    server.should_exit = True
    close_half_requests(server)


def on_signals() -> anyio.Event:
    """Set an event on Ctrl-C, SIGTERM or the supervisor's death."""
    stopping = anyio.Event()
    loop = asyncio.get_running_loop()

    def orphaned(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    if (supervisor := multiprocessing.parent_process()) is not None:
        loop.add_reader(supervisor.sentinel, orphaned, supervisor.sentinel)
    return stopping
