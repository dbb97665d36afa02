"""Trials of a server: load below and beyond its capacity, a busy neighbour, clients that leave, ``kill -9``."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.serve.client import Record, ask, connect, load, saturate, summary
from benchmarks.serve.servers import Look, Server, late
from benchmarks.serve.targets import Embedding, Stream

Row = dict[str, Any]
Target = Embedding | Stream
LEVELS = (0.3, 0.6, 0.9, 1.2)
KILL = 4
"""Times the seconds of a level that the load lasts in which a rank is killed."""
CLIENTS = 16
"""The clients of the closed loop that finds the capacity, and of wrk."""
MINUTE = 60.0
LONG = "a text as long as the model reads " * 60
TEXTS = 64
"""Long texts of the request whose client leaves: as many as are allowed."""


async def loads(servers: Sequence[Server], target: Target, seconds: float) -> list[Row]:
    """All loads, each on one server and then on the other: without a pause, the levels, and beside a neighbour.

    The levels are shares of what the last server does without a pause.
    """
    rows = [await note("no pause", server, capacity(server, target, seconds)) for server in servers]
    most = rows[-1]["per_s"]
    for level in LEVELS:
        for server in servers:
            loading = under(server, target, level * most, seconds)
            rows.append(await note(f"{100 * level:.0f} %", server, loading))
    for server in servers:
        with neighbour():
            loading = under(server, target, 0.6 * most, seconds)
            rows.append(await note("60 %, a busy neighbour", server, loading))
    return rows


async def note(load: str, server: Server, measuring: Any) -> Row:
    """Say what was measured, for whoever looks on."""
    began = time.perf_counter()
    row = {"load": load, "by": server.name, **await measuring}
    print(f"{time.perf_counter() - began:6.1f} s  {load} {server.name}: {row['per_s']:.0f}/s", flush=True)
    return row


async def under(server: Server, target: Target, rate: float, seconds: float) -> Row:
    """One load level."""
    before = await server.look()
    records = await load(server.url, target, rate, seconds)
    return {"rate": rate, **summary(records, seconds), **spent(before, await server.look(), records, target)}


async def capacity(server: Server, target: Target, seconds: float) -> Row:
    """Measure the rate for clients that never pause, after a second in which the server warms up.

    Where a machine is so slow that no answer came within these seconds, it is given more.
    """
    await saturate(server.url, target, CLIENTS, min(1.0, seconds))
    while True:
        before = await server.look()
        records = await saturate(server.url, target, CLIENTS, seconds)
        row = {"rate": None, **summary(records, seconds), **spent(before, await server.look(), records, target)}
        if row["per_s"] or not row["good"]:
            return row
        seconds *= 2


def spent(before: Look, after: Look, records: list[Record], target: Target) -> Row:
    """Return what it cost: CPU seconds of all processes for 1,000 good answers, and how late the loop was."""
    good = sum(record.status == 200 for record in records)
    return {
        "cpu_per_1000": 1000 * (after.cpu - before.cpu) / good if good else None,
        "late_p99": late(before, after, target.late),
    }


async def split(server: Server, target: Embedding, count: int) -> Row:
    """Split the time of a request that is alone: means in ms."""
    async with connect(server.url) as http:
        await ask(http, target, 0, time.perf_counter())
        before = await server.look()
        took = [(await ask(http, target, number, time.perf_counter())).seconds for number in range(count)]
    after = await server.look()
    found = {
        part: 1e3 * (after.metrics[name] - before.metrics[name]) / count
        for part in target.parts
        if (name := f'embedding_seconds_total{{part="{part}"}}')
    }
    whole = 1e3 * sum(took) / count
    return {"whole": whole, **found, "HTTP": whole - sum(found.values())}


async def leaving(server: Server, target: Embedding) -> Row:
    """A client asks for much, and leaves once half of that was computed.

    :returns: steps of the model that were computed before and after it left, and until how many seconds after.
    """
    steps = [await progress(server, target)]
    # The interruption of a whole connection is what a client's end is; aiohttp closes it when the task is cancelled.
    body = {"texts": [LONG] * TEXTS}
    async with connect(server.url) as http:
        request = asyncio.create_task(http.post("/embed", json=body))
        while (now := await progress(server, target)) - steps[0] < TEXTS // 8:  # four long texts are a step
            await asyncio.sleep(0.01)
            if request.done():
                raise RuntimeError(f"{server.name} has answered {request.result().status} before half was done")
        request.cancel()
        left = ended = time.perf_counter()
        await asyncio.wait([request])
        steps.append(now)
        while time.perf_counter() - ended < 1.5:
            if (now := await progress(server, target)) > steps[-1]:
                steps.append(now)
                ended = time.perf_counter()
            await asyncio.sleep(0.01)
    return {"before": steps[1] - steps[0], "after": steps[-1] - steps[1], "seconds": ended - left}


async def progress(server: Server, target: Embedding) -> float:
    """Steps of the model so far."""
    return (await server.look()).metrics.get(target.progress, 0.0)


async def killed(server: Server, target: Target, rate: float, seconds: float, rank: int | str) -> Row:
    """``kill -9`` of a rank amid a load: what becomes of the requests, and when one is served again.

    :param rank: or a group of them, of which the last one is killed.
    """
    loading = asyncio.create_task(load(server.url, target, rate, seconds))
    await asyncio.sleep(seconds / 5)
    moment = time.perf_counter()
    server.kill(rank)
    found = around(records := await loading, moment)
    if found["again"] is None:
        found["again"] = await served(server, target, moment)
    return {"rate": rate, **summary(records, seconds), **found}


async def served(server: Server, target: Target, moment: float) -> float | None:
    """Seconds from a moment until it serves, by requests one after the other; None: it does not within a minute."""
    async with connect(server.url) as http:
        ends = time.perf_counter() + MINUTE
        while time.perf_counter() < ends:
            record = await ask(http, target, 0, time.perf_counter())
            if record.status == 200:
                return record.first - moment
            await asyncio.sleep(0.05)
    return None


def around(records: list[Record], moment: float) -> Row:
    """Summarise the effects of a kill at this moment.

    :returns: seconds until a request was served that came later, None if none was; how long the slowest of those took
        that got no answer, after it came or after the kill; and how many got none.
    """
    served = [r.first - moment for r in records if r.due > moment and r.status == 200]
    failed = [r.ended - max(r.due, moment) for r in records if r.status != 200 and r.ended > moment]
    return {"again": min(served, default=None), "failed": len(failed), "failed_after": max(failed, default=None)}


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A process that wants a core for itself, meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def burn() -> None:
    """Compute nothing, for ever."""
    while True:
        pass


async def wrk(server: Server, target: Embedding, seconds: float) -> Row | None:
    """Run wrk, and return its report; None where it is not installed."""
    program = shutil.which("wrk")
    if program is None:
        return None
    texts = [re.sub(r"[^\w ,.]", "", text) for text in target.texts]
    bodies = ",\n".join(f'\'{{"texts": "{text}"}}\'' for text in texts)
    script = (
        f"local bodies = {{{bodies}}}\nlocal n = 0\nfunction request()\n  n = n + 1\n"
        "  return wrk.format('POST', '/embed', nil, bodies[n % #bodies + 1])\nend\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = ["-t1", f"-c{CLIENTS}", f"-d{max(1, round(seconds))}s", "--latency", "-s", file.name, server.url]
        process = await asyncio.create_subprocess_exec(program, *command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    return parse_wrk(output.decode())


def parse_wrk(text: str) -> Row:
    """Return the figures of wrk's report that are shown.

    :raises ValueError: it is none.
    """
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    times = {share: re.search(rf"{share}%\s+([\d.]+)(us|ms|s)\n", text) for share in (50, 99)}
    if rate is None or None in times.values():
        raise ValueError(f"wrk printed no report: {text}")
    unit = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    sockets = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    return {
        "per_s": float(rate[1]),
        **{f"p{share}": float(found[1]) * unit[found[2]] for share, found in times.items() if found},
        "errors": (int(bad[1]) if bad else 0) + (sum(map(int, sockets.groups())) if sockets else 0),
    }
