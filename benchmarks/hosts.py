"""Collectives of ranks on several hosts, which are network namespaces of this machine, joined by virtual cables.

Run it as root with ``python -m benchmarks.hosts [--layout 0011] [--before FOLDER]``. The layout is the host of each
rank. FOLDER is another checkout, with an environment in ``.venv``: its ranks take turns with those of this one, some
calls each, and a ratio is the median, over the rounds, of this one's mean against the other's. Ranks, the kernel's
network and the cables share the machine's cores, so this shows what a collective costs all of them together. What it
takes where each has its own is simulated by ``tests/transports/ucx/test_ucx_schedules.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocomms

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
SIZES = (1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
"""Bytes of a rank's tensor: of all blocks where it has one for each rank, else of its one."""
SECONDS = 0.15
"""How long the calls of one turn take, about."""


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Hosts with one interface each, all on one bridge, which is on a host of its own."""
    switch, *names = (f"bench-{os.getpid()}-{i}" for i in range(count + 1))
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "net0", "type", "bridge")
        ip("-n", switch, "link", "set", "net0", "up")
        for host, name in enumerate(names):
            plug = f"plug{host}"
            ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", plug, "netns", switch)
            ip("-n", switch, "link", "set", plug, "master", "net0", "up")
            ip("-n", name, "address", "add", f"10.79.0.{host + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    """Change the machine's networks."""
    subprocess.run(["ip", *words], check=True)


def call(comm: aiocomms.Communicator, op: str, size: int) -> Any:
    """A call of some op, as a function without arguments."""
    ranks = comm.size
    whole, part = torch.zeros(max(size // 4, ranks)), torch.zeros(max(size // 4 // ranks, 1))
    wholes = [torch.zeros_like(whole) for _ in range(ranks)] if op in ("gather", "scatter") else []
    into = torch.zeros(ranks * len(whole)) if op == "all_gather" else torch.zeros(ranks * len(part))
    first = comm.rank == 0
    return {
        "all_reduce": lambda: comm.all_reduce(whole),
        "all_gather": lambda: comm.all_gather_single(into, whole),
        "reduce_scatter": lambda: comm.reduce_scatter_single(part, into),
        "all_to_all": lambda: comm.all_to_all_single(torch.empty_like(into), into),
        "gather": lambda: comm.gather(wholes if first else None, whole, 0),
        "scatter": lambda: comm.scatter(whole, wholes if first else None, 0),
    }[op]


async def serve(rank: int, size: int, folder: str) -> None:
    """One rank: take turns as they are asked for, and say how long each call took, in the mean."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    async with aiocomms.new_comm("ucx", store=store, rank=rank, size=size) as comm:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            op, bytes_of, calls = json.loads(line)
            run = call(comm, op, bytes_of)
            await comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                await run()
            print((time.perf_counter() - start) / calls, flush=True)


class Ranks:
    """The ranks of one checkout, which sleep until it is their turn."""

    def __init__(self, checkout: str | None, names: list[str], layout: str, folder: str) -> None:
        Path(folder).mkdir()
        python = f"{checkout}/.venv/bin/python" if checkout else sys.executable
        command = [python, __file__, f"--layout={layout}", f"--folder={folder}"]
        environment = os.environ | {"AIOCOMMS_TOKEN": "of a benchmark of hosts", "MASTER_ADDR": "10.79.0.1"}
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[int(host)], *command, f"--rank={rank}"],
                cwd=checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(layout)
        ]
        self.read()

    def read(self) -> list[str]:
        """A line of each rank."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        assert all(lines), "a rank has ended"
        return lines

    def turn(self, op: str, size: int, calls: int) -> float:
        """Seconds of a call, in the mean, of the slowest rank."""
        for process in self.processes:
            assert process.stdin
            print(json.dumps([op, size, calls]), file=process.stdin, flush=True)
        return max(map(float, self.read()))

    def end(self) -> None:
        """No more turns."""
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            process.wait(30)


def measure(everybody: list[Ranks], op: str, size: int, rounds: int) -> list[list[float]]:
    """By round, the figure of each checkout's ranks."""
    found = []
    calls = max(1, min(200, int(SECONDS / max(ranks.turn(op, size, 1) for ranks in everybody))))
    for turn in range(rounds):
        order = everybody if turn % 2 else everybody[::-1]
        taken = {id(ranks): ranks.turn(op, size, calls) for ranks in order}
        found.append([taken[id(ranks)] for ranks in everybody])
    return found


def main() -> None:
    """Start all ranks, and print a table; or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="0011")
    parser.add_argument("--before")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.rank is not None:
        return asyncio.run(serve(args.rank, len(args.layout), args.folder))
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ranks on hosts {args.layout}")
    hosts = max(int(host) for host in args.layout) + 1
    with namespaces(hosts) as names, tempfile.TemporaryDirectory() as folder:
        checkouts = [None] + ([args.before] if args.before else [])
        everybody = [Ranks(where, names, args.layout, f"{folder}/{i}") for i, where in enumerate(checkouts)]
        for op in args.ops.split(","):
            for size in map(int, args.sizes.split(",")):
                show(op, size, measure(everybody, op, size, args.rounds))
        for ranks in everybody:
            ranks.end()
    return None


def show(op: str, size: int, found: list[list[float]]) -> None:
    """Print one row."""
    figures = "".join(f"{statistics.median(column) * 1e6:>12.1f} µs" for column in zip(*found, strict=True))
    ratio = f"{statistics.median(row[0] / row[1] for row in found):>8.2f}" if len(found[0]) > 1 else ""
    print(f"{op:16}{size:>10}{figures}{ratio}", flush=True)


if __name__ == "__main__":
    main()
