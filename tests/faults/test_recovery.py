"""Ranks die, are stopped and come back; the survivors form a new communicator."""

from __future__ import annotations

import asyncio
import functools
import logging.handlers
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import HANGS, KILLED, LARGE, Rank, Run, empty, exchange, numbers, together
from simulated import NET

import aiocomms
from aiocomms.bootstrap.recovery import Decision, Recovery
from aiocomms.bootstrap.stores import connect_store
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError, StoreLostError

pytestmark = pytest.mark.real

BEAT = {"heartbeat": 2.0}
LONG = 2 * HANGS
"""Seconds for a new communicator: a rank that waits for another one until then hangs."""


async def lost(comm: Communicator) -> CommError:
    """Return the error that ends all collectives of a communicator."""
    while True:
        try:
            await comm.all_reduce(torch.ones(LARGE))
        except (PeerDiedError, CommAbortedError) as error:
            return error


def give_up_late_ones(place: Rank, *present: int) -> None:
    """Have ``reconfigure`` in this process wait for late ranks until these have come, and no moment longer."""
    proposal = Recovery._proposal

    def proposes(self: Recovery, came: set[int], waited: float) -> Decision | None:
        return proposal(self, came, math.inf if came.issuperset(present) else 0.0)

    place.replace(Recovery, "_proposal", proposes)


async def works(comm: Communicator) -> None:
    """Run each kind of op, and split the communicator."""
    if comm.size > 1:
        await exchange(comm, 100)
    assert (await comm.all_reduce(torch.ones(LARGE)) == comm.size).all()
    child = await comm.split(list(range(comm.size))[::-1])
    assert child is not None
    assert (await child.all_reduce(torch.ones(3)) == comm.size).all()
    await child.aclose()


# ------------------------------------------------------------------------------------------------------------ deaths


async def outlive(place: Rank, victims: list[int], explicit: bool, hosted: bool) -> tuple[str, int, int]:
    """Reconfigure after deaths. With ``hosted`` rank 0 serves the store. A wait for a dead rank would hang."""
    more: dict[str, Any] = {}
    if hosted:
        more["store"] = await served(place)
    comm = await place.open(**more)
    await together(place, comm)
    if place.rank in victims:
        await place.die()
    await lost(comm)
    left = [rank for rank in range(place.size) if rank not in victims]
    # A rank without connections to the survivors cannot tell a second death from a late rank.
    told = place.transport == "ucx" or len(victims) == 1
    give_up_late_ones(place, *(range(place.size) if told else left))
    new = await comm.reconfigure(left if explicit else None, timeout=LONG)
    assert comm.closed
    await works(new)
    with pytest.raises(CommAbortedError, match="is lost"):
        comm.barrier()
    await new.aclose()
    return new.name, new.rank, new.size


async def served(place: Rank) -> dist.Store:
    """Return the store that rank 0 serves, and that ends when rank 0 dies."""
    if place.simulated:
        place.launch(0)
        return place.store()
    at = await port(place)
    reach = functools.partial(connect_store, "127.0.0.1", at, place.rank, place.size, agent_store=False, timeout=HANGS)
    return await asyncio.to_thread(reach)


async def port(place: Rank) -> int:
    """Return a free port, which rank 0 chooses."""
    file = place.folder / "port"
    if place.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as it:
            part = place.folder / "port.part"
            part.write_text(str(it.getsockname()[1]))
        part.rename(file)
    await place.heard("port")
    return int(file.read_text())


@pytest.mark.parametrize("victims", [[1], [0], [2]])
@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_survivors_of_a_death_reconfigure(ranks: Run, transport: str, victims: list[int]) -> None:
    results = ranks(3, outlive, victims, False, False)
    assert results.pop(victims[0]) is KILLED
    assert results == [("world@2", 0, 2), ("world@2", 1, 2)]


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_survivors_of_two_deaths_reconfigure(ranks: Run, transport: str, explicit: bool) -> None:
    results = ranks(4, outlive, [1, 2], explicit, False)
    assert results[1:3] == [KILLED, KILLED]
    assert [results[0], results[3]] == [("world@2", 0, 2), ("world@2", 1, 2)]


@pytest.mark.search
@pytest.mark.fault(31, transport="ucx")
@pytest.mark.parametrize("transport", ["ucx"])
@pytest.mark.parametrize("size", [2, 4])
def test_survivors_reconfigure_without_the_store(ranks: Run, transport: str, size: int) -> None:
    killed, *results = ranks(size, outlive, [0], False, True)
    assert killed is KILLED
    assert results == [("world@2", rank, size - 1) for rank in range(size - 1)]


