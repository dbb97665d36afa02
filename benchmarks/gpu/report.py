"""The table of docs/benchmarks/gpu.md, from what was measured or from nothing."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.targets import TARGETS
from benchmarks.tables import table

NOT_MEASURED = "not measured: no GPU could be reached"


def shown(value: float, unit: str) -> str:
    """A figure with its unit."""
    return f"{value:.3g}{'x' if unit == 'x' else ' ' + unit}"


def markdown(results: dict[str, Any]) -> str:
    """Format where it was measured, and a row for every figure that is wanted; one that is not there says why."""
    figures = {figure["key"]: figure for figure in results["figures"]}
    rows = []
    for target in TARGETS:
        found = figures.get(target.key, {"value": None, "why": NOT_MEASURED})
        reached = {None: "", True: "yes", False: "MISSED"}[found.get("met")]
        value = found["why"] if found["value"] is None else shown(found["value"], target.unit)
        rows.append([target.what, target.wanted, value, reached])
    where = "\n".join(f"* {key}: {value}" for key, value in results["where"].items())
    return "\n\n".join(filter(None, [where, table(["what", "target", "measured", "reached"], rows, 4)])) + "\n"


def missed(results: dict[str, Any]) -> list[str]:
    """Targets that were measured and are not reached."""
    return [figure["key"] for figure in results["figures"] if figure["met"] is False]


def lacking(results: dict[str, Any]) -> list[str]:
    """Figures that could not be had although there is a GPU, with the reason."""
    return [f"{figure['key']}: {figure['why']}" for figure in results["figures"] if figure["value"] is None]
