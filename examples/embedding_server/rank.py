"""One rank of the job, from its first message to its last; rank 0 also serves HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import torch
import uvicorn
from anyio import to_thread

from aiocomms.errors import CommError

from .batcher import Batcher
from .ending import exiting_by
from .links import open_links
from .model import Stage
from .pipeline import THREADS, Pipeline, settle
from .server import create_app
from .web import Server, close_half_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiocomms.serving import Service

    from .links import Tell

DRAIN = 0.6  # seconds that the requests in flight have after Ctrl-C; then they get a 503
GRACE = 5.0  # seconds after Ctrl-C when a rank leaves, whatever is left to do


@dataclass(frozen=True, slots=True)
class Shape:
    """How the model is laid out.

    :param tp: over how many parts each layer is split; there are as many stages as there are ranks for that
    :param threads: the size of each rank's pool
    :param torch_threads: the threads of each operation of torch; 0: those of the machine's cores that a rank has
    """

    tp: int = 1
    threads: int = THREADS
    torch_threads: int = 0


async def run(
    listen: Callable[[], socket.socket],
    shape: Shape,
    tell: Tell | None = None,
    join: bool = False,
    open_links: Any = open_links,
) -> None:
    """Join the other ranks, run this rank's share of the model, and leave in good order.

    :param listen: gives the socket on which rank 0 serves
    :param tell: tells the supervisor which rank is lost, and None whenever rank 0 serves; without a supervisor nobody
        takes the place of a rank that is lost
    :param join: take such a place
    :param open_links: by what the ranks communicate
    :raises SystemExit: if the job cannot go on, with a sentence that says why
    """
    settle()
    gc.freeze()  # modules stay: no collection need visit them. A communicator is freed by one, so it comes later
    with exiting_by(CommError), ending_on_signals() as stopping:
        async with open_links(shape.tp, stopping, tell, join) as (service, links):
            place = links.place
            own = len(os.sched_getaffinity(0)) // (place.tp * place.pp)
            torch.set_num_threads(shape.torch_threads or max(1, own))
            stage = await to_thread.run_sync(Stage, place.stage, place.pp, place.part, place.tp)
            pipeline = Pipeline(links, stage, shape.threads)
            if place.rank == 0:
                await serve(service, pipeline, place.pp, listen(), stopping, tell)
            else:
                await service.work(pipeline.execute)
        print(f"rank {place.rank} has ended", flush=True)


@contextmanager
def ending_on_signals() -> Iterator[anyio.Event]:
    """Set an event on Ctrl-C, SIGTERM or the supervisor's death; cancel the block if it lasts `GRACE` seconds more.

    Ranks other than 0 need no more than that: they end when rank 0 ends the stream.
    """
    stopping = anyio.Event()
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def stop() -> None:
            stopping.set()
            scope.deadline = min(scope.deadline, anyio.current_time() + GRACE)

        def orphaned(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        if (supervisor := multiprocessing.parent_process()) is not None:
            loop.add_reader(supervisor.sentinel, orphaned, supervisor.sentinel)
        yield stopping
    if scope.cancelled_caught:
        logging.warning("it was held up, and left after %g s with something unfinished", GRACE)


async def serve(
    service: Service,
    pipeline: Pipeline,
    stages: int,
    listener: socket.socket,
    stopping: anyio.Event,
    tell: Tell | None,
) -> None:
    """Serve HTTP until `stopping` is set; then what is under way ends, and the other ranks leave."""
    end = " and cannot answer." if tell is None else "; another process is about to take its place."
    with suppress(*(CommError,) if tell is None else ()):  # every client has been told
        async with service.drive(pipeline.execute) as driver:
            batcher = Batcher(driver, stages, f"The model lost one of its stages{end}")
            config = uvicorn.Config(create_app(batcher), lifespan="off", log_level="warning", limit_concurrency=1000)
            server = Server(config)
            if tell is not None:
                tell(None)
            print(f"serving on http://{listener.getsockname()[0]}:{listener.getsockname()[1]}", flush=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(batcher.feed)
                tasks.start_soon(batcher.metrics.watch_loop)
                tasks.start_soon(drain, server, batcher, stopping)
                await server.serve(sockets=[listener])
                tasks.cancel_scope.cancel()


async def drain(server: uvicorn.Server, batcher: Batcher, stopping: anyio.Event) -> None:
    """When it is time to stop, let the requests in flight finish, but not for ever."""
    await stopping.wait()
    server.should_exit = True
    await anyio.sleep(DRAIN)
    batcher.stop("The server is stopping.")
    close_half_requests(server)
