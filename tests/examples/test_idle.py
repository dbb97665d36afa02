"""A rank that waits for work in the tutorial and the examples may wait beyond the communicator's deadline.

Each rank begins to wait under a short deadline. Once a later op has timed out, the rank gets work.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommTimeoutError
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
SHORT, LONG = 0.05, 30.0


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@asynccontextmanager
async def idle(world: list[Communicator], *waiting: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Start coroutines that wait, let every rank's deadline pass, run the body, and await the coroutines."""
    for comm in world:
        comm.set_timeout(SHORT)
    tasks = [asyncio.create_task(one) for one in waiting]
    await asyncio.sleep(0)  # each coroutine has begun its op
    for comm in world:
        with pytest.raises(CommTimeoutError):
            await comm.recv(torch.empty(0), (comm.rank + 1) % comm.size, tag=99)
        comm.set_timeout(LONG)
    assert not any(task.done() for task in tasks)
    yield tasks
    await asyncio.gather(*tasks)


def each(world: list[Communicator], call: Any) -> Awaitable[list[Any]]:
    return asyncio.gather(*map(call, world))


async def tutorial() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "async def assist" in block]
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    weight = torch.ones(8, 2)
    async with local_world(3) as world, idle(world, *(names["assist"](comm, weight) for comm in world[1:])):
        assert (await names["handle"](world[0], weight, torch.ones(1, 8)) == 24).all()
        await world[0].broadcast_object(None, root=0)


async def tensor_parallel() -> None:
    from tensor_parallel.layers import RowParallelLinear

    async with local_world(2) as world, AsyncExitStack() as stack:
        services = [await stack.enter_async_context(Service(comm)) for comm in world]
        layers = [RowParallelLinear(lambda *_: torch.ones(1, 1), "", 2, service.comm) for service in services]
        worker = services[1].work(partial(asyncio.to_thread, layers[1]))
        async with idle(world, worker), services[0].drive(partial(asyncio.to_thread, layers[0])) as driver:
            assert (await driver.run(torch.tensor([[2.0]]))).item() == 5


async def embedding_server() -> None:
    from embedding_server.links import Links, Place
    from embedding_server.pipeline import Pipeline

    async with local_world(2) as world, AsyncExitStack() as stack:
        services = [await stack.enter_async_context(Service(comm)) for comm in world]
        links = [Links(service.comm, Place(service.comm.rank, 1, 2)) for service in services]
        first, last = (Pipeline(each, lambda data, lengths: data * len(lengths)) for each in links)
        async with idle(world, services[1].work(last.execute)), services[0].drive(first.execute) as driver:
            vectors, _ = await driver.run((0, torch.ones(2), torch.tensor([5, 6])))
            assert vectors.tolist() == [4, 4]


@pytest.mark.parametrize("program", [tutorial, tensor_parallel, embedding_server], ids=lambda f: f.__name__)
def test_idle_rank_outlives_the_deadline(program: Any) -> None:
    asyncio.run(program())
