"""Every case of the catalogue is accounted for on every transport, by tests that there are or by a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cases import CASES, TRANSPORTS, Case
from report import PAGE, ROOT

Counts = Counter[tuple[int, str]]


@pytest.fixture(scope="module")
def tests() -> Counts:
    """How many tests pytest finds of each case on each transport."""
    command = [sys.executable, str(Path(__file__).with_name("report.py")), "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^case (\d+) on (\w+): ", done.stdout, re.MULTILINE)
    return Counter((int(number), transport) for number, transport in found)


def test_every_case_is_there_once() -> None:
    numbers = [case.number for case in CASES]
    assert numbers == sorted(set(numbers))
    assert numbers[:70] == list(range(1, 71))


def test_no_test_shows_a_case_that_there_is_not(tests: Counts) -> None:
    assert {number for number, _ in tests} <= {case.number for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_is_accounted_for(case: Case, transport: str, tests: Counts) -> None:
    if reason := case.untested(transport):
        assert len(reason) > 15
        assert not tests[case.number, transport], "there are tests after all"
    else:
        assert tests[case.number, transport], "there is no test, and no reason"


def test_the_page_names_every_case() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (\w+) \| .* \| .* \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(str(case.number), transport) for case in CASES for transport in TRANSPORTS]
