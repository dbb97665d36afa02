"""One rank of the job: its share of the model; rank 0 also serves HTTP."""

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

DRAIN = 0.6  # seconds that the requests in flight have after SIGTERM; then they get a 503


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


class EmbeddingServer(WebService):
    """The server as one rank has it: rank 0 drives, every other rank works.

    :param open_links: by what the ranks communicate
    """

    batcher: Batcher
    """On rank 0, while it serves."""
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
        """Work, on every rank but 0."""
        await super().work()
        await self.links.part()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Drive, on rank 0."""
        async with super().lifespan(app), anyio.create_task_group() as tasks:
            self.batcher = Batcher(self.driver, self.links.place.pp, load_tokenizer())
            tasks.start_soon(self.batcher.feed)
            tasks.start_soon(metrics.watch_loop)
            yield
            tasks.cancel_scope.cancel()
        await self.links.part()

    async def drain(self) -> None:
        """When it is time to stop, let the requests in flight finish, but not for ever."""
        await anyio.sleep(DRAIN)
        self.batcher.stop("The server is stopping.")
