"""The program at the head of docs/serving.md under ``aiocomms run``, with clients, deaths, upgrades and departures.

``SERVED_SECONDS`` says how long it serves while ranks die; the default is ten minutes. Clients send requests at 80 %
of the rate that the server reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from test_run import Running, free, readiness

SECONDS = float(os.environ.get("SERVED_SECONDS", "600"))
DEATHS, UPGRADES = 20.0, 60.0
"""Seconds between two deaths, and between two replacements of all ranks."""
AT_MOST = 1.0
"""Seconds within which a request is refused."""
BACK = 3.0
"""Seconds after a death within which a request is answered."""
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
PROGRAM = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]

pytestmark = [pytest.mark.real, pytest.mark.search, pytest.mark.timeout(SECONDS + 300, method="signal")]


class Clients:
    """Clients that send requests, some of which disconnect, and the outcomes of the requests."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.outcomes: Counter[str] = Counter()
        self.answered: list[float] = []
        """The times at which answered requests were sent."""
        self.wrong: list[str] = []
        self.driver_died: list[float] = []
        self._numbers = itertools.count(1)

    async def ask(self) -> None:
        """Send a request, and judge its answer."""
        number, sent = next(self._numbers) % 50, time.monotonic()
        try:
            async with self._session.post(self._url, json=[[float(number)] * 8]) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            took = time.monotonic() - sent
            self.outcomes["connection lost"] += 1
            # The death of a process breaks the connections that it has accepted.
            if not any(sent - AT_MOST < died < sent + took + AT_MOST for died in self.driver_died):
                self.wrong.append(f"{error!r} after {took:.2f} s")
            return
        took = time.monotonic() - sent
        self.outcomes[str(response.status)] += 1
        if response.status == 200 and answer == [[number * 24.0] * 2]:
            self.answered.append(sent)
        elif response.status != 503 or took > AT_MOST:
            self.wrong.append(f"{response.status} {answer} to {number} after {took:.2f} s")

    async def visit(self) -> None:
        """Send a request; one client of ten disconnects at a random time."""
        if random.random() < 0.9:
            return await self.ask()
        try:
            async with asyncio.timeout(random.uniform(0, 0.02)):
                await self.ask()
        except TimeoutError:
            self.outcomes["left"] += 1

    async def rate(self, seconds: float) -> float:
        """Return how many requests a second are answered to 16 clients."""
        ends, before = time.monotonic() + seconds, len(self.answered)

        async def client() -> None:
            while time.monotonic() < ends:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(16)))
        return (len(self.answered) - before) / seconds

    async def load(self, rate: float, ends: float) -> None:
        """Send requests at this rate until the end, whether or not answers come."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while due < ends:
                tasks.create_task(self.visit())
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    def without_answer(self, when: float) -> float:
        """Return for how long after some moment requests were sent that had no answer."""
        return min((sent for sent in self.answered if sent > when), default=float("inf")) - when


async def disturb(job: Running, health: int, clients: Clients, ends: float) -> list[float]:
    """Kill ranks one at a time, and replace all ranks now and then; return the times of the deaths."""
    deaths: list[float] = []
    for turn in itertools.count(1):
        await asyncio.sleep(DEATHS)
        if time.monotonic() > ends - DEATHS:
            return deaths
        if turn % round(UPGRADES / DEATHS) == 0:
            job.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(DEATHS / 2)
        status, body = await asyncio.to_thread(readiness, health)
        assert status == 200, f"{DEATHS / 2:g} s after the last disturbance: {body}"
        rank = turn % 2
        deaths.append(time.monotonic())
        if rank == 0:
            clients.driver_died.append(deaths[-1])
        os.kill(body["ranks"][rank]["pid"], signal.SIGKILL)
    raise AssertionError


@contextlib.asynccontextmanager
async def clients_of(port: int) -> AsyncIterator[Clients]:
    # Each request has a connection of its own. A kept connection breaks when its server process is replaced.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limit = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        yield Clients(session, f"http://127.0.0.1:{port}/infer")


async def serve(job: Running, port: int, health: int) -> int:
    """Let clients send requests for a while, then end the server during requests. Return its exit code."""
    ended = asyncio.create_task(asyncio.to_thread(job.end))  # The thread reads what is printed.
    async with clients_of(port) as clients:
        rate = 0.8 * await clients.rate(5)
        supervisor = psutil.Process(job.process.pid)
        ends = time.monotonic() + SECONDS
        load = asyncio.create_task(clients.load(rate, ends))
        await asyncio.sleep(min(DEATHS, SECONDS / 4))
        before = memory(supervisor)
        deaths = await disturb(job, health, clients, ends)
        await load
        after = memory(supervisor)
        asked = asyncio.gather(*(clients.ask() for _ in range(8)))
        await asyncio.sleep(0)
        job.process.send_signal(signal.SIGTERM)
        await asked
    back = [clients.without_answer(died) for died in deaths]
    print(f"{rate:.0f} requests a second: {dict(clients.outcomes)}, {len(deaths)} deaths")
    print(
        f"answered again after {statistics.median(back):.2f} s, at most {max(back):.2f} s; memory {before} -> {after}"
    )
    print(*clients.wrong[:20], sep="\n")
    assert not clients.wrong
    assert max(back) < BACK
    assert all(after[name] < 1.2 * size for name, size in before.items())
    return await ended


def memory(supervisor: psutil.Process) -> dict[str, int]:
    """Return the MiB of the processes that are never replaced: the supervisor and the fork server."""
    [fork_server] = supervisor.children()
    return {"supervisor": mib(supervisor), "fork server": mib(fork_server)}


def mib(process: psutil.Process) -> int:
    return process.memory_full_info().uss >> 20


async def have_the_worker_leave(job: Running, port: int, health: int, times: int) -> int:
    """End the worker alone several times while clients send requests, then the server. Return its exit code."""
    ended = asyncio.create_task(asyncio.to_thread(job.end))
    try:
        async with clients_of(port) as clients, asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(clients.rate(12 * times))
            for _ in range(times):
                await asyncio.sleep(2)
                await asyncio.to_thread(end_the_worker, health)
            restarted = time.monotonic()
            await asking
        print(f"{dict(clients.outcomes)}, answered again after {clients.without_answer(restarted):.2f} s")
        assert set(clients.outcomes) == {"200"}, clients.wrong[:20]
        assert not clients.wrong
        assert clients.without_answer(restarted) < BACK
        job.process.send_signal(signal.SIGTERM)
        return await ended
    finally:
        job.process.kill()  # If a check has failed, the thread that reads would not end otherwise.


def end_the_worker(health: int) -> None:
    """Send SIGTERM to the process of rank 1 alone, and wait until another one has formed a communicator."""
    status, body = readiness(health)
    assert status == 200
    before, ends = body["ranks"][1]["pid"], time.monotonic() + 30
    os.kill(before, signal.SIGTERM)
    while status != 200 or body["ranks"][1]["pid"] == before:
        assert time.monotonic() < ends, body
        time.sleep(0.1)
        status, body = readiness(health)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Running, int, int]]:
    """Serve the program; yield the job, the server's port, and the port of the health checks."""
    (tmp_path / "server.py").write_text(PROGRAM)
    port, health = free(), free()
    job = Running(
        tmp_path, "-n", "2", "--restart", "on-failure", "--max-restarts", "100", "--listen", f"127.0.0.1:{port}",
        "--health", str(health), "--preload", "uvicorn", "--log-dir", "logs", "server.py",
    )  # fmt: skip
    try:
        job.wait_for(r"\[0\].*Uvicorn running")
        yield job, port, health
    finally:
        print("\n".join((job.shown + job.output).splitlines()[-60:]))
        job.process.kill()
        job.process.wait()
        assert job.process.stdout is not None
        job.process.stdout.close()


def test_the_program_of_the_page_serves_while_ranks_die_and_are_replaced(job):
    assert asyncio.run(serve(*job)) in (0, 128 + signal.SIGTERM)


def test_no_request_fails_when_the_worker_alone_is_told_to_end(job):
    assert asyncio.run(have_the_worker_leave(*job, times=2)) in (0, 128 + signal.SIGTERM)
    assert job[0].output.count("rank 1 has ended, to be replaced: exit code 0") == 2
    assert "2 ranks, 2 restarts" in job[0].output
