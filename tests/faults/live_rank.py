"""One rank of a live group with a hundred tasks, which writes the result of each call to a file, a line for each.

``python live_rank.py PORT RANK SIZE PROCESS FILE`` runs until it gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import torch
from torch.distributed import TCPStore

import aiocomms
from aiocomms.errors import LeftBehindError

TASKS = 100
TIMEOUT = 0.5


async def call(group: aiocomms.LiveGroup, name: str, process: int, log: int, over: asyncio.Event) -> None:
    """Call one lane again and again, with a number of this process's own in each contribution."""
    lane, number = await group.lane(name), 0
    while not over.is_set():
        number += 1
        mine = torch.zeros(group.size, dtype=torch.int64)
        mine[group.rank] = process << 40 | int(name) << 32 | number
        began = time.monotonic()
        try:
            found = await lane.all_reduce(mine, timeout=TIMEOUT)
        except LeftBehindError:  # The machine was too busy for this process.
            continue
        took = time.monotonic() - began
        line = [name, found.number, found.ranks, found.value.tolist(), number == 1, group.rank, took]
        os.write(log, (json.dumps(line) + "\n").encode())
        await asyncio.sleep(0.01)


async def main(port: int, rank: int, size: int, process: int, file: str) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with aiocomms.live_group(store=store, rank=rank, size=size) as group, asyncio.TaskGroup() as tasks:
        os.close(os.open(f"{file}.{process}", os.O_CREAT))
        for name in range(TASKS):
            tasks.create_task(call(group, str(name), process, log, over))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
