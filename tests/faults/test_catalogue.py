"""Every case of the catalogue is accounted for on every transport, by tests that there are or by a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from cases import CASES, TRANSPORTS
from report import ROOT

pytestmark = pytest.mark.deterministic

Counts = Counter[tuple[int, str]]


@pytest.fixture(scope="module")
def tests() -> Counts:
    """Count the tests that pytest finds of each case on each transport."""
    command = [sys.executable, str(Path(__file__).with_name("report.py")), "--list"]
    env = os.environ | {"PYTEST_ADDOPTS": "--assert=plain"}  # No test runs here, and rewriting takes half of the time.
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^case (\d+) on (\w+): ", done.stdout, re.MULTILINE)
    return Counter((int(number), transport) for number, transport in found)


def test_catalogue_numbers_are_unique_and_complete() -> None:
    numbers = [case.number for case in CASES]
    assert numbers == sorted(set(numbers))
    assert numbers[:70] == list(range(1, 71))


def test_every_fault_mark_names_a_case_of_the_catalogue(tests: Counts) -> None:
    assert {number for number, _ in tests} <= {case.number for case in CASES}


def test_every_case_has_tests_or_a_reason_on_every_transport(tests: Counts) -> None:
    wrong = [
        f"case {case.number} on {transport}: {count} tests, and {reason!r} as the reason for none"
        for case, transport in product(CASES, TRANSPORTS)
        for reason, count in [(case.untested(transport), tests[case.number, transport])]
        if bool(reason) == bool(count) or (reason and len(reason) <= 15)
    ]
    assert not wrong, "\n".join(wrong)
