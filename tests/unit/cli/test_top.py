"""``aiocomms top`` on real processes: some hang, some end, and some may not be inspected."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import torch
from processes import PATIENCE, Rank, Run

from aiocomms.cli import main
from aiocomms.cli.top import drawing, looking
from aiocomms.cli.top.looking import Top, TopFrame
from aiocomms.diagnosis.live import PREFIX, Sight, listeners
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

TOP = [sys.executable, "-m", "aiocomms", "top"]
STRANGER = 65534
"""A user that is not root and has no processes."""

WAITS = """
import asyncio, torch
from aiocomms.testing import local_world

async def waits(comm):
    await comm.recv(torch.zeros(5, dtype=torch.int32), 1, tag=3, timeout=None)

async def barrier(comm):
    await comm.barrier()

async def main():
    async with local_world(2, name="pair") as (left, right):
        await asyncio.gather(*[barrier(comm) for comm in (left, right)])
        asyncio.create_task(waits(left), name="the waiter")
        await asyncio.sleep(0)
        print("waits", flush=True)
        HANG

asyncio.run(main())
"""


@pytest.fixture(params=["time.sleep(1000)", "while True: pass", "await asyncio.sleep(1000)"])
def hang(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hung(hang: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process in which a rank waits for a message; its loop hangs, or has nothing to do."""
    code = "import time" + WAITS.replace("HANG", hang)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            yield process
        finally:
            process.kill()


idle = pytest.mark.parametrize("hang", ["await asyncio.sleep(1000)"])


async def waits(comm) -> None:
    await comm.recv(torch.zeros(1), 1, tag=7)


async def reduces(comm) -> None:
    await comm.all_reduce(torch.ones(3))


async def tangle(place: Rank, name: str) -> tuple[int, str]:
    """Let ranks 0 and 1 reduce, and rank 2 wait for rank 1, whose loop hangs; rank 0 runs ``aiocomms top``."""
    async with place.open(name) as comm:
        await comm.all_reduce(torch.ones(3))
        call = waits if place.rank == 2 else reduces
        task = asyncio.create_task(call(comm), name=f"the task of rank {place.rank}")
        await asyncio.sleep(0)
        place.tell(f"waits {place.rank}")
        said = b""
        if place.rank == 0:
            await place.all_told("waits", 1, 2)
            command = [*TOP, "all", "--interval", "0.1"]
            looks = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            said, _ = await looks.communicate()
            assert looks.returncode == 0
            place.tell("seen")
        elif place.rank == 1:
            place.told("seen")  # This call blocks the event loop.
            await comm.send(torch.ones(1), 2, tag=7)
        await task
        if place.rank == 2:
            await reduces(comm)
    return os.getpid(), said.decode()


@pytest.mark.search
@pytest.mark.real
@pytest.mark.parametrize("transport", ["c10d", "ucx"])
def test_top_shows_which_rank_waits_for_which(ranks: Run) -> None:
    name = f"tangle {secrets.token_hex(4)}"
    results = ranks(3, tangle, name)
    said = results[0][1]
    [shown] = [part for part in said.split("\n\n") if f"communicator '{name}', 3 ranks, " in part]
    _title, heading, *rest = shown.strip().splitlines()
    assert " ".join(heading.split()) == "rank process ops/s done failed pending bytes age operation task awaited at"
    rows = [re.split(r"\s{2,}", line.strip()) for line in rest[:3]]
    assert [row[:2] for row in rows] == [[str(rank), str(pid)] for rank, (pid, _) in enumerate(results)]
    assert [row[2:7] for row in rows] == [["0", "1", "0", "1", "12 B"]] * 2 + [["0", "1", "0", "1", "4 B"]]
    for rank, row in enumerate(rows):
        age, *what = row[7:]
        assert 0.1 <= float(age.removesuffix(" s")) < PATIENCE
        call = "waits" if rank == 2 else "reduces"
        place = re.escape(what.pop())
        assert re.search(rf"test_top\\\.py:\d+\\ in\\ {call}$", place), place
        assert what == ["recv(src=1, tag=7)" if rank == 2 else "all_reduce", f"the task of rank {rank}"]
    assert (
        "all_reduce: ranks 0, 1 are in it (collective 2), "
        "rank 2 has finished collective 1 (all_reduce #0) and is in recv(src=1, tag=7)" in shown
    )
    assert re.search(r"rank 2 waits for rank 1: recv\(src=1, tag=7\), for .* in task 'the task of rank 2' at ", shown)
    assert "they wait in a circle: rank 1 -> rank 2 -> rank 1" in shown


