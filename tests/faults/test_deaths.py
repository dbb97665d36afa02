"""A process dies: the cases 1 to 10 of the catalogue."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from oracle import FULL, end, forgotten, left_after_meeting, named, oracle
from processes import KILLED, LARGE, Rank, Run, empty, free_port, hear, numbers, together
from simulated import IN_BOTH, NET, PROCESSES

import aiocomms
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.communicator import formation
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.rma import Window
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError
from aiocomms.lowlevel import clock

pytestmark = pytest.mark.real

HUGE = 8 * 2**20
"""Elements of int64: 64 MiB."""
VICTIMS = (0, 1, 2) if FULL else (1,)
DELAYS = (0.0, 0.005, 0.02, 0.05) if FULL else (0.02,)
Notice = Callable[[list[float]], None]


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


async def lost_at_once(comm: Communicator, victim: int) -> None:
    """Check that all later ops are refused because of the death."""
    for call in (comm.barrier, lambda: comm.send(torch.ones(1), (comm.rank + 1) % comm.size)):
        with pytest.raises(CommAbortedError, match=f"rank {victim}"):
            call()
    await comm.aclose()


# ------------------------------------------------------------------------------------------------- 1: in the midst


async def lose_amid(place: Rank, count: int, victim: int, delay: float) -> float:
    if place.simulated:
        count = min(count, LARGE)
    async with oracle(place, victim):
        comm = await place.open()
        await together(place, comm)

        async def go_on() -> None:
            while True:
                total = sum(numbers(3, rank) for rank in range(place.size))
                got = await comm.all_reduce(numbers(count, place.rank))
                assert torch.equal(got[:3], total)

        if place.rank == victim:
            place.die_later(delay)
            await go_on()
        await end(go_on(), comm, [victim])
        took = place.since_death()
        await lost_at_once(comm, victim)
        return took


@pytest.mark.fault(1)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("count", [8, HUGE])
def test_death_amid_a_collective_is_noticed_in_time(
    ranks: Run, notice: Notice, count: int, victim: int, delay: float
) -> None:
    took = ranks(3, lose_amid, count, victim, delay)
    assert took.pop(victim) is KILLED
    notice(took)


async def lose_while_idle(place: Rank) -> float:
    """Let rank 1 die while no op has a deadline: its death ends each pending op, and ``lost()`` returns."""
    async with oracle(place, 1):
        comm = await place.open(timeout=None)
        await together(place, comm)
        lost = asyncio.create_task(comm.lost())
        works = [comm.recv(empty(3), (comm.rank + 1) % 3), comm.recv_object((comm.rank + 1) % 3)]
        if place.rank != 1:
            works += [comm.broadcast_object(None, 1), comm.all_reduce(numbers(3, place.rank))]
        place.tell(f"idle {place.rank}")
        if place.rank == 1:
            await hear(place, "idle", 0, 2)
            await place.die()
        for work in works:
            with pytest.raises((PeerDiedError, CommAbortedError)):
                await work
        took = place.since_death()
        error = await lost
        assert isinstance(error, PeerDiedError)
        assert error.peer == 1
        await lost_at_once(comm, 1)
        return took


@pytest.mark.fault(1)
def test_death_while_idle_without_a_deadline_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    took = ranks(3, lose_while_idle)
    assert took.pop(1) is KILLED
    notice(took)


# ------------------------------------------------------------------------------------------------ 2 to 4: messages


async def lose_a_sender(place: Rank) -> float:
    """Kill a sender whose small message has no receive yet: the message arrives whole, or not at all."""
    async with oracle(place, 1):
        comm = await place.open()
        if place.rank == 1:
            sending = comm.send(numbers(20, 1), 0)
            if not place.simulated:  # A simulated network buffers no message: the send ends with the receive.
                await sending
            await hear(place, "ready", 0)
            await place.die()
        lost = comm.recv(empty(3), 1, 5)
        place.tell("ready 0")
        with pytest.raises(PeerDiedError) as caught:
            await lost
        took = place.since_death()
        named(caught.value, comm, [1])
        with contextlib.suppress(PeerDiedError, CommAbortedError):
            assert torch.equal(await comm.recv(empty(20), 1), numbers(20, 1))
        await comm.aclose()
        return took


@pytest.mark.fault(2)
def test_death_of_a_sender_with_an_unreceived_message_is_noticed(ranks: Run, notice: Notice) -> None:
    took, killed = ranks(2, lose_a_sender)
    assert killed is KILLED
    notice([took])


async def lose_amid_a_message(place: Rank, victim_sends: bool, delay: float) -> float:
    async with oracle(place, 1):
        comm = await place.open()
        await together(place, comm)
        gives = (place.rank == 1) == victim_sends
        count = LARGE if place.simulated else HUGE
        kept: list[weakref.ref[Any]] = []

        async def go_on() -> None:
            while True:
                tensor = numbers(count, 1) if gives else torch.full((count,), -1)
                kept[:] = [weakref.ref(tensor)]
                got = await (comm.send(tensor, 1 - place.rank) if gives else comm.recv(tensor, 1 - place.rank))
                assert gives or torch.equal(got, numbers(count, 1))

        if place.rank == 1:
            place.die_later(delay)
            await go_on()
        error = await end(go_on(), comm, [1])
        took = place.since_death()
        await lost_at_once(comm, 1)
        error.__traceback__ = None
        if not place.simulated:  # In a simulation the dead rank has the tensor itself, and not its bytes.
            await forgotten(kept[0])
        return took


@pytest.mark.fault(3, 4)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_amid_a_message_is_noticed_in_time(ranks: Run, notice: Notice, victim: str, delay: float) -> None:
    took, killed = ranks(2, lose_amid_a_message, victim == "sender", delay)
    assert killed is KILLED
    notice([took])


# ----------------------------------------------------------------------------------------------------- 5: windows


async def put_and_flush(window: Window, dst: int) -> None:
    await window.put(numbers(8, 0), dst)
    await window.flush(dst)


ACCESSES: dict[str, Callable[[Window, int], Any]] = {
    "put": lambda window, dst: window.put(numbers(60_000, 0), dst),
    "get": lambda window, src: window.get(empty(60_000), src),
    "fetch_add": lambda window, dst: window.fetch_add(dst, 0, 1),
    "flush": put_and_flush,
}


async def access_for_ever(place: Rank, comm: Communicator, what: str) -> None:
    window = await comm.new_window(empty(60_000))
    await together(place, comm)
    if place.rank == 1:
        place.die_later(0.02)
        await asyncio.sleep(10)
    while True:
        await ACCESSES[what](window, 1)


async def lose_a_target(place: Rank, what: str) -> float:
    async with oracle(place, 1):
        comm = await place.open()
        await end(access_for_ever(place, comm, what), comm, [1])
        took = place.since_death()
        await comm.aclose()
        return took


@pytest.mark.fault(5)
@pytest.mark.parametrize("what", ACCESSES if FULL else ["get", "flush"])
def test_death_of_a_window_target_is_noticed_in_time(ranks: Run, notice: Notice, what: str) -> None:
    took = ranks(3, lose_a_target, what)
    assert took.pop(1) is KILLED
    notice(took)


# ------------------------------------------------------------------------------------ 6: two, and the store's host


async def lose_two(place: Rank, port: int) -> float:
    """Kill rank 0, which serves the store, and the last rank at the same time."""
    async with oracle(place, 0, 3):
        place.launch(port)
        comm = await aiocomms.new_comm(place.transport)
        await comm.barrier()
        if place.rank in (0, 3):
            await hear(place, "posted", 1, 2)
            await place.die()
        count = LARGE if place.simulated else HUGE
        works = [comm.recv(empty(3), 0), comm.recv(empty(3), 3), comm.all_reduce(numbers(count, place.rank))]
        place.tell(f"posted {place.rank}")
        peers = set()
        for work in works:
            with pytest.raises(PeerDiedError) as caught:
                await work
            named(caught.value, comm, [0, 3])
            peers.add(caught.value.peer)
        took = place.since_death()
        assert len(peers) == 1, "the first reason stays"
        await comm.aclose()
        formation._launched.clear()  # a launcher's store is kept for the next communicator
        del comm, works, work, caught
        return took


@pytest.mark.fault(6)
def test_simultaneous_deaths_with_the_store_host_are_noticed_in_time(
    ranks: Run, notice: Notice, transport: str
) -> None:
    first, *took, last = ranks(4, lose_two, 0 if transport == "net" else free_port())
    assert (first, last) == (KILLED, KILLED)
    notice(took)


# ----------------------------------------------------------------------------------------------- 7 and 8: each end


async def lose_politely(place: Rank) -> float:
    """Send SIGTERM to rank 1, whose handler closes the communicator."""
    async with oracle(place, 1):
        comm = await place.open()
        await comm.barrier()
        if place.rank == 1:
            asked = asyncio.Event()
            if not place.simulated:
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
            await hear(place, "posted", 0, 2)
            place.end(asked.set if place.simulated else lambda: os.kill(os.getpid(), signal.SIGTERM))
            await asked.wait()
            await comm.aclose()
            place.tell("closed 1")
            return 0.0
        works = [comm.recv(empty(3), 1), comm.all_reduce(numbers(9, place.rank))]
        place.tell(f"posted {place.rank}")
        for work in works:
            with pytest.raises(CommAbortedError, match="closed by rank 1") as caught:
                await work
            named(caught.value, comm, [1])
        took = place.since_death()
        await comm.aclose()
        return took


@IN_BOTH
@pytest.mark.fault(7)
def test_sigterm_with_a_close_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    notice(ranks(3, lose_politely))


ENDS: dict[str, tuple[Callable[[], object], int]] = {
    "sys.exit": (lambda: sys.exit(3), 3),
    "os._exit": (lambda: os._exit(0), 0),
    "segfault": (lambda: ctypes.string_at(0), -signal.SIGSEGV),
    "abort": (os.abort, -signal.SIGABRT),
}


async def lose_somehow(place: Rank, how: str) -> float:
    async with oracle(place, 1):
        comm = await place.open()
        await comm.barrier()
        if place.rank == 1:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            await hear(place, "posted", 0, 2)
            place.end(ENDS[how][0])
        works = [comm.recv(empty(3), 1), comm.all_reduce(numbers(HUGE, place.rank))]
        place.tell(f"posted {place.rank}")
        closes = how == "sys.exit"  # The event loop ends in order, and closes what is open.
        for work in works:
            with pytest.raises(CommAbortedError if closes else PeerDiedError) as caught:
                await work
            named(caught.value, comm, [1])
            assert ("closed" in caught.value.message) == closes
        took = place.since_death()
        await comm.aclose()
        return took


@PROCESSES
@pytest.mark.fault(8)
@pytest.mark.parametrize("how", ENDS if FULL else ["os._exit", "segfault"])
def test_death_by_any_signal_or_exit_is_noticed_in_time(ranks: Run, notice: Notice, how: str) -> None:
    took = ranks(3, lose_somehow, how, codes={1: ENDS[how][1]})
    assert took.pop(1) is KILLED
    notice(took)


# -------------------------------------------------------------------------------------------------- 9: no memory


async def leave(comm: Communicator, limits: tuple[int, int]) -> None:
    """Leave the communicator's context by an error, which aborts the other ranks."""
    async with comm:
        try:
            await comm.recv_object(0)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


