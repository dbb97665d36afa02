"""A rank that brings up a communicator, calls one op of each family, and closes; a fresh interpreter runs this file.

It prints as JSON what may have held its event loop meanwhile. By a launcher's variables it is one rank, on asyncio,
uvloop or trio; without these the ranks are two tasks of asyncio. With ``--times`` it prints its slow callbacks instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
from loop_watch import Callbacks, watched

import aiocomms


async def calls(comm: Any) -> None:
    """Call one op of each family."""
    other, tensor = 1 - comm.rank, torch.ones(8)
    await comm.all_reduce(tensor)
    await comm.barrier()
    await comm.all_gather_single(torch.empty(16), tensor)
    await comm.lane(7).all_reduce(tensor)
    received = comm.recv(torch.empty(8), other)
    await comm.send(tensor, other)
    await received
    batch = comm.batch()
    batch.send(tensor, other)
    batch.recv(torch.empty(8), other)
    await batch.issue()
    got = comm.recv_object(other)
    await comm.send_object({"a": 1, "t": tensor}, other)
    await got
    await comm.all_gather_object([comm.rank])
    async with await comm.open_stream(other) as stream:
        await stream.send(tensor)
        await stream.receive()
    async with await comm.new_window(torch.zeros(8)) as window:
        await window.put(tensor, other)
        await window.flush(other)
        await comm.barrier()
    async with await comm.split([0, 1]) as part:
        await part.all_reduce(tensor)


async def rank(transport: str, place: dict[str, Any]) -> None:
    async with aiocomms.new_comm(transport, **place) as comm:
        await calls(comm)
        aiocomms.serving.Service(comm)


async def main(transport: str) -> None:
    if "RANK" in os.environ:
        await rank(transport, {})
    else:
        store = torch.distributed.HashStore()
        await asyncio.gather(*(rank(transport, {"store": store, "rank": n, "size": 2}) for n in range(2)))


async def held(transport: str) -> list[str]:
    with watched() as held:
        await main(transport)
    return [str(each) for each in held]


async def slow(transport: str) -> list[Any]:
    with Callbacks() as callbacks:
        await main(transport)
    return sorted(callbacks.found, reverse=True)


if __name__ == "__main__":
    named = aiocomms.new_comm  # before there is a loop
    transport, loop = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "asyncio"
    if loop == "trio":
        import trio

        print(json.dumps(trio.run(held, transport)))
    elif loop == "uvloop":
        import uvloop

        print(json.dumps(uvloop.run(held(transport))))
    else:
        print(json.dumps(asyncio.run((slow if loop == "--times" else held)(transport))))
