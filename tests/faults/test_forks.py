"""A forked child has nothing of its parent's communicators, and may open its own."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import HANGS, PATIENCE, Rank, Run, death, free_port

from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import StoreLostError
from aiocomms.lowlevel import store_errors

pytestmark = pytest.mark.real


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return a transport between processes."""
    return request.param


def sockets() -> set[str]:
    """Return the stream sockets of this process. UCX's own socket for wake-ups is no connection, and does not count."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The descriptor is of something else.
            link = str(entry.readlink())
            with socket.socket(fileno=os.dup(int(entry.name))) as it:
                if it.type == socket.SOCK_STREAM:
                    found.add(link)
    return found


def stay(place: Rank, before: set[str]) -> None:
    """Run as a child: write down its sockets, and outlive the parent."""
    extra = sockets() - before
    (place.folder / "extra").write_text(" ".join(extra))
    place.tell("child")
    place.told("over")
    os._exit(0)


def by_fork(place: Rank, before: set[str]) -> None:
    if not os.fork():
        stay(place, before)


def by_multiprocessing(place: Rank, before: set[str]) -> None:
    # torch's DataLoader starts its workers like this.
    multiprocessing.get_context("fork").Process(target=stay, args=(place, before), daemon=True).start()


async def die_with_a_child(place: Rank, victim: int, fork: Callable[[Rank, set[str]], None]) -> None:
    before = sockets()
    comm = await place.open()
    await comm.barrier()
    if place.rank == victim:
        fork(place, before)
        await asyncio.to_thread(place.told, "child")
        await comm.barrier()
        await place.die()
    await comm.barrier()
    try:
        assert (await death(comm.recv(torch.zeros(1), victim, timeout=PATIENCE))).peer == victim
        assert (place.folder / "extra").read_text() == ""
    finally:
        place.tell("over")
    await comm.aclose()


@pytest.mark.fault(79)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fork", [by_fork, by_multiprocessing])
def test_death_of_a_rank_with_a_forked_child_is_noticed_at_once(
    ranks: Run, victim: int, fork: Callable[[Rank, set[str]], None]
) -> None:
    """A rank's connections end with it, and the other rank notices at once: there is no heartbeat here.

    Both ranks are victims, as one of them opened the connection, and the other one accepted it.
    """
    ranks(2, die_with_a_child, victim, fork)


@store_errors()
def ask_for_ever(store: torch.distributed.Store) -> None:
    while True:  # The kernel ends the host meanwhile.
        store.check(["here 0"])


async def stores_host_dies(place: Rank, port: int) -> None:
    before = sockets()
    store = await asyncio.to_thread(
        connect_store, "127.0.0.1", port, place.rank, 2, agent_store=False, timeout=PATIENCE
    )
    store.set(f"here {place.rank}", "yes")
    await asyncio.to_thread(store.wait, [f"here {1 - place.rank}"])
    if place.rank == 0:
        await asyncio.to_thread(place.told, "ready")
        by_fork(place, before)
        await asyncio.to_thread(place.told, "child")
        await place.die()
    place.tell("ready")
    await asyncio.to_thread(place.told, "died")
    try:
        with pytest.raises(StoreLostError):
            await asyncio.wait_for(asyncio.to_thread(ask_for_ever, store), PATIENCE)
        assert (place.folder / "extra").read_text() == ""
    finally:
        place.tell("over")


@pytest.mark.fault(79)
@pytest.mark.parametrize("transport", ["c10d"])  # The store is the same for all transports.
def test_death_of_the_store_host_with_a_forked_child_is_noticed(ranks: Run) -> None:
    ranks(2, stores_host_dies, free_port())


WITH_CHILDREN = """
import asyncio, gc, os, sys, torch, aiocomms
transport, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)

async def use(name):
    store = torch.distributed.FileStore(f"{folder}/{name}", 2)
    comm = await aiocomms.new_comm(transport, store=store, rank=rank, size=2, name=name)
    await comm.all_reduce(torch.ones(100_000))
    await comm.barrier()
    return comm

async def use_and_close(name):
    await (await use(name)).aclose()

loop = asyncio.new_event_loop()
comm = loop.run_until_complete(use("parent"))
child = os.fork()
if not child:
    asyncio.run(use_and_close("child"))
    try:
        comm.barrier()
    except aiocomms.CommError as error:
        print(type(error).__name__)
    del comm
    gc.collect()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
loop.run_until_complete(comm.all_reduce(torch.ones(100_000)))
loop.run_until_complete(comm.aclose())
loop.run_until_complete(loop.shutdown_asyncgens())
loop.close()
"""


@pytest.mark.fault(80)
def test_forked_child_may_open_its_own_communicator(tmp_path: Path, transport: str) -> None:
    """The child uses and closes its own, drops its parent's, and ends by `sys.exit`; the parent goes on."""
    command = [sys.executable, "-c", WITH_CHILDREN, transport, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], stdout=-1, stderr=-1, text=True) for rank in range(2)]
    try:
        printed = [process.communicate(timeout=HANGS) for process in processes]
        assert printed == [("CommClosedError\n7\n", "")] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
