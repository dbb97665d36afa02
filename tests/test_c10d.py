"""What is c10d's own, between real processes; what every transport must do is in the conformance suite."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import aiocomms
from aiocomms import ReduceOp
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch.distributed", "aiocomms.rendezvous", "aiocomms_c10d", "psutil", "pytest"])

NOTICE = 1.0
"""Seconds within which a visible death is noticed."""


def entry(each, rank, size, folder, results):
    """A rank's process."""
    torch.set_num_threads(1)
    try:
        outcome = asyncio.run(each(rank, size, folder))
    except BaseException:
        outcome = AssertionError(f"rank {rank}:\n{traceback.format_exc()}")
    results.put((rank, outcome))


def run(each, size, folder, dead=()):
    """Run ``await each(rank, size, folder)`` in ``size`` processes; returns what they return, in rank order."""
    results = processes.Queue()
    ranks = [processes.Process(target=entry, args=(each, r, size, str(folder), results)) for r in range(size)]
    for rank in ranks:
        rank.start()
    try:
        got = dict(results.get(timeout=40) for _ in range(size - len(dead)))
        for number, rank in enumerate(ranks):
            rank.join(20)
            assert rank.exitcode == (-signal.SIGKILL if number in dead else 0), f"rank {number}: exit {rank.exitcode}"
    finally:
        for rank in ranks:
            rank.kill()
    for outcome in got.values():
        if isinstance(outcome, AssertionError):
            raise outcome
    return [got[r] for r in sorted(got)]


def join(rank, size, folder, name="world"):
    return aiocomms.new_comm("c10d", store=dist.FileStore(f"{folder}/store", size), rank=rank, size=size, name=name)


# ----------------------------------------------------------------------------------------------------------- deaths


async def lose_the_last(rank, size, folder, op):
    comm = await join(rank, size, folder)
    await comm.barrier()
    last = size - 1
    if rank == last:
        if op == "large all_reduce":
            comm.all_reduce(torch.ones(16 * 2**20))
            await asyncio.sleep(0.02)  # somewhere in the middle; wherever it is, the others must notice
        os.kill(os.getpid(), signal.SIGKILL)
    call = {
        "recv": lambda: comm.recv(torch.empty(4), last),
        "large send": lambda: comm.send(torch.ones(2**20), last),
        "small all_reduce": lambda: comm.all_reduce(torch.ones(2)),
        "large all_reduce": lambda: comm.all_reduce(torch.ones(16 * 2**20)),
    }[op]
    start = time.monotonic()
    try:
        await call()
    except CommError as error:
        took, first = time.monotonic() - start, error
    else:
        raise AssertionError("it completed without a rank it needs")
    with pytest.raises(CommAbortedError):
        comm.barrier()
    await comm.aclose()
    return type(first).__name__, first.peer, took


@pytest.mark.parametrize("op", ["recv", "large send", "small all_reduce", "large all_reduce"])
@pytest.mark.parametrize("size", [2, 4])
def test_survivors_notice_a_death(op, size, tmp_path):
    for name, peer, took in run(functools.partial(lose_the_last, op=op), size, tmp_path, dead=(size - 1,)):
        assert name == PeerDiedError.__name__
        assert peer == size - 1
        assert took < NOTICE + 2  # the victim may live on for a moment after the call, on a busy machine


# ------------------------------------------------------------------------------------------------------- big and many


async def exchange(rank, size, folder):
    async with join(rank, size, folder) as comm:
        peer = 1 - rank
        for n in (8 * 2**20, 3, 2**20):
            mine, theirs = torch.full((n,), float(rank)), torch.full((n,), -1.0)
            await asyncio.gather(comm.send(mine, peer), comm.recv(theirs, peer))
            assert theirs.eq(peer).all()
        works = [comm.send(torch.full((i % 700,), i), peer, -i) for i in range(2000)]
        for i in reversed(range(2000)):
            got = torch.empty(i % 700, dtype=torch.int64)
            await comm.recv(got, peer, -i)
            assert got.eq(i).all()
        for work in works:
            await work


def test_large_messages_both_ways_and_many_that_wait(tmp_path):
    run(exchange, 2, tmp_path)


async def overlap(rank, size, folder):
    async with join(rank, size, folder) as comm:
        tensors = [torch.full((n,), float(rank + 1)) for n in (4, 200_000, 1, 300_000, 0, 70_000) * 4]
        works = [comm.all_reduce(t, ReduceOp.SUM) for t in tensors]
        for work in reversed(works):
            await work
        assert all(t.eq(size * (size + 1) / 2).all() for t in tensors)


def test_small_and_large_collectives_overlap(tmp_path):
    run(overlap, 3, tmp_path)


# -------------------------------------------------------------------------------------------------------- surroundings


async def look_around(rank, size, folder):
    async with join(rank, size, folder):
        listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}, listening


def test_it_listens_on_loopback_alone(tmp_path):
    run(look_around, 2, tmp_path)


async def again_and_again(rank, size, folder):
    store = dist.FileStore(f"{folder}/store", size)

    async def once(i):
        async with aiocomms.new_comm("c10d", store=store, rank=rank, size=size, name=f"comm{i}") as comm:
            await comm.all_reduce(torch.ones(100_000))
            await comm.all_reduce(torch.ones(1))

    def count():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    await once(0)
    before = count()
    for i in range(1, 12):
        await once(i)
    assert count() == before


def test_nothing_is_left_behind(tmp_path):
    run(again_and_again, 2, tmp_path)


# ------------------------------------------------------------------------------------------------------ adopted groups


async def adopt(rank, size, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/theirs", size), rank=rank, world_size=size)
    group = dist.group.WORLD
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    async with await aiocomms.from_process_group(group) as comm:
        assert (comm.rank, comm.size) == (rank, size)
        for n in (3, 100_000):
            got = torch.full((n,), float(rank))
            await comm.all_reduce(got)
            assert got.eq(sum(range(size))).all()
        peer = (rank + 1) % size
        got = torch.empty(1)
        await asyncio.gather(comm.send(torch.tensor([float(rank)]), peer), comm.recv(got, (rank - 1) % size))
        assert got.item() == (rank - 1) % size
        child = await comm.split(list(range(size)), name="child")
        assert (await child.all_reduce(torch.ones(1))).item() == size
        await child.aclose()
    dist.all_reduce(tensor)  # it is still its owner's
    assert tensor.eq(size**2).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_a_users_group_is_used_and_left_as_it_was(size, tmp_path):
    run(adopt, size, tmp_path)


def test_what_is_no_group_is_not_adopted():
    async def main():
        with pytest.raises(aiocomms.errors.ArgumentTypeError, match="pg is a str"):
            await aiocomms.from_process_group("world")

    asyncio.run(main())
