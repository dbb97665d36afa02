"""One rank of the job, from its first message to its last; rank 0 also serves HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import torch
import uvicorn
from anyio import to_thread

import aiocomms
from aiocomms.errors import CommError

from .batcher import Batcher
from .model import Stage
from .pipeline import loopback, open_ring, run_stage
from .server import create_app

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from anyio.abc import ObjectStream
    from torch import Tensor

DRAIN = 0.6  # seconds that the requests in flight have after Ctrl-C; then they get a 503
GRACE = 1.5  # seconds after Ctrl-C when a rank leaves, whatever is left to do


async def run(host: str, port: int) -> None:
    """Join the other ranks, run this rank's stage of the model, and leave in good order.

    :raises SystemExit: if the job cannot go on, with a sentence that says why
    """
    try:
        with ending_on_signals() as stopping:
            async with aiocomms.new_comm() as comm:
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.size))
                stage = await to_thread.run_sync(Stage, comm.rank, comm.size)
                gc.freeze()  # what is loaded stays: no collection need visit it, nor the one at exit (half a second)
                inbound, outbound = await open_ring(comm)
                if comm.rank == 0:
                    await serve(listen(host, port), Batcher(comm.size), stage, inbound, outbound, stopping)
                else:
                    await run_stage(stage, inbound, outbound)
                if not comm.aborted:
                    await comm.barrier()  # leave together: whoever leaves early is missed by those still at work
            print(f"rank {comm.rank} has ended", flush=True)
    except CommError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


@contextmanager
def ending_on_signals() -> Iterator[anyio.Event]:
    """Set an event on Ctrl-C or SIGTERM, and cancel the block if it has not ended `GRACE` seconds later.

    Ranks other than 0 need no more than that: they end when rank 0 ends the stream.
    """
    stopping = anyio.Event()
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def stop() -> None:
            stopping.set()
            scope.deadline = min(scope.deadline, anyio.current_time() + GRACE)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        yield stopping


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host} port {port}: {error}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it each answer takes 40 ms
    return listener


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal is for the whole rank."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    listener: socket.socket,
    batcher: Batcher,
    stage: Stage,
    inbound: ObjectStream[Tensor],
    outbound: ObjectStream[Tensor],
    stopping: anyio.Event,
) -> None:
    """Serve HTTP until `stopping` is set, then end the streams of all ranks."""
    config = uvicorn.Config(create_app(batcher), lifespan="off", log_level="warning", limit_concurrency=1000)
    server = Server(config)
    async with anyio.create_task_group() as pipeline:
        pipeline.start_soon(run_pipeline, batcher, stage, inbound, outbound)
        print(f"serving on http://{listener.getsockname()[0]}:{listener.getsockname()[1]}", flush=True)
        async with anyio.create_task_group() as http:
            http.start_soon(drain, server, batcher, stopping)
            await server.serve(sockets=[listener])
            http.cancel_scope.cancel()
        batcher.close()  # the end of the stream now travels round the ring and ends `run_pipeline`


async def run_pipeline(
    batcher: Batcher, stage: Stage, inbound: ObjectStream[Tensor], outbound: ObjectStream[Tensor]
) -> None:
    """Run rank 0's part of the ring until it ends or breaks, and fail what is then left without an answer."""
    entrance = loopback()
    try:
        async with anyio.create_task_group() as parts:
            parts.start_soon(batcher.feed, entrance)
            parts.start_soon(run_stage, stage, entrance, outbound)
            parts.start_soon(batcher.collect, inbound)
    except* Exception as errors:
        logging.error("the pipeline broke: %r", errors.exceptions[0])
    batcher.fail("The model lost one of its stages and cannot answer.")


async def drain(server: uvicorn.Server, batcher: Batcher, stopping: anyio.Event) -> None:
    """When it is time to stop, let the requests in flight finish, but not for ever."""
    await stopping.wait()
    server.should_exit = True
    await anyio.sleep(DRAIN)
    batcher.fail("The server is stopping.")
    await anyio.sleep(0.1)  # for these answers to be written
    for connection in server.server_state.connections:
        connection.transport.close()  # what is left is half a request
