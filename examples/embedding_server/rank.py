"""One rank of the job, from its first message to its last; rank 0 also serves HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import torch
import uvicorn
from anyio import to_thread

import aiocomms
from aiocomms.errors import CommError, PeerDiedError

from .batcher import Batcher
from .model import Stage
from .pipeline import loopback, open_ring, run_stage
from .server import create_app

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator

    from anyio.abc import ObjectStream
    from torch import Tensor

    from aiocomms import Communicator

    Work = Callable[[ObjectStream[Tensor], ObjectStream[Tensor]], Awaitable[None]]
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
            async with aiocomms.new_comm(timeout=RECOVERY, join=True) if join else aiocomms.new_comm() as comm:
                rank, size = comm.rank, comm.size
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
                stage = await to_thread.run_sync(Stage, rank, size)
                if rank == 0:
                    batcher = Batcher(size)
                    work = partial(run_pipeline, batcher, stage, tell)
                    await serve(listen(), batcher, stopping, partial(outlive, comm, work, tell, stopping))
                else:
                    await outlive(comm, partial(run_stage, stage), tell, stopping)
            print(f"rank {rank} has ended", flush=True)
    except* CommError as errors:
        failure = errors
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise SystemExit(f"{type(failure).__name__}: {failure}")


async def outlive(comm: Communicator, work: Work, tell: Tell | None, stopping: anyio.Event) -> None:
    """Do this rank's work on a ring; when a rank is lost, go on on a new one, with the process that takes its place."""

    def report(error: CommError) -> None:
        logging.warning("%s", error)
        if tell is not None and isinstance(error, PeerDiedError) and error.peer is not None:
            tell(error.peer)

    while True:
        async with comm:
            comm.register_abort_hook(report)
            try:
                await work(*await open_ring(comm))
                if not comm.aborted:
                    await comm.barrier()  # leave together: whoever leaves early is missed by those still at work
            except Exception:
                if tell is None or not comm.aborted:
                    raise
            if tell is None or stopping.is_set() or not comm.aborted:
                return
            successor = await comm.reconfigure(size=comm.size, timeout=RECOVERY)
        comm = successor


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


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal is for the whole rank."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    listener: socket.socket, batcher: Batcher, stopping: anyio.Event, pipeline: Callable[[], Awaitable[None]]
) -> None:
    """Serve HTTP until `stopping` is set, then end the streams of all ranks."""
    config = uvicorn.Config(create_app(batcher), lifespan="off", log_level="warning", limit_concurrency=1000)
    server = Server(config)
    async with anyio.create_task_group() as background:
        background.start_soon(pipeline)
        await batcher.opened.wait()
        print(f"serving on http://{listener.getsockname()[0]}:{listener.getsockname()[1]}", flush=True)
        async with anyio.create_task_group() as http:
            http.start_soon(drain, server, batcher, stopping)
            await server.serve(sockets=[listener])
            http.cancel_scope.cancel()
        batcher.close()  # the end of the stream now travels round the ring and ends `run_pipeline`


async def run_pipeline(
    batcher: Batcher, stage: Stage, tell: Tell | None, inbound: ObjectStream[Tensor], outbound: ObjectStream[Tensor]
) -> None:
    """Run rank 0's part of the ring until it ends or breaks, and fail what is then left without an answer."""
    entrance = loopback()
    batcher.open()
    if tell is not None:
        tell(None)
    try:
        async with anyio.create_task_group() as parts:
            parts.start_soon(batcher.feed, entrance)
            parts.start_soon(run_stage, stage, entrance, outbound)
            parts.start_soon(batcher.collect, inbound)
    except* Exception:
        if tell is not None:
            raise
        logging.exception("the pipeline broke")  # and rank 0 goes on saying so
    finally:
        end = " and cannot answer." if tell is None else "; another process is about to take its place."
        batcher.fail(f"The model lost one of its stages{end}")


async def drain(server: uvicorn.Server, batcher: Batcher, stopping: anyio.Event) -> None:
    """When it is time to stop, let the requests in flight finish, but not for ever."""
    await stopping.wait()
    server.should_exit = True
    await anyio.sleep(DRAIN)
    batcher.fail("The server is stopping.")
    for connection in server.server_state.connections:
        # The others uvicorn closes by itself, when their answers are written.
        if connection.cycle is not None and connection.cycle.more_body:
            connection.transport.close()  # half a request
