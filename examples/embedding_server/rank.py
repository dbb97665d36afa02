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
from functools import partial
from typing import TYPE_CHECKING

import anyio
import torch
import uvicorn
from anyio import to_thread

import aiocomms
from aiocomms.errors import CommError, PeerDiedError
from aiocomms.serving import Service

from .batcher import Batcher
from .model import Stage
from .pipeline import Pipeline
from .server import create_app
from .web import Server, close_half_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiocomms import Communicator

    Tell = Callable[[int | None], None]

RECOVERY = 30.0  # seconds in which those that are left, and those that take the place of the dead, find each other
DRAIN = 0.6  # seconds that the requests in flight have after Ctrl-C; then they get a 503
GRACE = 5.0  # seconds after Ctrl-C when a rank leaves, whatever is left to do


async def run(listen: Callable[[], socket.socket], tell: Tell | None = None, join: bool = False) -> None:
    """Join the other ranks, run this rank's stage of the model, and leave in good order.

    :param listen: gives the socket on which rank 0 serves
    :param tell: tells the supervisor which rank is lost, and None whenever rank 0 serves; without a supervisor nobody
        takes the place of a rank that is lost
    :param join: take such a place
    :raises SystemExit: if the job cannot go on, with a sentence that says why
    """
    gc.freeze()  # modules stay: no collection need visit them. A communicator is freed by one, so it comes later
    failure: BaseException | None = None
    try:
        with ending_on_signals() as stopping:
            comm = await (aiocomms.new_comm(timeout=RECOVERY, join=True) if join else aiocomms.new_comm())
            async with Service(comm, None if tell is None else partial(recover, tell, stopping)) as service:
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.size))
                pipeline = Pipeline(service.comm, await to_thread.run_sync(Stage, comm.rank, comm.size))
                if comm.rank == 0:
                    await serve(service, pipeline, listen(), stopping, tell)
                else:
                    await service.work(pipeline.execute)
            print(f"rank {comm.rank} has ended", flush=True)
    except* CommError as errors:
        failure = errors
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise SystemExit(f"{type(failure).__name__}: {failure}")


async def recover(tell: Tell, stopping: anyio.Event, lost: Communicator) -> Communicator:
    """When a rank is lost, go on with the process that takes its place: every rank that is left does this."""
    reason = await lost.lost()
    if isinstance(reason, PeerDiedError) and reason.peer is not None:
        tell(reason.peer)
    try:
        if stopping.is_set():
            raise reason
        comm = await lost.reconfigure(size=lost.size, timeout=RECOVERY)
    except CommError:
        stopping.set()  # rank 0 ends, too, and the supervisor starts another
        raise
    if comm.rank == 0:
        tell(None)
    return comm


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
    service: Service, pipeline: Pipeline, listener: socket.socket, stopping: anyio.Event, tell: Tell | None
) -> None:
    """Serve HTTP until `stopping` is set; then what is under way ends, and the other ranks leave."""
    end = " and cannot answer." if tell is None else "; another process is about to take its place."
    with suppress(*(CommError,) if tell is None else ()):  # every client has been told
        async with service.drive(pipeline.execute) as driver:
            batcher = Batcher(driver, service.comm.size, f"The model lost one of its stages{end}")
            config = uvicorn.Config(create_app(batcher), lifespan="off", log_level="warning", limit_concurrency=1000)
            server = Server(config)
            if tell is not None:
                tell(None)
            print(f"serving on http://{listener.getsockname()[0]}:{listener.getsockname()[1]}", flush=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(batcher.feed)
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
