"""Draws the first page's charts from the figures of docs/benchmarks: ``make chart`` writes why.png and why-gpu.png."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
ON_GPU = {
    "bus bandwidth, 2 ranks, all_reduce of 64 MiB / torch's": "all_reduce, 2 ranks / torch",
    "bandwidth, 1 rank, all_gather of 64 MiB / torch's": "all_gather, 1 rank / torch",
    "UCX send/recv of 64 MiB, 2 processes / device-to-device copy": "send and recv, UCX / a copy",
}
"""What the page of the GPU calls each ratio, and what the chart does."""


def rows(page: str) -> list[list[str]]:
    """The rows of a page's tables, as lists of cells."""
    lines = (DOCS / "benchmarks" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def medians() -> dict[str, str]:
    """The median of each way, as the page of the benchmark has it."""
    table = rows("cpu.md")
    first = next(index for index, row in enumerate(table) if row[0] == OPERATION)
    last = next(index for index in range(first + 1, len(table)) if table[index][0])
    found = {WAYS[way]: median for _, way, median, *_ in table[first:last] if way in WAYS}
    return dict(sorted(found.items(), key=lambda each: microseconds(each[1])))


def microseconds(time: str) -> float:
    """``"1.57 ms"`` as a number."""
    number, unit = time.split()
    return float(number) * FACTORS[unit]


def ratios() -> dict[str, str]:
    """The bandwidths on a GPU as parts of others' bandwidths, as the page of the GPU has them."""
    measured = {row[0]: row[2].removesuffix("x") for row in rows("gpu.md") if row[0] in ON_GPU}
    return {shown: measured[name] for name, shown in ON_GPU.items()}


def when_and_where() -> str:
    """The run's date and machine."""
    text = (DOCS / "benchmarks" / "cpu.md").read_text()
    return ", ".join(re.search(rf"^\* {what}: (.*)$", text, re.MULTILINE)[1] for what in ("machine", "when"))


def gpu_when_and_where() -> str:
    """The date and GPU of the page of the GPU."""
    text = (DOCS / "benchmarks" / "gpu.md").read_text()
    gpu, day = re.search(r"one NVIDIA (\w+) .*?\(([\d-]+)\)", text, re.DOTALL).groups()
    return f"{gpu}, {day}, before the native launcher"


def described(given: Mapping[str, str]) -> str:
    """The chart in words, which it carries: by them a test knows whether it is that of the page's figures."""
    return "; ".join(f"{name}: {value}" for name, value in given.items())


def draw(path: Path) -> None:
    """Write the chart of times on a CPU."""
    given = medians()
    lengths = {name: microseconds(time) for name, time in given.items()}
    axes = bars(lengths, given, lambda name: name.startswith("aiocomms"))
    axes.set_xscale("log")
    axes.set_xlim(10, 15_000)
    axes.set_xticks([10, 100, 1000, 10_000], ["10 µs", "100 µs", "1 ms", "10 ms"])
    axes.minorticks_off()
    title = f"{OPERATION} between two processes of a host: the median time of one"
    save(axes, path, title, f"logarithmic; {when_and_where()}", described(given))


def draw_gpu(path: Path) -> None:
    """Write the chart of bandwidths on a GPU."""
    given = ratios()
    axes = bars({name: float(ratio) for name, ratio in given.items()}, given, lambda name: True)
    axes.set_xlim(0, 1.2)
    title = "64 MiB on a GPU: aiocomms' bandwidth / the bandwidth of torch or a copy"
    save(axes, path, title, gpu_when_and_where(), described(given))


def bars(lengths: Mapping[str, float], shown: Mapping[str, str], ours: Callable[[str], bool]) -> Any:
    """Return axes with one bar for each name, and the shown text at the end of each bar."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "aiocomms", "font.size": 11}
    figure = Figure(figsize=(7.6, 1.3 + 0.3 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    colors = ["#0a7d91" if ours(name) else "#b8bec6" for name in shown]
    drawn = axes.barh([*lengths], [*lengths.values()], color=colors, height=0.7)
    axes.bar_label(drawn, [*shown.values()], padding=5)
    axes.invert_yaxis()
    axes.tick_params(left=False, colors="#48566b")
    axes.tick_params(axis="y", colors="#222832")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def save(axes: Any, path: Path, title: str, below: str, text: str) -> None:
    """Write a chart with its title, the line below it, and the chart in words."""
    axes.figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes.set_xlabel(below, loc="left", fontsize=9, color="#48566b")
    axes.figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Description": text})


if __name__ == "__main__":
    draw(DOCS / "why.png")
    draw_gpu(DOCS / "why-gpu.png")