async def outlive_again(place: Rank) -> list[str]:
    """Reconfigure after each death of one rank after the other; the store dies with the first."""
    names = []
    comm = await place.open(store=await served(place))
    for victim in range(place.size - 1):
        await works(comm)
        if place.rank == victim:
            await place.die()
        await lost(comm)
        comm = await comm.reconfigure()
        names.append(comm.name)
    await works(comm)
    await comm.aclose()
    return names


@pytest.mark.fault(31, transport="ucx")
@pytest.mark.parametrize("transport", ["ucx"])
def test_survivors_reconfigure_after_each_of_several_deaths(ranks: Run, transport: str) -> None:
    assert ranks(4, outlive_again)[3] == ["world@2", "world@3", "world@4"]


async def without_a_store(place: Rank) -> str:
    comm = await place.open(store=await served(place))
    await together(place, comm)
    if place.rank == 0:
        await place.die()
    await lost(comm)
    with pytest.raises(StoreLostError) as caught:
        await comm.reconfigure()
    await comm.aclose()
    return str(caught.value)


@pytest.mark.fault(31)
@pytest.mark.parametrize("transport", ["c10d"])
def test_reconfigure_that_needs_a_lost_store_says_so(ranks: Run, transport: str) -> None:
    assert all("store is lost" in text for text in ranks(3, without_a_store)[1:])


# ----------------------------------------------------------------------------------------- those that are not there


async def leave_one_out(place: Rank) -> str:
    """Reconfigure after a deadline without rank 2, which comes too late."""
    comm = await place.open()
    await comm.barrier()
    if place.rank < 2:
        with pytest.raises((CommTimeoutError, CommAbortedError)):
            await comm.all_reduce(torch.ones(3), timeout=0.3)
        give_up_late_ones(place, 0, 1)
        new = await comm.reconfigure(timeout=LONG)
        place.tell(f"formed {place.rank}")
        await works(new)
        await place.all_told("out", 2)
        await new.aclose()
        return new.name
    await place.all_told("formed", 0, 1)
    with pytest.raises(CommAbortedError) as caught:
        await comm.all_reduce(torch.ones(3))
    with pytest.raises(CommAbortedError, match="excluded") as caught:
        await comm.reconfigure()
    place.tell("out 2")
    await comm.aclose()
    return str(caught.value)


@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_rank_that_reconfigures_too_late_is_excluded(ranks: Run, transport: str) -> None:
    first, second, text = ranks(3, leave_one_out)
    assert first == second == "world@2"
    assert "ranks [0, 1] go on without it" in text


async def stop_one(place: Rank) -> Any:
    comm = await place.open(hints=BEAT)
    await comm.barrier()
    (place.folder / f"pid {place.rank}").write_text(str(os.getpid()))
    place.tell(f"ready {place.rank}")
    await place.all_told("ready", 0, 1, 2)
    if place.rank == 2:
        return await be_stopped(place, comm)
    waiting = comm.recv(torch.zeros(1), 1 - place.rank, 5)  # This sender lives.
    if place.rank == 0:
        os.kill(int((place.folder / "pid 2").read_text()), signal.SIGSTOP)
    with pytest.raises(PeerDiedError, match=r"rank 2 has died or was cut off: no sign of life for 2 s") as caught:
        await waiting
    new = await comm.reconfigure()
    mine = empty(1000)
    work = new.recv(mine, 1 - place.rank, 9)
    await works(new)
    if place.rank == 0:
        os.kill(int((place.folder / "pid 2").read_text()), signal.SIGCONT)
    await place.all_told("back", 2)
    await works(new)
    await new.send(numbers(1000, place.rank), 1 - place.rank, 9)
    assert torch.equal(await work, numbers(1000, 1 - place.rank))
    await new.aclose()
    return caught.value.peer


async def be_stopped(place: Rank, comm: Communicator) -> str:
    """Send all the time what no rank is to receive."""
    error: CommError | None = None
    while error is None:
        try:
            for rank in (0, 1):
                comm.send(torch.full((1000,), -1, dtype=torch.int64), rank, 9)
            await asyncio.sleep(0.01)
        except CommAbortedError as caught:
            error = caught
    # The first reason may be a broken connection, if UCX comes to that before the others' last words are read.
    with pytest.raises(CommAbortedError, match="this rank is excluded") as out:
        await comm.reconfigure()
    place.tell("back 2")
    await comm.aclose()
    return str(out.value)


