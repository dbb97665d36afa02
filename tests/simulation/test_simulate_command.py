"""The command ``aiocomms simulate``, and the trace that it writes of a history that fails."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from aiocomms.cli import main
from aiocomms.cli.trace import run as draw

pytestmark = pytest.mark.deterministic

PROGRAM = """
import torch
import aiocomms
from aiocomms.testing import here

async def right():
    async with aiocomms.new_comm() as comm:
        assert (await comm.all_reduce(torch.ones(1))).item() == comm.size

async def wrong():
    async with aiocomms.new_comm() as comm:
        for _ in range(20):
            await comm.all_reduce(torch.ones(1))

async def silent():
    async with aiocomms.new_comm(timeout=10) as comm:
        await comm.recv(torch.empty(1), (comm.rank + 1) % comm.size, tag=3)

async def again():
    if here().rank == 1 and not here().restarts:
        here().world.kill(1, 1.0)
    async with aiocomms.new_comm() as comm:
        await comm.barrier()
        assert comm.rank == 0

def synchronous():
    pass
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # The command adds it, too.
    (tmp_path / "of_a_user.py").write_text(PROGRAM)
    return "of_a_user.py"


def test_histories_without_an_error_are_counted(program, capsys):
    assert main(["simulate", f"{program}:right", "--ranks", "3", "--seeds", "4"]) == 0
    assert capsys.readouterr().out == "4 histories of 3 ranks without an error\n"


def test_failing_history_is_told_with_a_command_that_repeats_it(program, capsys):
    assert main(["simulate", f"{program}:wrong", "--ranks", "3", "--cuts", "1", "--slow", "2", "--deaths", "1"]) == 1
    told = capsys.readouterr().out
    assert "    await comm.all_reduce(torch.ones(1))" in told
    assert "PeerDiedError: all_reduce #" in told
    assert len(re.findall("^fault: ", told, re.MULTILINE)) == 1
    assert "aiocomms/testing" not in told
    command = shlex.split(told.rpartition("repeat it: ")[2])
    assert command[0] == "aiocomms"
    assert main(command[1:]) == 1
    assert capsys.readouterr().out.partition("has failed:")[2] == told.partition("has failed:")[2]


def test_trace_of_a_failing_history_says_who_waits(program, capsys):
    assert main(["simulate", f"{program}:silent", "--ranks", "3", "--seed", "5", "--trace", "trace"]) == 1
    assert "read it by: aiocomms trace trace" in capsys.readouterr().out
    assert main(["trace", "trace"]) == 1
    told = capsys.readouterr().out
    assert "communicator 'world', 3 ranks" in told
    assert "they waited in a circle, until a deadline passed: rank 0 -> rank 1 -> rank 2 -> rank 0" in told
    assert "no file of rank" not in told


def test_trace_shows_what_has_happened_in_the_ranks_rows(program, tmp_path, capsys):
    assert main(["simulate", f"{program}:wrong", "--ranks", "2", "--cuts", "1", "--trace", "trace"]) == 1
    draw([tmp_path / "trace"], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert rows == {"world: rank 0": 1, "world: rank 1": 2}
    happened = [event for event in events if event["ph"] == "i"]
    assert all(event["tid"] == event["pid"] and event["s"] == "t" for event in happened)
    told = {(event["pid"], event["name"]) for event in happened}
    assert {(1, "starts"), (2, "starts"), (1, "hears Sent of rank 1")} <= told
    assert any("loses its connections with rank" in name for _, name in told)
    operations = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in happened) <= min(event["ts"] for event in operations)
    assert max(event["ts"] + event["dur"] for event in operations) <= max(event["ts"] for event in happened) + 1
    assert {event["pid"] for event in operations} == {1, 2}


def test_trace_shows_a_death_and_a_restart(program, tmp_path, capsys):
    assert main(["simulate", f"{program}:again", "--trace", "trace"]) == 1
    draw([tmp_path / "trace"], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of_one = [event["name"] for event in events if event["ph"] == "i" and event["pid"] == 2]
    assert of_one[:3] == ["starts", "dies", "starts"]


def test_trace_is_never_written_over(program, capsys):
    given = ["simulate", f"{program}:wrong", "--cuts", "1", "--trace", "trace"]
    assert main(given) == 1
    assert main(given) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{}", "x", '{"wall": "1", "rank": 0, "what": "dies"}'])
def test_damaged_trace_is_refused_with_its_line(tmp_path, line, capsys):
    path = tmp_path / "simulation.aiocomms.jsonl"
    path.write_text(f'{{"format": "aiocomms simulation 1", "seed": "7"}}\n{line}\n')
    assert main(["trace", str(tmp_path)]) == 1
    assert f"{path} is no flight recorder: line 2: " in capsys.readouterr().err


MISTAKES = {
    "of_a_user.py": "FILE.py:FUNCTION is 'of_a_user.py', wanted a file of Python, a colon, and a function's name",
    "nothing.py:right": "FILE.py:FUNCTION is 'nothing.py:right', wanted a file of Python",
    "of_a_user.py:missing": "FUNCTION is 'missing', wanted an async function of of_a_user.py: right, wrong, silent",
    "of_a_user.py:synchronous": "FUNCTION is 'synchronous', wanted an async function of of_a_user.py: right",
    "of_a_user.py:right --seeds 0": "seeds is 0, wanted how many as an int of at least 1",
    "of_a_user.py:right --seed x": "seed is 'x', wanted an int, or a text such as '7/0,2'",
    "of_a_user.py:right --seed 7/2 --cuts 1": "seed names fault 2, wanted numbers below 1, as many faults there are",
    "of_a_user.py:right --ranks 0": "ranks is 0, wanted at least 1 rank as an int",
    "of_a_user.py:right --deaths -1": "deaths is -1, wanted a number of faults",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_wrong_argument_is_refused_in_one_sentence(program, given, capsys):
    assert main(["simulate", *given.split()]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"aiocomms simulate: {MISTAKES[given]}")
    assert told.out == ""
