"""Measure on one GPU: ``python -m benchmarks.gpu``. Prints the table, writes ``gpu.json`` and ``gpu.md``.

Ends with 1 if a figure could not be had. A target that was missed is shown, and no error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import onegpu, report
from benchmarks.gpu.targets import TARGETS, missing

LIMIT = 300.0
"""Seconds for the measures of one number of ranks."""


def worlds() -> dict[str, tuple[int, list[str]]]:
    """Return the measures that run in the same processes, and their numbers of ranks."""
    return {
        "one rank": (1, [t.key for t in TARGETS if t.size == 1]),
        "two ranks": (2, ["bandwidth2"]),
        "two ranks over UCX": (2, ["p2p", "get"]),
    }


def run_world(size: int, keys: list[str], rounds: int, nccl: tuple[int, ...]) -> dict[str, Any]:
    """Start the ranks, and return rank 0's answer; the reason for each figure if they fail."""
    with tempfile.TemporaryDirectory(prefix="aiocomms-gpu-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.rank",
            folder,
            f"--keys={','.join(keys)}",
            f"--rounds={rounds}",
        ]
        ranks = []
        for rank in range(size):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size)}
            if size > 1:
                env |= onegpu.environment(nccl, rank)
            ranks.append(subprocess.Popen(command, env=env))
        try:
            codes = [rank.wait(LIMIT) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [f"killed after {LIMIT:.0f} s"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        answer = Path(folder) / "answer"
        if answer.exists() and not any(codes):
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
    why = f"the ranks ended with {codes}"
    return {"where": {}, "figures": [missing(target, why) for target in TARGETS if target.key in keys]}


def main() -> int:
    """Measure, print, write; 1 if a figure could not be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="default: %(default)s")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs an NVIDIA GPU, and torch sees none here")
    results: dict[str, Any] = {"where": {}, "figures": []}
    for title, (size, keys) in worlds().items():
        print(f"{title}: {', '.join(keys)}", flush=True)
        answer = run_world(size, keys, options.rounds, onegpu.nccl_version())
        results["where"] |= answer["where"]
        results["figures"] += answer["figures"]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "gpu.md").write_text(report.markdown(results))
    print(f"\n{report.markdown(results)}\ntargets missed: {report.missed(results) or 'none'}")
    return int(bool(report.lacking(results)))


if __name__ == "__main__":
    sys.exit(main())