@pytest.mark.fault(11, 12, transport="ucx")
def test_stopped_rank_is_excluded(ranks: Run) -> None:
    first, second, text = ranks(3, stop_one)
    assert first == second == 2
    assert "this rank is excluded" in text


# ---------------------------------------------------------------------------------------------- those that only seem so


async def block(place: Rank) -> None:
    comm = await place.open(hints={"heartbeat": 1.0})
    await comm.barrier()
    if place.rank == 0:
        await asyncio.create_task(be_reported())
    await comm.all_reduce(torch.ones(3))
    await comm.aclose()


async def be_reported() -> None:
    """Block the loop: the debug mode of asyncio names the coroutine after a slow turn."""
    loop, said = asyncio.get_running_loop(), logging.handlers.BufferingHandler(99)
    logging.getLogger("asyncio").addHandler(said)
    loop.set_debug(True)
    await asyncio.sleep(0)
    time.sleep(3)  # noqa: ASYNC251 - The test blocks the loop on purpose.
    await asyncio.sleep(0)
    loop.set_debug(False)
    texts = [record.getMessage() for record in said.buffer]
    turns = [float(it[1]) for text in texts if (it := re.search(r"be_reported.* took (\S+) seconds", text))]
    assert max(turns) >= 3, texts


@pytest.mark.fault(14)
@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_blocked_loop_is_not_taken_for_dead(ranks: Run, transport: str) -> None:
    ranks(3, block)


async def hold_the_lock(place: Rank) -> None:
    import ctypes

    comm = await place.open(hints={"heartbeat": 1.0})
    await comm.barrier()
    if place.rank == 0:
        ctypes.PyDLL(None).usleep(3_000_000)  # This call holds the GIL.
    await comm.all_reduce(torch.ones(3))
    await comm.aclose()


@pytest.mark.search
@pytest.mark.fault(14, transport="ucx")
def test_long_call_that_holds_the_gil_is_not_taken_for_dead(ranks: Run) -> None:
    ranks(3, hold_the_lock)


async def starve(place: Rank) -> None:
    comm = await place.open(hints=BEAT, timeout=60)
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    burner = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    thread = threading.Thread(target=burn)
    thread.start()
    try:
        ends = time.monotonic() + 6
        while True:
            going = await comm.all_reduce(torch.tensor([float(time.monotonic() < ends)]), aiocomms.ReduceOp.MIN)
            if going.item() == 0:
                break
            await comm.all_reduce(torch.ones(LARGE))
    finally:
        stop.set()
        thread.join()
        burner.kill()
        await burner.wait()
    await comm.aclose()


@pytest.mark.search
@pytest.mark.fault(15)
@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_starved_rank_is_not_taken_for_dead(ranks: Run, transport: str) -> None:
    ranks(8, starve)


# ----------------------------------------------------------------------------------------------------------- newcomers


async def come_as_rank_1(place: Rank, size: int, timeout: float = LONG) -> Communicator:
    """Join as rank 1, in the place of the dead process."""
    return await aiocomms.new_comm(place.transport, store=place.store(), rank=1, size=size, timeout=timeout, join=True)


async def be_replaced(place: Rank) -> Any:
    """Let rank 1 die; process 3 takes its place."""
    if place.rank == 3:
        await place.heard("dead")
        comm = await come_as_rank_1(place, 3)
    else:
        comm = await place.open(ranks=[0, 1, 2])
        await together(place, comm)
        if place.rank == 1:
            place.tell("dead")
            await place.die()
        await lost(comm)
        comm = await comm.reconfigure(size=3)
    await works(comm)
    await comm.aclose()
    return comm.name, comm.rank, comm.size


@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_newcomer_replaces_a_dead_rank(ranks: Run, transport: str) -> None:
    results = ranks(4, be_replaced)
    assert results.pop(1) is KILLED
    assert results == [("world@2", 0, 3), ("world@2", 2, 3), ("world@2", 1, 3)]


