"""An open-loop client: requests leave when they are due, whether or not others have been answered.

What a request takes counts from when it was due, so a server that stalls is charged for all who would have come
meanwhile. The moments are those of a Poisson process, the same for each server that is compared. The client has the
server's cores, so it is by aiohttp, which needs a fraction of httpx's time for a request.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

PATIENCE = 30.0
"""Seconds after which a client gives a request up; it counts as broken."""


@dataclass(slots=True)
class Record:
    """One request. Moments are in seconds, by the clock of ``time.perf_counter``."""

    due: float
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    """The status of the answer; 0: there was none, for the connection broke, or was refused, or the client gave up."""
    right: bool | None = None
    """A flag that a 200 had the right answer; None: it cannot be known."""
    tokens: list[float] = field(default_factory=list)
    """The time at which each token of a stream came."""

    @property
    def seconds(self) -> float:
        """Return the time it took, in seconds."""
        return self.ended - self.due

    @property
    def first(self) -> float:
        """Return the time at which a stream's first token came, or at which the answer ended."""
        return self.tokens[0] if self.tokens else self.ended


class Target(Protocol):
    """A way to ask a kind of server."""

    async def ask(self, http: aiohttp.ClientSession, number: int, record: Record) -> None:
        """Send a request, and note its status, tokens and whether it is right.

        :raises aiohttp.ClientError: there was no whole answer.
        :raises TimeoutError: there was none within the client's patience.
        """


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client that opens as many connections as it has requests under way."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE)) as http:
        yield http


async def ask(http: aiohttp.ClientSession, target: Target, number: int, due: float) -> Record:
    """Ask once, now."""
    record = Record(due, time.perf_counter())
    try:
        await target.ask(http, number, record)
    except (aiohttp.ClientError, TimeoutError):
        record.status = 0
    record.ended = time.perf_counter()
    return record


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """The moments at which requests are due, in seconds from the beginning: a Poisson process."""
    rng, now = random.Random(seed), 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        yield now


async def load(url: str, target: Target, rate: float, seconds: float, seed: int = 1) -> list[Record]:
    """Send ``rate`` requests per second on average, for some seconds, and wait for all answers.

    :returns: in the order in which they were due.
    """
    tasks = []
    async with connect(url) as http, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        for number, moment in enumerate(arrivals(rate, seconds, seed)):
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            tasks.append(group.create_task(ask(http, target, number, began + moment)))
    return [task.result() for task in tasks]


async def saturate(url: str, target: Target, clients: int, seconds: float) -> list[Record]:
    """Have clients ask one request after the other, each without a pause: a closed loop, for the capacity."""
    records: list[Record] = []
    numbers = iter(range(10**9))

    async def one(http: aiohttp.ClientSession) -> None:
        while time.perf_counter() < ends:
            records.append(await ask(http, target, next(numbers), time.perf_counter()))

    async with connect(url) as http, asyncio.TaskGroup() as group:
        ends = time.perf_counter() + seconds
        for _ in range(clients):
            group.create_task(one(http))
    return records


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is not exceeded by this share of all; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(records: Sequence[Record], seconds: float) -> dict[str, float | int | None]:
    """Summarise a load.

    :param seconds: for how long requests were sent; what was answered later is no throughput of that time.
    :returns: counts; rates per second; times in ms, of good answers, from when they were due.
    """
    good = [record for record in records if record.status == 200 and record.right is not False]
    began = min((record.due for record in records), default=0.0)
    in_time = [record for record in good if record.ended <= began + seconds]
    tokens = [stamp for record in good for stamp in record.tokens if stamp <= began + seconds]
    gaps = [b - a for record in good for a, b in zip(record.tokens, record.tokens[1:], strict=False)]
    firsts = [record.tokens[0] - record.due for record in good if record.tokens]
    times = {
        "p50": quantile([record.seconds for record in good], 0.5),
        "p99": quantile([record.seconds for record in good], 0.99),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "gap_p50": quantile(gaps, 0.5),
        "gap_p99": quantile(gaps, 0.99),
        "sent_late_p99": quantile([record.sent - record.due for record in records], 0.99),
    }
    return {
        "sent": len(records),
        "good": len(good),
        "refused": sum(record.status == 503 for record in records),
        "broken": sum(record.status == 0 for record in records),
        "wrong": sum(record.right is False for record in records),
        "other": sum(record.status not in (0, 200, 503) for record in records),
        "per_s": len(in_time) / seconds,
        "tokens_per_s": len(tokens) / seconds if tokens else None,
        **{name: None if value is None else 1e3 * value for name, value in times.items()},
    }
