"""The process of the front."""

from __future__ import annotations

import gc
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import torch

from .front import Front
from .links import open_endpoint, open_world
from .model import read_shape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .links import World
    from .worker import Options

LINGER = 1.0  # the least seconds of 503 in health checks after SIGTERM, for a load balancer
DRAIN = 30.0  # seconds after SIGTERM within which streams must end


@asynccontextmanager
async def fronting(options: Options) -> AsyncIterator[Front]:
    """Run the front within the block. All decoders are ready at its start, and all groups end at its end."""
    gc.freeze()
    torch.set_num_threads(1)
    async with open_world() as world, open_endpoint() as here, anyio.create_task_group() as tasks:
        front = Front(here, read_shape(options.model))
        tasks.start_soon(front.run)
        tasks.start_soon(front.measures.beat)
        tasks.start_soon(keep, world, here.address)
        await front.ready(options.decoders)
        yield front
        front.end()
        tasks.cancel_scope.cancel()


async def keep(world: World, address: bytes) -> None:
    """Take part in meetings, which tell all ranks this process's address. End this process if meetings fail."""
    try:
        while True:
            await world.meet(address)
    except Exception:
        if callable(signal.getsignal(signal.SIGTERM)):  # uvicorn has installed a handler
            signal.raise_signal(signal.SIGTERM)
        raise


async def drain(front: Front) -> None:
    """Finish running requests before the stop, and refuse new requests."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, LINGER)
        tasks.start_soon(front.drain, "The server is stopping.", DRAIN)
