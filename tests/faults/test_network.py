"""The network between hosts fails: the cases 18 to 21 of the catalogue, in network namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hosts import Enter, address, hosts
from oracle import FULL, named
from processes import LARGE, Rank, Run, empty, hear, numbers

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError

pytestmark = [pytest.mark.real, pytest.mark.search]

HUGE = 8 * 2**20
"""Elements of int64: 64 MiB."""
ROUTE = {"MASTER_ADDR": address(0)}
Notice = Callable[[list[float]], None]


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Yield the names of two hosts, new ones for each test: kernels remember connections (tcp_metrics)."""
    with hosts(2) as made:
        yield made


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Cable:
    """A host's port of the switch, which its own processes cannot see."""

    def __init__(self, names: list[str], host: int) -> None:
        self.switch = names[0][:-1] + "0"
        self.plug = f"net0-{host}"

    def set(self, state: str) -> None:
        command("ip", "-n", self.switch, "link", "set", self.plug, state)


async def pull_the_plug(place: Rank, names: list[str], seconds: float) -> None:
    """Cut the link amid a transfer, which goes on when the link comes back in time."""
    async with place.open() as comm:
        await comm.barrier()
        if place.rank == 0:
            cable = Cable(names, 1)
            cable.set("down")
            threading.Timer(seconds, cable.set, ["up"]).start()
            await comm.send(numbers(HUGE, 0), 1)
        else:
            assert torch.equal(await comm.recv(empty(HUGE), 0), numbers(HUGE, 0))
        assert (await comm.all_reduce(torch.ones(LARGE)) == 2).all()


@pytest.mark.fault(18, 20)
def test_transfer_survives_a_link_that_comes_back(ranks: Run, names: list[str]) -> None:
    ranks(2, pull_the_plug, names, 0.3, before=Enter(names, "01", **ROUTE))


async def give_up(comm: Communicator) -> float:
    """Call a collective, which ends with its deadline, or with the other rank's report of its own.

    :returns: the seconds after the deadline, which counts from the call's return. On a busy machine, to make and post
        64 MiB takes longer than all that comes after it.
    """
    work = comm.all_reduce(numbers(HUGE, comm.rank), timeout=1)
    deadline = time.monotonic() + 1
    with pytest.raises((CommTimeoutError, CommAbortedError, PeerDiedError)) as caught:
        await work
    after = time.monotonic() - deadline
    named(caught.value, comm)
    assert comm.aborted
    with pytest.raises(CommAbortedError):
        comm.barrier()
    return after


async def lose_the_link(place: Rank, names: list[str]) -> float:
    comm = await place.open()
    await comm.barrier()
    cable = Cable(names, 1)
    if place.rank == 0:
        cable.set("down")
        place.tell("down 0")
    await hear(place, "down", 0)
    took = await give_up(comm)
    place.tell(f"gave up {place.rank}")
    await hear(place, "gave up", 0, 1)
    if place.rank == 0:
        cable.set("up")
    await comm.aclose()
    return took


@pytest.mark.fault(18)
def test_lost_link_is_noticed_in_time(ranks: Run, names: list[str], notice: Notice) -> None:
    notice(ranks(2, lose_the_link, names, before=Enter(names, "01", **ROUTE)))


async def lose_one_way(place: Rank, names: list[str]) -> float:
    """Drop what rank 1 sends, and nothing that it receives."""
    comm = await place.open()
    await comm.barrier()
    route = ("route", "add", "blackhole", f"{address(0)}/32")
    if place.rank == 1:
        command("ip", *route)
        place.tell("dropped 1")
    await hear(place, "dropped", 1)
    took = await give_up(comm)
    place.tell(f"gave up {place.rank}")
    await hear(place, "gave up", 0, 1)
    if place.rank == 1:
        command("ip", "route", "delete", *route[2:])
    await comm.aclose()
    return took


@pytest.mark.fault(19)
def test_link_lost_in_one_direction_is_noticed_in_time(ranks: Run, names: list[str], notice: Notice) -> None:
    notice(ranks(2, lose_one_way, names, before=Enter(names, "01", **ROUTE)))


# ------------------------------------------------------------------------------------------- 20: broken connections


