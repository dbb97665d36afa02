"""The store that rank 0 serves, with strangers at its port, and when no rank needs it: the cases 82, 94 and 101."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiocomms_ucx.status import BROKEN, error_of
from processes import HANGS, LARGE, PATIENCE, Rank, Run, exchange, free_port, listening
from simulated import NET
from torch.distributed import TCPStore

import aiocomms
from aiocomms import ops
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError
from aiocomms.transport import Transport

pytestmark = pytest.mark.real

TOKEN = "a token of these tests, of some length"
ROOM = 250
"""Descriptors that a rank may still open: fewer than a stranger opens connections."""


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def launched(place: Rank, port: int) -> None:
    """Set the variables of a launcher that serves no store itself."""
    os.environ |= {
        "RANK": f"{place.rank}",
        "WORLD_SIZE": f"{place.size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }


def with_a_token(rank: int) -> None:
    os.environ["AIOCOMMS_TOKEN"] = TOKEN


def threads() -> list[str]:
    """Return the names of the threads of stores."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "store" in name or "TCPStore" in name]


def ports() -> list[int]:
    """Return the TCP ports at which this process listens."""
    return [int(at.partition(":")[2], 16) for at in listening()[0]]


async def all_there(place: Rank, what: str) -> None:
    """Meet the other ranks without the communicator."""
    place.tell(f"{what} {place.rank}")
    await place.all_told(what, *range(place.size))


# ----------------------------------------------------------------------------------------- 82: nobody needs it any more


async def lets_go(place: Rank, port: int) -> None:
    launched(place, port)
    gc.disable()  # Nothing is left to a collection.
    for turn in range(3):
        comm = await aiocomms.new_comm(place.transport, timeout=HANGS)
        second = await aiocomms.new_comm(place.transport, name="second", timeout=HANGS)
        child = await comm.split([1, 0])
        await comm.aclose()
        await second.aclose()
        grandchild = await child.split([1, 0])  # This split needs the store.
        await exchange(grandchild, LARGE)
        await child.aclose()
        await exchange(grandchild, 3)
        await grandchild.aclose()
        await all_there(place, f"closed {turn}")
        ends = time.monotonic() + PATIENCE
        while threads():
            assert time.monotonic() < ends, threads()
            await asyncio.sleep(0.01)
        assert port not in ports()
        if place.rank == 0:
            socket.create_server(("127.0.0.1", port)).close()  # Any process can use the port.
        await all_there(place, f"free {turn}")


@pytest.mark.fault(82)
def test_last_close_frees_the_port_of_the_store(ranks: Run, transport: str) -> None:
    """The port is free although the program still holds the communicators, and nothing was collected."""
    ranks(2, lets_go, free_port())


async def goes_on(place: Rank, port: int) -> None:
    """Close the communicator of rank 0, which serves the store, while the others still need the store."""
    launched(place, port)
    comm = await aiocomms.new_comm(place.transport, timeout=HANGS)
    child = await comm.split([] if place.rank == 0 else [1, 2])
    await comm.aclose()
    await all_there(place, "closed")
    if child is not None:
        grandchild = await child.split([1, 0])
        await exchange(grandchild, LARGE)
        await grandchild.aclose()
        await child.aclose()
    else:
        assert port not in ports()
        await place.all_told("done", 1, 2)
    place.tell(f"done {place.rank}")
    comm = await aiocomms.new_comm(place.transport, timeout=HANGS)
    await exchange(comm, 3)
    await comm.aclose()


@pytest.mark.fault(82)
def test_store_stays_while_a_communicator_needs_it(ranks: Run, transport: str) -> None:
    ranks(3, goes_on, free_port())


async def takes_in(place: Rank, port: int) -> None:
    """Let rank 1 leave, and join again by the launcher's variables; then all is released."""
    place.launch(port)
    if not place.simulated:
        gc.disable()
    comm = await aiocomms.new_comm(place.transport, timeout=HANGS)
    await all_there(place, "met")
    if place.rank == 1:
        comm.abort("it leaves")
        await comm.aclose()
        comm = await aiocomms.new_comm(place.transport, join=True, timeout=HANGS)
    else:
        with pytest.raises(CommAbortedError):
            await comm.recv(torch.zeros(3), 1)
        comm = await comm.reconfigure([0, 2], size=3, timeout=HANGS)
    await exchange(comm, LARGE)
    await comm.aclose()
    await all_there(place, "closed")
    assert place.simulated or port not in ports()


@pytest.mark.parametrize("transport", [NET, "c10d", "ucx"])
@pytest.mark.fault(82)
def test_newcomer_finds_the_store(ranks: Run, transport: str) -> None:
    ranks(3, takes_in, 0 if transport == "net" else free_port())


