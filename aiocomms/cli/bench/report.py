"""The report of ``aiocomms bench``: a table that grows during the measurements, or one JSON document."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

import aiocomms
from aiocomms.cli.bench.arguments import BenchPlan
from aiocomms.cli.bench.machine import HostState, processors

SCHEMA = 1
"""The version of the JSON document, which increases when a field is renamed or removed."""


class Row(msgspec.Struct, frozen=True):
    """The result of one contender, operation and size.

    ``transport`` is a name from ``--transport``. ``by`` is the measured contender: this transport, or a peer that is
    compared with it. ``carrier`` is the transport that executed the operation, for example the transport that
    ``"auto"`` chose; None for a peer. ``wrong`` is None if no result was checked. ``ratio`` is the median time of
    ``by`` divided by the median time of ``transport``. For a peer, ``ratio`` is None if the transport lacks the
    operation. ``states`` has one state of the host for each round of turns.
    """

    op: str
    transport: str
    by: str
    carrier: str | None
    bytes: int
    count: int
    iterations: int
    p50_us: float
    p99_us: float
    mean_us: float
    algbw_gbs: float | None
    busbw_gbs: float | None
    late_p99_us: float
    cpu_us: float
    states: list[HostState]
    wrong: int | None
    ratio: float | None


class Missing(msgspec.Struct, frozen=True):
    """A missing measurement. ``op`` is None if no operation of a contender could be measured."""

    by: str
    op: str | None
    reason: str


class Report(msgspec.Struct):
    """The JSON document. Times are in µs, bandwidths in 10⁹ bytes per second."""

    schema: int
    version: str
    torch: str
    host: str
    processors: int
    ranks: int
    in_process: bool
    idle_late_p99_us: dict[str, float]
    rows: list[Row]
    missing: list[Missing]

    @property
    def wrong(self) -> int:
        """The total number of wrong elements."""
        return sum(row.wrong or 0 for row in self.rows)

    def good(self, transports: Sequence[str]) -> bool:
        """Return whether all elements were right, and no measurement of the given transports is missing."""
        return not self.wrong and not any(missing.by in transports for missing in self.missing)


class Reporter:
    """The reporter of rank 0, which prints the report."""

    def __init__(self, plan: BenchPlan, ranks: int) -> None:
        self.plan = plan
        self.report: Report = Report(
            SCHEMA, aiocomms.__version__, str(torch.__version__), _host(), processors(), ranks,
            plan.in_process, {}, [], [],
        )  # fmt: skip
        self._bar: Any = None
        self._say(
            f"# {ranks} ranks{' in one process' if plan.in_process else ''}, {self.report.processors} processors: "
            f"{self.report.host}\n# float32, sums, root 0; {plan.iterations} iterations, {plan.warmup} before"
        )
        self._said = ("", "")

    def idle(self, transport: str, late: float) -> None:
        """Report the lateness of the event loop while no operation is pending.

        The system's timers cause this lateness.
        """
        self.report.idle_late_p99_us[transport] = round(late * 1e6, 3)
        self._say(f"# {transport}: beside no operation the loop is {late * 1e6:.0f} µs late at p99")

    def row(self, row: Row) -> None:
        """Report a row."""
        self.report.rows.append(row)
        if self._said != (row.op, row.transport):
            self._said = (row.op, row.transport)
            carrier = f" ({row.carrier})" if row.carrier not in (None, row.transport) else ""
            self._say(_HEAD.format(what=f"{row.op} by {row.transport}{carrier}"))
        self._say(_line(row))

    def missing(self, by: str, op: str | None, reason: str) -> None:
        """Report a missing measurement and its reason."""
        self.report.missing.append(Missing(by, op, reason))
        self._say(f"# {by}{f', {op}' if op else ''}: not measured: {reason}")

    def end(self) -> None:
        """Print the JSON document, or the last lines of the table."""
        if self.plan.json:
            print(msgspec.json.format(msgspec.json.encode(self.report), indent=2).decode())
        elif self.report.rows:
            print(f"# wrong: {self.report.wrong if self.plan.check else 'not checked'}")
            looks = [state for row in self.report.rows for state in row.states]
            loops, trips = (sorted(values) for values in zip(*looks, strict=True))
            trip = f", a cache line's round trip {trips[0]:.0f} to {trips[-1]:.0f} ns" if trips[0] else ""
            print(f"# a step of an empty loop took {loops[0]:.1f} to {loops[-1]:.1f} ns{trip}")

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[None]:
        """Show a progress bar until the context ends, if rich is installed and the output is a terminal."""
        with _bar(steps) as self._bar:
            yield
        self._bar = None

    def step(self, what: str) -> None:
        """Advance the progress bar by one step."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=what)

    def _say(self, text: str) -> None:
        if self.plan.json:
            return
        if self._bar is not None and sys.stdout.isatty():
            self._bar.console.out(text, highlight=False)  # The text stands above the bar.
        else:
            print(text, flush=True)


_HEAD = (
    "#\n# {what}\n#       size        count  by                 p50       p99      mean   algbw   busbw  late p99"
    "    CPU/op   #wrong    ratio\n#        (B)   (elements)                    (µs)      (µs)      (µs)  (GB/s)"
    "  (GB/s)      (µs)      (µs)"
)


def _line(row: Row) -> str:
    bandwidths = (f"{'-' if value is None else f'{value:.3f}':>8}" for value in (row.algbw_gbs, row.busbw_gbs))
    ratio = "" if row.carrier is not None or row.ratio is None else f"{row.ratio:.2f}x"
    return (
        f"{row.bytes:>12} {row.count:>12}  {row.by:12} {row.p50_us:>9.1f} {row.p99_us:>9.1f} {row.mean_us:>9.1f}"
        f"{''.join(bandwidths)} {row.late_p99_us:>9.0f} {row.cpu_us:>9.1f} "
        f"{'-' if row.wrong is None else row.wrong:>8} {ratio:>8}"
    ).rstrip()


def _bar(steps: int) -> AbstractContextManager[Any]:
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return contextlib.nullcontext()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("", total=steps)
    return bar


def _host() -> str:
    names = [platform.machine()]
    with contextlib.suppress(OSError):
        rows = Path("/proc/cpuinfo").read_text().splitlines()
        names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")][:1] or names
    return f"{names[0]}, {platform.system()} {platform.release()}"
