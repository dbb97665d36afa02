"""The program of `make demo-generate`: train the model if there is none, start the server, and use it over HTTP.

It compares every token of concurrent streams with the unsplit model. Clients leave, a decoder is killed, and in the end
the server gets SIGTERM during streams. The exit code is 0 only if all checks succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from anyio import to_thread
from embedding_server.job import Job, launched
from prometheus_client.parser import text_string_to_metric_families

from .model import Model
from .train import kept

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prometheus_client.core import Metric

PRELOAD = "text_generator.server", "text_generator.decode", "text_generator.prefill"
PROMPTS = (
    "The communicator ",
    "An endpoint is ",
    "When a process dies, ",
    "## What it costs\n\n",
    "```python\nimport asyncio\n",
    "await comm.",
    "A deadline ",
    "| `put(tensor, ",
)
TOKENS = 96  # the tokens that continue each prompt
LONG = 400  # the tokens of streams with an event in the middle
LEAVERS = 12
LATE = 0.005  # the loop's lateness in seconds to compare the 99th percentile with; it depends on the machine
LIMIT = 900.0  # seconds after which the demonstration fails


async def demo(options: argparse.Namespace) -> None:
    """Run the demonstration.

    :raises SystemExit: a check failed
    """
    path = options.model or kept()
    model = Model.load(path)
    ranks = 1 + (1 + options.decoders) * options.tp * options.pp
    given = f"--model={path}", f"--tp={options.tp}", f"--pp={options.pp}"
    async with launched(ranks, PRELOAD, "text_generator", *given) as job:
        url = await job.read_until(r"serving on (\S+)\n")
        print(f"{options.decoders} decode groups of {options.tp} shards in {options.pp} stages serve on {url}\n")
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            user = User(http, model)
            await show_texts(user)
            await leave(user)
            await kill_decoder(user, job)
            await show_metrics(user)
            await end(user, job, ranks)


class User:
    """A user that sends requests, and compares the answers with the unsplit model."""

    def __init__(self, http: httpx.AsyncClient, model: Model) -> None:
        self.http, self._model = http, model

    async def stream(self, prompt: str, count: int) -> AsyncIterator[int]:
        """Yield the tokens that continue a prompt, as they arrive."""
        body = {"prompt": prompt, "max_tokens": count}
        async with self.http.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix("data: "))["token"]
        raise SystemExit(f"the stream that continues {prompt!r} has ended early")

    async def health(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the server's health check has a wanted state, and return it."""
        while (response := await self.http.get("/healthz")).status_code != 200 or not wanted(response.json()):
            pass
        return response.json()

    async def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the server's processes."""
        page = (await self.http.get("/metrics")).raise_for_status().text
        return {family.name: family for family in text_string_to_metric_families(page)}

    async def all_at_once(
        self, count: int, amid: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[list[bytes], list[list[float]]]:
        """Continue all prompts at the same time, and compare each token.

        :param amid: the function to call when every stream has begun
        :returns: the texts, and the arrival time of each token
        """
        texts = [bytearray() for _ in PROMPTS]
        times: list[list[float]] = [[] for _ in PROMPTS]
        begun = 0
        all_begun = anyio.Event()

        async def client(i: int) -> None:
            nonlocal begun
            async for token in self.stream(PROMPTS[i], count):
                texts[i].append(token)
                times[i].append(time.perf_counter())
                if len(texts[i]) == 5:
                    begun += 1
                    all_begun.set() if begun == len(PROMPTS) else None

        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(client, i)
            if amid is not None:
                await all_begun.wait()
                await amid()
        for prompt, text in zip(PROMPTS, map(bytes, texts), strict=True):
            if len(text) != count or not await to_thread.run_sync(self._model.chooses, prompt.encode(), text):
                expected = self._model.generate(prompt.encode(), count)
                raise SystemExit(f"{prompt!r} was continued by {text!r}, and by the unsplit model with {expected!r}")
        return [bytes(text) for text in texts], times


def total(families: dict[str, Metric], name: str) -> float:
    """Return the sum of a counter over all processes."""
    samples = families[f"text_generator_{name}"].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


async def show_texts(user: User) -> None:
    """Print the model's continuations of the prompts, and the speed."""
    began = time.perf_counter()
    texts, times = await user.all_at_once(TOKENS)
    seconds = max(map(max, times)) - began
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"    {prompt}\033[1m{text.decode(errors='replace')}\033[0m\n".replace("\n", "\n    ").rstrip(" "))
    first = statistics.median(1e3 * (row[0] - began) for row in times)
    rate = len(PROMPTS) * TOKENS / seconds
    print(f"{len(PROMPTS)} prompts at once, {rate:.0f} tokens/s, the first after a median of {first:.0f} ms")
    print("every token is the unsplit model's\n")


