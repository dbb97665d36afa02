"""The tests of sharded_lookup. Run ``pytest`` in this folder."""

from __future__ import annotations

import functools
import math
from contextlib import asynccontextmanager

import anyio
import pytest
import torch
from sharded_lookup import hold, holders, open_lookup, place

from aiocomms.errors import CommAbortedError
from aiocomms.testing.faults import delay, drop, inject, kill, slow_link

RANKS, ROWS, WIDTH = 4, 30, 8
SHARDS = RANKS - 1
TABLE = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
WANTED = [7, 0, 29, 11, 7, 12]

pytestmark = [pytest.mark.anyio, pytest.mark.ranks(RANKS)]  # each test runs on asyncio and on trio


def load(shard: int) -> torch.Tensor:
    return TABLE[shard::SHARDS]


@asynccontextmanager
async def serving(world, *, dies=(), reply_within=None, **options):
    """Open the lookup of rank 0, and run the tasks of the other ranks."""

    async def holder(comm):
        try:
            await hold(comm, load, reply_within)
        except CommAbortedError:
            assert comm.rank in dies

    async with anyio.create_task_group() as tasks:
        for comm in world[1:]:
            tasks.start_soon(holder, comm)
        async with open_lookup(world[0], WIDTH, **options) as lookup:
            yield lookup


async def test_rows_are_those_of_the_table(world):
    async with serving(world, patience=math.inf) as lookup:
        for wanted in (WANTED, [3], []):
            assert torch.equal((await lookup.rows(wanted)).rows, TABLE[wanted])


@pytest.mark.parametrize("how", [functools.partial(delay, 3600), functools.partial(slow_link, 0.01)])
async def test_a_holder_that_is_late_is_not_waited_for(world, how):
    async with serving(world, patience=0.01) as lookup:
        with inject(world, how(ranks=[1], op="send_object")) as injected:
            answer = await lookup.rows(WANTED)
            assert torch.equal(answer.rows, TABLE[WANTED])
            assert answer.missing == []
        assert {fault.rank for fault in injected} == {1}
    assert not world[0].aborted


async def test_an_answer_says_what_is_missing(world):
    late = anyio.Event()
    async with serving(world, patience=0.01, deadline=0.1) as lookup:
        with inject(world, delay(until=late, ranks=holders(2, SHARDS), op="send_object")):
            answer = await lookup.rows([2, 5])
            assert answer.missing == [2]
            assert not answer.rows.any()
            late.set()


async def test_after_a_lost_reply_all_go_on(world):
    async with serving(world, patience=0.01, reply_within=0.1) as lookup:
        with inject(world, drop(ranks=[1], op="send_object", nth=1)) as injected:
            assert torch.equal((await lookup.rows([0])).rows, TABLE[[0]])  # the neighbour has answered
            await world[0].lost()
            assert torch.equal((await lookup.rows(WANTED)).rows, TABLE[WANTED])
        assert injected == [("drop", 1, "send_object", 1)]
        assert lookup.comm.size == RANKS


@pytest.mark.parametrize("victim", range(1, RANKS))
async def test_a_holder_dies_while_it_answers(world, victim):
    async with serving(world, dies=[victim], patience=0.01) as lookup:
        with inject(world, kill(ranks=[victim], op="send_object", nth=1)) as injected:
            answer = await lookup.rows(WANTED)
            assert torch.equal(answer.rows, TABLE[WANTED])
        assert injected == [("kill", victim, "send_object", 1)]
        await world[0].lost()
        assert torch.equal((await lookup.rows(WANTED)).rows, TABLE[WANTED])
        assert lookup.comm.size == RANKS - 1


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_is_late_the_rows_are_right(world, seed):
    async with serving(world, patience=0.001) as lookup:

        async def ask(first):
            wanted = [(first + 7 * i) % ROWS for i in range(5)]
            assert torch.equal((await lookup.rows(wanted)).rows, TABLE[wanted])

        with inject(world, delay(0.003, probability=0.3), seed=seed) as injected:
            async with anyio.create_task_group() as tasks:
                for first in range(10):
                    tasks.start_soon(ask, first)
        assert {fault.op for fault in injected} == {"send_object", "recv_object"}


def test_each_shard_is_held_twice():
    assert sorted(rank for shard in range(SHARDS) for rank in holders(shard, SHARDS)) == [1, 1, 2, 2, 3, 3]
    assert [place(row, SHARDS) for row in (0, 4, 29)] == [(0, 0), (1, 1), (2, 9)]
