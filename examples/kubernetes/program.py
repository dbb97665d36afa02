"""The program of the pods: a sum over all ranks once a second, until SIGTERM or for a number of seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import torch

import aiocomms
from aiocomms import ReduceOp

READY = Path(os.environ["READY_FILE"])
"""The file that the readiness probe checks."""


async def main(seconds: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiocomms.new_comm() as comm:
        await asyncio.to_thread(READY.touch)
        for second in range(seconds):
            state = await comm.all_reduce(torch.tensor([float(stop.is_set()), 1.0]), ReduceOp.SUM)
            if comm.rank == 0:
                print(f"second {second}: {int(state[1])} ranks", flush=True)
            if state[0] > 0:  # one rank is enough, so that all ranks stop at the same sum
                break
            await asyncio.sleep(1)


READY.unlink(missing_ok=True)  # an earlier container may have left the file
asyncio.run(main(int(sys.argv[1])))
