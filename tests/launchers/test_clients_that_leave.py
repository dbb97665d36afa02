"""Clients of web frameworks disconnect during requests: the plans of these end, and no memory or descriptor leaks."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import torch
import uvicorn
from concurrency import until
from fastapi import FastAPI
from fastapi import Request as FastAPIRequest
from litestar import Litestar, post
from litestar import Request as LitestarRequest
from litestar import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from aiocomms.errors import ClientLeftError
from aiocomms.integrations.asgi import until_disconnect
from aiocomms.integrations.uvicorn import Server
from aiocomms.lowering.lane_abort import REMEMBERED
from aiocomms.serving import Driver, Service
from aiocomms.testing import local_world

pytestmark = [pytest.mark.real, pytest.mark.search, pytest.mark.timeout(300)]

CLIENTS, ROUND = 10_000, 1000
AT_ONCE = 50
FOREVER = 10**9


class Model:
    """A service of two ranks that counts the steps of each plan on each of them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.steps: list[Counter[int]] = [Counter(), Counter()]
        self.left: dict[int, list[int]] = {}
        """The steps that each rank had made of a plan when its client was found to have left."""

    async def answer(self, request: Any, plan: Any) -> float:
        """Run a plan for a client."""
        try:
            return await until_disconnect(request, self.driver.run(plan))
        except ClientLeftError:
            self.left[plan["number"]] = [steps[plan["number"]] for steps in self.steps]
            raise


@asynccontextmanager
async def model() -> AsyncIterator[Model]:
    """Open the service."""
    async with local_world(2) as world:
        services = [Service(comm) for comm in world]

        def execute_on(rank: int) -> Callable[[Any], Any]:
            async def execute(plan: Any) -> float:
                for _ in range(plan["steps"]):
                    opened.steps[rank][plan["number"]] += 1
                    total = await services[rank].comm.all_reduce(torch.tensor([float(plan["number"])]))
                    await asyncio.sleep(0)
                return total.item()

            return execute

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(services[1].work(execute_on(1)))
            async with services[0].drive(execute_on(0)) as driver:
                opened = Model(driver)
                yield opened


def starlette(served: Model) -> Any:
    async def infer(request: StarletteRequest) -> JSONResponse:
        return JSONResponse(await served.answer(request, await request.json()))

    return Starlette(routes=[Route("/", infer, methods=["POST"])], exception_handlers={ClientLeftError: nobody})


def fastapi(served: Model) -> Any:
    app = FastAPI(exception_handlers={ClientLeftError: nobody})

    async def infer(plan: dict[str, int], request: FastAPIRequest) -> float:
        return await served.answer(request, plan)

    infer.__annotations__ = {"plan": dict[str, int], "request": FastAPIRequest, "return": float}
    app.post("/")(infer)
    return app


def litestar(served: Model) -> Any:
    async def infer(request: LitestarRequest) -> float:
        return await served.answer(request, await request.json())

    infer.__annotations__ = {"request": LitestarRequest, "return": float}
    return Litestar([post("/", status_code=200)(infer)], exception_handlers={ClientLeftError: left})


def left(_request: LitestarRequest, _error: Exception) -> LitestarResponse:
    return LitestarResponse(None, status_code=499)


async def nobody(_request: Any, _error: Exception) -> JSONResponse:
    return JSONResponse(None, status_code=499)


class Client:
    """A client of one request."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def send(self, plan: Any) -> None:
        """Connect, and send a request."""
        self.reader, self.writer = await asyncio.open_unix_connection(self._path)
        body = json.dumps(plan)
        self.writer.write(
            "POST / HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )

    async def read(self) -> Any:
        """Return the answer."""
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        self.writer.close()
        return json.loads(body)

    def leave(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()


@asynccontextmanager
async def served_at(path: str, framework: Callable[[Model], Any]) -> AsyncIterator[Model]:
    """Serve a model by a framework."""
    async with model() as opened:
        server = Server(uvicorn.Config(framework(opened), uds=path, lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        yield opened
        server.should_exit = True
        await serving


@pytest.mark.parametrize("framework", [starlette, fastapi, litestar], ids=lambda framework: framework.__name__)
def test_nothing_more_is_computed_for_a_client_that_has_left(framework, tmp_path):
    async def main() -> None:
        async with served_at(path, framework) as served:
            leaver, stayer = Client(path), Client(path)
            await leaver.send({"number": 1, "steps": FOREVER})
            await until(lambda: served.steps[1][1] > 0)
            leaver.leave()
            await stayer.send({"number": 2, "steps": 5})
            assert await stayer.read() == 4.0
            await until(lambda: not served.driver._plans)
            assert all(steps[1] - then <= 2 for steps, then in zip(served.steps, served.left[1], strict=True))

    path = str(tmp_path / "socket")
    asyncio.run(main())


def test_ten_thousand_clients_that_leave_at_random_leave_nothing(tmp_path):
    async def visit(served: Model, number: int) -> None:
        client = Client(path)
        leaves = random.random() < 0.9
        await client.send({"number": number, "steps": FOREVER if leaves else 3})
        if leaves:
            for _ in range(random.randrange(100)):
                await asyncio.sleep(0)
            client.leave()
        else:
            assert await client.read() == 2 * number

    async def visits(served: Model, numbers: range) -> tuple[int, int]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with limit:
                await visit(served, number)

        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(one(number))
        await until(lambda: not served.driver._plans)
        for steps in served.steps:
            steps.clear()
        served.left.clear()
        gc.collect()
        return psutil.Process().memory_full_info().uss, psutil.Process().num_fds()

    async def main() -> None:
        async with served_at(path, starlette) as served:
            tasks = len(asyncio.all_tasks())
            rounds = [await visits(served, range(first, first + ROUND)) for first in range(0, CLIENTS, ROUND)]
            assert len(asyncio.all_tasks()) == tasks
        print(f"bytes and descriptors after each {ROUND} clients: {rounds}")
        *before, last = rounds[REMEMBERED // ROUND + 1 :]  # Ranks remember the ends of so many lanes.
        assert last[1] == before[0][1]
        assert last[0] < 1.02 * max(size for size, _ in before)

    path = str(tmp_path / "socket")
    asyncio.run(main())
