"""Costs that grow with the number of ranks while a communicator forms.

Processes that form one over ``ucx``, ranks of one event loop, and the calls and bytes that each of up to 10,000 ranks
has of its store: those are counted, of the real code of the meeting and of an exchange, over a store that counts. Run
it with ``make bench-scale`` or ``python -m benchmarks.scale [--json FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, Store

import aiocomms
from aiocomms.bootstrap import registry
from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.lowlevel.auth import Seal
from aiocomms.testing import local_world, run_ranks

PROCESSES = (2, 4, 8, 16, 32, 64)
SIMULATED = (10, 100, 1000, 10_000)
LOCAL = 1000
ROUNDS = 3
VALUE = bytes(300)
"""About as many bytes as a rank of ``ucx`` tells the others in all its exchanges."""
READERS = 5
"""Ranks of those simulated that read all values, which is the same for each, and takes longest."""
PATIENCE = 300.0


class CountingStore(Store):
    """A store that counts the calls, and the bytes that are sent and got by them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = HashStore()
        self.calls = self.bytes = 0

    def _count(self, *data: Any) -> None:
        self.calls += 1
        self.bytes += sum(map(len, data))

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self.kept.set(key, value)

    def append(self, key: str, value: Any) -> None:
        self._count(key, value)
        self.kept.append(key, value)  # type: ignore[attr-defined]  # torch has it

    def get(self, key: str) -> bytes:
        value = self.kept.get(key)
        self._count(key, value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.kept.multi_get(keys)
        self._count(*keys, *values)
        return values

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return self.kept.check(keys)

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return self.kept.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count(key, expected, desired)
        return self.kept.compare_set(key, expected, desired)


class Steps:
    """One rank's steps, and what it has asked of the store by them."""

    def __init__(self, store: CountingStore, steps: Iterator[float]) -> None:
        self._store, self._steps = store, steps
        self.calls = self.bytes = 0

    def step(self) -> bool:
        """Take a step; whether it was the last one."""
        calls, size = self._store.calls, self._store.bytes
        try:
            return next(self._steps, None) is None
        finally:
            self.calls += self._store.calls - calls
            self.bytes += self._store.bytes - size


def arriving(size: int) -> list[Steps]:
    """All ranks come, and then each looks until it has met the others."""
    store = CountingStore()
    return _all_done([Steps(store, Arrival(store, r, size, Seal(b"key", "w")).steps(PATIENCE)) for r in range(size)])


def exchanging(size: int, readers: int) -> list[Steps]:
    """All ranks leave a value, and then the last ones look until they have all; those alone are returned."""
    store, place = CountingStore(), {"device": torch.device("cpu"), "timeout": PATIENCE, "seal": Seal(b"key", "w")}
    ranks = (StoreRendezvous(store, r, size, name="w", **place) for r in range(size))
    return _all_done([Steps(store, it.steps(store, "key", {it.rank: VALUE})) for it in ranks], readers)


def _all_done(ranks: list[Steps], count: int | None = None) -> list[Steps]:
    """Let each take its first step, and then some as many as it takes."""
    left = [rank for rank in ranks if not rank.step()]
    chosen = ranks if count is None else ranks[-count:]
    for rank in left:
        while rank in chosen and not rank.step():
            pass
    return chosen


def counted() -> list[dict[str, int]]:
    """The most calls and bytes that any rank needs, where the others have come."""
    rows = []
    for size in SIMULATED:
        for what, ranks in (("meeting", arriving(size)), ("exchange", exchanging(size, READERS))):
            calls, data = max(rank.calls for rank in ranks), max(rank.bytes for rank in ranks)
            rows.append({"what": what, "ranks": size, "calls": calls, "bytes": data})
    return rows


# ---------------------------------------------------------------------------------------------------- one event loop


async def in_one_process(size: int) -> dict[str, float]:
    """Open a world of ranks in this process, have them meet once, and close it; in seconds."""
    times = [time.perf_counter()]
    async with local_world(size, timeout=PATIENCE) as comms:
        times.append(time.perf_counter())
        await run_ranks(comms, lambda comm: comm.barrier())
        times.append(time.perf_counter())
    times.append(time.perf_counter())
    form, barrier, close = (after - before for before, after in itertools.pairwise(times))
    return {"form": form, "barrier": barrier, "close": close}


# --------------------------------------------------------------------------------------------------------- processes


async def form(transport: str) -> dict[str, float]:
    """Run one process: note when it begins, when it has formed the communicator, and when it has closed it."""
    times = {"began": time.monotonic()}
    async with aiocomms.new_comm(transport, timeout=PATIENCE) as comm:
        times["formed"] = time.monotonic()
        await comm.barrier()
    times["closed"] = time.monotonic()
    return times


def _main(transport: str, place: dict[str, str], results: Any) -> None:
    os.environ |= place
    torch.set_num_threads(1)
    results.put(asyncio.run(form(transport)))


def in_processes(size: int, transport: str) -> dict[str, float]:
    """Form one of processes that have imported everything; in seconds, from when the last one begins."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiocomms.communicator.opening", registry.entries()[transport].module])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{size}"}
    results = context.Queue()
    processes = [
        context.Process(target=_main, args=(transport, where | {"RANK": f"{r}"}, results)) for r in range(size)
    ]
    for process in processes:
        process.start()
    try:
        times = [results.get(timeout=PATIENCE) for _ in processes]
    finally:
        for process in processes:
            process.kill()
    began, formed, closed = (max(each[what] for each in times) for what in ("began", "formed", "closed"))
    return {"form": formed - began, "close": closed - formed}


# ------------------------------------------------------------------------------------------------------------ report


def measure(transport: str, sizes: list[int]) -> dict[str, Any]:
    """Everything, in seconds, calls and bytes."""
    worlds = [asyncio.run(in_one_process(LOCAL)) for _ in range(ROUNDS)]
    rows = {size: [in_processes(size, transport) for _ in range(ROUNDS)] for size in sizes}
    return {
        "local": {what: statistics.median(world[what] for world in worlds) for what in worlds[0]},
        "processes": {
            size: {what: statistics.median(each[what] for each in found) for what in found[0]}
            for size, found in rows.items()
        },
        "store": counted(),
    }


def show(found: dict[str, Any], transport: str) -> None:
    """Print the tables."""
    print(f"{'':30}{'form':>10}{'barrier':>10}{'close':>10}")
    for size, row in found["processes"].items():
        print(f"{f'{size} processes, {transport}':30}{row['form']:8.2f} s{row['close']:18.2f} s")
    row = found["local"]
    print(f"{f'{LOCAL} ranks of a loop, local':30}{row['form']:8.2f} s{row['barrier']:8.2f} s{row['close']:8.2f} s")
    print(f"\n{'of the store, for each rank':30}{'calls':>10}{'bytes':>12}")
    for row in found["store"]:
        print(f"{row['what'] + ' of ' + str(row['ranks']):30}{row['calls']:10}{row['bytes']:12,}")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--sizes", type=int, nargs="*", default=PROCESSES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.transport, given.sizes)
    show(found, given.transport)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
