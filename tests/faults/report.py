"""``make faults``: run every test of a case of the fault catalogue, and write build/fault-table.md.

``--list`` prints the tests of each case on each transport instead.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from cases import CASES, TRANSPORTS, Case  # noqa: E402 - found by the path above

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "faults.json"
PAGE = ROOT / "build" / "fault-table.md"
SUITE = ["aiocomms/testing/conformance", "--full", *(f"--transport={name}" for name in TRANSPORTS)]
TESTS = ["-m", "fault", "tests", *SUITE]
"""The arguments of pytest for all tests of the catalogue."""

HEAD = """# The fault table

Each case of the fault catalogue on each transport: how many tests show it and what became of them, or why there is
none, of it or of some part. `docs/reliability.md` says what the tests hold their ranks to. `make faults` writes it.

| case | what | transport | outcome | noticed after: median / worst |
|---|---|---|---|---|
"""


def shown(item: pytest.Item) -> list[tuple[int, str]]:
    """Return the cases that a test shows, and on which transports: see cases.py."""
    parameters = item.callspec.id if hasattr(item, "callspec") else ""
    if "net" in parameters.split("-"):  # a simulation has no transport of the catalogue
        return []
    own = tuple(sorted(set(re.findall("|".join(TRANSPORTS), parameters))))
    pairs = []
    for marker in item.iter_markers("fault"):
        only = marker.kwargs.get("transport")
        if not marker.args or not set(marker.kwargs) <= {"transport"} or only not in (None, *TRANSPORTS):
            raise pytest.UsageError(f"{item.nodeid}: wanted @pytest.mark.fault(number, ..., transport='ucx'): {marker}")
        on = (only,) if only else own or TRANSPORTS
        pairs += [(number, transport) for number in marker.args for transport in on]
    return pairs


class Results:
    """The tests of each case, their outcomes, and the seconds after which each noticed its fault."""

    def __init__(self) -> None:
        self.tests: dict[tuple[int, str], set[str]] = defaultdict(set)
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.notices: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note all tests before pytest deselects some."""
        for item in items:
            for pair in shown(item):
                self.tests[pair].add(item.nodeid)

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
        """Load the results of an earlier run."""
        if FOUND.exists():
            found = json.loads(FOUND.read_text())
            self.outcomes, self.reasons = found["outcomes"], found["reasons"]
            self.notices.update(found["notices"])

    def row(self, case: Case, transport: str) -> str:
        cells = [str(case.number), case.what, transport]
        if untested := case.untested(transport):
            return f"| {' | '.join([*cells, f'no test: {untested}', ''])} |"
        tests = self.tests[case.number, transport] & self.outcomes.keys()
        counts = [
            f"{n} {outcome}"
            for outcome in ("passed", "failed", "xfailed", "skipped")
            if (n := sum(self.outcomes[test] == outcome for test in tests))
        ]
        reasons = {self.reasons[test] for test in tests if test in self.reasons}
        why = "".join(f" ({reason})" for reason in (case.gap(transport), *sorted(reasons)) if reason)
        noticed = [value for test in tests for value in self.notices[test]]
        times = f"{statistics.median(noticed):.2f} / {max(noticed):.2f} s" if noticed else ""
        return f"| {' | '.join([*cells, ', '.join(counts or ['not run']) + why, times])} |"

    def write(self) -> None:
        FOUND.parent.mkdir(exist_ok=True)
        found = {"outcomes": self.outcomes, "reasons": self.reasons, "notices": self.notices}
        FOUND.write_text(json.dumps(found))
        PAGE.write_text(HEAD + "\n".join(self.row(case, on) for case in CASES for on in TRANSPORTS) + "\n")


def listed() -> int:
    """Print a line for each case, transport and test."""
    results = Results()
    code = pytest.main(
        [*TESTS, "--loops=asyncio", "--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[results]
    )
    for (number, transport), tests in sorted(results.tests.items()):
        for test in sorted(tests):
            print(f"case {number} on {transport}: {test}")
    return int(code)


def main() -> int:
    """Run all tests, or add those that pytest's arguments select to earlier results; then write the table."""
    if sys.argv[1:] == ["--list"]:
        return listed()
    os.environ.setdefault("AIOCOMMS_FAULTS", "full")
    results = Results()
    if len(sys.argv) > 1:
        results.load()
    code = pytest.main([*TESTS, "--loops=asyncio", *sys.argv[1:]], plugins=[results])
    results.write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
