"""Ours against its peers, side by side in one run: MPICH, gloo, UCXX, and UCX's own ``ucx_perftest``.

``make bench`` runs it in an environment of its own. docs/benchmarks/cpu.md says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from aiocomms.bootstrap import registry
from benchmarks.peers import report
from benchmarks.peers.race import Pace, Worlds, race
from benchmarks.peers.rows import rows
from benchmarks.peers.special import SPECIAL, run_special
from benchmarks.peers.state import Probe
from benchmarks.peers.world import ContenderFailedError

FULL, QUICK = Pace(rounds=10, seconds=0.05), Pace(rounds=3, seconds=0.02)
PACKAGES = ("aiocomms", "aiocomms-ucx", "torch", "mpich", "mpi4py", "ucxx-cu13", "libucx-cu13")
EXAMPLE = "ucxx"
"""The example transport's name; it races in sends and receives where it is installed."""


def about(pace: Pace, transport: str) -> dict[str, str]:
    """Where and with what this was measured."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "measured": f"transport {transport}, {pace.rounds} rounds of {2e3 * pace.seconds:.0f} ms each",
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx", help="which of ours")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows whose title this expression finds")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where compare.json, .md and .png go")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print the tables of an earlier run instead")
    return parser.parse_args()


def measure(transport: str, example: str | None, pattern: str, pace: Pace) -> list[dict[str, Any]]:
    """All rows that are wanted."""
    results: list[dict[str, Any]] = []

    def note(row: dict[str, Any], start: float) -> None:
        results.append(row)
        print(f"{time.perf_counter() - start:6.1f} s  {row['title']}", *row["failures"], sep="\n  ", flush=True)

    wanted = re.compile(pattern, re.IGNORECASE)
    worlds, probe = Worlds(transport, example), Probe()
    try:
        for row in rows(transport):
            if wanted.search(row.title):
                start = time.perf_counter()
                note(race(worlds, row, pace, probe), start)
        worlds.close()
    except ContenderFailedError as error:
        results.append({"title": "closing", "ours": "", "figures": [], "verdicts": [], "failures": [str(error)]})
    finally:
        worlds.close(force=True)
        probe.kill()
    for title in SPECIAL:
        if wanted.search(title):
            start = time.perf_counter()
            note(run_special(title, transport, pace), start)
    return results


def choose(transport: str, available: Mapping[str, str | None]) -> str | None:
    """The example transport's name if it can be raced too; exits where ours cannot be."""
    why = available.get(transport, "it is not installed")
    if why is not None:
        sys.exit(f"transport {transport!r} cannot be measured: {why}")
    return EXAMPLE if EXAMPLE in available and available[EXAMPLE] is None and transport != EXAMPLE else None


def main() -> int:
    """Measure, print, write; 1 if a contender failed."""
    args = parse()
    if args.report:
        print(report.markdown(json.loads(args.report.read_text())), end="")
        return 0
    example = choose(args.transport, registry.available(torch.device("cpu")))
    args.out.mkdir(parents=True, exist_ok=True)
    pace = QUICK if args.quick else FULL
    where = about(pace, args.transport)
    results = {"where": where, "rows": measure(args.transport, example, args.rows, pace)}
    text = report.markdown(results)
    print(f"\n{text}\nmusts missed: {report.missed(results)}")
    (args.out / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "compare.md").write_text(text)
    report.chart(results, args.out / "compare.png")
    return int(any(row["failures"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
