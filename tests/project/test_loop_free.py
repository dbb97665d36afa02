"""Nothing of ours holds the event loop: what opens a communicator, the first call of each family, and its close."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from loop_watch import WAITS, Callbacks, watched
from processes import HANGS, free_port

pytestmark = pytest.mark.deterministic

SCRIPT = Path(__file__).parents[1] / "support" / "loop_rank.py"


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})


def end(process: subprocess.Popen[str]) -> list[str]:
    """Return what may have held the loop of a process."""
    printed, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 0
    held: list[str] = json.loads(printed)
    return held


@pytest.fixture(scope="module")
def held_by_local() -> list[str]:
    return end(start("local"))


def test_ranks_of_one_process_never_block_the_loop(held_by_local: list[str]) -> None:
    assert held_by_local == []


@pytest.mark.search
@pytest.mark.real
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_launched_ranks_never_block_the_loop(transport: str, loop: str) -> None:
    """Run ranks in fresh interpreters, where nothing was loaded before but torch."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(transport, loop, RANK=str(n), LOCAL_RANK=str(n), **place) for n in range(2)]
    assert [end(rank) for rank in ranks] == [[], []]


# -------------------------------------------------------------------------------------- whether that would be noticed


def imports() -> None:
    sys.modules.pop("this_is_not_there", None)
    with pytest.raises(ImportError):
        __import__("this_is_not_there")


def opens(tmp: Path) -> None:
    (tmp / "file").write_text("text")


def loads(tmp: Path) -> None:
    with pytest.raises(OSError, match="none"):
        ctypes.CDLL(str(tmp / "none.so"))


def waits() -> None:
    threading.Event().wait(0)


@pytest.mark.parametrize(
    ("call", "event"),
    [
        (imports, "import"),
        (lambda: opens(Path.cwd()), "open"),
        (lambda: loads(Path.cwd()), "ctypes.dlopen"),
        (lambda: os.listdir(), "os.listdir"),  # noqa: PTH208 - the event is of this
        (lambda: sys.audit("time.sleep", 1), "time.sleep"),  # a deterministic test must not call time.sleep
        (waits, WAITS),
    ],
    ids=["import", "open", "dlopen", "listdir", "sleep", "wait"],
)
def test_watch_reports_a_call_that_may_block(
    call: Any, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with watched() as held:
        call()
    assert event in [each.event for each in held]
    assert any(__file__ in line for each in held for line in each.stack)
    before = len(held)
    call()
    assert len(held) == before, "behind the context nothing is noted"


def test_watch_ignores_calls_that_never_block() -> None:
    thread = threading.Thread(target=waits)
    with watched() as held:
        Path("/proc/self/stat").read_text()  # the kernel's own
        ctypes.CDLL(None)
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
        thread.start()  # whatever another thread waits for
    thread.join()
    assert held == []


def test_long_callback_is_reported_with_its_stack(run: Any) -> None:
    """The limit is below what any callback takes; no bound is an upper one."""

    async def main() -> Callbacks:
        with Callbacks(limit=1e-9) as callbacks:
            import asyncio

            await asyncio.sleep(0)
        return callbacks

    callbacks = run(main)
    assert callbacks.found
    assert callbacks.worst >= max(each.seconds for each in callbacks.found) > 0
