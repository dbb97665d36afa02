"""``torch.distributed`` over aiocomms and over gloo: ``dist.all_reduce``, and a step of DDP, round by round in turn.

Run it with ``make bench`` or ``python -m benchmarks.torch_backend``. Both backends are groups of the same two
processes, each bound to a core where there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiocomms.integrations.torch_backend
from aiocomms.cli.bench.machine import bind

BACKENDS = ("gloo", aiocomms.integrations.torch_backend.BACKEND)
SIZES = (8, 64 * 2**10, 2**20)


def reducing(group: Any, nbytes: int) -> Callable[[], None]:
    """One ``dist.all_reduce``."""
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=group) and None


def awaiting(group: Any, nbytes: int) -> Callable[[], None]:
    """Ten that are awaited, one after the other; gloo's by an executor."""
    tensor = torch.zeros(nbytes // 4)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(10):
            work: Any = dist.all_reduce(tensor, group=group, async_op=True)
            await (work if hasattr(work, "__await__") else loop.run_in_executor(None, work.wait))

    runner = asyncio.Runner()
    return lambda: runner.run(main())


def stepping(group: Any) -> Callable[[], None]:
    """A step of a small model: forward, backward with its reduction, optimizer."""
    torch.manual_seed(1)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = torch.randn(16, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    return step


def rank_of(rank: int, folder: str, rounds: int, results: Any) -> None:
    """One of the two processes."""
    bind(rank, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    groups = {name: dist.new_group([0, 1], backend=name) for name in BACKENDS}
    subjects: dict[str, tuple[dict[str, Callable[[], None]], int, int]] = {}
    for nbytes in SIZES:
        ways = {name: reducing(group, nbytes) for name, group in groups.items()}
        subjects[f"dist.all_reduce {nbytes} B"] = ways, 50, 1
    ways = {name: awaiting(group, 8) for name, group in groups.items()}
    subjects["await dist.all_reduce 8 B"] = ways, 5, 10
    subjects["a step of DDP, 1 MiB of gradients"] = {n: stepping(g) for n, g in groups.items()}, 20, 1
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for what, (ways, count, share) in subjects.items():
            for name, call in ways.items():
                dist.barrier()
                call()
                for _ in range(count):
                    start = time.perf_counter()
                    call()
                    found.setdefault((what, name), []).append((time.perf_counter() - start) / share)
    dist.destroy_process_group()
    if rank == 0:
        results.send(found)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_of, args=(r, folder, args.rounds, theirs)) for r in range(2)]
        for rank in ranks:
            rank.start()
        found = mine.recv()
        for rank in ranks:
            rank.join()
    print(f"torch {torch.__version__}, 2 processes, {args.rounds} rounds in turn, load before {os.getloadavg()[0]:.2f}")
    print("| operation | backend | median | mean | p99 | times aiocomms' median |\n|---|---|---:|---:|---:|---:|")
    for (what, name), each in found.items():
        ours = statistics.median(found[what, aiocomms.integrations.torch_backend.BACKEND])
        median, p99 = statistics.median(each), sorted(each)[int(0.99 * len(each))]
        print(
            f"| {what} | {name} | {median * 1e6:.1f} µs | {statistics.mean(each) * 1e6:.1f} µs | {p99 * 1e6:.1f} µs "
            f"| {median / ours:.2f} |"
        )


if __name__ == "__main__":
    main()
