"""Errors and recorder files of real processes when one of them is missing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import PATIENCE, Rank, Run

from aiocomms.cli import main
from aiocomms.core import postmortem
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError

pytestmark = [pytest.mark.real, pytest.mark.search]

HEARD = 2.0
"""The seconds in which a rank that is not busy answers, on however slow a machine."""


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


async def fails(work) -> CommError:
    try:
        await work
    except CommError as error:
        return error
    raise AssertionError(f"{work} came to an end")


async def lose(place: Rank, folder: str, busy: bool) -> str:
    """Return each rank's error: rank 2 misses the third collective, as it waits for a message or blocks its loop."""
    os.environ["AIOCOMMS_RECORDER_DIR"] = folder
    postmortem.PATIENCE, postmortem.LONGER, postmortem.WRITING = HEARD if busy else PATIENCE, PATIENCE, PATIENCE
    async with place.open("tp") as comm:
        for _ in range(2):
            await comm.all_reduce(torch.ones(3))
        work = comm.recv(torch.zeros(1), 1, tag=7) if place.rank == 2 else comm.all_reduce(torch.ones(3), timeout=None)
        place.tell(f"called {place.rank}")
        if place.rank == 0:
            await place.all_told("called", 1, 2)
            while list(comm._core.waiting_for(work)) != [2]:  # noqa: ASYNC110 - no event tells that rank 1's call has come
                await asyncio.sleep(0)
            comm._core.expire(work)  # The watchdog makes this call.
        elif place.rank == 2 and busy:
            place.told("failed 0")
        error = await fails(work)
        assert isinstance(error, CommTimeoutError)
        place.tell(f"failed {place.rank}")
        with pytest.raises(CommAbortedError, match="its deadline passed"):
            await comm.barrier()
        return str(error)


@pytest.mark.fault(16)
def test_timeout_error_names_the_missing_process_and_what_it_is_in(ranks: Run, tmp_path: Path) -> None:
    said = ranks(3, lose, str(tmp_path / "records"), False)
    for message in said:
        assert re.search(
            r"its deadline passed; waiting for rank 2: ranks 0, 1 are in it \(collective 3\), rank 2 has finished "
            r"collective 2 \(all_reduce #1\) and is in recv\(src=1, tag=7\)", message
        ), message  # fmt: skip
    assert len(list((tmp_path / "records").iterdir())) == 3
    for rank, message in enumerate(said):
        (named,) = re.findall(r"\[flight recorder: (.*)\]", message)[-1:]
        assert f"rank{rank}" in named
        assert stat.S_IMODE(Path(named).stat().st_mode) == 0o600


@pytest.mark.fault(14)
def test_timeout_error_says_that_a_busy_rank_does_not_answer(ranks: Run, tmp_path: Path) -> None:
    said = ranks(3, lose, str(tmp_path / "records"), True)
    for message in said[:2]:
        assert re.search(r"ranks 0, 1 are in it \(collective 3\), rank 2 does not answer", message), message


