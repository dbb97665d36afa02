"""The conformance suite as a stranger runs it: what it needs, what it says when a rank hangs, dies or disagrees.

That the transports of this repository pass is tested by the suite itself, which is part of this repository's tests.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import HANGS, SUITE_HANGS

from aiocomms.testing.conformance import processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(2 * SUITE_HANGS)]

SUITE = "aiocomms.testing.conformance"

STRANGER = """
import os, time
from aiocomms import ops
from aiocomms.transport import OP_RESULT, Capabilities
from aiocomms_local import LocalTransport

class Messenger(LocalTransport):
    '''Carries messages and nothing else, so that everything else is expressed in them.'''
    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}), in_process=True)

class Deaf(LocalTransport):
    '''Blocks the loop on the last of several ranks.'''
    def post(self, op, work):
        if self._rank and self._rank == self._matcher.size - 1:
            time.sleep(1000)
        super().post(op, work)

class Alone(LocalTransport):
    '''Each rank is a process, and there is but one; it dies at its first barrier.'''
    capabilities = Capabilities(ops=LocalTransport.capabilities.ops)
    def post(self, op, work):
        if isinstance(op, ops.Barrier):
            os._exit(7)
        if isinstance(op, ops.AllToAll):
            time.sleep(1000)
        super().post(op, work)
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution of transports that nobody here has heard of."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "strangers.py").write_text(STRANGER)
    info = folder / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    classes = ("Messenger", "Deaf", "Alone")
    entries = "".join(f"{name.lower()} = strangers:{name}\n" for name in classes)
    (info / "entry_points.txt").write_text(f"[aiocomms.transports]\n{entries}")
    return folder


def run(stranger: Path, *arguments: str, modules: str = "") -> subprocess.CompletedProcess[str]:
    """Run the suite, or some of its modules, by its package's name, far from this repository; a warning is an error."""
    chosen = [f"{SUITE}.{module}" for module in modules.split()] or [SUITE]
    quick = ["--deadline=100", "--assert=plain", "-pno:cacheprovider", "-pno:hypothesispytest", "-Werror"]
    command = [sys.executable, "-m", "pytest", "--pyargs", *chosen, *quick, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(stranger), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, cwd=stranger, env=environment, capture_output=True, text=True, timeout=SUITE_HANGS, check=False
    )


@pytest.mark.search
def test_transport_that_only_carries_messages_conforms(stranger: Path) -> None:
    done = run(stranger, "--transport=messenger", "--ranks=3", "--loops=asyncio", "--seed=5")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "aiocomms conformance: --seed=5" in done.stdout


@pytest.mark.search
def test_conformance_runs_on_a_mapping_of_transports(stranger: Path) -> None:
    done = run(stranger, "--transport=collectives=local,p2p=local", "--loops=trio", "--ranks=2", modules="test_split")
    assert done.returncode == pytest.ExitCode.OK, done.stdout


@pytest.mark.search
def test_wrong_transport_option_is_a_usage_error(stranger: Path) -> None:
    done = run(stranger, "--transport=nobody", modules="test_idle")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "--transport nobody: it is not installed" in done.stderr
    done = run(stranger, "--transport=local@thread", modules="test_idle")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "--transport local@thread: got '@thread' after the name, wanted '@processes' or nothing" in done.stderr


@pytest.mark.fault(139)
def test_transport_beside_itself_in_processes_runs_again_what_memory_decides(stranger: Path) -> None:
    """Their worlds have names of their own, and processes run again what they can change."""
    options = ["--transport=ucx", "--transport=ucx@processes", "--loops=asyncio", "-rA", "-k", "mapped"]
    done = run(stranger, *options, modules="test_windows")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert set(re.findall(r"PASSED .*::(\w+\[.*\])", done.stdout)) == {
        "test_write_to_a_mapped_window_reaches_its_owner[ucx-asyncio-2]",
        "test_write_to_a_mapped_window_reaches_its_owner[ucx@processes-asyncio-2]",
        "test_mapped_tells_whether_map_remote_tensor_succeeds[ucx-asyncio-1]",
        "test_mapped_tells_whether_map_remote_tensor_succeeds[ucx-asyncio-3]",
    }


