"""Every case of the catalogue is accounted for on every transport, by tests that there are or by a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from catalogue import CASES, TRANSPORTS, Case
from report import BEGIN, END, arguments, matches

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """All that pytest finds where the catalogue says that tests are."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *arguments(quick=True),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_case_is_there_once() -> None:
    assert [case.number for case in CASES] == list(range(1, 71))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_it_is_accounted_for(case: Case, collected: list[str]) -> None:
    for transport in TRANSPORTS:
        assert case.tests(transport) or case.reasons(transport)
        assert all(len(reason) > 15 for reason in case.reasons(transport))
        for name in case.tests(transport):
            assert matches(collected, name, transport), f"there is no {name} on {transport}"


def test_the_page_names_every_case() -> None:
    rows = PAGE[PAGE.index(BEGIN) : PAGE.index(END)].splitlines()
    for case in CASES:
        found = {row.split(" | ")[2] for row in rows if row.startswith(f"| {case.number} |")}
        assert found == set(TRANSPORTS), case
