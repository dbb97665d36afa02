"""The front's process, from its first message to its last."""

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

LINGER = 1.0  # seconds after SIGTERM in which health checks get a 503, at least, so that a balancer hears of it
DRAIN = 30.0  # seconds that streams have to end after SIGTERM


@asynccontextmanager
async def fronting(options: Options) -> AsyncIterator[Front]:
    """Be the front within the block; at its beginning all decoders can be used, at its end all groups end."""
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
    """Take part in meetings, at which all hear where groups find this process; end it if there will be no other."""
    try:
        while True:
            await world.meet(address)
    except Exception:
        if callable(signal.getsignal(signal.SIGTERM)):  # uvicorn has set it
            signal.raise_signal(signal.SIGTERM)
        raise


async def drain(front: Front) -> None:
    """When it is time to stop, answer what is under way, and refuse what comes."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, LINGER)
        tasks.start_soon(front.drain, "The server is stopping.", DRAIN)