@pytest.mark.search
@pytest.mark.parametrize("device", ["meta", "cuda", "cuda:99", "abacus"])
def test_unusable_device_is_a_usage_error(stranger: Path, device: str) -> None:
    """Said once and before anything runs, not by every check."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(stranger, "--transport=local", f"--device={device}", modules="test_idle")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert f"--device {device}: no tensor can be made and read there: " in done.stderr


@pytest.mark.search
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_communicators_are_opened_on_the_given_device(stranger: Path, device: str) -> None:
    """The communicators are opened on it."""
    (stranger / "where.py").write_text(
        "import unittest\n"
        "from aiocomms.testing.conformance import case\n"
        "def skip(self, *rest, init=case.Case.__init__):\n"
        "    init(self, *rest)\n"
        "    raise unittest.SkipTest(f'on {self.comm.device}, as {self.place.device} says')\n"
        "case.Case.__init__ = skip\n"
    )
    options = ["--transport=local", f"--device={device}", "--ranks=2", "--loops=asyncio", "-pwhere", "-rs"]
    done = run(stranger, *options, modules="test_split")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert f"on {device}, as {device} says" in done.stdout


def test_blocked_loop_is_reported_with_its_stack(stranger: Path) -> None:
    """The loop itself is blocked, so all that can be said is where."""
    options = ["--transport=deaf", "--ranks=2", "--loops=asyncio", "--deadline=2", "-x"]
    done = run(stranger, *options, modules="test_split")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "the loop does not come back" in done.stdout
    assert "time.sleep(1000)" in done.stdout


def test_hung_or_dead_process_is_reported_and_replaced(stranger: Path) -> None:
    """Each is reported with what it was doing, and the next check has a new one."""
    options = ["--transport=alone", "--ranks=1", "--loops=trio", "--deadline=5", "-rA", "--full"]
    done = run(stranger, *options, "-k", "split_with_all or large", modules="test_split test_collectives")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    failed = {line.split("::")[1].split("[")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {
        "test_split_with_all_ranks_forms_an_equal_communicator",
        "test_collectives_of_large_tensors_are_right",
    }, done.stdout
    assert "its process ended with 7" in done.stdout
    assert "it does not answer" in done.stdout
    assert re.search(r'strangers.py", line \d+ in post', done.stdout), done.stdout
    assert "PASSED" in done.stdout


HANGING = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "w"))
print("here", flush=True)
time.sleep(1000)
"""


def test_hung_process_gets_time_to_dump_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on when it has been looked for twice."""
    dump, sleep, looks = tmp_path / "dump", time.sleep, list[float]()
    with subprocess.Popen([sys.executable, "-c", HANGING, str(dump)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGSTOP)

        def look(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 2:
                process.send_signal(signal.SIGCONT)
            sleep(seconds)

        monkeypatch.setattr(processes, "STOP", HANGS)
        monkeypatch.setattr(time, "sleep", look)
        member: Any = SimpleNamespace(_process=process, _dump=dump)
        said = processes._Member.stuck(member)
        process.kill()
    assert "line " in said


def test_stopped_check_reports_its_pending_work(stranger: Path) -> None:
    """One rank has passed; the other one waits for ever, and its part of the report says for what."""
    (stranger / "broken.py").write_text(
        "import aiocomms_local.matching as matching\nmatching.SharedMatcher.leave = lambda *_: []\n"
    )
    options = ["--transport=local", "--ranks=2", "--loops=uvloop", "--deadline=3", "-pbroken", "-x"]
    done = run(stranger, *options, "-k", "needs_a_closed_rank", modules="test_closing")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "--- rank 0: passed" in done.stdout
    assert re.search(r"--- rank 1: stopped\n<Work recv #0 on 'other' .*pending>", done.stdout), done.stdout
