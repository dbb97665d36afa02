"""The size of the pool in which a rank computes: its threads, and those of torch within each operation.

Run it with ``python -m benchmarks.serve.pool [--seconds S]``. Each row is a server of its own, asked by one client, and
then by 16, none of which pauses.
"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.serve.client import quantile, saturate
from benchmarks.serve.phases import capacity
from benchmarks.serve.report import number
from benchmarks.serve.servers import ours
from benchmarks.serve.targets import Embedding
from benchmarks.tables import table

LAYOUTS = ((1, 1), (1, 2), (2, 1))
SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
"""Threads of the pool, and of torch."""


async def measure(target: Embedding, layout: tuple[int, int], size: tuple[int, int], seconds: float) -> list[str]:
    """A row of the table."""
    threads, of_torch = size
    with ours(*layout, f"--threads={threads}", f"--torch-threads={of_torch}") as server:
        await saturate(server.url, target, 1, min(1.0, seconds))
        alone = await saturate(server.url, target, 1, seconds)
        crowd = await capacity(server, target, seconds)
    p50 = quantile([1e3 * record.seconds for record in alone], 0.5)
    figures = [len(alone) / seconds, p50, crowd["per_s"], crowd["p50"], crowd["p99"], crowd["late_p99"]]
    return [f"--tp {layout[0]} --pp {layout[1]}", str(threads), str(of_torch), *map(number, figures)]


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of clients (default: %(default)s)")
    seconds = parser.parse_args().seconds
    target = Embedding.load()
    rows = [await measure(target, layout, size, seconds) for layout in LAYOUTS for size in SIZES]
    alone, crowd = ["1 client: per s", "p50 ms"], ["16 clients: per s", "p50 ms", "p99 ms", "loop late p99 ms"]
    print(table(["layout", "pool", "torch", *alone, *crowd], rows, 1))


if __name__ == "__main__":
    asyncio.run(main())