def test_trace_names_the_missing_process_and_what_it_is_in(
    ranks: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time()
    records, output = tmp_path / "records", tmp_path / "trace.json"
    ranks(3, lose, str(records), False)
    assert main(["trace", str(records), "--output", str(output)]) == 1
    said = capsys.readouterr().out
    assert "communicator 'tp', 3 ranks" in said
    assert "no file of rank" not in said
    assert "rank 0 was the first to write, because: all_reduce #2 on 'tp' (rank 0): its deadline passed" in said
    assert (
        "all_reduce: ranks 0, 1 are in it (collective 3), "
        "rank 2 has finished collective 2 (all_reduce #1) and is in recv(src=1, tag=7)\n" in said
    )
    assert re.search(
        r"rank 2 waits for rank 1: recv\(src=1, tag=7\), for \d.* at .*test_recorder_processes.py:\d+", said
    )
    assert "they wait in a circle: rank 1 -> rank 2 -> rank 1" in said
    events = json.loads(output.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"tp: rank {rank}" for rank in range(3)]
    by_rank = {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid, name in names.items()}
    pending = {rank: [e["name"] for e in by_rank[rank] if e["cat"] == "pending"] for rank in by_rank}
    waiting = ["all_reduce (pending)"]
    assert pending == {"tp: rank 0": waiting, "tp: rank 1": waiting, "tp: rank 2": ["recv(src=1, tag=7) (pending)"]}
    for rank in by_rank.values():
        assert [e["name"] for e in rank if e["cat"] == "done"] == ["all_reduce"] * 2
        assert all(e["dur"] >= 0 for e in rank)
    starts = [e["ts"] / 1e6 for rank in by_rank.values() for e in rank]
    assert began - 1 < min(starts) <= max(starts) < time.time() + 1  # on one clock, which is the host's


HUNG = """
import asyncio, os, sys, time, torch, aiocomms
aiocomms.dump_on_signal()
async def waits(comm):
    await comm.recv(torch.zeros(5, dtype=torch.int32), 1, tag=3)
async def main():
    comm = await aiocomms.new_comm("local", store=torch.distributed.HashStore(), rank=0, size=1, name="alone")
    await comm.all_reduce(torch.ones(2))
    from aiocomms.testing import local_world
    async with local_world(2, name="pair") as (left, _):
        asyncio.create_task(waits(left), name="the waiter")
        await asyncio.sleep(0)
        print("blocked", flush=True)
        HANG
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["time.sleep(60)", "while True: pass", "sys.stdin.read()"])
def test_signal_dumps_the_recorder_while_the_loop_is_blocked(how: str, tmp_path: Path) -> None:
    records = tmp_path / "records"
    environment = os.environ | {"AIOCOMMS_RECORDER_DIR": str(records)}
    with subprocess.Popen(
        [sys.executable, "-c", HUNG.replace("HANG", how)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "blocked\n"
            for turn in (1, 2):
                # Python sees a signal that comes just before a system call only after the call.
                wait_for(lambda: how == "while True: pass" or sleeps(process.pid))
                process.send_signal(signal.SIGUSR1)
                wait_for(lambda turn=turn: len(whole(records)) == 3 * turn)
            assert process.poll() is None
        finally:
            process.kill()
    headers = [whole(records)[path][0] for path in sorted(whole(records))]
    assert sorted((h["comm"], h["rank"], h["reason"]) for h in headers) == sorted(
        [("alone", 0, "SIGUSR1"), ("pair", 0, "SIGUSR1"), ("pair", 1, "SIGUSR1")] * 2
    )
    (item,) = next(lines for lines in whole(records).values() if lines[0]["comm"] == "pair" and not lines[0]["rank"])[
        1:
    ]
    assert (item["name"], item["args"], item["state"]) == ("recv", {"src": 1, "tag": 3, "channel": 0}, "pending")
    assert item["task"] == "the waiter"
    assert item["where"] == "<string>:5 in waits"
    assert item["tensors"] == ["tensor: int32 [5]"]


def whole(folder: Path) -> dict[Path, list[dict]]:
    """Return the decoded lines of each complete file."""
    found = {}
    for path in folder.glob("*"):
        text = path.read_text()
        if text.endswith("\n"):
            found[path] = [json.loads(line) for line in text.splitlines()]
    return found


def sleeps(pid: int) -> bool:
    """Return whether the main thread of a process waits in a system call."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def wait_for(condition) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_signal_handler_is_installed_only_when_asked_for() -> None:
    code = """
import asyncio, signal, aiocomms
async def main():
    async with aiocomms.new_comm("local"):
        print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
asyncio.run(main())
"""
    for asked, untouched in (("", "True"), ("0", "True"), ("1", "False")):
        environment = os.environ | {"AIOCOMMS_RECORDER_SIGNAL": asked}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == untouched
