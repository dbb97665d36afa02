"""Ours against its peers, side by side in one run: MPICH, gloo, UCXX, and UCX's own ``ucx_perftest``.

Each row is a run of ``aiocomms bench`` with what it must reach. ``make bench`` runs it in an environment of its own.
docs/benchmarks/cpu.md says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from aiocomms.bootstrap import registry
from benchmarks import perftest, tables
from benchmarks.special import SPECIAL
from benchmarks.targets import NAMES, ROWS, Row, Versus

CORES = 2
"""The number of cores that are used, however many there are."""
FULL, QUICK = 0.4, 0.1
"""Seconds for which each contender of a row is measured."""
MOST = 20_000
"""Iterations of a row."""
PATIENCE = 300.0
"""Seconds that a row may take."""
PACKAGES = ("aiocomms", "aiocomms-ucx", "torch", "mpich", "mpi4py", "ucxx-cu13", "libucx-cu13")
EXAMPLE = "ucxx"
"""The example transport's name; it is measured in sends and receives where it is installed."""
SENDS = ("send", "send_burst")


class RowFailedError(Exception):
    """A run of ``aiocomms bench`` went wrong."""


def about(seconds: float, transport: str) -> dict[str, str]:
    """Return where and with what this was measured."""
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
        "measured": f"transport {transport}, {seconds * 1e3:.0f} ms each, in 5 turns",
    }


def run_bench(row: Row, transport: str, vs: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Run ``aiocomms bench`` for a row, and return the rows of its document."""
    size = str(row.nbytes)
    options = ["-b", size, "-e", size, "-n", str(row.ranks), "-i", str(MOST), "-s", str(seconds * row.patience)]
    options += ["--neighbours", str(row.neighbours), "--transport", transport, "--json"]
    options += (["--bind"] if row.bound else []) + (["--vs", ",".join(vs)] if vs else [])
    ops = [row.op, *filter(None, [row.beside])]
    command = [sys.executable, "-m", "aiocomms", "bench", *ops, *options]
    # One thread each, and loopback: every contender is given the same.
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=True)
        document = done.stdout[f"\n{done.stdout}".index("\n{") :]  # libraries log in front of it, and behind it
        return json.JSONDecoder().raw_decode(document)[0]["rows"]
    except (subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise RowFailedError(said[-1] if said else repr(error)) from error


def figure(row: Row, measured: dict[str, Any]) -> dict[str, Any]:
    """One contender, as the report has it."""
    ours = measured["carrier"] is not None
    name = f"aiocomms {measured['by']}" if ours else NAMES[measured["by"]]
    return {
        "name": measured["op"] if measured["op"] == row.beside else name,
        "median_us": measured["p50_us"], "mean_us": measured["mean_us"], "p99_us": measured["p99_us"],
        "cpu_us": measured["cpu_us"] * row.ranks,
        "gb_per_s": measured["algbw_gbs"] if measured["bytes"] > 4096 else None,
    }  # fmt: skip


def measure_row(row: Row, transport: str, example: str | None, seconds: float) -> dict[str, Any]:
    """One row's figures and verdicts, and the host's states."""
    result: dict[str, Any] = {"title": row.title, "ours": f"aiocomms {transport}", "failures": [], "verdicts": []}
    figures: list[dict[str, Any]] = []
    try:
        found = run_bench(row, transport, row.vs, seconds)
        result["states"] = found[0]["states"]
        if example is not None and row.op in SENDS:  # in processes of its own: it opens UCXX as the peer does
            found += run_bench(row, example, (), seconds)
        figures = [figure(row, it) for it in found] + perftests(row)
        result["verdicts"] = [it for target in row.targets if (it := judge(figures, target)) is not None]
        if row.late is not None:
            must, aim = row.late
            late = found[0]["late_p99_us"] / 1e3
            result["verdicts"].append({"what": "loop late, p99", "value": late, "unit": "ms", "must": must, "aim": aim})
    except (RowFailedError, perftest.PerftestFailedError) as error:
        result["failures"].append(f"{row.title}: {error}")
    return result | {"figures": figures}


def perftests(row: Row) -> list[dict[str, Any]]:
    """Return the figures of UCX's own benchmark, if it has such an operation."""
    found = []
    for tls in perftest.TRANSPORTS if row.op in perftest.TESTS else ():
        took = [perftest.Perftest(row.op, row.nbytes, tls).trial() * 1e6 for _ in range(3)]
        median = statistics.median(took)
        bandwidth = row.nbytes / median / 1e3 if row.nbytes > 4096 else None
        found.append({
            "name": f"ucx_perftest {tls}", "median_us": median, "mean_us": statistics.mean(took), "p99_us": None,
            "cpu_us": None, "gb_per_s": bandwidth,
        })  # fmt: skip
    return found


def judge(figures: list[dict[str, Any]], target: Versus) -> dict[str, Any] | None:
    """Ours against the quickest of those meant; None where there is none."""
    ours, key = figures[0], f"{target.of}_us"
    field = [it for it in figures[1:] if it["name"].startswith(target.against)]
    if not field:
        return None
    best = min(field, key=lambda other: other[key])
    what = f"{'time' if target.of == 'median' else target.of} / {best['name']}"
    return {"what": what, "value": ours[key] / best[key], "unit": "x", "must": target.must, "aim": target.aim}


def measure(transport: str, example: str | None, pattern: str, seconds: float) -> list[dict[str, Any]]:
    """All rows that are wanted."""
    results: list[dict[str, Any]] = []
    wanted = re.compile(pattern, re.IGNORECASE)

    def note(row: dict[str, Any], start: float) -> None:
        results.append(row)
        print(f"{time.perf_counter() - start:6.1f} s  {row['title']}", *row["failures"], sep="\n  ", flush=True)

    for row in ROWS:
        if wanted.search(row.title):
            start = time.perf_counter()
            note(measure_row(row, transport, example, seconds), start)
    for title, special in SPECIAL.items():
        if wanted.search(title):
            start = time.perf_counter()
            figures, verdicts = special(transport, 3 if seconds == QUICK else 10)
            note({"title": title, "ours": "", "figures": figures, "verdicts": verdicts, "failures": []}, start)
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx", help="which of ours")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows whose title this expression finds")
    parser.add_argument("--quick", action="store_true", help="a short time for each: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where compare.json, .md and .png go")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print the tables of an earlier run instead")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write; 1 if a row failed."""
    args = parse()
    if args.report:
        print(tables.markdown(json.loads(args.report.read_text())), end="")
        return 0
    available = registry.available(torch.device("cpu"))
    why = available.get(args.transport, "it is not installed")
    if why is not None:
        sys.exit(f"transport {args.transport!r} cannot be measured: {why}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    example = EXAMPLE if available.get(EXAMPLE, "") is None and args.transport != EXAMPLE else None
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = QUICK if args.quick else FULL
    where = about(seconds, args.transport)
    results = {"where": where, "rows": measure(args.transport, example, args.rows, seconds)}
    text = tables.markdown(results)
    print(f"\n{text}\nmusts missed: {tables.missed(results)}")
    (args.out / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "compare.md").write_text(text)
    tables.chart(results, args.out / "compare.png")
    return int(any(row["failures"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
