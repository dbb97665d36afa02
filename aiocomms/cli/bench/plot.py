"""The plot of a report: time and bus bandwidth against the size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from aiocomms.cli.bench.arguments import UNITS
from aiocomms.cli.bench.report import Report, Row

_WIDTH, _HEIGHT = 5.5, 3.6


def draw(report: Report, path: Path) -> None:
    """Draw two panels for each operation, with a line for each contender.

    :raises OSError: the file cannot be written.
    """
    ops = list(dict.fromkeys(row.op for row in report.rows if row.bytes))
    figure = Figure(figsize=(2 * _WIDTH, _HEIGHT * max(1, len(ops))), layout="constrained")
    figure.suptitle(f"{report.ranks} ranks, {report.processors} processors: {report.host}", fontsize="medium")
    panels: Any = figure.subplots(max(1, len(ops)), 2, squeeze=False)
    for op, (time, bandwidth) in zip(ops, panels, strict=False):
        rows = [row for row in report.rows if row.op == op]
        _panel(time, rows, "p50_us", f"{op}: µs, the median, and up to the 99th percentile")
        _panel(bandwidth, rows, "busbw_gbs", f"{op}: bus bandwidth, GB/s")
    figure.savefig(path)


def _panel(axes: Any, rows: Sequence[Row], field: str, title: str) -> None:
    axes.set(title=title, xlabel="bytes", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_bytes))
    axes.grid(visible=True, which="major", alpha=0.3)
    for transport, by in dict.fromkeys((row.transport, row.by) for row in rows):
        mine = [row for row in rows if (row.transport, row.by) == (transport, by)]
        sizes = [row.bytes for row in mine]
        label = by if by == transport else f"{by}, beside {transport}"
        (line,) = axes.plot(sizes, [getattr(row, field) for row in mine], marker="o", markersize=3, label=label)
        if field == "p50_us":
            axes.fill_between(
                sizes, [row.p50_us for row in mine], [row.p99_us for row in mine], color=line.get_color(), alpha=0.15
            )
    axes.legend(fontsize="small")


def _bytes(value: float, _: object) -> str:
    """Format a size as the option ``--minbytes`` accepts it, for example ``4K``."""
    unit = next((unit for unit in ("G", "M", "K") if value >= UNITS[unit]), "")
    return f"{value / UNITS[unit]:.4g}{unit}"
