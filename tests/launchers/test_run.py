"""``aiocomms run`` with real processes: deaths, a hang, a rolling replacement, its own end, and no process left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import HANGS

pytestmark = [pytest.mark.real, pytest.mark.search, pytest.mark.timeout(HANGS, method="signal")]

SERVER = """
import asyncio, os, signal, sys, torch, aiocomms
from aiocomms.errors import CommError

async def main():
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    comm = await aiocomms.new_comm("ucx", timeout=60)
    say = lambda what: print(f"{what} {os.getpid()} {comm.name} {os.environ['AIOCOMMS_RESTARTS']}")
    say("formed")
    left = asyncio.ensure_future(leaving.wait())
    while not left.done():
        work = asyncio.ensure_future(comm.recv(torch.zeros(1), 1 - comm.rank, timeout=None))
        await asyncio.wait([work, left], return_when="FIRST_COMPLETED")
        if left.done():
            work.cancel()
        elif isinstance(work.exception(), CommError):
            again = asyncio.ensure_future(comm.reconfigure(size=2, timeout=60))
            await asyncio.wait([again, left], return_when="FIRST_COMPLETED")
            if again.done():
                comm = again.result()
            else:
                again.cancel()  # The other rank has heard of the end before this one.
    await comm.aclose()
    say("left")

asyncio.run(main())
"""

GLOO = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("sum", x.item(), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


class Running:
    """The process of the command, with the output of the command and its ranks."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiocomms", "run", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"AIOCOMMS_HEARTBEAT": "2"} | environment,
        )  # fmt: skip
        self.output = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until the output after the last match matches a pattern."""
        assert self.process.stdout is not None
        while not (found := re.search(pattern, self.output)):
            line = self.process.stdout.readline()
            assert line, f"it has ended without {pattern!r}:\n{self.shown}{self.output}"
            self.output += line
        self.shown += self.output[: found.end()]
        self.output = self.output[found.end() :]
        return found

    shown = ""

    def formed(self, rank: int) -> int:
        """Wait until a process of a rank has formed its communicator; return its PID."""
        return int(self.wait_for(rf"\[{rank}\] formed (\d+)")[1])

    def both(self) -> list[int]:
        """Wait until both ranks have formed their communicators, in any order; return their PIDs."""
        pids = {}
        for _ in range(2):
            found = self.wait_for(r"\[(\d)\] formed (\d+)")
            pids[int(found[1])] = int(found[2])
        return [pids[0], pids[1]]

    def end(self) -> int:
        """Wait for the command's end; return the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[object]:
    """Yield a function that starts the command. At the end, wait until none of its processes is left."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "over_gloo.py").write_text(GLOO)
    jobs: list[Running] = []

    def start(*arguments: str, **environment: str) -> Running:
        jobs.append(Running(tmp_path, *arguments, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        print(job.shown + job.output)
        job.process.kill()
        job.process.wait()
        assert job.process.stdout is not None
        job.process.stdout.read()  # The pipe ends when the last of the processes has.
        job.process.stdout.close()


def readiness(port: int) -> tuple[int, dict[str, object]]:
    """Return the status and the body of /readyz."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def free() -> int:
    """Return a port that no process uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_ranks_that_die_or_hang_are_replaced_then_all_one_by_one_and_then_they_leave(running, tmp_path):
    port = free()
    job = running("-n", "2", "--restart", "on-failure", "--health", str(port), "--log-dir", "logs", "server.py")
    first = job.both()
    status, body = readiness(port)
    assert status == 200
    assert [rank["pid"] for rank in body["ranks"]] == first
    os.kill(first[1], signal.SIGKILL)
    second = job.formed(1)
    os.kill(first[0], signal.SIGSTOP)  # The other rank loses it after 2 s, and then it is killed.
    third = job.formed(0)
    while readiness(port)[0] != 200:
        pass
    job.process.send_signal(signal.SIGHUP)
    job.wait_for(rf"\[1\] left {second}")
    job.formed(1)
    job.wait_for(rf"\[0\] left {third}")
    job.wait_for("all ranks have been replaced")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    assert "2 ranks, 4 restarts; rank 0: exit code 0; rank 1: exit code 0" in job.output
    assert "failed first" not in job.output
    assert f"formed {second} " in (tmp_path / "logs" / "rank1.1.log").read_text()


def test_all_ranks_start_anew_on_a_store_of_their_own_when_none_has_a_communicator_of_ours(running):
    job = running("-n", "2", "--restart", "on-failure", "over_gloo.py")
    assert job.end() == 0
    assert job.output.count("sum 2.0 attempt 1") == 2


def test_failure_without_restarts_ends_all_with_its_exit_code(running, tmp_path):
    (tmp_path / "bad.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(600)\n"
    )
    job = running("-n", "2", "bad.py")
    assert job.end() == 7
    assert "rank 1 failed first: exit code 7" in job.output


def test_program_runs_as_python_runs_it(running, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "app" / "program.py").write_text(
        "import beside, os, sys\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()\n"
        "print(sys.argv, beside.NAME, os.getcwd(), sys.path[0])\n"
        "sys.stdout.write('no end of line')\n"
        "raise ValueError('wrong')\n"
    )
    job = running("app/program.py", "-n", "3")
    assert job.end() == 1
    assert f"[0] ['app/program.py', '-n', '3'] beside {tmp_path} {tmp_path}/app\n" in job.output
    assert "[0] no end of line\n" in job.output
    assert "[0] ValueError: wrong\n" in job.output
    assert "runpy" not in job.output
    assert "forkserver" not in job.output


def test_socket_for_rank_0_waits_for_it_at_descriptor_3(running, tmp_path):
    (tmp_path / "accepts.py").write_text(
        "import os, socket\n"
        "assert os.environ['LISTEN_PID'] == str(os.getpid()) and os.environ['LISTEN_FDS'] == '1'\n"
        "connection, _ = socket.socket(fileno=3).accept()\n"
        "connection.sendall(connection.recv(100))\n"
    )
    port = free()
    job = running("--listen", f"127.0.0.1:{port}", "accepts.py")
    with contextlib.ExitStack() as stack:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                break
        client.sendall(b"hello")  # The rank has not been started yet.
        assert client.recv(100) == b"hello"
    assert job.end() == 0


def test_port_in_use_is_named_and_nothing_is_left(running):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, what in (("--listen", "listen cannot be at"), ("--health", "health cannot be asked at")):
            job = running(option, f"127.0.0.1:{port}", "server.py")
            assert job.end() == 1
            assert job.output == f"aiocomms run: {what} 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("victim", ["supervisor", "fork server"])
def test_ranks_end_when_the_supervisor_or_the_fork_server_is_killed(running, victim):
    job = running("-n", "2", "--grace", "5", "server.py")
    job.both()
    supervisor = psutil.Process(job.process.pid)
    (server,) = supervisor.children()
    ranks = server.children()
    assert len(ranks) == 2
    (supervisor if victim == "supervisor" else server).kill()
    assert psutil.wait_procs([*ranks, server], timeout=HANGS)[1] == []
    if victim == "fork server":
        assert job.end() == 137


def test_ranks_of_two_supervisors_are_one_job(running):
    token = {"AIOCOMMS_TOKEN": "a token of these tests"}
    places = ("-n", "1", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{free()}", "--restart", "on-failure")
    first = running(*places, "server.py", **token)
    second = running(*places, "--node-rank", "1", "server.py", **token)
    first.formed(0)
    os.kill(second.formed(1), signal.SIGKILL)
    second.formed(1)
    assert running(*places, "server.py", **token).end() == 1  # The place is taken.
    assert running(*places, "--node-rank", "1", "server.py", **token).end() == 1
    stranger = running(*places, "--node-rank", "1", "server.py", AIOCOMMS_TOKEN="a token of other tests")
    assert stranger.end() == 1
    assert "check tokens" in stranger.output
    second.process.send_signal(signal.SIGTERM)  # The job ends on both hosts.
    assert first.end() == 0
    assert second.end() == 0
    assert "2 ranks, 1 restart; rank 0: exit code 0; rank 1: exit code 0" in first.output


def test_imports_that_hang_end_by_the_second_signal(running, tmp_path):
    (tmp_path / "hangs.py").write_text("print('hangs', flush=True)\nimport threading\nthreading.Event().wait()\n")
    job = running("-n", "1", "--preload", "hangs", "server.py", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    job.wait_for("hangs")
    for _ in range(2):
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("SIGTERM: all ranks are to end|fork server was killed")
    assert job.end() == 137


CANCELLED = """
import anyio, os, signal
from aiocomms.launching import Job, supervise

