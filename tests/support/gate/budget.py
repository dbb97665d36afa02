"""Hold a tier to its budget of CPU seconds and of real tests; print its ten slowest tests.

``tests/budget.toml`` has a table for each tier. Its CPU seconds are those of the run's tests, with all their processes,
on the machine of the budget. ``tests/seconds.json`` has what each long group of tests took there. Half of these CPU
seconds passed in groups that ran at most ``speed`` times as fast in this run: the weighted median. The run's CPU
seconds are scaled by it. So a slow machine, which slows all groups, is no defect, and tests that grow or are added
are seen. Seconds of a clock would not do: on another machine tests that wait take the same, and tests that compute do
not, so that no one factor scales both.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gate.kinds import REAL, SUITE
from gate.schedule import LONG, SECONDS, group_of, seconds_of

BUDGET = Path(__file__).parents[2] / "budget.toml"
LAST = Path(__file__).parents[3] / "build" / "gate" / "seconds.json"
"""The file in which each run of a tier leaves the seconds of its groups."""
_PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which processes that tests have left must end to be counted."""
SLACK = 1.2
SLOWEST = 10
START = "gate-cpu-before-tests"


def pytest_configure(config: pytest.Config) -> None:
    """Have each process measure what its tests take, and the one that hears of all of them add it up."""
    if config.getoption("--tier"):
        config.pluginmanager.register(Meter(), "gate-meter")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Account(config), "gate-account")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, and of the processes that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Meter:
    """Has each report say how many CPU seconds its phase took. This runs where the test does."""

    def __init__(self) -> None:
        self._last = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Have a worker tell what it took before its first test: it depends on the number of workers."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[START] = cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """Begin to count."""
        self._last = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        """Note what the phase took."""
        report, last = (yield), self._last
        self._last = cpu_seconds()
        report.cpu = self._last - last
        return report


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
        self._start = 0.0
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._kinds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test's setup, call or teardown."""
        self._tests[report.nodeid] += report.duration
        self._groups[group_of(report.nodeid)].update(wall=report.duration, cpu=getattr(report, "cpu", 0.0))
        if report.when == "call" and not report.skipped:
            check = " checks of transports" if report.nodeid.startswith(SUITE) else " tests"
            self._kinds[getattr(report, "kind", REAL) + check] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Leave out what a worker took before its first test."""
        self._start += getattr(node, "workeroutput", {}).get(START, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Make a run red that passes, and costs too much."""
        _reap()
        self._cpu = cpu_seconds() - self._start
        then = {name: took["cpu"] for name, took in seconds_of(self._tier).items()}
        self._speed = speed({name: took["cpu"] for name, took in self._groups.items()}, then)
        self._over = list(self._excess())
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        LAST.parent.mkdir(parents=True, exist_ok=True)
        LAST.write_text(json.dumps({"tier": self._tier, "speed": self._speed, "groups": self._groups}))

    def _excess(self) -> Iterator[str]:
        scaled, allowed = self._cpu * self._speed, self._budget["cpu_seconds"]
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
        write(f"tier {self._tier}: {counted}; {wall:.0f} s, {self._cpu:.0f} CPU s at speed {self._speed:.2f}")
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


def speed(now: Mapping[str, float], then: Mapping[str, float]) -> float:
    """Return how many times faster than ``then`` the median CPU second of the groups ran that are in both."""
    both = [name for name in then.keys() & now.keys() if now[name] > 0 and then[name] > 0]
    ratios = sorted((then[name] / now[name], then[name]) for name in both)
    half = sum(seconds for _, seconds in ratios) / 2
    for ratio, seconds in ratios:
        half -= seconds
        if half <= 0:
            return ratio
    return 1.0


def main() -> None:
    """Write what the last run took into ``tests/seconds.json``, its CPU seconds scaled to the machine of the budget."""
    last = json.loads(LAST.read_text())
    groups = {
        name: {"wall": round(took["wall"], 1), "cpu": round(took["cpu"] * last["speed"], 1)}
        for name, took in sorted(last["groups"].items(), key=lambda group: -group[1]["wall"])
        if took["wall"] >= LONG
    }
    tiers = json.loads(SECONDS.read_text()) | {last["tier"]: groups}
    lines = json.dumps(dict(sorted(tiers.items())), indent=1)
    SECONDS.write_text(re.sub(r'\{\n +("wall": \S+)\n +("cpu": \S+)\n +\}', r"{\1 \2}", lines) + "\n")


if __name__ == "__main__":
    main()
