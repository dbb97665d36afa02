"""One rank: ``python -m benchmarks.gpu.rank``, started by ``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from benchmarks.gpu.measures import MEASURES, Bench, settle
from benchmarks.gpu.onegpu import nccl_version
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.targets import OF_WINDOWS_AND_MESSAGES, TARGETS, missing


async def run(stage: Stage, folder: Path, rank: int, size: int, keys: list[str], **sizes: Any) -> list[dict[str, Any]]:
    """Open both contenders and run the measures.

    :param sizes: of :class:`Bench`
    :returns: figures; the cause where one could not be had
    """
    results = []
    for key in keys:
        target = next(target for target in TARGETS if target.key == key)
        name = stage.p2p if key in OF_WINDOWS_AND_MESSAGES else stage.transport
        try:
            store = dist.FileStore(str(folder / f"ours {key}"), size)
            options = {"store": store, "rank": rank, "size": size, "timeout": 60}
            async with aiocomms.new_comm(name, stage.device, **options) as comm:
                results.append(await MEASURES[key](Bench(comm, stage, **sizes)))
                await comm.barrier()
            await settle()
        except Exception as error:  # the others go on
            traceback.print_exc()
            results.append(missing(target, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    return results


def versions() -> dict[str, str]:
    """Return the versions of all that was measured on, and with."""
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s.*?(\d+\.\d[\d.]*)", driver.read_text()) if driver.exists() else None
    about = {
        "GPU": f"{properties.name}, {properties.total_memory >> 30} GiB, {properties.multi_processor_count} SMs",
        "driver": found[1] if found else "unknown",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "NCCL": ".".join(map(str, nccl_version())),
    }
    for package in ("cupy-cuda13x", "cupy-cuda12x", "nccl4py", "aiocomms-ucx", "libucx-cu13"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            continue
    return about


def main() -> None:
    """Run the measures and write what rank 0 has found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keys", type=str)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    stage = Stage()
    keys = options.keys.split(",")
    if set(keys) - OF_WINDOWS_AND_MESSAGES:
        stage.init(dist.FileStore(str(options.folder / "torch"), size), rank, size)
    results = asyncio.run(run(stage, options.folder, rank, size, keys, rounds=options.rounds))
    if rank == 0:
        answer = {"where": versions() | {"when": time.strftime("%Y-%m-%d")}, "figures": results}
        (options.folder / "answer").write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
