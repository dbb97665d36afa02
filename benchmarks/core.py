"""Costs of the core by itself: no wire, no second process.

Run it with ``make bench`` or ``python -m benchmarks.core [--json FILE]``. Everything is measured in one run, the
yardstick (``await asyncio.sleep(0)``) in turn with each subject, and printed as medians, p99 and ratios: times drift
from machine to machine and from minute to minute, ratios much less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import selectors
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import uvloop

import aiocomms
from aiocomms.testing import local_world

ROUNDS = 40
BATCH = 1000


def quantiles(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in µs."""
    return {"median_us": statistics.median(samples) * 1e6, "p99_us": statistics.quantiles(samples, n=100)[98] * 1e6}


async def batch(call: Callable[[], Awaitable[Any]], n: int) -> float:
    """Seconds per awaited call, over ``n`` calls."""
    start = time.perf_counter()
    for _ in range(n):
        await call()
    return (time.perf_counter() - start) / n


async def finished_in_post(transport: str) -> dict[str, Any]:
    """An op that completes inside ``post``: a world of one, all_reduce of 8 bytes, against ``sleep(0)``."""
    async with aiocomms.new_comm(transport) as comm:
        tensor = torch.ones(2)
        subjects = {
            "sleep(0)": lambda: asyncio.sleep(0),
            "all_reduce 8 B": lambda: comm.all_reduce(tensor),
            "broadcast 8 B": lambda: comm.broadcast(tensor, 0),
            "barrier": comm.barrier,
        }
        samples: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(ROUNDS):
            for name, call in subjects.items():
                samples[name].append(await batch(call, BATCH))
    rows = {name: quantiles(values) for name, values in samples.items()}
    for name, values in samples.items():
        rows[name]["ratio"] = statistics.median(
            value / yardstick for value, yardstick in zip(values, samples["sleep(0)"], strict=True)
        )
    return rows


async def recorded(transport: str) -> dict[str, Any]:
    """Measure what the flight recorder adds to an op that completes inside ``post``: with and without it, in turn."""
    tensor = torch.ones(2)
    samples: dict[str, list[float]] = {name: [] for name in ("with", "without")}
    async with aiocomms.new_comm(transport) as comm:
        ledger = comm._core.ledger
        for _ in range(4 * ROUNDS):
            for name in samples:
                ledger.recording = name == "with"
                samples[name].append(await batch(lambda: comm.all_reduce(tensor), BATCH))
    rows = {f"all_reduce 8 B, {name} recorder": quantiles(values) for name, values in samples.items()}
    for name, values in zip(rows, samples.values(), strict=True):
        rows[name]["ratio"] = statistics.median(v / w for v, w in zip(values, samples["without"], strict=True))
    added = statistics.median(w - wo for w, wo in zip(samples["with"], samples["without"], strict=True))
    rows["all_reduce 8 B, with recorder"]["recorder_ns"] = added * 1e9
    return rows


async def message_between_tasks() -> dict[str, Any]:
    """A message of 8 bytes between two ranks that are tasks of one loop, there and back, against two ``sleep(0)``."""
    async with local_world(2) as (one, two):
        tensor, back = torch.ones(2), torch.ones(2)

        async def echo(n: int) -> None:
            for _ in range(n):
                await two.recv(back, 0)
                await two.send(back, 0)

        async def ping() -> None:
            await one.send(tensor, 1)
            await one.recv(tensor, 1)

        trips, sleeps = [], []
        for _ in range(ROUNDS):
            task = asyncio.create_task(echo(BATCH))
            trips.append(await batch(ping, BATCH))
            await task
            sleeps.append(await batch(lambda: asyncio.sleep(0), BATCH))
    ratio = statistics.median(trip / (2 * sleep) for trip, sleep in zip(trips, sleeps, strict=True))
    return {"round trip 8 B": quantiles(trips) | {"ratio": ratio}}


