"""``make faults``: run every test that the catalogue names, and write the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from catalogue import CASES, TRANSPORTS, Case  # noqa: E402 - found by the path above

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by make faults -->", "<!-- end -->"
SUITE = "aiocomms/testing/conformance"


def path(name: str) -> str:
    """A test's name as pytest has it."""
    return name.replace("conformance::", f"{SUITE}/")


def arguments(quick: bool) -> list[str]:
    """Of pytest, to run or to find all that is named."""
    named = {path(name) for case in CASES for t in TRANSPORTS for name in case.tests(t)}
    where = sorted({name.partition("::")[0] for name in named} if quick else named)
    return [*where, *(f"--transport={name}" for name in TRANSPORTS), *(["--loops=asyncio"] if quick else [])]


def matches(ids: Iterable[str], name: str, transport: str) -> list[str]:
    """The tests of a name that run on a transport: where the transport is a parameter, those that have it."""
    found = [it for it in ids if it.partition("[")[0] == path(name)]
    apart = {it: set(re.findall("|".join(TRANSPORTS), it.partition("[")[2])) for it in found}
    return [it for it, names in apart.items() if transport in names or not any(apart.values())]


class Results:
    """What became of each test, and how soon the fault was noticed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.notices: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if report.when == "call" or outcome != "passed":
            self.outcomes[report.nodeid] = outcome
            self.reasons.pop(report.nodeid, None)
            if outcome == "xfailed":
                self.reasons[report.nodeid] = report.wasxfail
            elif outcome == "skipped" and isinstance(report.longrepr, tuple):
                self.reasons[report.nodeid] = report.longrepr[2]
        if report.when == "call":
            self.notices[report.nodeid] = [value for key, value in report.user_properties if key == "notice"]

    def load(self) -> None:
        """Go on from what an earlier run found."""
        if FOUND.exists():
            found = json.loads(FOUND.read_text())
            self.outcomes, self.reasons = found["outcomes"], found["reasons"]
            self.notices.update(found["notices"])

    def row(self, case: Case, transport: str) -> str:
        named, reasons = case.tests(transport), case.reasons(transport)
        cells = [str(case.number), case.what, transport]
        if not named:
            return f"| {' | '.join([*cells, 'no test: ' + '; '.join(reasons), ''])} |"
        ids = [it for name in named for it in matches(self.outcomes, name, transport)]
        counts = [f"{n} {kind}" for kind in ("passed", "failed", "xfailed", "skipped") if (n := self.count(ids, kind))]
        why = [*reasons, *{self.reasons[it] for it in ids if it in self.reasons}]
        noticed = [value for it in ids for value in self.notices[it]]
        times = f"{statistics.median(noticed):.2f} / {max(noticed):.2f} s" if noticed else ""
        return (
            f"| {' | '.join([*cells, ', '.join(counts or ['not run']) + ''.join(f' ({it})' for it in why), times])} |"
        )

    def count(self, ids: Iterable[str], outcome: str) -> int:
        return sum(self.outcomes[it] == outcome for it in ids)

    def write(self) -> None:
        rows = [self.row(case, transport) for case in CASES for transport in TRANSPORTS]
        head = "| case | what | transport | outcome | noticed after: median / worst |\n|---|---|---|---|---|\n"
        table = f"{BEGIN}\n\n{head}" + "\n".join(rows) + f"\n\n{END}"
        page = PAGE.read_text()
        FOUND.parent.mkdir(exist_ok=True)
        found = {"outcomes": self.outcomes, "reasons": self.reasons, "notices": self.notices}
        FOUND.write_text(json.dumps(found))
        PAGE.write_text(page[: page.index(BEGIN)] + table + page[page.index(END) + len(END) :])


def main() -> int:
    """Run all, or what pytest's arguments select and add it to what was found before; write the table in any case."""
    os.environ.setdefault("AIOCOMMS_FAULTS", "full")
    results = Results()
    if len(sys.argv) > 1:
        results.load()
    code = pytest.main([*arguments(quick=False), "--loops=asyncio", *sys.argv[1:]], plugins=[results])
    results.write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
