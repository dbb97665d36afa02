"""What the tests of the text generator have in common: a small model, and the server as its users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
HANGS = 600.0  # seconds after which a test hangs, however slow the machine; nothing else here is bounded by time
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


class Served:
    """A server under its supervisor, and what that has printed."""

    def __init__(self, model: Path, *options: str, heartbeat: str = "0") -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        command = [sys.executable, "-m", "text_generator.supervisor", "--port=0", f"--model={model}", *options]
        self.process = subprocess.Popen(
            command, cwd=EXAMPLES, env=os.environ | {"AIOCOMMS_HEARTBEAT": heartbeat}, stdout=subprocess.PIPE,
            stderr=self.log, text=True, start_new_session=True,
        )  # fmt: skip
        self.groups: dict[str, list[int]] = {}
        self.front = 0
        self._news = threading.Condition()
        self._url: Future[str] = Future()
        self._reader = threading.Thread(target=self._read)
        self.http: httpx.Client

    def __enter__(self) -> Self:
        self._reader.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self._url.result(), timeout=None, limits=limits)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        sys.stderr.write(self.errors())
        self.log.close()
        if hasattr(self, "http"):
            self.http.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            if started := re.fullmatch(r"(\S+) is processes ([\d ]+)\n", line):
                with self._news:
                    self.groups[started[1]] = [int(pid) for pid in started[2].split()]
                    self._news.notify_all()
            elif started := re.fullmatch(r"the front is process (\d+)\n", line):
                self.front = int(started[1])
            elif line.startswith("serving on ") and not self._url.done():
                self._url.set_result(line.split()[-1])
        if not self._url.done():
            self._url.set_exception(EOFError("it never served"))

    def errors(self) -> str:
        """What its processes have complained of."""
        self.log.seek(0)
        return self.log.read()

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
        os.kill(self.groups[name][rank], what)

    def kill_front(self) -> None:
        os.kill(self.front, signal.SIGKILL)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A group does nothing meanwhile, so that the order of events is the test's; nobody takes it for dead."""
        ranks = range(len(self.groups[name]))
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
