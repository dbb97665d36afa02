"""Draws the first page's chart from the figures of docs/benchmarks/cpu.md: ``make chart`` writes docs/why.png."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
OPERATION = "all_reduce 1 MiB"
WAYS = {
    "aiocomms ucx": "aiocomms, awaited",
    "MPICH blocking": "MPICH, the loop stands still",
    "gloo blocking": "gloo, the loop stands still",
    "gloo awaited by executor": "gloo, in a thread of an executor",
    "gloo awaited by future": "gloo, by its future's callback",
    "gloo awaited by polling": "gloo, polled by a task",
}
"""What the page of the benchmark calls each way, and what the chart does."""
FACTORS = {"µs": 1.0, "ms": 1000.0}


def medians() -> dict[str, str]:
    """The median of each way, as the page of the benchmark has it."""
    text = (DOCS / "benchmarks" / "cpu.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    first = next(index for index, row in enumerate(rows) if row[0] == OPERATION)
    last = next(index for index in range(first + 1, len(rows)) if rows[index][0])
    found = {WAYS[way]: median for _, way, median, *_ in rows[first:last] if way in WAYS}
    return dict(sorted(found.items(), key=lambda each: microseconds(each[1])))


def microseconds(time: str) -> float:
    """``"1.57 ms"`` as a number."""
    number, unit = time.split()
    return float(number) * FACTORS[unit]


def when_and_where() -> str:
    """The run's date and machine."""
    text = (DOCS / "benchmarks" / "cpu.md").read_text()
    return ", ".join(re.search(rf"^\* {what}: (.*)$", text, re.MULTILINE)[1] for what in ("machine", "when"))


def described() -> str:
    """The chart in words, which it carries: by them a test knows whether it is that of the page's figures."""
    return "; ".join(f"{name}: {time}" for name, time in medians().items())


def draw(path: Path) -> None:
    """Write the chart."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "aiocomms", "font.size": 11}
    given = medians()
    names, times = list(given), [microseconds(time) for time in given.values()]
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    axes = figure.add_subplot()
    colors = ["#0a7d91" if name.startswith("aiocomms") else "#b8bec6" for name in names]
    axes.barh(names, times, color=colors, height=0.7)
    for row, (time, shown) in enumerate(zip(times, given.values(), strict=True)):
        axes.text(time * 1.08, row, shown, va="center")
    axes.set_xscale("log")
    axes.set_xlim(10, 15_000)
    axes.set_xticks([10, 100, 1000, 10_000], ["10 µs", "100 µs", "1 ms", "10 ms"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.tick_params(left=False, colors="#48566b")
    axes.tick_params(axis="y", colors="#222832")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(
        f"{OPERATION} between two processes of a host: the median time of one", x=0.01, ha="left", fontsize=12
    )
    axes.set_xlabel(f"logarithmic; {when_and_where()}", loc="left", fontsize=9, color="#48566b")
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Description": described()})


if __name__ == "__main__":
    draw(DOCS / "why.png")
