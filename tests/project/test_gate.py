"""The gate: what it runs again, what is red at once, what it keeps, and what a deterministic test must not do."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import budget, ledger, retry, sample, schedule
from gate.clock import SHORT
from processes import HANGS

from aiocomms.errors import CommTimeoutError
from aiocomms.progress import deadlines
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

ENTRY = ledger.Entry("tests/test_x.py::test_y", "2026-11-20", 1, "1", "cpu avg10=0.00", "it came too late")


def days_later(days: int) -> dt.date:
    return dt.date.fromisoformat(ENTRY.date) + dt.timedelta(days=days)


# ------------------------------------------------------------------------------------------------------------- ledger


def test_ledger_keeps_one_entry_for_each_test() -> None:
    once = ledger.add([], ENTRY)
    twice = ledger.add(once, ENTRY._replace(date="2026-11-22", failure="other"))
    assert twice == [ENTRY._replace(count=2, failure="other")]


def test_ledger_is_refused_when_it_is_old_or_long() -> None:
    assert ledger.refusal([ENTRY], days_later(5)) == ""
    assert "tests/test_x.py::test_y" in ledger.refusal([ENTRY], days_later(6))
    many = [ENTRY._replace(test=str(number)) for number in range(11)]
    assert ledger.refusal(many[:10], days_later(0)) == ""
    assert "11 entries, wanted at most 10" in ledger.refusal(many, days_later(0))


# -------------------------------------------------------------------------------------------------------------- clock


def test_short_deadline_passes_by_turns_and_not_by_time(run: Callable[..., None]) -> None:
    async def main() -> None:
        async with local_world(2) as (late, _):
            work = late.recv(torch.zeros(1), 1, timeout=0.9 * SHORT)
            assert deadlines.clock.now() < time.monotonic()  # the clock stands still
            with pytest.raises(CommTimeoutError):
                await work
            assert deadlines.clock.now() > work_began + 0.9 * SHORT

    work_began = time.monotonic()
    run(main)


# -------------------------------------------------------------------------------------------------------------- retry

RANK = """E       AssertionError:
E       rank 1:
E       Traceback (most recent call last):
E         File "test_x.py", line 7, in body
E           {source}
E       {error}
"""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (">       assert got == want\nE       AssertionError: assert b'a' == b'b'", "wrong data"),
        (">       assert torch.equal(got, want)\nE       assert False", "wrong data"),
        ("E   aiocomms.testing.conformance.data.WrongData: element 3 differs", "wrong data"),
        (RANK.format(source="assert torch.equal(await work, want)", error="AssertionError"), "wrong data"),
        ("E       AssertionError: rank 1 ended with -11: None", "a crash"),
        ("worker 'gw0' crashed while running 'tests/test_x.py::test_y'", "a crash"),
        ("E   WARNING: ThreadSanitizer: data race (pid=7)", "a sanitizer's report"),
        ("E       AssertionError: still held: [Counter({'socket:[]': 1})]", "a leak"),
        ("E       AssertionError: ranks [1] hang", "a hang"),
    ],
)
def test_failure_is_never_retried(text: str, what: str) -> None:
    assert retry.never(text) == what


@pytest.mark.parametrize(
    "text",
    [
        ">       assert took < 3\nE       assert 4.2 < 3",
        RANK.format(source="assert torch.equal(await work, want)", error="aiocomms.errors.CommTimeoutError: late"),
        "        want = torch.tensor([1])\n>       assert len(told) == 2\nE       assert 1 == 2",
        "E       AssertionError: nobody told 'ready 1'",
    ],
)
def test_failure_by_chance_may_be_retried(text: str) -> None:
    assert retry.never(text) == ""


# ----------------------------------------------------------------------------------------------------------- schedule


def test_tests_of_a_module_and_of_a_world_stay_together() -> None:
    assert schedule.group_of("tests/unit/test_x.py::test_y[asyncio]") == "tests/unit/test_x.py"
    suite = "aiocomms/testing/conformance/test_collectives.py::test_collectives_of_large_tensors_are_right"
    assert schedule.group_of(f"{suite}[ucx@processes-asyncio-2-broadcast]") == "ucx@processes-asyncio-2"
    assert schedule.group_of(f"{suite}[ucx-trio-3]") == "ucx-trio-3"


# ------------------------------------------------------------------------------------------------------------- budget

THEN = {"tests/a.py": 40.0, "tests/b.py": 30.0, "local-asyncio-2": 20.0, "tests/gone.py": 10.0, "tests/waits.py": 0.0}


def test_speed_is_that_of_the_median_cpu_second() -> None:
    now = {"tests/a.py": 60.0, "tests/b.py": 45.0, "local-asyncio-2": 200.0, "tests/new.py": 500.0}
    assert budget.speed(now, THEN) == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("now", [{}, {"tests/new.py": 3.0}, {"tests/a.py": 0.0}, {"tests/waits.py": 1.0}])
def test_speed_is_1_where_nothing_can_be_compared(now: dict[str, float]) -> None:
    assert budget.speed(now, THEN) == 1.0


# --------------------------------------------------------------------------------------------------------------- tiers


@pytest.mark.parametrize(
    ("marks", "params", "kept"),
    [
        (["deterministic"], {}, True),
        (["deterministic"], {"loop": "asyncio", "transport": "local", "size": 3}, True),
        (["deterministic"], {"loop": "trio"}, False),
        (["deterministic"], {"transport": "ucx"}, False),
        (["deterministic", "slow"], {}, False),
    ],
)
def test_check_runs_quick_tests_on_asyncio_and_local(marks: list[str], params: dict[str, object], kept: bool) -> None:
    assert sample.is_quick(marks, params) == kept


# ------------------------------------------------------------------------------------------------------ planted tests

CONFTEST = """
from pathlib import Path
from gate import budget, ledger
pytest_plugins = [f"gate.{name}" for name in (
    "options", "kinds", "sample", "leaks", "ledger", "retry", "schedule", "budget"
)]
HERE = Path(__file__).parent
ledger.PATH, budget.LAST = HERE / "flaky.jsonl", HERE / "seconds.json"
"""

PLANTED = """
import os, pathlib, subprocess, time
import pytest
HERE = pathlib.Path(__file__).parent

