"""Tables of what was measured, what was to be reached, and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import table

FASTER, SOONER, LATE = 1.3, 0.6, 5.0
"""The limits of the embedding server, against its twin: requests per second, or else p99; and ms of lateness at p99."""
FASTER_STREAMS = 1.5
"""The same of tokens per second; or else SOONER, of p99 between tokens."""
COLUMNS = {
    "sent": "sent", "good": "good", "refused": "503", "broken": "broken", "wrong": "wrong", "per_s": "good/s",
    "tokens_per_s": "tokens/s", "p50": "p50 ms", "p99": "p99 ms", "ttft_p50": "first token ms", "ttft_p99": "its p99",
    "gap_p50": "between tokens ms", "gap_p99": "its p99", "cpu_per_1000": "CPU s/1000", "late_p99": "loop late p99 ms",
    "sent_late_p99": "client late p99 ms",
}  # fmt: skip
ORDER = ("aiocomms", "gloo twin")
COLORS = {"aiocomms": "tab:blue", "gloo twin": "tab:orange"}
Row = dict[str, Any]


class Verdict(NamedTuple):
    """A limit to reach, and whether it was reached."""

    what: str
    value: str
    wanted: str
    reached: bool


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def print_verdicts(verdicts: Sequence[Verdict]) -> str:
    """A table of them."""
    rows = [[v.what, "must" if v.reached else "MISSED", v.value, v.wanted] for v in verdicts]
    return table(["what", "reached", "value", "wanted"], rows, 3)


def loads(rows: Sequence[Row]) -> str:
    """All loads of one layout."""
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    cells = [[row["load"], row["by"], *(number(row.get(key)) for key in shown)] for row in rows]
    return table(["load", "by", *(COLUMNS[key] for key in shown)], cells, 2)


def find(layout: Row, load: str, by: str) -> Row:
    """One of its rows."""
    return next(row for row in layout["rows"] if row["load"] == load and row["by"] == by)


def splits(layout: Row) -> str:
    """Tabulate where the time of a request goes that is alone."""
    parts = list(layout["split"][ORDER[0]])
    rows = [[by, *(f"{layout['split'][by][part]:.2f}" for part in parts)] for by in ORDER]
    return table(["one client, ms", *parts], rows, 1)


def again(killed: Row) -> str:
    """Say when it was served again."""
    return "never" if killed["again"] is None else f"{killed['again']:.2f} s"


def leavings(layout: Row) -> str:
    """Tabulate what is still computed for a client that has left, and the effects of a kill."""
    rows = []
    for by in ORDER:
        left, killed = layout["leaving"][by], layout["killed"][by]
        failed = "" if killed["failed_after"] is None else f"{killed['failed_after']:.2f} s"
        counts = [number(killed[kind]) for kind in ("refused", "broken", "wrong")]
        rows.append([by, number(left["after"]), f"{left['seconds']:.2f} s", *counts, failed, again(killed)])
    head = [
        "by",
        "steps after it left",
        "for",
        "503 after kill -9",
        "broken",
        "wrong",
        "slowest of them",
        "again after",
    ]
    return table(head, rows, 1)


def stream_leavings(layout: Row) -> str:
    """The same of the text generator."""
    rows = []
    for by in ORDER:
        left, killed = layout["leaving"][by], layout["killed"][by]
        counts = [number(killed[kind]) for kind in ("good", "refused", "broken", "wrong")]
        rows.append([by, number(left["after"]), f"{number(left['free_ms'])} ms", *counts, again(killed)])
    head = ["by", "steps after a client left", "its pages free after", "kill -9: good", "503", "broken", "wrong"]
    return table([*head, "a token again after"], rows, 1)


def wrks(layout: Row) -> str:
    """Tabulate wrk's figures, or say that it is not there."""
    if layout["wrk"] is None:
        return "wrk is not installed (`apt-get install wrk`): not measured."
    keys = ("per_s", "p50", "p99", "errors")
    rows = [[by, *(number(layout["wrk"][by][key]) for key in keys)] for by in ORDER]
    return table(["wrk", "answers/s", "p50 ms", "p99 ms", "errors"], rows, 1)


def ratios(layout: Row, of: str, till: str) -> tuple[float, float]:
    """Multiples of the twin's: of what is done without a pause, and of what it takes at 60 %."""
    done = [find(layout, "no pause", by)[of] for by in ORDER]
    took = [find(layout, "60 %", by)[till] for by in ORDER]
    return tuple(a / b if a and b else float("inf") for a, b in (done, took))  # type: ignore[return-value]


def common(layout: Row) -> list[Verdict]:
    """Return the verdicts on what every server is to reach."""
    mine = [row for row in layout["rows"] if row["by"] == ORDER[0]]
    late = max((row["late_p99"] or 0.0 for row in mine if row["load"] in ("30 %", "60 %", "90 %")), default=0.0)
    wrong = sum(row["wrong"] + row["other"] for row in mine) + layout["killed"][ORDER[0]]["wrong"]
    return [
        Verdict("loop late at p99, up to 90 %", f"{late:.1f} ms", f"<= {LATE:.0f} ms", late <= LATE),
        Verdict("wrong answers", number(wrong), "0", wrong == 0),
    ]


