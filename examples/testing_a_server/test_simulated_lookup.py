"""The tests of the lookup in simulated worlds, where processes die, stop, and lose their connections."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import anyio
import pytest
import torch
from sharded_lookup import hold, open_lookup

from aiocomms import CommError, Communicator
from aiocomms.errors import PeerDiedError
from aiocomms.testing import here

RANKS, ROWS, WIDTH = 4, 30, 8
SHARDS = RANKS - 1
TABLE = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
REQUESTS = 20
LASTS = 0.05  # seconds for all requests


def load(shard: int) -> torch.Tensor:
    return TABLE[shard::SHARDS]


async def serve(comm: Communicator) -> None:
    """Ask for rows on rank 0, and hold the shards on the other ranks."""
    if comm.rank:
        await hold(comm, load, 0.1)
        return
    async with open_lookup(comm, WIDTH, patience=0.01) as lookup, anyio.create_task_group() as tasks:

        async def ask(first: int) -> None:
            wanted = [(first + 7 * i) % ROWS for i in range(5)]
            answer = await lookup.rows(wanted)
            assert torch.equal(answer.rows, TABLE[wanted])
            assert not answer.missing

        for first in range(REQUESTS):
            tasks.start_soon(ask, first)
            await anyio.sleep(LASTS / REQUESTS)


@pytest.mark.simulated(RANKS, seeds=30)
async def test_rows_are_right_in_whatever_order_messages_come(comm):
    await serve(comm)


@pytest.mark.simulated(RANKS, seeds=30)
async def test_rows_are_right_when_a_holder_dies(comm):
    if comm.rank == 0:
        asyncio.get_running_loop().call_later(random.uniform(0, LASTS), here().world.kill, random.randint(1, SHARDS))
        await serve(comm)
    else:
        with suppress(CommError):  # rank 0 may dismiss the holder at that moment
            await serve(comm)


@pytest.mark.simulated(RANKS, seeds=30)
async def test_holders_end_with_the_one_that_asks(comm):
    if comm.rank == 1:
        asyncio.get_running_loop().call_later(random.uniform(0, LASTS), here().world.kill, 0)
    if comm.rank == 0:
        await serve(comm)
    else:
        with pytest.raises(PeerDiedError, match="rank 0 has died or was cut off"):
            await serve(comm)


@pytest.mark.simulated(RANKS, seeds=30)
async def test_no_row_is_wrong_when_the_network_fails(comm):
    if comm.rank == 0:
        one, other = random.sample(range(RANKS), 2)
        seconds = random.choice([0.01, 1.0, 20.0])  # after 5 s without a sign of life a rank counts as dead
        asyncio.get_running_loop().call_later(random.uniform(0, LASTS), here().world.part, one, other, seconds)
    try:
        await serve(comm)
    except* CommError:
        pass  # a rank that other ranks consider dead cannot continue
