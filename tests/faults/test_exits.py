"""The end of a process: in any order, sent messages arrive, no rank is called dead, and nothing is printed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import HANGS

pytestmark = [pytest.mark.real, pytest.mark.search]


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return a transport between processes."""
    return request.param


def run(program: str, *arguments: object, quiet: bool = False, ranks: int = 2) -> list[tuple[int, str, str]]:
    """Run a program once for each rank, whose number is the last argument.

    :param quiet: show no warnings but those that Python shows by itself.
    :returns: the status and the output of each rank.
    """
    command = [
        sys.executable,
        "-W",
        "ignore::ResourceWarning" if quiet else "always::ResourceWarning",
        "-c",
        program,
        *map(str, arguments),
    ]
    environment = os.environ | {"AIOCOMMS_HEARTBEAT": "0"}
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=-1, stderr=-1, text=True)
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=HANGS) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(ended: Sequence[tuple[int, str, str]], said: Sequence[str]) -> None:
    """Check that all ranks have ended with status 0, and have printed exactly these texts."""
    assert [(status, out, err) for status, out, err in ended] == [(0, text, "") for text in said]


LATE = """
import atexit, asyncio, sys, threading
transport, folder, order, rank = *sys.argv[1:4], int(sys.argv[4])

def stop():
    asyncio.run_coroutine_threadsafe(finish(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

if order == "before":
    atexit.register(stop)  # Python calls it after all that is registered later

import torch, aiocomms
if order == "after":
    atexit.register(stop)

async def start():
    global comm
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    comm = await aiocomms.new_comm(transport, store=store, rank=rank, size=2)
    if order == "at last":
        atexit.register(stop)
    if rank:
        await comm.send(torch.tensor([1.0]), 0)
        sent.append(comm.send(torch.ones(100_000), 0))  # nobody receives it yet

async def finish():
    if rank:
        await comm.send(torch.tensor([3.0]), 0)
        await sent[0]
    else:
        got = [await comm.recv(torch.zeros(size), 1) for size in (1, 100_000, 1)]
        print([tensor.sum().item() for tensor in got])
        try:
            await comm.recv(torch.zeros(1), 1)
        except aiocomms.CommError as error:
            print(type(error).__name__)
    await comm.aclose()

sent = []
loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever, daemon=True)
thread.start()
asyncio.run_coroutine_threadsafe(start(), loop).result()
"""


@pytest.mark.fault(81)
@pytest.mark.parametrize("order", ["before", "after", "at last"])
def test_exit_handler_may_communicate_whatever_its_order(tmp_path: Path, transport: str, order: str) -> None:
    """An exit handler sends, receives and closes, also if the program registered it before it imported this library."""
    check(run(LATE, transport, tmp_path, order), ["[1.0, 100000.0, 3.0]\nCommAbortedError\n", ""])


LEFT = """
import asyncio, ctypes, sys, threading
import torch, aiocomms
transport, folder, how, rank = *sys.argv[1:4], int(sys.argv[4])
tensor = torch.ones(100_000)  # once: torch's own calls end the process of a daemon thread that is in one at the end

async def start():
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    comm = await aiocomms.new_comm(transport, store=store, rank=rank, size=2)
    await comm.all_reduce(tensor)
    return comm

async def pour():
    try:
        while True:
            await comm.all_reduce(tensor)
    except aiocomms.CommError:  # the other rank has ended, or this one is about to
        pass

if how == "held by C":
    async def main():
        async with await start() as comm:
            await comm.barrier()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    asyncio.run(main())
else:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    comm = asyncio.run_coroutine_threadsafe(start(), loop).result()
    if how == "busy":
        asyncio.run_coroutine_threadsafe(pour(), loop)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result()
"""


STARTING = """
import asyncio, threading
import torch, aiocomms

async def start():
    try:
        while True:
            comm = await aiocomms.new_comm("ucx", store=torch.distributed.HashStore(), rank=0, size=1)
            started.set()
            await comm.aclose()
    except aiocomms.CommError:  # Python is ending
        pass

started = threading.Event()
threading.Thread(target=asyncio.run, args=[start()], daemon=True).start()
started.wait()
"""


@pytest.mark.fault(83, transport="ucx")
def test_interpreter_exit_with_a_daemon_thread_in_the_engine_is_silent() -> None:
    """UCX takes long to start: most of these processes end amid its start."""
    for _ in range(5):
        check(run(STARTING, quiet=True, ranks=2), ["", ""])


@pytest.mark.fault(83)
@pytest.mark.parametrize("how", ["held by C", "idle", "busy"])
def test_interpreter_exit_with_open_or_unfreed_communicators_is_silent(
    tmp_path: Path, transport: str, how: str
) -> None:
    """A communicator is open on a daemon thread's loop, or closed and never freed: the process exits with no output."""
    if (transport, how) == ("c10d", "busy"):
        pytest.skip("gloo may end a process that stops amid a collective: see what is known to fail")
    check(run(LEFT, transport, tmp_path, how, quiet=True), ["", ""])


AT_FAULT = """
import asyncio, os, sys, time
import torch, aiocomms

async def main():
    async with aiocomms.new_comm(sys.argv[1]) as comm:
        await comm.barrier()
        if comm.rank == 1:
            raise ValueError("what rank 1 stumbles over")
        await comm.all_reduce(torch.ones(1))

try:
    asyncio.run(main())
finally:
    if os.environ["RANK"] == "1":
        time.sleep(0.5)  # it still has something to close
"""


@pytest.mark.fault(126)
def test_torchrun_names_the_failed_rank_as_root_cause(tmp_path: Path, transport: str) -> None:
    """torchrun names the rank that failed, though another rank has heard of the failure and would exit earlier."""
    script = tmp_path / "at_fault.py"
    script.write_text(AT_FAULT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    before, _, cause = ended.stderr.partition("Root Cause")
    assert re.search(r"rank +: 1 .*exitcode +: 1 .*ValueError: what rank 1 stumbles over", cause, re.DOTALL), (
        ended.stderr
    )
    assert "aborted by rank 1: ValueError: what rank 1 stumbles over" in before.rpartition("Failures:")[2]


FAILS_FIRST = """
import asyncio, os, sys
port, rank = sys.argv[1:]
os.environ.update(RANK=rank, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
import aiocomms
from aiocomms.bootstrap.stores import connect_store

async def main():
    await aiocomms.new_comm("c10d")

if rank == "1":
    there = connect_store("127.0.0.1", int(port), 1, 3, agent_store=False, timeout=60)  # so that there is a store
    raise ValueError("what rank 1 stumbles over")
asyncio.run(main())
"""


@pytest.mark.fault(122)
def test_rank_that_waits_to_form_hears_why_another_failed() -> None:
    """The ranks have 600 s to meet, and this test has fewer: they must hear of the failure before."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ended = run(FAILS_FIRST, port, ranks=3)
    assert [status for status, _, _ in ended] == [1, 1, 1]
    assert "ValueError: what rank 1 stumbles over" in ended[1][2]
    for _, _, printed in (ended[0], ended[2]):
        assert "rank 1 failed before it joined: ValueError: what rank 1 stumbles over" in printed
