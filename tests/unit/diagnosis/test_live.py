"""The live view of a process: who may look, that it costs nothing until then, and that it leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import anyio.lowlevel
import pytest
import torch
from processes import PATIENCE, no_threads

from aiocomms.diagnosis import live as module
from aiocomms.diagnosis.live import listeners
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

STRANGER = 65534
"""A user that is not root and has no processes."""


def addresses() -> list[str]:
    """Return the addresses at which this process can be inspected."""
    return listeners(Path("/proc/net/unix").read_text(), os.geteuid()).get(os.getpid(), [])


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


async def new_tasks(before: set[str], count: int) -> list[str]:
    """Wait until there are so many new threads; those that opened a world end a moment later."""
    ends = time.monotonic() + PATIENCE
    while len(tasks() - before) != count:
        assert time.monotonic() < ends, f"{tasks() - before}, wanted {count}"
        await anyio.lowlevel.checkpoint()
    return sorted(tasks() - before)


def sockets() -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The listing's own descriptor is closed by now.
            found += str(path.readlink()).startswith("socket")
    return found


def ask(address: str) -> bytes:
    """Return all that a process says. The caller's loop does not run meanwhile."""
    said = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        while more := connection.recv(1 << 16):
            said += more
    return said


def in_child(call: Callable[[], bool]) -> int:
    """Make a call in a forked child; return the child's exit status, which is 0 if the call returns true."""
    child = os.fork()
    if not child:
        os._exit(0 if call() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_listener_exists_while_a_communicator_is_open(run) -> None:
    async def main() -> None:
        before = tasks()
        async with local_world(2):
            [address] = addresses()
            async with local_world(2, name="more"):
                assert addresses() == [address]
                assert ask(address).count(b'"comm":"more"') == 2
            assert ask(address).count(b"\n") == 3  # two, and the end
            await new_tasks(before, 1)
        assert addresses() == []
        with pytest.raises(ConnectionRefusedError):
            ask(address)
        await new_tasks(before, 0)

    run(main)


def test_listener_thread_sleeps_while_no_client_connects() -> None:
    def status(thread: str) -> tuple[str, int]:
        rows = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
        words = [row.split() for row in rows]
        state = next(row[1] for row in words if row[0] == "State:")
        return state, sum(int(row[1]) for row in words if row[0].endswith("ctxt_switches:"))

    async def main() -> None:
        before = tasks()
        async with local_world(1) as [comm]:
            [thread] = await new_tasks(before, 1)
            ask(addresses()[0])  # After an answer the thread has begun.
            seen = ("", -1)
            while seen[0] != "S" or seen != status(thread):  # The thread must sleep again.
                await asyncio.sleep(0)
                seen = status(thread)
            for _ in range(1000):
                await comm.all_reduce(torch.ones(1))
                await asyncio.sleep(0)
            assert status(thread) == seen
            ask(addresses()[0])
            assert status(thread)[1] > seen[1]

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.real
def test_listener_sends_nothing_to_another_user() -> None:
    def strangers_look(address: str) -> bool:
        os.setuid(STRANGER)
        return ask(address) == b""

    async def main() -> None:
        async with local_world(1):
            [address] = addresses()
            assert in_child(lambda: strangers_look(address)) == 0
            assert in_child(lambda: ask(address) != b"") == 0

    asyncio.run(main())


@pytest.mark.real
def test_forked_child_has_a_listener_of_its_own() -> None:
    def child(held: int) -> bool:
        if sockets() >= held or not ask(address):  # the parent answers
            return False
        return asyncio.run(own()) and addresses() == []

    async def own() -> bool:
        async with local_world(1, name="the child's"):
            return len(addresses()) == 1 and b"the child's" in ask(addresses()[0])

    async def main() -> None:
        nonlocal address
        async with local_world(1):
            [address] = addresses()
            held = sockets()
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, lambda: in_child(lambda: child(held))) == 0
            assert ask(address).count(b"\n") == 2

    address = ""
    asyncio.run(main())


def test_listener_is_absent_when_the_recorder_folder_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOMMS_RECORDER_DIR", "")

    async def main() -> None:
        before = tasks()
        async with local_world(2):
            assert addresses() == []
            await new_tasks(before, 0)

    asyncio.run(main())


def test_listener_ignores_the_default_socket_timeout() -> None:
    async def main() -> None:
        async with local_world(1):
            assert module.live._listener.gettimeout() is None

    socket.setdefaulttimeout(0.01)
    try:
        asyncio.run(main())
    finally:
        socket.setdefaulttimeout(None)


def test_client_that_never_reads_does_not_delay_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 10_000.0)  # longer than a test may take

    async def main() -> socket.socket:
        async with local_world(200) as comms:
            for comm in comms:
                comm.recv(torch.zeros(1), 0, tag=1).forget()
            guest = socket.socket(socket.AF_UNIX)
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            guest.connect(addresses()[0])
            assert await asyncio.to_thread(select.select, [guest], [], [], PATIENCE) != ([], [], [])
            return guest

    with asyncio.run(main()) as guest:
        said = b""
        while more := guest.recv(1 << 16):
            said += more
    assert not said.endswith(b"\n\n")  # The answer was cut off.
    assert addresses() == []


def test_communicator_opens_without_a_thread_or_descriptor_for_the_listener(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    caplog.set_level("INFO", "aiocomms")

    async def main() -> None:
        with no_threads():
            world = local_world(1)
            [comm] = await world.__aenter__()
        assert addresses() == []
        assert (await comm.all_reduce(torch.ones(1))).item() == 1
        async with local_world(1):  # The next communicator tries again.
            assert ask(addresses()[0]).count(b"\n") == 3
        assert len(addresses()) == 1
        await world.__aexit__(None, None, None)
        assert addresses() == []

    asyncio.run(main())
    assert "cannot be looked at by `aiocomms top`: can't start new thread" in caplog.text


def test_listener_logs_a_failure_once_and_serves_the_next_client(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    async def main() -> None:
        async with local_world(1) as [comm]:
            with monkeypatch.context() as patch:
                patch.setattr(type(comm), "_sight", lambda self: 1 / 0)
                assert [ask(addresses()[0]) for _ in range(2)] == [b"", b""]
            assert ask(addresses()[0]).endswith(b"\n\n")

    asyncio.run(main())
    assert caplog.text.count("aiocomms top: ZeroDivisionError: division by zero") == 1
