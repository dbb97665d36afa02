"""One rank of the job, with its share of the model. Rank 0 also serves HTTP."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import torch
from anyio import to_thread

from aiocomms.integrations.asgi import WebService

from . import metrics
from .batcher import Batcher
from .links import open_links
from .model import Stage, load_tokenizer
from .pipeline import THREADS, Pipeline, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiocomms.serving import Service
    from aiocomms.serving.plans import Execute

    from .links import Links

DRAIN = 0.6  # seconds after SIGTERM for the requests in flight, which get a 503 after that


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of the model.

    :param tp: the number of parts of each layer; the number of stages is the number of ranks divided by it
    :param threads: the size of each rank's pool of threads
    :param torch_threads: the threads of each torch operation; 0 means the rank's share of the machine's cores
    """

    tp: int = 1
    threads: int = THREADS
    torch_threads: int = 0


class EmbeddingServer(WebService):
    """One rank of the server. Rank 0 drives, and every other rank works.

    :param open_links: the function that opens the communication of the ranks
    """

    batcher: Batcher
    """The batcher, on rank 0 while it serves."""
    links: Links

    def __init__(self, shape: Shape, open_links: Any = open_links) -> None:
        super().__init__(self.start)
        self._shape, self._open_links = shape, open_links

    async def start(self) -> tuple[Service, Execute]:
        """Join the other ranks, and load this rank's share of the model."""
        settle()
        shape = self._shape
        service, self.links = await self._open_links(shape.tp)
        place = self.links.place
        own = len(os.sched_getaffinity(0)) // (place.tp * place.pp)
        torch.set_num_threads(shape.torch_threads or max(1, own))
        stage = await to_thread.run_sync(Stage, place.stage, place.pp, place.part, place.tp)
        return service, Pipeline(self.links, stage, shape.threads).execute

    async def work(self) -> None:
        """Work on every rank except rank 0."""
        await super().work()
        await self.links.part()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Drive the other ranks on rank 0."""
        async with super().lifespan(app), anyio.create_task_group() as tasks:
            self.batcher = Batcher(self.driver, self.links.place.pp, load_tokenizer())
            tasks.start_soon(self.batcher.feed)
            tasks.start_soon(metrics.watch_loop)
            yield
            tasks.cancel_scope.cancel()
        await self.links.part()

    async def drain(self) -> None:
        """Let the requests in flight finish for some time before the stop."""
        await anyio.sleep(DRAIN)
        self.batcher.stop("The server is stopping.")