async def let_go_of_the_callers(place: Rank, port: int) -> None:
    """Check that the caller's own store lives while the caller holds it, or a communicator over it is open."""
    gc.disable()
    comm = await place.open(store=TCPStore("127.0.0.1", port, is_master=place.rank == 0, wait_for_workers=False))
    assert (port in ports()) == (place.rank == 0)
    child = await comm.split([0, 1])
    await exchange(child, 2)
    await child.aclose()
    await comm.aclose()
    assert port not in ports()
    await all_there(place, "one has gone")
    store = TCPStore("127.0.0.1", port, is_master=place.rank == 0, wait_for_workers=False)
    comm = await place.open(store=store)
    await exchange(comm, 3)
    await comm.aclose()
    assert (port in ports()) == (place.rank == 0)
    await all_there(place, "closed")
    del store
    assert port not in ports()
    await all_there(place, "free")


@pytest.mark.fault(82, 138)
def test_closed_communicator_keeps_no_store_of_its_caller(ranks: Run, transport: str) -> None:
    ranks(2, let_go_of_the_callers, free_port())


# ------------------------------------------------------------------------------ 94 and 101: a stranger at the open port


async def withstands(place: Rank, port: int, early: bool) -> None:
    """Let a stranger connect with rank 0's store, before the other rank comes or after it."""
    launched(place, port)
    if place.rank == 1:
        if early:
            await place.all_told("poured", 0)
        async with aiocomms.new_comm(place.transport, timeout=HANGS) as comm:
            await works(comm)
        return
    coming = asyncio.create_task(opened(place))
    if early:
        while port not in ports():  # noqa: ASYNC110 - the kernel says so to nobody
            await asyncio.sleep(0.001)
    else:
        await coming
    me = psutil.Process()
    resident, descriptors, most = me.memory_info().rss, me.num_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors + ROOM, most))
    # The stranger is a process of its own: its ends of the connections must not count here.
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, str(port), stdin=-1, stdout=-1)
    assert stranger.stdout is not None
    assert await stranger.stdout.readline() == b"poured\n"
    grown = me.memory_info().rss - resident
    assert grown < 64 * 2**20, f"{grown} bytes more"
    assert me.num_fds() - descriptors < ROOM - 50
    place.tell("poured 0")
    comm = await coming
    await works(comm)
    assert port not in ports(), "it listens though all are there"
    await comm.aclose()
    stranger.kill()
    await stranger.wait()


STRANGER = """
import contextlib, socket, sys
from datetime import timedelta
from torch.distributed import DistError, TCPStore

# What somebody without the token does who speaks torch's protocol: counters, values without end, and silence.
port = int(sys.argv[1])
with contextlib.suppress(DistError):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    for key in ("came/0", "came/1", "join/1"):
        store.add(f"aiocomms/world/{key}", 1)
    for number in range(256):
        store.set(f"flood {number}", "x" * 2**20)
held = []
with contextlib.suppress(OSError):
    for _ in range(300):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        held[-1].send(b"a")
print("poured", flush=True)
sys.stdin.read()
"""


async def opened(place: Rank) -> Any:
    return await aiocomms.new_comm(place.transport, timeout=HANGS)


async def works(comm: Any) -> None:
    """Do all that takes descriptors."""
    await exchange(comm, LARGE)
    child = await comm.split([1, 0])
    await exchange(child, 3)
    await child.aclose()
    comm.dump()


@pytest.mark.fault(94, 101)
@pytest.mark.parametrize("early", [True, False], ids=["while it forms", "when it is formed"])
@pytest.mark.parametrize("before", [with_a_token], ids=["token"])
def test_foreign_store_clients_consume_no_memory_or_descriptors(
    ranks: Run, transport: str, early: bool, before: Callable[[int], None]
) -> None:
    """A client that does not prove to be of the job gets no memory or descriptors, and its counters have no effect."""
    ranks(2, withstands, free_port(), early, before=before)


@pytest.mark.deterministic
@pytest.mark.fault(101, transport="c10d")
@pytest.mark.fault(101, transport="ucx")
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), PermissionError("not here")])
def test_os_error_while_opening_a_transport_becomes_comm_error(error: OSError) -> None:
    plan = Selection({"p2p": "some"}, {"p2p": Transport}, {})

    async def fail(cls: type[Transport], family: Any) -> Transport:
        raise error

    with pytest.raises(CommError, match="the transport 'some' cannot be opened") as caught:
        asyncio.run(open_transports(plan, fail))
    assert caught.value.__cause__ is error


@pytest.mark.deterministic
@pytest.mark.fault(101, transport="ucx")
def test_unreachable_rank_is_not_taken_for_dead() -> None:
    """UCX also calls a rank unreachable if this process has no descriptors left; a death ends the rank's connection."""
    unreachable, reset = 6, 25
    op = ops.Send(torch.ones(3), 1)
    assert isinstance(error_of(op, BROKEN, reset, 0, 0, 2), PeerDiedError)
    said = error_of(op, BROKEN, unreachable, 0, 0, 2)
    assert type(said) is CommError
    assert "rank 1" in said.message
