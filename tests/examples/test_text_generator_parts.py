"""The parts of the text generator, each alone, in one process."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client")
pytest.importorskip("safetensors")

from generator import one_thread, random_model
from supervised import EXAMPLES

pytestmark = pytest.mark.deterministic

PROMPT = b"a prompt that is longer than two pages and no whole number of them"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that imports a module of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"text_generator.{name}")

    with one_thread():
        yield load


Queues = dict[tuple[int, int], "asyncio.Queue[Any]"]


class Ways:
    """The links of one rank, in a group whose ranks are tasks. `queues` has a queue for each stage and shard."""

    def __init__(self, place: Any, queues: Queues, inbox: asyncio.Queue[Any]) -> None:
        self._place, self._queues, self._inbox = place, queues, inbox

    async def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the tensors of all shards of the stage, in the order of their arrival."""
        for shard in range(self._place.shards):
            self._queues[self._place.stage, shard].put_nowait(x)
        own = self._queues[self._place.stage, self._place.shard]
        parts = [await own.get() for _ in range(self._place.shards)]
        await asyncio.sleep(0)
        return sum(parts[1:], parts[0])

    async def receive(self, x: torch.Tensor) -> torch.Tensor:
        got = await self._inbox.get()
        assert got.shape == x.shape
        return got

    async def pass_on(self, x: torch.Tensor) -> None:
        self.next.put_nowait(x)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 3)])
def test_shards_over_pages_choose_the_tokens_of_the_whole_model(part: Any, tmp_path: Path, tp: int, pp: int) -> None:
    """The prompt comes in chunks, then token by token beside another sequence, on pages in no order."""
    model, pages = part("model"), part("pages")
    path = tmp_path / "model.safetensors"
    random_model(model).save(path)
    whole = model.Model.load(path)
    places = [model.Part(stage, pp, shard, tp) for stage in range(pp) for shard in range(tp)]
    shards = [model.Shard(path, place) for place in places]
    caches = [pages.Cache(shards[0].shape, place, 12) for place in places]

    async def step(tokens: list[list[int]], begins: list[int], tables: list[list[int]]) -> list[int]:
        queues = {(place.stage, place.shard): asyncio.Queue() for place in places}
        inboxes = [asyncio.Queue() for _ in places]
        ways = [Ways(place, queues, inbox) for place, inbox in zip(places, inboxes, strict=True)]
        for i in range(len(places) - tp):
            ways[i].next = inboxes[i + tp]
        what = pages.Step(torch.tensor(tokens), torch.tensor(begins), pages.table(tables))
        done = await asyncio.gather(*(pages.run_step(*it, what) for it in zip(shards, caches, ways, strict=True)))
        assert all((choice is None) is not place.last for choice, place in zip(done, places, strict=True))
        return done[-1][0].tolist()

    async def main() -> None:
        own, other = [7, 2, 11, 5, 9, 1], [3, 10]
        for begin in range(0, len(PROMPT), 32):
            [token] = await step([list(PROMPT[begin : begin + 32])], [begin], [own])
        [beside] = await step([list(b"beside")], [0], [other])
        tokens, besides = [token], [beside]
        for i in range(20):
            begins = [len(PROMPT) + i, len(b"beside") + i]
            token, beside = await step([tokens[-1:], besides[-1:]], begins, [own, other])
            tokens.append(token)
            besides.append(beside)
        assert bytes(tokens) == whole.generate(PROMPT, 21)
        assert bytes(besides) == whole.generate(b"beside", 21)
        assert whole.chooses(PROMPT, bytes(tokens))
        assert not whole.chooses(PROMPT, bytes([tokens[0] ^ 1, *tokens[1:]]))

    asyncio.run(main())


def test_tp_or_pp_that_does_not_divide_the_model_is_refused(part: Any) -> None:
    model = part("model")
    with pytest.raises(ValueError, match="--tp is 3, and the model's 8 heads"):
        model.Part(0, 1, 0, 3).check(model.Shape())
    with pytest.raises(ValueError, match="--pp is 5, and the model has 4 layers"):
        model.Part(0, 5, 0, 1).check(model.Shape())


def test_pages_are_granted_in_request_order(part: Any) -> None:
    async def main() -> None:
        pages = part("pages").Pages(11)
        first = await pages.take(6)
        big, small = asyncio.create_task(pages.take(8)), asyncio.create_task(pages.take(1))
        await asyncio.sleep(0)
        assert (pages.waiting, pages.free) == (2, 4)  # the small request waits its turn, although a page for it is free
        pages.give_back(first)
        taken = await big, await small
        assert sorted([*taken[0], *taken[1], *await pages.take(1)]) == list(range(1, 11))  # page 0 is never granted

    asyncio.run(main())


def test_cancelled_request_for_pages_does_not_delay_the_next(part: Any) -> None:
    async def main() -> None:
        pages = part("pages").Pages(11)
        first = await pages.take(6)
        big, small = asyncio.create_task(pages.take(8)), asyncio.create_task(pages.take(1))
        await asyncio.sleep(0)
        big.cancel()
        assert len(await small) == 1
        late = asyncio.create_task(pages.take(9))
        await asyncio.sleep(0)
        pages.give_back(first)  # the request has its pages now, but its task has not run yet
        late.cancel()
        await asyncio.wait([late])
        assert (late.cancelled(), pages.free, pages.waiting) == (True, 9, 0)

    asyncio.run(main())


def test_front_refuses_requests_that_it_cannot_serve(part: Any) -> None:
    front = part("front")

    async def ask(it: Any) -> str:
        with pytest.raises(front.UnavailableError) as refused:
            await anext(it.generate(b"x", 1, front.Client()))
        return str(refused.value)

    async def main() -> None:
        here = front.Front(None, part("model").Shape())
        assert await ask(here) == "No decoder is there; one is coming."
        for role, name in (("prefill", "p"), ("decode", "d")):
            here.groups[name] = front.Group(role, name, SimpleNamespace(), [], 9, 8)
        here.groups["p"].knows.add("d")
        here.under_way = front.AT_ONCE
        assert await ask(here) == "The server has 256 requests already; try again later."
        await here.drain("The server is stopping.", 0.0)
        assert await ask(here) == "The server is stopping."
        here.check(b"x" * 64, 64)
        with pytest.raises(front.TooLargeError, match="together at most 128 are taken"):
            here.check(b"x" * 65, 64)

    asyncio.run(main())


def test_metrics_pages_of_several_processes_merge_into_one(part: Any) -> None:
    metrics = part("metrics")
    texts = []
    for name in ("a", "b"):
        measures = metrics.Measures(name)
        measures.counter("things", "Things.").inc(3)
        texts.append(measures.text())
    page = metrics.merge(texts)
    assert page.count("# TYPE text_generator_things_total counter") == 1
    for name in ("a", "b"):
        assert f'text_generator_things_total{{process="{name}"}} 3.0' in page
