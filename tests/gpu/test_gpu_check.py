"""The runner of `make gpu-check`, with steps that need no GPU: its steps, counts, skips, reports and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import check
from gpu.check import Result, Step
from processes import HANGS, PATIENCE

pytestmark = [pytest.mark.real, pytest.mark.search]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks, whose table it prints, are no part of a distribution

TESTS = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="needs two GPUs")
@pytest.mark.parametrize("n", range(3))
def test_two(n): pass

def test_wrong(): assert WRONG

@pytest.fixture
def broken(): assert not WRONG

def test_broken(broken): pass
"""


def program(name: str, source: str, limit: float = HANGS, **more: object) -> Step:
    return Step(name, [sys.executable, "-c", source], limit, **more)


def suite(folder: Path, name: str, source: str) -> Step:
    """Write a file of tests, and return the step that runs it."""
    file = folder / f"test_{name}.py"
    file.write_text(source)
    options = ["-pno:cacheprovider", f"--rootdir={folder}", "-c/dev/null", "--junitxml={junit}"]
    return Step(name, [sys.executable, "-m", "pytest", str(file), *options], HANGS, tests=True)


def written(out: Path) -> dict[str, Result]:
    return {row["name"]: Result(**row) for row in json.loads((out / "check.json").read_text())}


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [program("one", "print('hello')"), suite(tmp_path, "two", "def test(): pass")]
    assert check.check(steps, tmp_path / "out") == 0
    results = written(tmp_path / "out")
    assert [(r.name, r.status, r.detail) for r in results.values()] == [
        ("one", "passed", ""), ("two", "passed", "1 passed"),
    ]  # fmt: skip
    assert (tmp_path / "out" / "one.log").read_text() == "hello\n"
    assert "nothing failed" in capsys.readouterr().out


def test_a_failure_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    steps = [
        program("one", "raise SystemExit(3)"),
        program("two", "import os; os.abort()"),
        suite(tmp_path, "three", TESTS.replace("WRONG", "False")),
        suite(tmp_path, "four", TESTS.replace("WRONG", "True")),
        program("five", ""),
    ]
    assert check.check(steps, out) == 1
    results = written(out)
    assert [r.status for r in results.values()] == ["failed"] * 4 + ["passed"]
    assert results["one"].detail.startswith("ended with 3; see ")
    assert results["two"].detail.startswith("ended with -6; see ")
    assert results["three"].detail.startswith("2 passed, 1 failed, 3 skipped; ended with 1; see ")
    assert results["four"].detail.startswith("2 passed, 1 failed, 3 skipped; ended with 1; see ")
    assert "failed: one, two, three, four" in capsys.readouterr().out


def test_what_is_skipped_is_said_with_the_reason(tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = [
        program("tool", "raise SystemExit(1)", why_not=lambda: "the tool is not installed"),
        suite(tmp_path, "some", TESTS.split("def test_wrong", maxsplit=1)[0]),
    ]
    assert check.check(steps, out) == 0
    text = (out / "check.md").read_text()
    assert "| the tool is not installed" in text
    assert "* skipped in some: 3 times: needs two GPUs" in text


@pytest.mark.parametrize("source", ["", "import pytest\npytestmark = pytest.mark.skip('no GPU')\ndef test(): pass"])
def test_tests_that_test_nothing_have_failed(tmp_path: Path, source: str) -> None:
    """A machine on which every test is skipped must not count as one on which every test passes."""
    assert check.check([suite(tmp_path, "nothing", source)], tmp_path / "out") == 1


def test_a_step_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "stuck.log"

    class Late(subprocess.Popen[bytes]):
        """A process whose time limit begins once it has printed the PID of its child."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and not log.read_text():
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Late)
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    assert check.check([program("stuck", source, limit=1.0)], tmp_path) == 1
    assert written(tmp_path)["stuck"].detail.startswith("killed after 1 s; see ")
    wait_for_end(int(log.read_text()))


def test_what_a_step_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid)"
    )
    assert check.check([program("messy", source)], tmp_path) == 0
    wait_for_end(int((tmp_path / "messy.log").read_text()))


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, or is a zombie."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives on")


def test_a_figure_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "gpu.md").write_text("old figures")
    assert check.check([program("benchmarks", "raise SystemExit(1)")], tmp_path) == 1
    assert "old figures" not in (tmp_path / "check.md").read_text()
    figures = f"import pathlib; pathlib.Path({str(tmp_path / 'gpu.md')!r}).write_text('new figures')"
    assert check.check([program("benchmarks", figures)], tmp_path) == 0
    assert "new figures" in (tmp_path / "check.md").read_text()


@pytest.mark.parametrize("nccl", [(2, 29, 7), (2, 30, 7)])
def test_the_steps(nccl: tuple[int, ...], tmp_path: Path) -> None:
    """The steps are conformance on 1, 2 and 4 ranks, faults, graphs, arrays, examples, sanitizers and benchmarks."""
    steps = {step.name: step for step in check.all_steps(nccl, tmp_path)}
    assert len(steps) == 6 + 1 + 4 + 2 + 1
    for name, ranks in (("1 rank", 1), ("2 ranks", 2), ("4 ranks", 4)):
        for transport in ("nccl", "ucx"):
            step = steps[f"conformance, {transport}, {name}"]
            where = transport if ranks == 1 else f"{transport}@processes"
            assert {f"--transport={where}", "--device=cuda", f"--ranks={ranks}"} <= set(step.command)
            assert step.tests
    shared = steps["conformance, nccl, 2 ranks"].environment
    assert steps["conformance, nccl, 2 ranks, launcher in Python"].environment == {**shared, "AIOCOMMS_PURE": "1"}
    assert shared["NCCL_MAX_CTAS"] == "1"
    assert shared["NCCL_NVLS_ENABLE"] == "0"
    assert (shared.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1") == (nccl >= (2, 30))
    assert ("own_host" in shared.get("PYTHONPATH", "")) == (nccl < (2, 30))
    assert "NCCL_HOSTID" not in shared  # this value would be the same for all ranks
    assert steps["conformance, nccl, 1 rank"].environment == {}
    for step in steps.values():
        for argument in step.command:
            if argument.startswith("tests/"):
                assert (ROOT / argument).exists()


def test_every_process_is_a_host_of_its_own() -> None:
    """A forked process, such as a rank of the conformance suite, has a host ID of its own too."""
    source = (
        "import os\nprint(os.environ['NCCL_HOSTID'], flush=True)\n"
        "if os.fork() == 0:\n    print(os.environ['NCCL_HOSTID'], flush=True)\nelse:\n    os.wait()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(check.OWN_HOST)}
    hosts = [
        subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    names = [name for host in hosts for name in host.stdout.split()]
    assert len(set(names)) == len(names) == 4


def test_a_sanitizer_that_is_not_there_or_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.no_sanitizer() == "compute-sanitizer is not installed"
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho first line\necho Device not supported\nexit 1\n")
    tool.chmod(0o755)
    assert check.no_sanitizer() == "compute-sanitizer does not work here: Device not supported"
    tool.write_text("#!/bin/sh\nexit 0\n")
    assert check.no_sanitizer() == ""


@pytest.mark.parametrize("command", [["-m", "tests.gpu.check"], ["tests/gpu/look.py"]])
def test_without_a_gpu_it_says_so_and_fails(command: list[str]) -> None:
    if not subprocess.run([sys.executable, "tests/gpu/look.py"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("gpu-check needs an NVIDIA GPU, and ")
    assert done.stdout == ""
