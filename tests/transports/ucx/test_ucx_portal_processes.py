"""Threads that post beside their loop in processes of their own, where a post looks on until its op is done."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import HANGS, Rank, Run, in_turn

from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.portal.works import BlockingWork
from aiocomms.lowlevel import in_use

pytestmark = pytest.mark.real

pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)

ROUNDS, LANES = 80, 2
COUNTS = (1, 2, 700, 20_000, 400_000)
"""Elements: of what is done at once, and of what takes many looks at the engine."""


@pytest.fixture
def transport() -> str:
    return "ucx"


def count_posts() -> list[bool]:
    """Note of each call from now on whether its own thread has posted it."""
    posts: list[bool] = []
    post: Callable[[Any], bool] = BlockingWork._posted

    def counted(work: Any) -> bool:
        posts.append(post(work))
        return posts[-1]

    BlockingWork._posted = counted  # type: ignore[method-assign]
    return posts


def reduce_in_a_lane(comm: Communicator, key: int) -> None:
    choice, lane = random.Random(key), comm.portal().lane(key)
    for i in range(ROUNDS):
        count = choice.choice(COUNTS)
        got = lane.all_reduce(torch.full((count,), float(comm.rank + i + key))).wait(HANGS)
        assert torch.equal(got, torch.full((count,), 2.0 * (i + key) + 1))


def exchange(comm: Communicator) -> None:
    choice, portal, peer = random.Random(7), comm.portal(), 1 - comm.rank
    for i in range(ROUNDS):
        count = choice.choice(COUNTS)
        sent = portal.send(torch.full((count,), float(comm.rank + i)), peer, 3)
        got = portal.recv(torch.zeros(count), peer, 3).wait(HANGS)
        assert torch.equal(got, torch.full((count,), float(peer + i)))
        sent.wait(HANGS)


async def reduce_on_the_loop(comm: Communicator) -> None:
    for i in range(ROUNDS):
        got = await comm.all_reduce(torch.full((3,), float(comm.rank + i)))
        assert got.tolist() == [2.0 * i + 1] * 3
        await asyncio.sleep(0)


async def everybody_posts(place: Rank) -> None:
    """Threads and the loop of both ranks post at once."""
    posts = count_posts()
    async with place.open() as comm:
        threads = [asyncio.to_thread(reduce_in_a_lane, comm, key) for key in range(LANES)]
        await asyncio.gather(*threads, asyncio.to_thread(exchange, comm), reduce_on_the_loop(comm))
        core = comm._core
        assert not core.in_flight
        items = core.recorder.snapshot("for the test").items()
        assert [item.seq for item in items] == list(range(core.ledger.issued - len(items), core.ledger.issued))
        assert {item.state for item in items} == {"done"}
        counted = [item.collective for item in items if item.collective]
        assert counted == list(range(ROUNDS - len(counted) + 1, ROUNDS + 1))
    assert len(posts) == (LANES + 2) * ROUNDS
    assert sum(posts) > 0, "some of them by the threads themselves"


def called_elsewhere(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Have another thread call, once this one lets it have the interpreter's lock."""
    go, works = threading.Event(), list[Any]()
    thread = threading.Thread(target=lambda: works.append(call()) if go.wait(HANGS) else None)
    thread.start()
    go.set()
    return thread, works


async def memory_in_use(place: Rank, kind: str) -> None:
    """No other op may move the memory of a pending post, such as to share it as a window."""
    async with place.open() as comm:
        if place.rank == 1:
            for _ in range(int((await comm.recv(torch.zeros(1), 0, tag=9)).item())):
                await (comm.all_reduce(torch.ones(4)) if kind == "collective" else comm.send(torch.ones(4), 0))
            return
        portal, shortcuts = comm.portal(), comm._core.shortcuts
        assert shortcuts is not None
        call: Callable[[Any], Any] = (
            portal.all_reduce if kind == "collective" else lambda tensor: portal.recv(tensor, 1)
        )
        calls: list[Any] = []
        amid = False
        while not amid:  # the thread may have been before this one could look
            arena = torch.zeros(8)
            thread, works = called_elsewhere(lambda mine=arena[:4]: call(mine))
            while not works and not (amid := shortcuts.elsewhere(None) == 1):
                pass
            assert in_use(arena.untyped_storage())
            thread.join(HANGS)
            calls += works
        await comm.send(torch.tensor([float(len(calls))]), 1, tag=9)
        for work in calls:
            assert (await asyncio.to_thread(work.wait)).tolist() == [1.0] * 4
        assert arena.tolist() == [1.0] * 4 + [0.0] * 4


def test_threads_and_loop_of_both_ranks_post_memory_that_cannot_be_moved(ranks: Run) -> None:
    ranks(2, in_turn, *((memory_in_use, kind) for kind in ("collective", "message")), everybody_posts)