@pytest.mark.search
@pytest.mark.real
def test_top_shows_a_process_whose_loop_hangs(hung: subprocess.Popen[str], capsys) -> None:
    assert main(["top", str(hung.pid), "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "communicator 'pair', 2 ranks, local" in said
    assert re.search(
        r"\n +0 +\d+ +0 +1 +0 +1 +20 B +[\d.]+ s +recv\(src=1, tag=3\) +the waiter +<string>:6 in waits\n", said
    )
    assert "rank 0 waits for rank 1: recv(src=1, tag=3), for " in said


@pytest.mark.search
@idle
@pytest.mark.real
def test_top_notes_a_process_that_has_ended(hung: subprocess.Popen[str], capsys) -> None:
    top = Top(hung.pid)
    [group] = top.look().groups
    assert (group.comm, sorted(group.ranks), top.ended()) == ("pair", [0, 1], False)
    hung.kill()
    os.waitid(os.P_PID, hung.pid, os.WEXITED | os.WNOWAIT)  # The process has ended, and is not reaped yet.
    frame = top.look()
    assert (frame.groups, frame.notes) == ([], [f"process {hung.pid} has no communicator open that can be looked at"])
    assert top.ended()
    for _ in range(2):
        assert main(["top", str(hung.pid)]) == 1
        assert capsys.readouterr().err == f"aiocomms top: there is no process {hung.pid}\n"
        hung.wait()


@pytest.mark.search
@idle
@pytest.mark.real
def test_top_refreshes_a_terminal_until_the_process_ends(hung: subprocess.Popen[str]) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    command = [*TOP, str(hung.pid), "--interval", "0.05"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as top:
        os.close(theirs)
        said = b""
        try:
            while said.count(b"the waiter") < 6:  # Each frame shows the task twice.
                said += os.read(ours, 1 << 16)
            hung.kill()
            hung.wait()
            with contextlib.suppress(OSError):  # The other end of the terminal is closed.
                while os.read(ours, 1 << 16):
                    pass
        finally:
            os.close(ours)
            top.terminate()  # The command may still run.
        assert top.wait() == 0
    assert b"\x1b[" in said


@pytest.mark.search
@idle
@pytest.mark.real
def test_top_says_that_a_stopped_process_does_not_answer(hung: subprocess.Popen[str], capsys) -> None:
    hung.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, hung.pid, os.WSTOPPED)
    assert main(["top", str(hung.pid), "--interval", "0.1"]) == 0
    assert capsys.readouterr().out == f"process {hung.pid} does not answer: dead, stopped or busy\n"


@pytest.mark.search
@pytest.mark.real
def test_top_refuses_processes_of_other_users_or_without_a_communicator(capsys) -> None:
    us = os.geteuid()
    with subprocess.Popen(["sleep", "1000"], user=STRANGER if us == 0 else None) as sleeper:
        other, owner = (sleeper.pid, STRANGER) if us == 0 else (1, 0)
        assert main(["top", str(other)]) == 1
        assert capsys.readouterr().err == (
            f"aiocomms top: process {other} is of user {owner}, wanted one of this user's, {us}\n"
        )
        sleeper.kill()
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        assert main(["top", str(sleeper.pid)]) == 1
        said = f"aiocomms top: process {sleeper.pid} has no communicator open that can be looked at\n"
        assert capsys.readouterr().err == said
        sleeper.kill()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["4294967296"], "there is no process 4294967296"),
        (["-1"], "PID|all is '-1', wanted the number of a process, or all"),
        (["world"], "PID|all is 'world', wanted the number of a process, or all"),
        (["all", "--interval", "0"], "--interval is 0.0, wanted 0.05 to 3600 seconds"),
        (["all", "--interval", "nan"], "--interval is nan, wanted 0.05 to 3600 seconds"),
    ],
)
def test_wrong_arguments_of_top_are_refused(arguments: list[str], why: str, capsys) -> None:
    assert main(["top", *arguments]) == 1
    assert capsys.readouterr().err == f"aiocomms top: {why}\n"


def test_top_without_rich_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("aiocomms.cli.top.find_spec", lambda name: None)
    assert main(["top", "all"]) == 1
    assert capsys.readouterr().err == "aiocomms top: it needs rich: pip install 'aiocomms[top]'\n"


