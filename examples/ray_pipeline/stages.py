"""A stage of the model as an async actor: the embedding server's code, on a node that Ray selects.

    driver                 rank 0              rank 1            ...   rank n-1
    embed.remote ───────>  Batcher ── plan ──> stage 1 ─> ...  ──────> stage n-1
        vectors <───────   stage 0 <────────────────────── vectors ───────'

The actors meet by a name, with `aiocomms.integrations.ray.rendezvous`. When an actor dies, Ray restarts it and calls
its `run` again. The other actors notice the death and meet by the same name, and the pipeline goes on with the new one.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING

import anyio
import ray
import torch
from anyio import to_thread
from embedding_server import model
from embedding_server.batcher import Batcher, PipelineDownError
from embedding_server.links import Links, Place
from embedding_server.pipeline import Pipeline

import aiocomms.integrations.ray
from aiocomms.serving import Service

if TYPE_CHECKING:
    from aiocomms import Communicator
    from aiocomms.serving import Driver

MEETING = 120.0
"""Seconds within which all stages must meet. They include the time in which Ray restarts a stage."""
LOST = "The model lost one of its stages; Ray is starting it anew."


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Stage:
    """One stage. The first stage also accepts texts."""

    def __init__(self) -> None:
        self._driving: asyncio.Future[tuple[Driver, Batcher]] = asyncio.Future()
        self._stopping = asyncio.Event()

    async def run(self, name: str, rank: int, size: int) -> int:
        """Run a stage until the first stage is stopped.

        :param name: the name by which the stages meet
        :returns: the rank, after a clean end
        """
        meet = partial(aiocomms.integrations.ray.rendezvous, name, rank=rank, size=size, timeout=MEETING)

        async def recover(lost: Communicator) -> Communicator:
            return await meet()

        async with Service(await meet(), recover) as service:
            torch.set_num_threads(1)  # Ray gives the actor one core
            links = Links(service.comm, Place(rank, 1, size))
            pipeline = Pipeline(links, await to_thread.run_sync(model.Stage, rank, size))
            if rank == 0:
                await self._drive(service, pipeline)
            else:
                await service.work(pipeline.execute)
        return rank

    async def _drive(self, service: Service, pipeline: Pipeline) -> None:
        async with service.drive(pipeline.execute) as driver, anyio.create_task_group() as tasks:
            batcher = Batcher(driver, service.comm.size, model.load_tokenizer(), LOST)
            tasks.start_soon(batcher.feed)
            self._driving.set_result((driver, batcher))
            await self._stopping.wait()
            batcher.stop("The pipeline is stopping.")
            tasks.cancel_scope.cancel()

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector of 384 numbers per text, on the first stage. Concurrent calls share micro-batches.

        :raises PipelineDownError: the pipeline is stopping
        """
        driver, batcher = await asyncio.shield(self._driving)
        while True:
            try:
                return await batcher.embed(texts)
            except PipelineDownError:
                if self._stopping.is_set():
                    raise
            await driver.ready()  # wait until another process replaces the lost stage

    async def stop(self) -> None:
        """Stop all stages. Call this method on the first stage."""
        self._stopping.set()

    async def where(self) -> tuple[str, int]:
        """Return the node and the process of this stage."""
        return ray.get_runtime_context().get_node_id(), os.getpid()
