"""A service behind an ASGI application in a simulated world: clients leave, the worker dies, probes are asked."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import aiocomms
from aiocomms.errors import ArgumentError, ClientLeftError, CommClosedError, CommError
from aiocomms.integrations.asgi import WebService, until_disconnect
from aiocomms.serving import Service
from aiocomms.testing import here, simulate

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, StreamingResponse  # noqa: E402
from starlette.routing import Mount, Route  # noqa: E402

pytestmark = pytest.mark.deterministic

STEPS: dict[int, Counter[int]] = {}
"""The steps that each rank has made of each plan."""


async def recover(lost: Any) -> Any:
    return await lost.reconfigure(size=lost.size, timeout=60)


async def start() -> tuple[Service, Any]:
    service = Service(await aiocomms.new_comm(timeout=20, join=here().restarts > 0), recover)
    steps = STEPS[service.comm.rank] = Counter()

    async def execute(plan: Any) -> Any:
        for _ in range(plan["steps"]):
            steps[plan["x"]] += 1
            await asyncio.sleep(0.01)
            yield (await service.comm.all_reduce(torch.tensor([float(plan["x"])]))).item()

    return service, execute


def make_app(served: WebService) -> Starlette:
    async def ask(request: Request) -> Any:
        plan = await request.json()
        try:
            items = await until_disconnect(request, served.driver.run(plan, timeout=30))
        except aiocomms.CommError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        return JSONResponse(items[-1])

    async def stream(request: Request) -> Any:
        items = served.driver.stream(await request.json())
        return StreamingResponse((f"{item}\n" async for item in items), media_type="text/plain")

    async def unread(request: Request) -> Any:
        with pytest.raises(ArgumentError, match="read it before"):
            await until_disconnect(request, asyncio.sleep(1000))
        return JSONResponse("refused")

    routes = [Route(f"/{call.__name__}", call, methods=["POST"]) for call in (ask, stream, unread)]
    return Starlette(routes=[*routes, Mount("/", served.probes)], lifespan=served.lifespan)


class Server:
    """The server of one history, on rank 0."""

    def __init__(self, **limits: Any) -> None:
        self.served = WebService(start, **limits)
        self.app = make_app(self.served)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        transport = httpx.ASGITransport(app=self.app)
        async with (
            self.app.router.lifespan_context(self.app),
            httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client,
        ):
            yield client

    async def leave(self, path: str, plan: Any, after: float) -> list[Any]:
        """Be a client that leaves after some seconds; return what it was sent until then."""
        body = json.dumps(plan).encode()
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []
        loop = asyncio.get_running_loop()
        ends = loop.time() + after

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(max(0.0, ends - loop.time()))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "headers": []}
        await self.app({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)
        return sent


async def run(client: Any, **limits: Any) -> Any:
    """Run ``client(server, http)`` on rank 0, and work on the others."""
    server = Server(**limits)
    if here().rank:
        return await server.served.work()
    async with server.open() as http:
        return await client(server, http)


@pytest.mark.parametrize("path", ["/ask", "/stream"])
def test_client_that_leaves_ends_its_plan_on_all_ranks(path):
    async def client(server: Server, http: Any) -> None:
        async def one(number: int) -> None:
            await asyncio.sleep(random.random())
            if number % 3:
                await server.leave(path, {"x": number, "steps": 10_000}, random.random())
                await asyncio.sleep(0.02)  # the operation under way ends
                before = [steps[number] for steps in STEPS.values()]
                await asyncio.sleep(1)
                assert [steps[number] for steps in STEPS.values()] == before
                assert max(before) - min(before) <= 2
            else:
                reply = await http.post(path, json={"x": number, "steps": 5})
                assert reply.status_code == 200
                assert float(reply.text.splitlines()[-1]) == 3 * number

        await asyncio.gather(*map(one, range(30)))
        assert not server.served.driver._plans

    for seed in range(3):
        simulate(lambda: run(client), 3, seed=seed)


def test_handler_answers_503_when_there_is_no_room():
    async def client(server: Server, http: Any) -> None:
        ask = [http.post("/ask", json={"x": number, "steps": 10}) for number in range(5)]
        codes = Counter(reply.status_code for reply in await asyncio.gather(*ask))
        assert codes == {200: 3, 503: 2}

    simulate(lambda: run(client, max_running=1, max_waiting=2), 2)


def test_probes_follow_a_death_and_a_recovery():
    pytest.importorskip("prometheus_client")

    async def client(server: Server, http: Any) -> Any:
        assert [(await http.get(path)).status_code for path in ("/healthz", "/readyz", "/other")] == [200, 200, 404]
        assert (await http.post("/ask", json={"x": 1, "steps": 3})).json() == 2.0
        text = (await http.get("/metrics")).text
        assert 'aiocomms_generation{comm="world",rank="0"} 1.0' in text
        here().world.kill(1, 0.5)
        lost = await http.post("/ask", json={"x": 1, "steps": 100})
        assert lost.status_code == 503
        health, ready = await http.get("/healthz"), await http.get("/readyz")
        assert (health.status_code, ready.status_code) == (200, 503)
        assert "rank 1 has died or was cut off" in ready.text
        await server.served.driver.ready()
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post("/ask", json={"x": 1, "steps": 3})).json() == 2.0
        text = (await http.get("/metrics")).text
        assert 'aiocomms_generation{comm="world",rank="0"} 2.0' in text
        assert 'aiocomms_recoveries_total{comm="world",rank="0"} 1.0' in text
        assert 'aiocomms_plans_total{comm="world",outcome="done",rank="0",reason=""} 2.0' in text
        assert 'aiocomms_plans_total{comm="world",outcome="failed",rank="0",reason="PlanLostError"} 1.0' in text

    for seed in range(3):
        simulate(lambda: run(client), 2, seed=seed)


def test_probes_of_a_service_that_is_ending_or_over():
    async def client(server: Server, http: Any) -> Any:
        server.served.driver._told_to_end()
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.text) == (503, "the service is ending")
        return server

    async def program() -> None:
        server = await run(client)
        if server is not None:
            transport = httpx.ASGITransport(app=server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                over = await http.get("/healthz")
            assert over.status_code == 503
            assert "the driver has ended" in over.text

    simulate(program, 2)


def test_body_that_was_not_read_is_refused():
    async def client(server: Server, http: Any) -> None:
        assert (await http.post("/unread", json={"x": 1})).json() == "refused"

    simulate(lambda: run(client), 1)


def test_awaited_for_a_client_gives_its_result_its_error_or_the_clients_end():
    async def program() -> None:
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def fail() -> None:
            raise KeyError("x")

        assert await until_disconnect(receive, asyncio.sleep(1, "done")) == "done"
        with pytest.raises(KeyError):
            await until_disconnect(receive, fail())
        shared = asyncio.create_task(asyncio.sleep(1000))
        asyncio.get_running_loop().call_later(1, shared.cancel)
        with pytest.raises(asyncio.CancelledError):
            await until_disconnect(receive, shared)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await until_disconnect(receive, asyncio.sleep(1000))
        asyncio.get_running_loop().call_later(1, left.set)
        with pytest.raises(ClientLeftError, match="has disconnected"):
            await until_disconnect(receive, asyncio.sleep(1000))
        with pytest.raises(KeyError):
            await until_disconnect(fail, asyncio.sleep(1000))
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await until_disconnect(lambda: cancelled, asyncio.sleep(1000))

    simulate(program, 1)


def test_each_rank_serves_or_works_by_its_launcher(monkeypatch):
    calls = []
    served = WebService(start)
    with pytest.raises(CommClosedError, match="not open"):
        served.driver  # noqa: B018
    monkeypatch.setattr("aiocomms.integrations.asgi.anyio.run", lambda work: calls.append(work.__name__))
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        served.main(lambda: calls.append("serve"))
    assert calls == ["serve", "work"]


def test_web_server_is_told_to_end_when_nobody_takes_the_place_of_a_lost_rank():
    told = asyncio.Event()
    answers: list[int] = []

    async def serve() -> None:
        async with Server().open() as client:
            await told.wait()
            answers.append((await client.get("/healthz")).status_code)

    async def program() -> None:
        if here().rank:
            await WebService(start).work()
            return
        asyncio.get_running_loop().call_later(1, here().world.kill, 1)
        with pytest.raises(CommError, match="no process joined as the free ranks"):
            await serve()

    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        simulate(program, 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answers == [503]
