"""The text generator of the examples and its twin over gloo, under the same load, in turns."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve import phases
from benchmarks.serve.client import ask, connect
from benchmarks.serve.servers import Server, generator, generator_twin
from benchmarks.serve.targets import Stream

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from text_generator.model import Model, Part, Shard
from text_generator.pages import Cache, Step, run_step

Row = dict[str, Any]
PROMPTS = (
    "The communicator ", "An endpoint is ", "When a process dies, ", "## What it costs\n\n",
    "```python\nimport asyncio\n", "await comm.", "A deadline ", "| `put(tensor, ",
)  # fmt: skip
TOKENS = 64
"""The tokens that follow each prompt."""
LEAVERS = 16
"""Clients that leave after half of their stream, beside as many that stay."""
VICTIM = "decode-0"


class Alone:
    """The links of a rank that has the whole of what it needs: sums of one, and nobody before or behind it."""

    async def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing to add."""
        return x

    async def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, as no stage is before this one."""
        return x

    async def pass_on(self, x: torch.Tensor) -> None:
        """Drop the output, as no stage is behind this one."""


async def model_alone(path: Path, tp: int, pp: int, steps: int) -> float:
    """Time a step of the first rank of a group for one sequence that has 64 tokens: a mean, in ms."""
    shard = Shard(path, Part(0, pp, 0, tp))
    cache = Cache(shard.shape, shard.part, 8)
    step = Step(torch.tensor([[1]]), torch.tensor([TOKENS]), torch.arange(1, 6)[None])
    with torch.inference_mode():
        await run_step(shard, cache, Alone(), step)
        began = time.perf_counter()
        for _ in range(steps):
            await run_step(shard, cache, Alone(), step)
    return 1e3 * (time.perf_counter() - began) / steps


async def split(server: Server, target: Stream, model: float) -> Row:
    """Split the time between two tokens, with one client: means in ms."""
    async with connect(server.url) as http:
        await ask(http, target, 0, 0.0)
        before = await server.look()
        records = [await ask(http, target, number, time.perf_counter()) for number in range(len(PROMPTS))]
    after = await server.look()

    def grown(kind: str) -> float:
        names = [name for name in after.metrics if name.startswith(f"text_generator_step_seconds_{kind}{{")]
        return sum(after.metrics[name] - before.metrics.get(name, 0.0) for name in names)

    gaps = [record.tokens[-1] - record.tokens[0] for record in records]
    whole = 1e3 * sum(gaps) / (len(gaps) * (TOKENS - 1))
    step = 1e3 * grown("sum") / grown("count")
    return {"whole": whole, "model": model, "links": step - model, "front and HTTP": whole - step}


async def leaving(server: Server, stays: Stream, leaves: Stream) -> Row:
    """Clients leave amid their streams, beside others: what is computed for them, and when their pages are free."""
    before = await server.look()
    async with connect(server.url) as http:
        all_ = [ask(http, target, n, time.perf_counter()) for n in range(LEAVERS) for target in (stays, leaves)]
        records = await asyncio.gather(*all_)
        while True:  # until the server has noticed all of them
            health = await (await http.get("/healthz")).json()
            if not health["requests"] and all(it["pages"] == it["pages_free"] for it in health["decoders"].values()):
                break
            await asyncio.sleep(0.01)
    after = await server.look()
    wasted = sum(
        value - before.metrics.get(name, 0.0)
        for name, value in after.metrics.items()
        if name.startswith("text_generator_wasted_tokens_total")
    )
    free = sorted(health["pages_free_after_ms"])[-LEAVERS:]
    wrong = sum(not record.right for record in records[::2])
    return {"after": wasted / LEAVERS, "free_ms": free[len(free) // 2] if free else None, "wrong": wrong}


def answers(model: Model) -> list[bytes]:
    """Return what the unsplit model makes of the prompts."""
    return [model.generate(prompt.encode(), TOKENS) for prompt in PROMPTS]


def shown(text: bytes) -> str:
    """Decode as for a client, which never hears the rest of a character that has not come to its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)


async def race(path: Path, tp: int, pp: int, seconds: float) -> dict[str, Any]:
    """All phases of one layout, with the model of a file."""
    wanted = [shown(text) for text in await asyncio.to_thread(answers, Model.load(path))]
    target = Stream(list(PROMPTS), TOKENS, wanted)
    leaves = Stream(list(PROMPTS), TOKENS, leave_after=TOKENS // 2)
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(start(tp, pp, path)) for start in (generator, generator_twin)]
        rows = await phases.loads(both, target, seconds)
        alone, rate = await model_alone(path, tp, pp, 200), 0.6 * rows[1]["per_s"]
        return {
            "tp": tp,
            "pp": pp,
            "rows": rows,
            "split": {s.name: await split(s, target, alone) for s in both},
            "leaving": {s.name: await leaving(s, target, leaves) for s in both},
            "killed": {s.name: await phases.killed(s, target, rate, phases.KILL * seconds, VICTIM) for s in both},
        }
