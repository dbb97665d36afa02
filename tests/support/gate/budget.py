"""Hold a tier to its budget of CPU seconds and of real tests; print its ten slowest tests.

``tests/budget.toml`` has a table for each tier. CPU seconds depend on the processor and on its neighbours. So each
worker times a short loop beside every test, and the seconds are scaled by how long that took on the machine of the
budget. The time on the clock is printed and not bounded: a busy machine is no defect.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate.kinds import REAL, SUITE
from gate.schedule import LONG, SECONDS, group_of

BUDGET = Path(__file__).parents[2] / "budget.toml"
LAST = Path(__file__).parents[3] / "build" / "gate" / "seconds.json"
"""Where each run of a tier leaves the seconds of its groups."""
_PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which processes that tests have left must end to be counted."""
SLACK = 1.2
SLOWEST = 10
LOOP = 10_000
"""Additions of the loop that is timed: some 0.3 ms."""


def probe() -> float:
    """Return the CPU seconds that a loop of fixed length takes now."""
    began, total = time.thread_time(), 0
    for number in range(LOOP):
        total += number
    return time.thread_time() - began


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Time the loop beside each test, where the test runs."""
    report = yield
    if call.when == "teardown" and item.config.getoption("--tier"):
        report.probe = probe()
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Add up what the tests take, in the process that hears of all of them."""
    if config.getoption("--tier") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Account(config), "gate-account")


class Account:
    """Adds up what a run costs, and compares it with the budget of its tier."""

    def __init__(self, config: pytest.Config) -> None:
        _adopt()
        self._tier: str = config.getoption("--tier")
        tiers = tomllib.loads(BUDGET.read_text())
        if self._tier not in tiers:
            raise pytest.UsageError(f"--tier={self._tier}: wanted one of {', '.join(tiers)}, as in {BUDGET.name}")
        self._budget = tiers[self._tier]
        self._began = time.monotonic()
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._kinds: Counter[str] = Counter()
        self._probes: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test's setup, call or teardown."""
        self._tests[report.nodeid] += report.duration
        if report.when == "call" and not report.skipped:
            check = " checks of transports" if report.nodeid.startswith(SUITE) else " tests"
            self._kinds[getattr(report, "kind", REAL) + check] += 1
        if hasattr(report, "probe"):
            self._probes.append(report.probe)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Make a run red that passes, and costs too much."""
        _reap()
        used = os.times()
        self._cpu = used.user + used.system + used.children_user + used.children_system
        self._over = list(self._excess())
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        groups: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            groups[group_of(test)] += seconds
        LAST.parent.mkdir(parents=True, exist_ok=True)
        LAST.write_text(json.dumps(groups))

    def _speed(self) -> float:
        """Return how long the loop took on the average, as a multiple of what it took where the budget was made."""
        return sum(self._probes) / len(self._probes) / self._budget["probe_seconds"] if self._probes else 1.0

    def _excess(self) -> Iterator[str]:
        scaled, allowed = self._cpu / self._speed(), self._budget["cpu_seconds"]
        if scaled > SLACK * allowed:
            yield f"{scaled:.0f} CPU seconds, scaled to the machine of the budget; it allows {allowed}, and 20 % more"
        real = self._kinds[f"{REAL} tests"]
        if real > self._budget["real_tests"]:
            yield f"{real} real tests; the budget allows {self._budget['real_tests']}"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what the tier has cost."""
        write, cost = terminalreporter.write_line, sorted(self._tests.items(), key=lambda test: -test[1])
        terminalreporter.section(f"the {SLOWEST} slowest tests of '{self._tier}'")
        for test, seconds in cost[:SLOWEST]:
            write(f"{seconds:7.1f} s  {test}")
        counted = ", ".join(f"{number} {kind}" for kind, number in sorted(self._kinds.items()))
        wall = time.monotonic() - self._began
        write(f"tier {self._tier}: {counted}; {wall:.0f} s, {self._cpu:.0f} CPU s at speed {1 / self._speed():.2f}")
        for over in self._over:
            write(f"OVER BUDGET: tier {self._tier} takes {over}. Make the tests above cheaper, or fewer", red=True)


def _adopt() -> None:
    """Become the parent of processes whose own parent ends: of servers that fork, which workers leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Wait for adopted processes, so that their CPU seconds count."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return


def main() -> None:
    """Write ``tests/seconds.json`` from the last run of a tier."""
    groups = {name: round(seconds, 1) for name, seconds in json.loads(LAST.read_text()).items() if seconds >= LONG}
    SECONDS.write_text(json.dumps(dict(sorted(groups.items(), key=lambda group: -group[1])), indent=1) + "\n")


if __name__ == "__main__":
    main()