def test_top_without_an_output_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell closes the output with ``>&-``."""
    monkeypatch.setattr("sys.stdout", None)
    assert main(["top", "all", "--interval", "0.05"]) == 0


def sights(*comms) -> list[tuple[int, Sight]]:
    return [(7, comm._sight()) for comm in comms]


def test_top_tells_communicators_of_one_name_apart() -> None:
    async def main() -> None:
        async with local_world(2) as (a, b), local_world(2) as (c, d), local_world(1) as [e], local_world(1) as [f]:
            groups = looking._groups(sights(a, d, c, b, e, f))
            found = [{rank: sight.meeting for rank, sight in group.ranks.items()} for group in groups]
        assert sorted(map(len, found)) == [1, 1, 2, 2]
        assert all(len(set(group.values())) == 1 for group in found)

    asyncio.run(main())


def test_top_notes_invisible_ranks_and_lost_communicators() -> None:
    async def main() -> None:
        async with local_world(2) as (left, right):
            [group] = looking._groups(sights(left))
            assert group.waits() == ["1 of its ranks cannot be seen from here: on other hosts, or ended"]
            right.abort("enough")
            await left.lost()
            [group] = looking._groups(sights(left, right))
            assert group.waits() == ["lost: aborted by rank 1: enough"]

    asyncio.run(main())


class Terminal(StringIO):
    """A terminal that is closed after some frames."""

    left = 3

    def isatty(self) -> bool:
        return self.left > 0


def test_top_ends_when_its_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())

    def frames() -> Iterator[TopFrame]:
        for _ in range(9):
            terminal.left -= 1
            yield TopFrame([], [f"{terminal.left} left"], {}, {})

    drawing.watch(frames())
    assert terminal.left == 0
    assert "1 left" in terminal.getvalue()


def test_top_shows_one_frame_on_a_terminal_that_cannot_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(["top", "all", "--interval", "0.05"]) == 0
    assert terminal.getvalue()


def test_top_shows_brackets_in_names(capsys) -> None:
    """Rich takes ``[/b]`` in a plain string for markup, here an invalid one."""

    async def main() -> None:
        async with local_world(2, name="pair [/b]") as world:
            streams = [comm.open_stream(1 - comm.rank, name="tokens [/b] [0]") for comm in world]
            opened = await asyncio.gather(*streams)
            frame = TopFrame(looking._groups(sights(*world)), ["a note [/b]"], {}, defaultdict(lambda: (0.0, 0.0)))
            drawing.show(frame)
            for stream in opened:
                await stream.aclose()

    asyncio.run(main())
    shown = capsys.readouterr().out
    for words in ("communicator 'pair [/b]'", "tokens [/b] [0]", "a note [/b]"):
        assert words in shown


def test_top_rates_count_ops_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with local_world(1) as [comm]:
            top = Top(os.getpid())
            first = await asyncio.to_thread(top.look)
            assert first.rates == {}
            for _ in range(500):
                await comm.all_reduce(torch.ones(1))
            before = next(iter(top._before.values()))
            second = await asyncio.to_thread(top.look)
            after = next(iter(top._before.values()))
            assert after[1] - before[1] == 500
            assert list(second.rates.values()) == [500 / (after[0] - before[0])]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"header": 1}\n\n', "says what makes no sense here: Expected `object`, got `int`"),
        (b"\xff\n\n", "says what makes no sense here: "),
        (b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n\n", "says what makes no sense here: maximum recursion depth"),
        (b'{"header"', None),
        (b"", None),
    ],
)
def test_malformed_answer_of_a_process_is_reported(said: bytes, why: str | None) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(said)
        answer = looking._hear(ours, time.monotonic() + PATIENCE)
    assert answer is None if why is None else answer.startswith(why)


def test_answer_of_another_format_is_named() -> None:
    async def main() -> bytes:
        async with local_world(1) as [comm]:
            sight = comm._sight()
            sight.header.format = "aiocomms recorder 2"
            return msgspec.json.encode(sight)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(asyncio.run(main()) + b"\n\n")
        answer = looking._hear(ours, time.monotonic() + PATIENCE)
    assert answer == "says what makes no sense here: its format is 'aiocomms recorder 2', of rank 0 of 1"


def test_only_listeners_of_this_user_are_found() -> None:
    row = "0000000000000000: 00000002 00000000 00010000 0001 01 4711 "
    names = [
        f"@{PREFIX}/1000/12/ab",
        f"@{PREFIX}/1000/12/aa",
        f"@{PREFIX}/1001/13/ab",
        f"@{PREFIX}/1000/x/ab",
        "/run/x",
        "",
    ]
    table = "Num RefCount Protocol Flags Type St Inode Path\n" + "\n".join(row + name for name in names)
    assert listeners(table, 1000) == {12: [f"\0{PREFIX}/1000/12/aa", f"\0{PREFIX}/1000/12/ab"]}
    assert listeners(Path("/proc/net/unix").read_text(), 4242) == {}