async def run_out_of_memory(place: Rank) -> float:
    """Have rank 1 run out of memory amid a receive of an object: it raises, and the other ranks are aborted."""
    async with oracle(place, reported="emory"):
        comm = await place.open()
        await comm.barrier()
        if place.rank == 1:
            place.end(lambda: None)
            place.tell("began 1")
        await hear(place, "began", 1)
        if place.rank == 0:
            work = comm.send_object(b"x" * (60 * 2**20), 1)
        if place.rank != 1:
            with pytest.raises(CommAbortedError, match="rank 1") as caught:
                await comm.all_reduce(numbers(9, place.rank))
            took = place.since_death()
            named(caught.value, comm)
            if place.rank == 0:
                await work.wait()
                work.exception()
                del work
            await comm.aclose()
            return took
        limits = resource.getrlimit(resource.RLIMIT_AS)
        room = psutil.Process().memory_info().vms + 40 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        with pytest.raises((MemoryError, RuntimeError, CommError)) as raised:
            await leave(comm, limits)
        assert re.search("emory|alloc", repr(raised.value)), raised.value
        del raised  # The traceback keeps the objects of its frames.
        return 0.0


@PROCESSES
@pytest.mark.fault(9)
def test_memory_error_on_one_rank_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    notice(ranks(3, run_out_of_memory, before=one_arena))