def connections() -> list[socket.socket]:
    """Return this process's TCP connections to the other host."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            it = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        try:
            other = it.family == socket.AF_INET and it.getpeername()[0] == address(0)
        except OSError:
            other = False
        if other:
            found.append(it)
        else:
            it.close()
    return found


def reset(it: socket.socket) -> None:
    """Have the kernel send RST: connecting to no address ends a TCP connection like that."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = ctypes.create_string_buffer(16)  # AF_UNSPEC
    assert libc.connect(it.fileno(), nowhere, 16) == 0, os.strerror(ctypes.get_errno())


def half_close(it: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side has closed the connection.
        it.shutdown(socket.SHUT_WR)


BREAKS: dict[str, Callable[[socket.socket], None]] = {"reset": reset, "half-close": half_close}


async def break_connections(place: Rank, how: str) -> float:
    """End rank 1's connections by its kernel, which tells rank 0; rank 1 itself has its deadline."""
    comm = await place.open()
    for _ in range(2):
        await comm.all_reduce(numbers(LARGE, place.rank))
    await comm.barrier()
    if place.rank == 1:
        await hear(place, "posted", 0)
        connected = connections()
        assert connected, "it goes another way"
        place.end(lambda: [BREAKS[how](it) for it in connected])
        for it in connected:
            it.close()
        await hear(place, "lost", 0)
        with pytest.raises(CommError):
            await comm.all_reduce(numbers(HUGE, place.rank), timeout=2)
        await comm.aclose()
        return 0.0
    works = [comm.recv(empty(9), 1, 9), comm.all_reduce(numbers(HUGE, 0))]
    place.tell("posted 0")
    for work in works:
        with pytest.raises((PeerDiedError, CommAbortedError)) as caught:
            await work
        named(caught.value, comm)
    took = place.since_death()
    place.tell("lost 0")
    await comm.aclose()
    return took


@pytest.mark.fault(20)
@pytest.mark.parametrize("how", BREAKS)
def test_broken_connection_is_noticed_in_time(ranks: Run, names: list[str], notice: Notice, how: str) -> None:
    notice(ranks(2, break_connections, how, before=Enter(names, "01", **ROUTE)))


async def dribble(place: Rank) -> None:
    """Use segments of a few bytes, from the handshake on: every header comes in pieces."""
    command("ip", "link", "set", "net0", "mtu", "88")
    async with place.open() as comm:
        for count in (1, 5, 300, 5000):
            total = sum(numbers(count, r) for r in range(2))
            assert torch.equal(await comm.all_reduce(numbers(count, place.rank)), total)
            given = comm.send(numbers(count, place.rank), 1 - place.rank)
            got = await comm.recv(empty(count), 1 - place.rank)
            assert torch.equal(got, numbers(count, 1 - place.rank))
            await given
        await comm.barrier()


@pytest.mark.fault(20)
def test_ops_are_right_over_segments_of_a_few_bytes(ranks: Run, names: list[str]) -> None:
    ranks(2, dribble, before=Enter(names, "01", **ROUTE))


# ------------------------------------------------------------------------------------------------ 21: a slow link


async def go_slow(place: Rank, rate: str) -> tuple[float, float]:
    """Send a MiB over a slow link: it takes its time, and no rank is taken for dead.

    :returns: the times at which this rank began and ended.
    """
    async with place.open() as comm:
        await comm.barrier()
        if place.rank == 0:
            command(
                "tc", "qdisc", "add", "dev", "net0", "root", "tbf", "rate", rate, "burst", "10kb", "latency", "400ms"
            )
        try:
            began = time.monotonic()
            if place.rank == 0:
                await comm.send(numbers(2**17, 0), 1)
            else:
                assert torch.equal(await comm.recv(empty(2**17), 0), numbers(2**17, 0))
            ended = time.monotonic()
            await comm.barrier()
        finally:
            if place.rank == 0:
                command("tc", "qdisc", "delete", "dev", "net0", "root")
        return began, ended


@pytest.mark.fault(21)
@pytest.mark.parametrize("rate", ["1mbit", "8mbit"] if FULL else ["16mbit"])
def test_slow_link_transfers_without_a_timeout(ranks: Run, names: list[str], rate: str) -> None:
    (began, _), (_, ended) = ranks(2, go_slow, rate, before=Enter(names, "01", **ROUTE))
    # The times are of one clock of the machine. Rank 1 may begin its receive when much has arrived.
    assert ended - began > 0.8 * 8.4 / int(rate.removesuffix("mbit")), "the link was not slow"
