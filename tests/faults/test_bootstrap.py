"""Failures of the store and the first meeting: the cases 30 to 34 of the catalogue. See also test_rendezvous.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import oracle
from processes import LARGE, Rank, Run, hear, in_turn, numbers
from simulated import NET, PROCESSES

import aiocomms
from aiocomms.errors import ArgumentError, CommAbortedError, CommTimeoutError, ProtocolError, StoreLostError
from aiocomms.lowlevel import HEAD_BYTES, auth, clock
from aiocomms.lowlevel.auth import RENDEZVOUS, Seal

pytestmark = pytest.mark.real

SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
Notice = Callable[[list[float]], None]


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[], tuple[int, int]]]:
    """Yield a call that starts a store's server in its own process, and returns its port and process ID."""
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
    """Stop the store, and then kill it: a formed communicator goes on, and one that forms fails in time."""
    took = []
    async with oracle(place):

        def reach() -> Any:
            return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1))

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
    async with aiocomms.new_comm(place.transport, name="alone", store=store, rank=place.rank, size=3):
        pass


@PROCESSES
@pytest.mark.fault(31, 32)
def test_stopped_and_dead_store_is_noticed_in_time(
    ranks: Run, notice: Notice, server: Callable[[], tuple[int, int]]
) -> None:
    late, lost = zip(*ranks(2, lose_the_store, *server()), strict=True)
    assert min(late) >= 0, late
    notice(list(lost))


async def split_without_a_store(place: Rank, port: int, pid: int) -> float:
    """Split without the store: a split that needs the store says that it is lost, and another one completes."""
    async with oracle(place):
        more: dict[str, Any] = {}
        if not place.simulated:
            more["store"] = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1))
        comm = await place.open("formed", **more)
        del more
        await comm.barrier()
        if place.rank == 0:
            place.lose_store(pid)
        await comm.barrier()
        began = clock.now()
        try:
            child = await comm.split(range(place.size))
        except StoreLostError:
            pass  # This transport needs the store.
        else:
            await child.aclose()
        took = clock.now() - began
        await comm.all_reduce(torch.ones(3))
        await comm.aclose()
        del comm
        return took


@pytest.mark.fault(31)
def test_split_without_a_store_ends_in_time_and_keeps_its_parent(
    ranks: Run, notice: Notice, transport: str, server: Callable[[], tuple[int, int]]
) -> None:
    notice(ranks(2, split_without_a_store, *((0, 0) if transport == "net" else server())))


async def differ(place: Rank, owner: Any, name: str, value: Any) -> str:
    """Give rank 1 another value; return the message of the error that each rank gets."""
    other = mock.patch.object(owner, name, value) if place.rank == 1 else contextlib.nullcontext()
    with other, pytest.raises((ProtocolError, CommAbortedError, CommTimeoutError)) as caught:
        await place.open()
    return caught.value.message


async def speak_another_version(place: Rank) -> None:
    """Give rank 1 another version of the wire: the error names both."""
    wire = __import__(f"aiocomms_{place.transport}.wire").wire
    versions = wire.VERSION, wire.VERSION + 1
    message = await differ(place, wire, "VERSION", versions[1])
    assert "version" in message, message
    assert {str(version) for version in versions} <= set(re.findall(r"\d+", message)), message


async def have_another_byte_order(place: Rank) -> None:
    """Give rank 1 another byte order: the error names both."""
    message = await differ(place, sys, "byteorder", "big")
    assert "little" in message, message
    assert "big" in message, message


async def speak_in_another_shape(place: Rank) -> None:
    """Have rank 1 write records of another version, which also have another shape, but for its arrival.

    The ranks refuse the records before they decode them.
    """
    if place.rank == 1:
        sign, dialect = Seal.sign, RENDEZVOUS._replace(version=4711)

        def signs(self: Seal, key: str, rank: int, value: bytes) -> bytes:
            shape = slice(HEAD_BYTES, None) if key.startswith(("came", "here", "roll")) else slice(-3, None)
            return dialect.head + sign(self, key, rank, value)[shape]

        Seal.sign = signs  # type: ignore[method-assign]
        auth.RENDEZVOUS = dialect
    with pytest.raises(ProtocolError) as caught:
        await place.open()
    message = caught.value.message
    assert {"4711", str(RENDEZVOUS.version)} <= set(re.findall(r"\d+", message)), message
    assert "version" in message


