"""A small job, as a user writes it: ``launched.py FOLDER DEED``, which a launcher starts once for each rank.

Each rank takes part in an all-reduce, a ring of messages and a barrier, and writes its results to a file in the folder.
The deed says whether the last rank exits with status 3, so that the others fail, or is killed the first time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch

import aiocomms
from aiocomms.bootstrap.launchers import read_environment

STATUS = 3


async def main(folder: Path, deed: str) -> None:
    async with aiocomms.new_comm(timeout=100) as comm:
        last = comm.rank == comm.size - 1
        total = await comm.all_reduce(torch.ones(1))
        sending = comm.send(torch.tensor([comm.rank]), (comm.rank + 1) % comm.size)
        received = await comm.recv(torch.tensor([-1]), (comm.rank - 1) % comm.size)
        await sending
        if last and deed == "leave":
            raise SystemExit(STATUS)
        if last and deed == "be killed once" and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await comm.barrier()
        launch = read_environment(os.environ)
        told = {
            "launcher": launch and launch.launcher, "rank": comm.rank, "size": comm.size, "host": socket.gethostname(),
            "sum": total.item(), "received": received.item(),
        }  # fmt: skip
        (folder / f"rank {comm.rank}").write_text(json.dumps(told))


def run(folder: str, deed: str) -> None:
    torch.set_num_threads(1)
    asyncio.run(main(Path(folder), deed))


if __name__ == "__main__":
    run(*sys.argv[1:])
