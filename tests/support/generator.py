"""The common parts of the text generator's tests: a small model, and the server as its users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import torch
from supervised import Supervised

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 3000  # tokens that take seconds, so that whatever a test does meanwhile happens amid them


def random_model(example: Any) -> Any:
    """A small model with random weights, whose every layer matters: each token depends on all before it."""
    shape = example.Shape(width=32, heads=4, layers=4, context=8192)
    generator = torch.Generator().manual_seed(1)
    return example.Model(
        shape,
        {
            name: torch.randn(size, generator=generator) * (1.0 if name == "embedding" else 2.0 * size[1] ** -0.5)
            for name, size in shape.weights().items()
        },
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread: several would wait for each other where others work beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stream:
    """An answer that comes token by token."""

    def __init__(self, response: httpx.Response) -> None:
        self.response, self._lines = response, response.iter_lines()
        self.tokens: list[int] = []
        self.text = ""

    def read(self, count: int) -> Self:
        """Read so many tokens."""
        for line in self._lines:
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                self.tokens.append(event["token"])
                self.text += event["text"]
                count -= 1
                if not count:
                    return self
        raise AssertionError("the stream has ended")

    def read_to_end(self) -> list[int]:
        """Read all tokens."""
        for line in self._lines:
            if line == "data: [DONE]":
                assert not [line for line in self._lines if line]
                return self.tokens
            if line:
                event = json.loads(line.removeprefix("data: "))
                self.tokens.append(event["token"])
                self.text += event["text"]
        raise AssertionError(f"the stream has no end, but ends after {self.tokens}")


class Served(Supervised):
    """The text generator, and its processes."""

    def __init__(
        self, model: Path, *options: str, tp: int = 1, pp: int = 1, decoders: int = 1, heartbeat: str = "0"
    ) -> None:
        launcher = "-m", "aiocomms", "run", f"-n{1 + (1 + decoders) * tp * pp}", "--restart=on-failure"
        imports = (f"--preload=text_generator.{name}" for name in ("server", "decode", "prefill"))
        program = "-m", "text_generator", f"--model={model}", f"--tp={tp}", f"--pp={pp}"
        super().__init__(*launcher, "--listen=127.0.0.1:0", *imports, *program, *options, AIOCOMMS_HEARTBEAT=heartbeat)
        self.groups: dict[str, list[int]] = {}
        self.front = 0

    def __enter__(self) -> Self:
        super().__enter__()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url.result(), timeout=None, limits=limits)
        return self

    def heard(self, line: str) -> None:
        if started := re.fullmatch(r"(\S+) is processes ([\d ]+)\n", line):
            with self.news:
                self.groups[started[1]] = [int(pid) for pid in started[2].split()]
                self.news.notify_all()
        elif started := re.fullmatch(r"the front is process (\d+)\n", line):
            with self.news:
                self.front = int(started[1])
                self.news.notify_all()

    def post(self, prompt: str, count: int) -> httpx.Response:
        return self.http.post("/generate", json={"prompt": prompt, "max_tokens": count})

    @contextmanager
    def stream(self, prompt: str, count: int) -> Iterator[Stream]:
        with self.http.stream("POST", "/generate", json={"prompt": prompt, "max_tokens": count}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Stream(response)

    def generate(self, prompt: str, count: int) -> list[int]:
        with self.stream(prompt, count) as stream:
            return stream.read_to_end()

    def health(self) -> dict[str, Any]:
        return self.http.get("/healthz").raise_for_status().json()

    def wait_for(self, seen: Any) -> dict[str, Any]:
        """Wait until /healthz has something to be seen."""
        while True:
            with suppress(httpx.HTTPStatusError):
                health = self.health()
                if seen(health):
                    return health
            time.sleep(0.01)

    def measured(self, name: str) -> float:
        """The sum of a metric over all processes."""
        page = self.http.get("/metrics").raise_for_status().text
        rows = re.findall(rf"^text_generator_{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        assert rows, page
        return sum(map(float, rows))

    def summed_up(self, group: str) -> float:
        """The bytes that the leader of a group has summed up with the other shards."""
        page = self.http.get("/metrics").raise_for_status().text
        labels = f'comm="{re.escape(group)} stage 0",op="all_reduce",rank="0"'
        return sum(map(float, re.findall(rf"^aiocomms_bytes_total{{{labels}[^}}]*}} (\S+)$", page, re.MULTILINE)))

    def send(self, what: int, name: str, rank: int = 0) -> None:
        """Send a signal to a process of a group."""
        os.kill(self.pids(name)[rank], what)

    def pids(self, name: str) -> list[int]:
        """The processes of a group, which may be at work before the line that tells of them is read."""
        with self.news:
            self.news.wait_for(lambda: name in self.groups)
            return self.groups[name]

    def wait_for_another(self, group: str) -> str:
        """Wait until a group has been formed anew; return its name."""
        anew = re.compile(rf"{group}\.(?!1$)\d+")
        health = self.wait_for(lambda health: any(map(anew.fullmatch, [*health["prefill"], *health["decoders"]])))
        return next(filter(anew.fullmatch, [*health["prefill"], *health["decoders"]]))

    def kill_front(self) -> None:
        with self.news:
            self.news.wait_for(lambda: self.front)  # process 0 would be all of the tests'
        os.kill(self.front, signal.SIGKILL)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A group does nothing meanwhile, so that the order of events is the test's; nobody takes it for dead."""
        ranks = range(len(self.pids(name)))
        for rank in ranks:
            self.send(signal.SIGSTOP, name, rank)
        try:
            yield
        finally:
            for rank in ranks:
                self.send(signal.SIGCONT, name, rank)


def assert_right(model: Any, prompt: str, tokens: list[int]) -> None:
    """Each token is the likeliest one behind those before it, as the unsplit model has it."""
    if not model.chooses(prompt.encode(), bytes(tokens)):
        assert bytes(tokens) == model.generate(prompt.encode(), len(tokens))