def runs():
    count = len(list(HERE.glob("run*")))
    (HERE / f"run{count}").touch()
    return count

@pytest.mark.real
def test_fails_three_times_of_ten():
    sum(range(3_000_000))
    assert runs() % 10 not in (0, 4, 7), "it came too late"

@pytest.mark.real
def test_gives_a_wrong_byte_three_times_of_ten():
    assert b"byte" == (b"bite" if runs() % 10 in (0, 4, 7) else b"byte")

@pytest.mark.real
def test_fails_again():
    assert runs() < 0

@pytest.mark.deterministic
def test_sleeps():
    time.sleep(0.001)

@pytest.mark.deterministic
def test_hides_that_it_starts_a_process():
    try:
        subprocess.run(["true"])
    except AssertionError:
        pass

@pytest.mark.real
def test_leaks_a_descriptor():
    os.open(__file__, os.O_RDONLY)

@pytest.mark.search
def test_has_no_kind():
    pass
"""


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run planted tests in a tier, with a ledger of its own; return pytest's exit status and output."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nmarkers = search: not here\n")

    def run(*tests: str) -> tuple[int, str]:
        chosen = [f"test_planted.py::{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "--tier=test", *chosen, "-pno:cacheprovider", "-rfE"]
        support = str(Path(__file__).parents[1] / "support")
        env = {**os.environ, "PYTHONPATH": support, "PYTEST_ADDOPTS": ""}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.real
def test_chance_failure_is_recorded_and_passes_the_gate(
    planted: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, output = planted("test_fails_three_times_of_ten")
    assert code == 0, output
    assert "flaky: 1 in this run, 1 in tests/flaky.jsonl" in output
    entry = json.loads((tmp_path / "flaky.jsonl").read_text())
    assert entry["test"] == "test_planted.py::test_fails_three_times_of_ten"
    assert "it came too late" in entry["failure"]
    assert len(list(tmp_path.glob("run*"))) == 1 + retry.TIMES
    assert json.loads((tmp_path / "seconds.json").read_text())["groups"]["test_planted.py"]["cpu"] > 0


DEFECTS = {
    "test_gives_a_wrong_byte_three_times_of_ten": "this is wrong data, which is never a matter of chance",
    "test_leaks_a_descriptor": "this is a leak, which is never a matter of chance",
    "test_fails_again": "FAILED AGAIN test_planted.py::test_fails_again",
    "test_sleeps": "a deterministic test sleeps",
    "test_hides_that_it_starts_a_process": "a deterministic test starts a process",
}
"""The words of the gate for each planted test that has a defect."""


@pytest.mark.real
def test_every_defect_fails_in_the_gate(planted: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = planted(*DEFECTS)
    assert code != 0, output
    for test, said in DEFECTS.items():
        assert said in output
        assert re.search(rf"^(FAILED|ERROR) test_planted\.py::{test}\b", output, re.MULTILINE), output
    assert not (tmp_path / "flaky.jsonl").exists()


@pytest.mark.real
def test_test_without_a_kind_fails_the_gate(planted: Callable[..., tuple[int, str]]) -> None:
    code, output = planted("test_has_no_kind")
    assert code != 0, output
    assert "1 tests have neither the mark 'deterministic' nor 'real'" in output