async def outstanding(count: int) -> tuple[float, float]:
    """Seconds per op to post ``count`` receives and then complete them, and Python bytes per pending receive."""
    async with local_world(2) as (one, two):
        tensors = [torch.empty(2) for _ in range(count)]
        payload = torch.ones(2)
        gc.collect()
        start = time.perf_counter()
        works = [one.recv(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
        for tag in range(count):
            await two.send(payload, 0, tag)
        for work in works:
            await work
        elapsed = time.perf_counter() - start
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        works = [one.recv(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for tag in range(count):
            await two.send(payload, 0, tag)
    return elapsed / count, (after - before) / count


async def many_receives() -> dict[str, Any]:
    """Measure whether 10,000 receives that wait cost more each than 100 do."""
    few, many = [], []
    memory = 0.0
    for _ in range(7):
        few.append(statistics.median([(await outstanding(100))[0] for _ in range(20)]))
        seconds, memory = await outstanding(10_000)
        many.append(seconds)
    ratio = statistics.median(m / f for m, f in zip(many, few, strict=True))
    return {
        "recv, 100 outstanding": quantiles(few) | {"ratio": 1.0},
        "recv, 10,000 outstanding": quantiles(many) | {"ratio": ratio, "bytes_each": memory},
    }


class CountingSelector(selectors.DefaultSelector):
    """Counts how often the loop wakes up."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def select(self, timeout: float | None = None) -> Any:
        """Count one turn of the loop."""
        self.wakes += 1
        return super().select(timeout)


def idle(seconds: float = 2.0) -> dict[str, Any]:
    """Turns of an asyncio loop that has nothing to do but a communicator; the two that end the wait are not counted."""
    rows: dict[str, Any] = {}
    for name, waiting in (("idle, nothing pending", False), ("idle, a recv that never comes", True)):
        selector = CountingSelector()

        async def watch(waiting: bool = waiting, selector: CountingSelector = selector) -> int:
            async with aiocomms.new_comm("local") as comm:
                work = comm.recv(torch.empty(2), 0) if waiting else None
                await asyncio.sleep(0.05)
                before = selector.wakes
                await asyncio.sleep(seconds)
                turns = selector.wakes - before
                if work is not None:
                    await work.cancel()
            return turns

        with asyncio.Runner(loop_factory=lambda selector=selector: asyncio.SelectorEventLoop(selector)) as runner:
            rows[name] = {"wake_ups_per_s": max(0, runner.run(watch()) - 2) / seconds}
    return rows


def run_all(run: Callable[..., Any]) -> dict[str, Any]:
    """The timed subjects, on one kind of loop."""
    native = {**run(finished_in_post("ucx")), **run(recorded("ucx"))}
    rows = {f"{name}, ucx": row for name, row in native.items()}
    rows |= {**run(finished_in_post("local")), **run(recorded("local"))}
    return {**rows, **run(message_between_tasks()), **run(many_receives())}


def show(title: str, rows: dict[str, Any]) -> None:
    """Print one table."""
    print(f"\n{title}\n{'':36}{'median':>10}{'p99':>10}{'ratio':>8}")
    for name, row in rows.items():
        if "median_us" in row:
            extra = f"   {row['bytes_each']:.0f} bytes each" if "bytes_each" in row else ""
            extra += f"   the recorder: {row['recorder_ns']:.0f} ns" if "recorder_ns" in row else ""
            print(f"{name:36}{row['median_us']:>7.2f} µs{row['p99_us']:>7.2f} µs{row['ratio']:>8.2f}{extra}")
        else:
            print(f"{name:36}{row['wake_ups_per_s']:>7.2f} wake-ups per second")


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    print(f"{where}; ratios to asyncio.sleep(0) in the same run, per suspension")
    print("(receives: to 100 outstanding; the flight recorder: to none)")
    results = {"asyncio": run_all(asyncio.run), "uvloop": run_all(uvloop.run), "idle": idle()}
    for title, rows in results.items():
        show(title, rows)
    if args.json:
        args.json.write_text(json.dumps({"where": where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