async def take_one_in(place: Rank) -> Any:
    """Admit a third rank to the living ranks 0 and 1, while a message is under way."""
    if place.rank == 2:
        await place.heard("formed")
        comm = await aiocomms.new_comm(place.transport, store=place.store(), rank=2, size=3, timeout=LONG, join=True)
    else:
        old = await place.open(ranks=[0, 1])
        peer = 1 - place.rank
        sending, got = old.send(numbers(LARGE, place.rank), peer), empty(LARGE)
        receiving = old.recv(got, peer)
        if place.rank == 0:
            place.tell("formed")
        comm = await old.reconfigure(size=3, timeout=LONG)
        assert torch.equal(await receiving, numbers(LARGE, peer))
        await sending
        assert (old.closed, old.aborted) == (True, False)
    await works(comm)
    await comm.aclose()
    return comm.name, comm.rank, comm.size


@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_healthy_communicator_admits_a_newcomer(ranks: Run, transport: str) -> None:
    assert ranks(3, take_one_in) == [("world@2", rank, 3) for rank in range(3)]


async def be_replaced_again(place: Rank) -> Any:
    """Let processes 1 and 2 die as rank 1, one after the other; rank 0 and process 3 survive."""
    if place.rank < 2:
        comm = await place.open(ranks=[0, 1])
    else:
        await place.heard(f"dead {place.rank - 1}")
        comm = await come_as_rank_1(place, 2)
    await works(comm)
    if place.rank in (1, 2):
        await place.heard(f"worked {place.rank}")
        place.tell(f"dead {place.rank}")
        await place.die()
    if place.rank == 0:
        for process in (1, 2):
            place.tell(f"worked {process}")
            await lost(comm)
            comm = await comm.reconfigure(size=2)
            await works(comm)
    await comm.aclose()
    return comm.name, comm.rank, comm.size


@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_second_newcomer_replaces_a_rank_that_died_again(ranks: Run, transport: str) -> None:
    results = ranks(4, be_replaced_again)
    assert results == [("world@3", 0, 2), KILLED, KILLED, ("world@3", 1, 2)]


async def nobody_joins(place: Rank) -> str:
    if place.rank == 1:
        with pytest.raises(CommTimeoutError, match="no communicator took this process in as rank 1") as late:
            await come_as_rank_1(place, 2, timeout=0.5)
        return str(late.value)
    comm = await aiocomms.new_comm(place.transport, store=dist.HashStore(), rank=0, size=1)
    comm.abort("to grow")
    with pytest.raises(CommTimeoutError, match="no process joined as the free ranks") as caught:
        await comm.reconfigure(size=2, timeout=1)
    await comm.aclose()
    return str(caught.value)


@pytest.mark.parametrize("transport", [NET, "ucx"])
def test_reconfigure_without_a_newcomer_times_out(ranks: Run, transport: str) -> None:
    ranks(2, nobody_joins)


async def form_again(place: Rank) -> tuple[str, int]:
    """Start process 2 anew as rank 1, over a store that keeps the entries of the crashed run."""
    if place.rank == 2:
        await place.heard("dead")
    else:
        comm = await place.open(ranks=[0, 1])
        await together(place, comm)
        if place.rank == 1:
            place.tell("dead")
            await place.die()
        await lost(comm)
        await comm.aclose()
    rank = min(place.rank, 1)
    async with aiocomms.new_comm(place.transport, store=place.store(), rank=rank, size=2) as comm:
        await works(comm)
        return comm.name, comm.rank


@pytest.mark.fault(11, 34)
@pytest.mark.parametrize("transport", [NET, "ucx", "c10d"])
def test_new_run_forms_on_the_store_of_a_crashed_run(ranks: Run, transport: str) -> None:
    assert ranks(3, form_again) == [("world", 0), KILLED, ("world", 1)]


RESTARTED = """
import asyncio, os, sys, torch, aiocomms

async def main():
    comm = await aiocomms.new_comm(sys.argv[1])
    total = await comm.all_reduce(torch.ones(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if comm.rank == 1:
            os._exit(9)
        await comm.barrier()
    print(f"rank {comm.rank} of {comm.size} sums up to {total.item():g}", flush=True)
    await comm.aclose()

asyncio.run(main())
"""


@pytest.mark.fault(11)
@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_torchrun_restart_forms_a_new_communicator(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script), transport]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):  # Ranks may write at the same time, into one line.
        assert result.stdout.count(f"rank {rank} of 2 sums up to 2") == 1, result.stdout


@pytest.fixture
def transport() -> str:
    """Return the transport of the tests that name none."""
    return "ucx"