def verdicts(layout: Row) -> list[Verdict]:
    """Return the verdicts on this layout of the embedding server."""
    faster, sooner = ratios(layout, "per_s", "p99")
    after, most = layout["leaving"][ORDER[0]]["after"], layout["pp"] + 1
    better = faster >= FASTER or sooner <= SOONER
    return [
        Verdict("requests/s without a pause, or p99 at 60 %, as a multiple of the twin's",
                f"{faster:.2f}, {sooner:.2f}", f">= {FASTER}, or <= {SOONER}", better),
        Verdict("micro-batches computed after a client left", number(after), f"<= {most}, those sent", after <= most),
        *common(layout),
    ]  # fmt: skip


def stream_verdicts(layout: Row) -> list[Verdict]:
    """The same of the text generator."""
    faster, sooner = ratios(layout, "tokens_per_s", "gap_p99")
    after = layout["leaving"][ORDER[0]]["after"]
    better = faster >= FASTER_STREAMS or sooner <= SOONER
    return [
        Verdict("tokens/s without a pause, or p99 between tokens at 60 %, as a multiple of the twin's",
                f"{faster:.2f}, {sooner:.2f}", f">= {FASTER_STREAMS}, or <= {SOONER}", better),
        Verdict("steps computed after a client left", number(after), "<= 1, the one under way", after <= 1),
        *common(layout),
    ]  # fmt: skip


def title(layout: Row) -> str:
    """Its name."""
    return f"--tp {layout['tp']} --pp {layout['pp']}"


def markdown(results: Row) -> str:
    """The whole report."""
    parts = ["\n".join(f"* {key}: {value}" for key, value in results["where"].items())]
    for layout in results["layouts"]:
        tables = (loads(layout["rows"]), splits(layout), leavings(layout), wrks(layout))
        parts += [f"### Embedding server, `{title(layout)}`", *tables, print_verdicts(verdicts(layout))]
    for layout in results["streams"]:
        tables = (loads(layout["rows"]), splits(layout), stream_leavings(layout))
        parts += [f"### Text generator, `{title(layout)}`", *tables, print_verdicts(stream_verdicts(layout))]
    return "\n\n".join(parts) + "\n"


def glance(results: Row, path: Path) -> None:
    """A picture for five seconds: what users notice, ours and the twin's, one pair of bars a layout."""
    from matplotlib.figure import Figure

    vectors = [(f"vectors\n{title(layout)}", layout) for layout in results["layouts"]]
    texts = [(f"text\n{title(layout)}", layout) for layout in results["streams"]]
    panels = {
        "requests per second\n(more is better)": (vectors, lambda it, by: find(it, "no pause", by)["per_s"]),
        "tokens per second\n(more is better)": (texts, lambda it, by: find(it, "no pause", by)["tokens_per_s"]),
        "ms between tokens, p99 at 60 % load\n(less is better)": (
            texts, lambda it, by: find(it, "60 %", by)["gap_p99"]
        ),
        "seconds until served again after kill -9\n(less is better)": (
            vectors + texts, lambda it, by: it["killed"][by]["again"]
        ),
    }  # fmt: skip
    panels = {name: panel for name, panel in panels.items() if panel[0]}
    figure = Figure(figsize=(13, 3.7), layout="constrained")
    widths = [1 + len(layouts) for layouts, _ in panels.values()]
    every = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (name, (layouts, of)) in zip(every, panels.items(), strict=True):
        for shift, by in zip((-0.2, 0.2), ORDER, strict=True):
            values = [of(layout, by) for _, layout in layouts]
            places = [place + shift for place in range(len(layouts))]
            bars = axes.bar(places, [value or 0.0 for value in values], 0.38, color=COLORS[by], label=by)
            axes.bar_label(bars, [number(value) or "never" for value in values])
        axes.set_title(name, fontsize="medium")
        axes.set_xticks(range(len(layouts)), [label for label, _ in layouts], fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def curves(results: Row, path: Path) -> None:
    """Draw the time of a request over the load."""
    from matplotlib.figure import Figure

    layouts = [*results["layouts"], *results["streams"]]
    figure = Figure(figsize=(5.5 * len(layouts), 3.9), layout="constrained")
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts, strict=True):
        for by in ORDER:
            rows = [row for row in layout["rows"] if row["by"] == by and row["load"].endswith(" %")]
            xs, what = [row["rate"] for row in rows], "gap_" if layout in results["streams"] else ""
            axes.plot(xs, [row[f"{what}p50"] for row in rows], "--", color=COLORS[by], label=f"{by}, p50")
            axes.plot(xs, [row[f"{what}p99"] for row in rows], "o-", color=COLORS[by], label=f"{by}, p99")
        kind = "between tokens" if layout in results["streams"] else "until the vector is there"
        server = "text" if layout in results["streams"] else "vectors"
        axes.set(
            title=f"{server}, {title(layout)}",
            xlabel="requests that come per second",
            ylabel=f"ms {kind}",
            yscale="log",
        )
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
