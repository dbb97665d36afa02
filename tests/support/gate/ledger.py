"""The ledger of chance failures: real tests that failed once, and passed twice when they were run again alone.

It is a file of the repository, ``tests/flaky.jsonl``, with a line for each test. Whoever finds out why a test failed
mends the test or the product, and deletes its line in the same commit.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

PATH = Path(__file__).parents[2] / "flaky.jsonl"
MOST, DAYS = 10, 5
"""The most entries there may be, and the most days an entry may live."""
LINES = 60
"""The number of the failure's last lines: what was raised, and the stacks of the ranks."""


class Entry(NamedTuple):
    """A chance failure."""

    test: str
    date: str
    """The day of its first failure, in UTC, such as ``2026-11-27``."""
    count: int
    """The number of runs in which it failed once."""
    seed: str
    load: str
    failure: str


def read() -> list[Entry]:
    """Read the entries."""
    if not PATH.exists():
        return []
    return [Entry(**json.loads(line)) for line in PATH.read_text().splitlines() if line.strip()]


def write(entries: Iterable[Entry]) -> None:
    """Write the entries, sorted by test, so that two branches rarely conflict."""
    PATH.write_text("".join(json.dumps(entry._asdict()) + "\n" for entry in sorted(entries)))


def add(entries: list[Entry], new: Entry) -> list[Entry]:
    """Return the entries with a new one, which counts up the one that its test has, if any."""
    old = next((entry for entry in entries if entry.test == new.test), None)
    if old is not None:
        new = new._replace(date=old.date, count=old.count + 1)
    return [*(entry for entry in entries if entry is not old), new]


def refusal(entries: list[Entry], today: dt.date) -> str:
    """Say what is wrong with the ledger; an empty text if nothing is."""
    late = [e for e in entries if (today - dt.date.fromisoformat(e.date)).days > DAYS]
    if late:
        return (
            f"tests/flaky.jsonl has entries that are older than {DAYS} days: {', '.join(e.test for e in late)}. "
            "Find out whether each is a defect of the test or of the product, mend it, and delete its line"
        )
    if len(entries) > MOST:
        return (
            f"tests/flaky.jsonl has {len(entries)} entries, wanted at most {MOST}. Mend what they have in common "
            "before anything else, and delete their lines"
        )
    return ""


def load() -> str:
    """Describe how busy the machine is: pressure stall information of Linux, or the load average."""
    found = []
    for resource in ("cpu", "io", "memory"):
        try:
            some = Path(f"/proc/pressure/{resource}").read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
        found.append(f"{resource} {some.removeprefix('some ').split(' total')[0]}")
    return "; ".join(found) or f"load average {os.getloadavg()[0]:.2f}"


def last_lines(text: str) -> str:
    """Return what an entry keeps of a failure's text."""
    return "\n".join(text.splitlines()[-LINES:])


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to begin a tier with a ledger that nobody looks after."""
    if not config.getoption("--tier") or hasattr(config, "workerinput"):
        return
    if said := refusal(read(), dt.datetime.now(dt.UTC).date()):
        raise pytest.UsageError(said)
