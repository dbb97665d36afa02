"""A history of a simulated program, which is the same each time."""

from __future__ import annotations

from typing import Any

from aiocomms.testing.simulation import Faults, History, simulate
from aiocomms.testing.simulation.history import Program


def repeated(program: Program, ranks: int, *, seed: int, faults: Faults | None = None, **options: Any) -> History:
    """Simulate a program twice by one seed; return the history, which must be the same."""
    one, other = (simulate(program, ranks, seed=seed, faults=faults, **options) for _ in range(2))
    for mine, theirs in zip(one.trace, other.trace, strict=False):
        assert mine == theirs
    assert len(one.trace) == len(other.trace)
    return one
