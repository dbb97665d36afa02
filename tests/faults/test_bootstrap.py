"""The store and the first meeting fail: the cases 30 to 32 of the catalogue; the rest is in test_rendezvous.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import LATE, VISIBLE, oracle
from processes import LARGE, Rank, Run, numbers

import aiocomms
from aiocomms.errors import CommAbortedError, CommTimeoutError, ProtocolError, StoreLostError

SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
Notice = Callable[[list[float], float], None]


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[], tuple[int, int]]]:
    """Starts a store's server in a process of its own: its port and its process's number."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[int, int]:
        it = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True)
        started.append(it)
        assert it.stdout is not None
        return int(it.stdout.readline()), it.pid

    yield start
    for it in started:
        it.kill()
        it.communicate()


async def lose_the_store(place: Rank, port: int, pid: int) -> list[float]:
    """Stopped, and then killed: what is formed goes on, what forms fails in its time."""
    took = []
    async with oracle(place):

        def reach() -> Any:
            return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))

        comm = await place.open("formed", store=reach())
        idle, another = reach(), reach()
        await comm.barrier()
        if place.rank == 0:
            os.kill(pid, signal.SIGSTOP)
        assert (await comm.all_reduce(torch.ones(LARGE)) == 2).all()
        began = time.monotonic()
        with pytest.raises((CommTimeoutError, StoreLostError)):
            await place.open("stopped", store=idle, timeout=0.5)
        took.append(time.monotonic() - began - 0.5)
        await comm.barrier()
        forming = asyncio.ensure_future(alone(place, another))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        if place.rank == 0:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises((StoreLostError, CommTimeoutError)):
            await forming
        took.append(time.monotonic() - began)
        assert torch.equal(await comm.all_reduce(numbers(LARGE, place.rank)), numbers(LARGE, 0) + numbers(LARGE, 1))
        await comm.barrier()
        await comm.aclose()
        del comm, idle, another, forming
    return took


async def alone(place: Rank, store: Any) -> None:
    async with aiocomms.new_comm(place.transport, name="alone", store=store, rank=place.rank, size=3, timeout=10):
        pass


def test_a_store_that_stops_and_dies(ranks: Run, notice: Notice, server: Callable[[], tuple[int, int]]) -> None:
    late, lost = zip(*ranks(2, lose_the_store, *server()), strict=True)
    assert max(late) < LATE, late
    notice(list(lost), VISIBLE)


async def split_without_a_store(place: Rank, port: int, pid: int) -> float:
    """A split that needs the store says that it is gone; one that does not comes off."""
    async with oracle(place):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
        comm = await place.open("formed", store=store)
        del store
        await comm.barrier()
        if place.rank == 0:
            os.kill(pid, signal.SIGKILL)
        await comm.barrier()
        began = time.monotonic()
        try:
            child = await comm.split(range(place.size))
        except StoreLostError:
            pass  # this transport needs it
        else:
            await child.aclose()
        took = time.monotonic() - began
        await comm.all_reduce(torch.ones(3))
        await comm.aclose()
        del comm
        return took


def test_a_split_without_a_store(ranks: Run, notice: Notice, server: Callable[[], tuple[int, int]]) -> None:
    notice(ranks(2, split_without_a_store, *server()), VISIBLE)


async def speak_another_version(place: Rank) -> str:
    """Both are told, by the versions."""
    if place.rank == 1:
        wire = __import__(f"aiocomms_{place.transport}.wire").wire
        wire.VERSION += 1
    with pytest.raises((ProtocolError, CommAbortedError, CommTimeoutError)) as caught:
        await place.open(timeout=3)
    return caught.value.message


def test_ranks_of_two_versions(ranks: Run) -> None:
    for message in ranks(2, speak_another_version):
        assert "version" in message, message
