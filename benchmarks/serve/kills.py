"""The embedding server under 80 % of its capacity, and a rank killed every 20 s: ``make bench-serve-kills``.

Each request is to end with the right answer, or with a 503 within a second of the kill or of when it was due; the
server is to serve again within 3 s of each kill; and its memory is to stay as it is. It ends with 1 if that is missed.

Rank 0 is spared: it holds the clients' connections, which no other process could go on with. What becomes of them when
it dies is said in the README of the example.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare import FULL, about
from benchmarks.serve.client import Record, load, quantile, summary
from benchmarks.serve.phases import around, capacity
from benchmarks.serve.report import Verdict, number, print_verdicts
from benchmarks.serve.servers import Server, ours
from benchmarks.serve.targets import Embedding
from benchmarks.tables import table

REFUSED, AGAIN, GROWN = 1.0, 3.0, 1.05
"""Seconds to a 503, seconds until it serves again (p99), and the memory in the end as a multiple of that before."""


class Killer:
    """Kills ranks, and notes when, and what memory all of them have meanwhile."""

    def __init__(self, server: Server) -> None:
        self.moments: list[float] = []
        self.memory: list[int] = []
        self._server = server
        self._rng = random.Random(1)

    async def run(self, every: float) -> None:
        """Kill a rank every so many seconds, until cancelled."""
        while True:
            for _ in range(4):
                await asyncio.sleep(every / 4)
                self.memory.append(await asyncio.to_thread(self._server.memory))
            there = [rank for rank in self._server.pids if rank]  # a rank that is not replaced yet has no entry
            self.moments.append(time.perf_counter())
            self._server.kill(self._rng.choice(there))


async def run(server: Server, target: Embedding, rate: float, seconds: float, every: float) -> dict[str, Any]:
    """Load the server, and kill its ranks meanwhile; the last kill leaves it the time to serve again."""
    killer = Killer(server)
    killing = asyncio.create_task(killer.run(every))
    asyncio.get_running_loop().call_later(seconds - every / 2, killing.cancel)
    records = await load(server.url, target, rate, seconds)
    await asyncio.wait([killing])
    return {"rate": rate, "seconds": seconds, **summary(records, seconds), **deaths(records, killer.moments),
            "memory": killer.memory}  # fmt: skip


def deaths(records: list[Record], moments: list[float]) -> dict[str, Any]:
    """Summarise the effects of the kills at these moments."""
    ends = [*moments[1:], float("inf")]
    found = [around([r for r in records if r.due < end], moment) for moment, end in zip(moments, ends, strict=True)]
    again = [death["again"] for death in found if death["again"] is not None]
    refused = [death["failed_after"] for death in found if death["failed_after"] is not None]
    return {
        "kills": len(moments),
        "never_again": len(moments) - len(again),
        "again_p50": quantile(again, 0.5),
        "again_p99": quantile(again, 0.99),
        "refused_after": max(refused, default=0.0),
    }


def verdicts(row: dict[str, Any]) -> list[Verdict]:
    """Return the limits to reach, and whether they were."""
    memory = row["memory"]
    quarter = max(1, len(memory) // 4)
    grown = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter] or memory)
    bad = {kind: row[kind] for kind in ("wrong", "broken", "other", "never_again")}
    again, refused = row["again_p99"], row["refused_after"]
    back = f"{again:.2f} s" if again else "never"
    neither = "answers neither right nor 503, and kills after which it never served"
    return [
        Verdict(neither, f"{bad}", "0", not any(bad.values())),
        Verdict("the slowest 503", f"{refused:.2f} s", f"<= {REFUSED:.0f} s", refused <= REFUSED),
        Verdict("served again at p99", back, f"<= {AGAIN:.0f} s", bool(again) and again <= AGAIN),
        Verdict("memory in the last quarter / in the second", f"{grown:.3f}", f"<= {GROWN}", grown <= GROWN),
    ]  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    """A table of it, and the memory in between."""
    keys = ("rate", "sent", "good", "refused", "p50", "p99", "kills", "again_p50", "again_p99", "refused_after")
    memory = [f"{bytes_ / 2**20:.0f}" for bytes_ in row["memory"][:: max(1, len(row["memory"]) // 12)]]
    return f"{table(list(keys), [[number(row[key]) for key in keys]], 0)}\n\nmemory, MiB: {', '.join(memory)}"


async def main() -> int:
    """Run it, and print what was found; 1 if something was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills (default: 20)")
    parser.add_argument("--load", type=float, default=0.8, help="the share of the capacity (default: 0.8)")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/kills.json"))
    options = parser.parse_args()
    if options.tp * options.pp < 2 or options.seconds < 2 * options.every:
        parser.error("wanted at least 2 ranks, and seconds for 2 kills")
    target = Embedding.load()
    with ours(options.tp, options.pp) as server:
        most = (await capacity(server, target, min(10.0, options.seconds / 4)))["per_s"]
        row = await run(server, target, options.load * most, options.seconds, options.every)
    where = {key: value for key, value in about(FULL, "ucx").items() if key != "measured"}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"where": where, "capacity": most, **row}, indent=1) + "\n")
    print(*(f"* {key}: {value}" for key, value in where.items()), sep="\n")
    print(f"\n{shown(row)}\n")
    found = verdicts(row)
    print(print_verdicts(found))
    return int(not all(verdict.reached for verdict in found))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