def one_arena(rank: int) -> None:
    """Limit glibc to one arena: the 64 MiB that it reserves for each further one would count against the limit."""
    m_arena_max = -8
    ctypes.CDLL(None).mallopt(m_arena_max, 1)


# ------------------------------------------------------------------------------------------------- 10: beginning


async def lose_before_the_first_op(place: Rank) -> float:
    async with oracle(place, 1):
        comm = await place.open()
        place.tell(f"open {place.rank}")
        if place.rank == 1:
            if place.simulated:  # A connection may lose the dead rank's messages, also that it has formed.
                await hear(place, "open", 0, 2)
            await place.die()
        await end(reduced(comm), comm, [1])
        took = place.since_death()
        await comm.aclose()
        return took


async def reduced(comm: Communicator) -> None:
    await comm.all_reduce(numbers(9, comm.rank))


@pytest.mark.fault(10)
def test_death_before_the_first_op_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    took = ranks(3, lose_before_the_first_op)
    assert took.pop(1) is KILLED
    notice(took)


def dies_after(place: Rank, calls: int) -> None:
    """Have this process die after so many exchanges of values between the ranks."""
    exchange, made = StoreRendezvous.exchange, 0

    async def dies(self: StoreRendezvous, key: str, value: bytes) -> list[bytes]:
        nonlocal made
        made += 1
        result = await exchange(self, key, value)
        if made == calls:
            await place.die()
        return result

    place.replace(StoreRendezvous, "exchange", dies)


