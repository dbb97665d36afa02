"""Tables in Markdown, which reads well in a terminal too, and the chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiocomms.cli.bench.machine import HostState

SLOW, FAR = 1.25, 1.35
"""Times the best of the run from which a core counts as slowed down, and caches as far: half of what was seen."""


def kinds(trials: Sequence[Sequence[float]], best: HostState) -> dict[str, int]:
    """Count the turns in each state of the host, of which there are up to four."""
    counts = {"quiet": 0, "slow": 0, "far": 0, "slow and far": 0}
    for loop, trip in trials:
        slow, far = loop > SLOW * best.loop, trip > FAR * best.trip
        counts["slow and far" if slow and far else "slow" if slow else "far" if far else "quiet"] += 1
    return counts


def table(head: list[str], rows: list[list[str]], left: int) -> str:
    """A table whose first ``left`` columns are text and the others numbers, padded."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def duration(us: float | None) -> str:
    """Three digits, and the unit that suits."""
    if us is None:
        return ""
    value, unit = (us, "µs") if us < 1000 else (us / 1e3, "ms")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def figures(results: dict[str, Any]) -> str:
    """Everything that was measured."""
    rows = []
    for row in results["rows"]:
        ours = next((f["median_us"] for f in row["figures"] if f["name"] == row["ours"]), None)
        title = row["title"]
        for f in row["figures"]:
            bandwidth = "" if f["gb_per_s"] is None else f"{f['gb_per_s']:.2f}"
            ratio = "" if ours is None else f"{f['median_us'] / ours:.2f}"
            times = [duration(f.get(key)) for key in ("median_us", "mean_us", "p99_us", "cpu_us")]
            rows.append([title, f["name"], *times, bandwidth, ratio])
            title = ""
    return table(["operation", "by", "median", "mean", "p99", "CPU", "GB/s", "time / ours"], rows, 2)


def number(value: float, unit: str) -> str:
    """A figure or a limit."""
    digits = 3 if unit == "x" and value < 0.1 else 2 if unit in ("x", "ms", "%") and value < 100 else 0
    return f"{value:.{digits}f}{'' if unit == 'x' else ' ' + unit}".strip()


def met(verdict: dict[str, Any]) -> str:
    """Say which limit is reached."""
    if verdict["must"] is not None and verdict["value"] > verdict["must"]:
        return "MISSED"
    if verdict["aim"] is not None:
        return "aim" if verdict["value"] <= verdict["aim"] else "must" if verdict["must"] is not None else "not the aim"
    return "must"


def verdicts(results: dict[str, Any]) -> str:
    """Tabulate the limits to reach, and whether they were reached."""
    rows = []
    for row in results["rows"]:
        title = row["title"]
        for v in row["verdicts"]:
            limits = ["" if v[k] is None else f"<= {number(v[k], v['unit'])}" for k in ("must", "aim")]
            rows.append([title, v["what"], met(v), number(v["value"], v["unit"]), *limits])
            title = ""
    return table(["operation", "what", "reached", "value", "must", "aim"], rows, 3)


def states(results: dict[str, Any]) -> str:
    """Count the turns of each row in each state of the host; an earlier run without probes gives nothing."""
    probed = [(row["title"], row["states"]) for row in results["rows"] if row.get("states")]
    looks = [look for _, of_row in probed for look in of_row]
    if not looks:
        return ""
    best, worst = HostState(*map(min, zip(*looks, strict=True))), HostState(*map(max, zip(*looks, strict=True)))
    rows = [[title, *map(str, kinds(of_row, best).values())] for title, of_row in probed]
    what = (
        f"Turns by the state of the host (a step of a loop took {best.loop:.1f} to {worst.loop:.1f} ns, "
        f"a line's way there and back {best.trip:.0f} to {worst.trip:.0f} ns):"
    )
    return f"{what}\n\n{table(['operation', *kinds([], best)], rows, 1)}"


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    about = "\n".join(f"* {key}: {value}" for key, value in results["where"].items())
    failures = [f"* failed: {text.splitlines()[0]}" for row in results["rows"] for text in row["failures"]]
    parts = [about, figures(results), verdicts(results), states(results), "\n".join(failures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def missed(results: dict[str, Any]) -> int:
    """Count the musts that are not reached."""
    return sum(met(v) == "MISSED" for row in results["rows"] for v in row["verdicts"])


def chart(results: dict[str, Any], path: Path) -> None:
    """Each peer's time as a multiple of ours, one line per race."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    races = [row for row in results["rows"] if any(f["name"] == row["ours"] for f in row["figures"])]
    if not races:
        return
    plot, axes = plt.subplots(figsize=(9, 1.2 + 0.42 * len(races)), layout="constrained")
    for family, marker in (("MPICH", "o"), ("gloo", "s"), ("UCXX", "^"), ("aiocomms", "v"), ("ucx_perftest", "x")):
        xs, ys = [], []
        for y, row in enumerate(races):
            ours = next(f["median_us"] for f in row["figures"] if f["name"] == row["ours"])
            theirs = [f for f in row["figures"] if f["name"].startswith(family) and f["name"] != row["ours"]]
            if theirs:
                xs.append(min(f["median_us"] for f in theirs) / ours)
                ys.append(y)
        if xs:
            axes.plot(xs, ys, marker, label=f"{family} (other ways)" if family == "aiocomms" else family)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(races)), [row["title"] for row in races])
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_xlabel(f"time as a multiple of {races[0]['ours']}'s (right of the line: ours is quicker)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plot.savefig(path, dpi=120)
    plt.close(plot)
