"""Real tests that fail are run again, alone, each time in a fresh process; a tier asks for that.

A test that fails again is red. One that passes twice goes into the ledger, and the run is green. Some failures are
never a matter of chance, whatever a second run would say: :data:`NEVER`. A deterministic test is never run again.

pytest-rerunfailures and flaky run a test again at once and in the same process, where what has made it fail may still
be there, beside whatever other tests the other workers have; neither keeps a list.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from gate import ledger
from gate.kinds import REAL, SUITE

TIMES = 2
ALONE = "AIOCOMMS_TEST_ALONE"
"""The environment variable of a run that repeats one test."""
DOUBTFUL = "doubtful"

NEVER = {
    "wrong data": r"WrongData|torch\.equal|array_equal|same_bits|assert_close|assert_allclose|Tensor-likes are not"
    r"|\b(?:tensor|array)\(|\bb(?:'|\")|wrong (?:answer|byte|data|number|result)",
    "a crash": r"[Ss]egmentation fault|Fatal Python error|core dumped|SIG(?:SEGV|ABRT|BUS|ILL|FPE)"
    r"|(?:ended with|returncode|exitcode|exited with)\D{0,4}-(?:4|6|7|8|11)\b|terminate called|worker '\w+' crashed",
    "a sanitizer's report": r"(?:Address|Thread|Leak|Memory|UndefinedBehavior)Sanitizer|runtime error: ",
    "a leak": r"still held|left behind|left open|left tasks behind|ResourceWarning|leaked|was never awaited",
    "a hang": r"\bhangs?\b|does not come back|does not answer|Timeout \(>|Timeout >",
}
"""The outcomes that are red at once, with the text by which a failure shows them."""


class Failure(NamedTuple):
    """The first failure of a test that is to be run again."""

    text: str
    load: str


def never(text: str) -> str:
    """Return what a failure's text shows that is never a matter of chance; an empty text if it shows nothing."""
    shown = "\n".join(evidence(text.splitlines()))
    return next((what for what, pattern in NEVER.items() if re.search(pattern, shown)), "")


def evidence(lines: Sequence[str]) -> Iterator[str]:
    """Leave out the source lines of a failure's text, but for those of assertions that failed.

    A frame that waits for ``assert torch.equal(await work, wanted)`` has found no wrong data.
    """
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith(">"):
            if re.match(r"E +(AssertionError|assert)\b", after):
                yield line
        elif re.match(r'E?\s*File ".*", line \d+', before):
            if re.match(r"E?\s*AssertionError\b", after):
                yield line
        elif not line.startswith(" "):
            yield line


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """Make a failure of a real test doubtful, unless it is never a matter of chance. This runs where the test does."""
    report = yield
    if report.failed and item.config.getoption("--tier") and report.kind == REAL and ALONE not in os.environ:
        if why := never(report.longreprtext):
            report.sections.append(("not run again", f"this is {why}, which is never a matter of chance"))
        else:
            report.outcome, report.load = DOUBTFUL, ledger.load()
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show a doubtful test by a question mark."""
    return (DOUBTFUL, "?", "DOUBTFUL") if report.outcome == DOUBTFUL else None


def pytest_configure(config: pytest.Config) -> None:
    """Run again what is doubtful, in the process that hears of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config), "gate-again")


class Again:
    """Collects what is doubtful, and runs it again when everything else has been run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._doubtful: dict[str, Failure] = {}
        self._flaky: list[ledger.Entry] = []
        self._red: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a doubtful test."""
        if report.outcome == DOUBTFUL:
            self._doubtful.setdefault(report.nodeid, Failure(report.longreprtext, report.load))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run each doubtful test again, until it fails or has passed often enough."""
        for test, failure in self._doubtful.items():
            output = next((text for _ in range(TIMES) if (text := self._fails(test))), "")
            if output:
                self._red[test] = f"{failure.text}\n--- and again, alone:\n{output}"
            else:
                self._flaky.append(self._entry(test, failure))
        if self._flaky:
            entries = ledger.read()
            for entry in self._flaky:
                entries = ledger.add(entries, entry)
            ledger.write(entries)
        if self._red and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _fails(self, test: str) -> str:
        """Run one test alone, in a fresh process; return its output if it fails, else an empty text."""
        # Its plug-in imports hypothesis at the end of a run that has none of its tests, and trio then warns.
        without = ["cacheprovider", "xdist", *(["hypothesispytest"] if test.startswith(SUITE) else [])]
        options = self._options() if test.startswith(SUITE) else []  # pytest knows them where the suite is named alone
        command = [sys.executable, "-m", "pytest", test, *options, *(f"-pno:{name}" for name in without)]
        done = subprocess.run(
            command, cwd=self._config.rootpath, env={**os.environ, ALONE: "1"}, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        return "" if done.returncode == pytest.ExitCode.OK else done.stdout

    def _options(self) -> list[str]:
        """Return the options of this run that a check of the conformance suite needs as well."""
        wanted = ("--transport=", "--device=", "--deadline=", "--seed=", "--loops=", "--full")
        return [option for option in self._config.invocation_params.args if str(option).startswith(wanted)]

    def _entry(self, test: str, failure: Failure) -> ledger.Entry:
        today = dt.datetime.now(dt.UTC).date().isoformat()
        seed = str(self._config.getoption("--seed", None))
        return ledger.Entry(test, today, 1, seed, failure.load, ledger.last_lines(failure.text))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what has become of the doubtful tests, and what the ledger holds, last of all."""
        write = terminalreporter.write_line
        for test, text in self._red.items():
            terminalreporter.section(f"failed again: {test}", red=True)
            write(text)
        if self._config.getoption("--tier"):
            for test in self._red:
                write(f"FAILED AGAIN {test}", red=True)
            for entry in self._flaky:
                write(f"FLAKY {entry.test} (seed {entry.seed}; {entry.load})", yellow=True)
            write(f"flaky: {len(self._flaky)} in this run, {len(ledger.read())} in tests/flaky.jsonl")
