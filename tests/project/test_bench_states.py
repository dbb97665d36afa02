"""The labels that `make bench` gives the host's state: probes label each turn, and a table counts the labels."""

from __future__ import annotations

from typing import Any

import pytest

from aiocomms.cli.bench.machine import HostState
from benchmarks.tables import kinds, markdown, states

pytestmark = pytest.mark.deterministic

BEST = HostState(8.0, 400.0)
TRIALS = [(8.0, 400.0), (9.9, 539.0), (10.1, 400.0), (8.1, 541.0), (12.0, 900.0)]


def row(title: str, trials: object) -> dict[str, Any]:
    """A row without figures."""
    return {"title": title, "ours": "", "figures": [], "verdicts": [], "failures": [], "states": trials}


def test_turns_are_counted_by_kind_of_slowness() -> None:
    assert kinds(TRIALS, BEST) == {"quiet": 2, "slow": 1, "far": 1, "slow and far": 1}


def test_states_are_relative_to_the_best_of_the_run() -> None:
    text = states({"rows": [row("later", TRIALS[2:]), row("first", TRIALS[:2])]})
    assert "8.0 to 12.0 ns" in text
    assert "400 to 900 ns" in text
    counted = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert counted[2:] == [["later", "0", "1", "1", "1"], ["first", "2", "0", "0", "0"]]


def test_run_without_probes_has_no_states_table() -> None:
    special = row("idle", [])
    del special["states"]
    assert states({"rows": [special, row("failed", [])]}) == ""
    assert "Turns" not in markdown({"where": {"when": "once"}, "rows": [special]})


def test_single_core_run_counts_no_far_turns() -> None:
    assert kinds([(8.0, 0.0)], HostState(8.0, 0.0)) == {"quiet": 1, "slow": 0, "far": 0, "slow and far": 0}


def test_turn_has_the_worse_of_its_two_probes() -> None:
    assert HostState(8.0, 900.0).worst(HostState(12.0, 400.0)) == HostState(12.0, 900.0)