async def lose_while_forming(place: Rank, calls: int) -> float:
    """Let rank 1 die after it has sent its address."""
    async with oracle(place, 1):
        if place.rank == 1:
            dies_after(place, calls)
        began = clock.now()
        with left_after_meeting(place, 4), pytest.raises((PeerDiedError, CommTimeoutError, CommError)) as caught:
            async with place.open("late") as comm:
                await comm.barrier()
        assert re.search(
            r"rank 1\b|ranks had not joined: 1\b|ranks did not connect within .*: \[1\]",
            str(caught.value),
        ), caught.value
        del caught  # The traceback keeps what did not form.
        return clock.now() - began


@pytest.mark.fault(10, 33)
def test_death_while_forming_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    took = ranks(3, lose_while_forming, 1)
    assert took.pop(1) is KILLED
    notice(took)


async def lose_while_late(place: Rank) -> None:
    """Let rank 1 die after rank 2 came late, which leaves rank 2 more time than rank 0: the error names rank 1."""
    if place.rank == 1:
        dies_after(place, 1)
    absent = pytest.raises(CommTimeoutError, match=r"these ranks had not joined: 1\.")
    with left_after_meeting(place, 5 if place.rank == 2 else 4), absent:
        await place.open()


@pytest.mark.fault(33)
@pytest.mark.parametrize("transport", ["c10d"])  # gloo does not say for whom it waits; ucx does
def test_death_while_forming_is_named_although_another_rank_was_late(ranks: Run) -> None:
    assert ranks(3, lose_while_late) == [None, KILLED, None]
