"""Time for which the event loop is held while a process's first communicator opens, between two fresh processes.

The longest callback, and by how much a task that sleeps for 0.5 ms over and over was late: that also where another
thread keeps the interpreter's lock. "Cold": the files of the environment were put out of the page cache, as far as the
kernel does that for who asks. What torch has made is frozen before: a full collection of garbage, which may fall into
any program, takes 0.1 s with it. Run it with ``python -m benchmarks.opening``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

ROUNDS = 5
PERIOD = 0.0005


async def beat(late: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(PERIOD)
        late[0] = max(late[0], time.perf_counter() - start - PERIOD)


async def rank(transport: str) -> dict[str, float]:
    """Open a communicator, call two ops, and close it; return milliseconds."""
    from loop_watch import Callbacks

    import aiocomms

    late = [0.0]
    beats = asyncio.create_task(beat(late))
    await asyncio.sleep(0.01)
    late[0] = 0.0
    with Callbacks() as callbacks:
        await asyncio.sleep(0)  # the callback that has begun is not among them
        start = time.perf_counter()
        comm = await aiocomms.new_comm(transport)
        took = time.perf_counter() - start
        await comm.barrier()
        await comm.all_gather_object(comm.rank)
        await comm.aclose()
    beats.cancel()
    return {"new_comm": 1e3 * took, "callback": 1e3 * callbacks.worst, "late": 1e3 * late[0]}


def evict() -> None:
    """Put the files of the environment out of the page cache."""
    for place in {*map(Path, sys.path), ROOT}:
        for folder, _, names in os.walk(place if place.is_dir() else ROOT / "benchmarks"):
            for name in names:
                with contextlib.suppress(OSError):
                    fd = os.open(Path(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)


def once(transport: str) -> dict[str, float]:
    """Run two ranks; return the worse of each figure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.opening", "--rank", transport]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **place, "RANK": n, "LOCAL_RANK": n}
        )
        for n in "01"
    ]
    told: list[Any] = [json.loads(each.communicate(timeout=240)[0]) for each in ranks]
    return {what: max(one[what] for one in told) for what in told[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank")
    transport = parser.parse_args().rank
    if transport is not None:
        import torch  # a program has imported it before there is a loop

        gc.collect()
        gc.freeze()
        del torch
        print(json.dumps(asyncio.run(rank(transport))))
        return
    print(f"{'':12}{'new_comm':>10}{'longest callback':>18}{'loop late by':>14}   ms, medians of {ROUNDS}")
    for name in ("ucx", "c10d"):
        for state in ("warm", "cold"):
            rounds = []
            for _ in range(ROUNDS):
                if state == "cold":
                    evict()
                rounds.append(once(name))
            row = {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
            print(
                f"{name + ', ' + state:12}{row['new_comm']:10.0f}{row['callback']:18.1f}{row['late']:14.1f}", flush=True
            )


if __name__ == "__main__":
    main()