async def leave(user: User) -> None:
    """Make clients leave during their streams, and measure when their pages are free."""
    for _ in range(LEAVERS):
        tokens = user.stream("A client that leaves ", LONG)
        for _ in range(10):
            await anext(tokens)
        await tokens.aclose()
    health = await user.health(lambda health: health["clients_left"] == LEAVERS)
    after = health["pages_free_after_ms"]
    wasted = total(await user.metrics(), "wasted_tokens")
    print(
        f"{LEAVERS} clients left amid their streams; {wasted:.0f} tokens were in the steps under way; pages were free"
    )
    print(f"after a median of {statistics.median(after):.1f} ms, and at most {max(after):.1f} ms\n")
    if wasted > LEAVERS:
        raise SystemExit("the decoders have computed more than one step for clients that had left")
    if any(it["pages_free"] != it["pages"] for it in health["decoders"].values()):
        raise SystemExit(f"not all pages are free: {health}")


async def kill_decoder(user: User, job: Job) -> None:
    """Kill a rank of a decode group during streams. Check that the streams continue and the group is replaced."""
    victims = await job.read_until(r"decode-0\.1 is processes ([\d ]+)\n")
    killed = replaced = 0.0

    async def kill() -> None:
        nonlocal killed, replaced
        victim = int(victims.split()[-1])
        print(f"kill -9 {victim}, a rank of the first decode group, with {len(PROMPTS)} streams under way")
        killed = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        await user.health(lambda health: any(re.match(r"decode-0\.(?!1$)", name) for name in health["decoders"]))
        replaced = time.perf_counter() - killed

    _, times = await user.all_at_once(LONG, kill)
    pauses = [b - a for row in times for a, b in pairwise(row) if b > killed]
    print("every stream went on to its end, and every token is the unsplit model's;")
    print(f"the longest that one had to wait for its next token was {max(pauses):.2f} s")
    print(f"the group served again, with another process in the place of that one, {replaced:.1f} s after\n")


async def show_metrics(user: User) -> None:
    """Print some of the metrics for Prometheus."""
    families = await user.metrics()
    print("/metrics: the event loops of all processes, how many of 1,000 times they were late by more than 5 ms")
    late: dict[str, dict[str, float]] = {}
    for sample in families["text_generator_loop_lateness_seconds"].samples:
        if sample.name.endswith("_bucket"):
            late.setdefault(sample.labels["process"], {})[sample.labels["le"]] = sample.value
    for process, buckets in sorted(late.items()):
        share = 1 - buckets[str(LATE)] / buckets["+Inf"]
        print(f"    {process:22} {1e3 * share:6.1f} {'' if share <= 0.01 else '  (more than 10 of 1,000)'}")
    for name in ("tokens", "again", "near_ties", "waited"):
        about = families[f"text_generator_{name}"].documentation
        print(f"    text_generator_{name}_total {total(families, name):.0f}: {about}")
    if total(families, "near_ties"):
        raise SystemExit("a token may have been chosen by the order of a sum")


async def end(user: User, job: Job, ranks: int) -> None:
    """Send SIGTERM during streams. Check that they complete, new ones are refused, and the processes end."""
    refused = ""

    async def terminate() -> None:
        nonlocal refused
        job.process.send_signal(signal.SIGTERM)
        while (await user.http.get("/healthz")).status_code == 200:  # until the front handles SIGTERM
            pass
        response = await user.http.post("/generate", json={"prompt": "too late", "max_tokens": 1})
        if response.status_code != 503:
            raise SystemExit(f"a request after SIGTERM was answered with {response.status_code}")
        refused = response.json()["error"]

    await user.all_at_once(LONG, terminate)
    print(f"\nSIGTERM: {len(PROMPTS)} streams went on to their end; a new one got a 503: {refused}")
    await job.check_end(ranks)
    print("all processes have ended")


async def main() -> None:
    """Run the demonstration with a time limit."""
    parser = argparse.ArgumentParser(prog="text_generator.demo", description=__doc__)
    parser.add_argument("--tp", default=2, type=int, help="default: %(default)s")
    parser.add_argument("--pp", default=1, type=int, help="default: %(default)s")
    parser.add_argument("--decoders", default=2, type=int, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="a file; without it, what was trained on the documentation, once")
    with anyio.fail_after(LIMIT):
        await demo(parser.parse_args())


if __name__ == "__main__":
    anyio.run(main)
