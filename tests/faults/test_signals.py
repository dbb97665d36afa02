"""The signals that this library handles: none when it is imported or used, and one if the user asks for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANGS

pytestmark = pytest.mark.real


@pytest.fixture(params=["local", "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


TOUCHED = """
import asyncio, os, signal, sys, torch.distributed
import aiocomms

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests ignore it, and so does a child

def handled():
    masks = (line.split() for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt")))
    return [int(mask, 16) & ~(3 << 31) for _, mask in masks]  # Of 32 and 33 each thread of the C library makes use.

def changed():
    return "changed" if handled() != before[0] or dict(os.environ) != before[1] else "unchanged"

async def main():
    async with aiocomms.new_comm(sys.argv[1], store=torch.distributed.HashStore(), rank=0, size=1) as comm:
        await comm.all_reduce(torch.ones(3))
        return changed()

before = handled(), dict(os.environ)
__import__(f"aiocomms_{sys.argv[1]}")
print(changed(), asyncio.run(main()), changed(), flush=True)
os.kill(os.getpid(), signal.SIGHUP)
print("survived")
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with exactly these variables of this library and of UCX."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOMMS_", "UCX_"))}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=rest | environment, capture_output=True, text=True, timeout=HANGS, check=False)


@pytest.mark.fault(84)
def test_transport_changes_no_signal_handler(transport: str) -> None:
    """The import of a transport and a communicator change no signal handler, and no variable of the environment."""
    done = run(TOUCHED, transport)
    assert done.stdout.split() == ["unchanged"] * 3, done.stderr
    assert done.returncode == -signal.SIGHUP


@pytest.mark.fault(84, transport="ucx")
@pytest.mark.parametrize(("variable", "value"), [("UCX_DEBUG_SIGNO", "SIGUSR2"), ("UCX_HANDLE_ERRORS", "bt")])
def test_ucx_handles_signals_only_as_its_variables_ask(variable: str, value: str) -> None:
    done = run(TOUCHED, "ucx", **{variable: value})
    assert done.stdout.split() == ["changed"] * 3, done.stderr
    assert done.returncode == -signal.SIGHUP  # The variables ask for other signals.


EARLY = """
import os, signal, sys
import aiocomms
assert "torch" not in sys.modules
os.kill(os.getpid(), signal.SIGUSR1)
import asyncio, torch
print("survived", flush=True)

async def main():
    async with aiocomms.new_comm("local"):
        os.kill(os.getpid(), signal.SIGUSR1)

asyncio.run(main())
print(*os.listdir(os.environ["AIOCOMMS_RECORDER_DIR"]))
"""


@pytest.mark.fault(85)
def test_recorder_signal_before_the_first_communicator_is_survived(tmp_path: Path) -> None:
    """The import installs the handler that the variable asks for; there is nothing to record yet."""
    done = run(EARLY, AIOCOMMS_RECORDER_SIGNAL="1", AIOCOMMS_RECORDER_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"survived\nworld\.rank0\.\S+\n", done.stdout), done.stdout


@pytest.mark.fault(85)
@pytest.mark.parametrize("asked", ["", "0"])
def test_unrequested_recorder_signal_ends_the_process(tmp_path: Path, asked: str) -> None:
    done = run(EARLY, AIOCOMMS_RECORDER_SIGNAL=asked, AIOCOMMS_RECORDER_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, ""), done.stderr


ON_ANOTHER_THREAD = """
import os, signal, threading
def load():
    import aiocomms
thread = threading.Thread(target=load)
thread.start()
thread.join()
import asyncio, aiocomms
async def main():
    async with aiocomms.new_comm("local"):
        os.kill(os.getpid(), signal.SIGUSR1)
asyncio.run(main())
"""


@pytest.mark.fault(85)
def test_import_on_another_thread_installs_the_handler_later() -> None:
    """Only the main thread can install a handler: it does so with the first communicator."""
    done = run(ON_ANOTHER_THREAD, AIOCOMMS_RECORDER_SIGNAL="1", AIOCOMMS_RECORDER_DIR="")
    assert (done.returncode, done.stderr) == (0, "")


BEFORE = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("the program's own"))
import aiocomms
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.fault(85)
def test_recorder_signal_runs_the_programs_own_handler_too() -> None:
    done = run(BEFORE, AIOCOMMS_RECORDER_SIGNAL="1")
    assert (done.returncode, done.stdout) == (0, "the program's own\n"), done.stderr