@PROCESSES
@pytest.mark.fault(30, 105)
def test_ranks_of_two_versions_or_byte_orders_name_both(ranks: Run) -> None:
    ranks(2, in_turn, speak_another_version, have_another_byte_order, speak_in_another_shape)


# ------------------------------------------------------------------------------------- 33 and 34: late, and twice


async def come_late(place: Rank) -> tuple[str, float]:
    """Let rank 2 come late but in time, then too late, so that the error names it; then form anew."""
    async with oracle(place):
        if place.rank == 2:
            await hear(place, "early", 0, 1)
        else:
            place.tell(f"early {place.rank}")
        async with place.open("world") as comm:
            await comm.barrier()
        if place.rank == 2:
            await hear(place, "gave up", 0, 1)
        message, took = await (give_up(place, 0.5) if place.rank == 2 else both_give_up(place))
        place.tell(f"gave up {place.rank}")
        await hear(place, "gave up", 0, 1, 2)
        async with place.open("world") as comm:
            assert torch.equal(await comm.all_reduce(numbers(9, place.rank)), sum(numbers(9, r) for r in range(3)))
        return message, took


async def give_up(place: Rank, patience: float) -> tuple[str, float]:
    """Return the error that names the missing ranks, and how many seconds after the deadline it came."""
    began = clock.now()
    with pytest.raises(CommTimeoutError) as caught:
        await place.open("world", timeout=patience)
    return caught.value.message, clock.now() - began - patience


async def both_give_up(place: Rank) -> tuple[str, float]:
    """Have ranks 0 and 1 give up; if one has not answered the other in time, try again with twice the timeout."""
    for turn in itertools.count():
        message, took = await give_up(place, 0.5 * 2**turn)
        if "had not joined: 2." in message:
            place.tell(f"heard {turn} {place.rank}")
        place.tell(f"turn {turn} {place.rank}")
        await hear(place, f"turn {turn}", 0, 1)
        if all((place.folder / f"heard {turn} {rank}").exists() for rank in (0, 1)):
            return message, took
    raise AssertionError


@pytest.mark.fault(33)
def test_late_rank_is_named_by_the_others_at_their_deadline(ranks: Run, notice: Notice) -> None:
    said, late = zip(*ranks(3, come_late), strict=True)
    for message, missing in zip(said, ["2", "2", "0, 1"], strict=True):
        assert f"these ranks had not joined: {missing}." in message, message
    notice(list(late))


async def come_twice(place: Rank) -> str:
    """Start processes 1 and 2 both as rank 1 of two: the earlier one gets an error, and the later one joins."""
    one = {"store": place.store(), "rank": min(place.rank, 1), "size": 2}
    if place.rank == 1:
        forming = asyncio.ensure_future(opened(place, **one))
        came = dist.PrefixStore("aiocomms/world", place.store())
        while not came.check(["came/1"]):  # noqa: ASYNC110 - a store has no events
            await asyncio.sleep(0.001)
        place.tell("came 1")
        with pytest.raises(ArgumentError) as caught:
            await forming
        place.tell("told 1")
        return caught.value.message
    await hear(place, *(("came", 1) if place.rank == 2 else ("told", 1)))
    comm = await opened(place, **one)
    assert (await comm.all_reduce(torch.ones(LARGE)) == 2).all()
    await comm.aclose()
    return ""


async def opened(place: Rank, **more: Any) -> Any:
    return await aiocomms.new_comm(place.transport, **more)


@pytest.mark.fault(34)
def test_earlier_process_of_a_duplicate_rank_fails_and_the_later_joins(ranks: Run) -> None:
    first, second, third = ranks(3, come_twice)
    assert "another process has joined as rank 1" in second
    assert first == third == ""