async def main():
    with anyio.CancelScope() as scope, anyio.open_signal_receiver(signal.SIGUSR1) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervise, Job(program=["saves.py"]))
            async for _ in signals:
                scope.cancel()

anyio.run(main)
"""
SAVES = """
import os, signal, sys
def save(*_):
    print("saves", flush=True)
    print("has saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
os.kill(int(os.environ["STARTER"]), signal.SIGUSR1)
while True:
    signal.pause()
"""


def test_ranks_print_until_their_end_when_the_supervision_is_cancelled(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    program = CANCELLED.replace("anyio.run", "os.environ['STARTER'] = str(os.getpid())\nanyio.run")
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[0] saves\n[0] has saved\n", "")


def test_ranks_run_when_the_command_has_no_output(tmp_path):
    """Each rank writes to its file, as with an output."""
    (tmp_path / "says.py").write_text("print('here')")
    arguments = shlex.join([sys.executable, "-m", "aiocomms", "run", "-n", "2", "--log-dir", "logs", "says.py"])
    ended = subprocess.run(["sh", "-c", f"exec {arguments} <&- >&- 2>&-"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert ended.returncode == 0
    assert [file.read_text() for file in (tmp_path / "logs").iterdir()] == ["here\n"] * 2


def test_program_of_the_documentation_is_there_again_after_a_death(running, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    program = re.search(r"```python\n(import asyncio\n.*?)```", page, re.DOTALL)
    assert program is not None
    (tmp_path / "server.py").write_text(program[1])
    port = free()
    job = running("-n", "2", "--restart", "on-failure", "--health", str(port), "server.py")
    for _ in range(2):
        job.wait_for(r"rank \d of 'world': 2 ranks are there")
    _, body = readiness(port)
    os.kill(body["ranks"][1]["pid"], signal.SIGKILL)
    for _ in range(2):
        job.wait_for(r"rank \d of 'world@2': 2 ranks are there")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    assert job.output.count("ends in order") == 2
