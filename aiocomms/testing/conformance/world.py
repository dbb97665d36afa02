"""The interface of a world, which runs a check on every rank, and the function that judges a check by its outcomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Outcome, Place, Span
from aiocomms.testing.conformance.rank import Request

GRACE = 0.3
"""The seconds for which the other ranks may continue, and fail by themselves, after one rank has failed."""

STOP = 3.0
"""The seconds within which a check must end after it was stopped."""

BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
"""anyio's backend and backend options for each kind of event loop."""


class World(ABC):
    """The ranks on which checks run."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def run(self, request: Request) -> list[Outcome]:
        """Run a check on every rank. Even if the check hangs, the method returns soon after the deadline.

        :returns: the outcomes, by rank.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources of the world, such as its threads or processes."""


def verdict(outcomes: Sequence[Outcome]) -> Outcome:
    """Judge a check as a whole by its outcomes on all ranks: ``"passed"``, ``"skipped"`` or ``"failed"``."""
    states = {outcome.status for outcome in outcomes}
    if states <= {"passed"}:
        wrong = _disagreement(outcomes) or _early(outcomes)
        return Outcome("failed", wrong) if wrong else Outcome("passed")
    if states == {"skipped"}:
        return Outcome("skipped", outcomes[0].text)
    return Outcome("failed", "\n".join(f"--- rank {r}: {o.status}\n{o.text}" for r, o in enumerate(outcomes)))


def _disagreement(outcomes: Sequence[Outcome]) -> str:
    first = outcomes[0].agreed
    for rank, outcome in enumerate(outcomes):
        for expected, value in zip(first, outcome.agreed, strict=False):
            if expected != value:
                return f"{data.WrongData.__name__}: the ranks disagree: {expected} on rank 0, {value} on rank {rank}"
        if len(outcome.agreed) != len(first):
            return f"rank 0 had {len(first)} things to agree on, rank {rank} {len(outcome.agreed)}"
    return ""


def _early(outcomes: Sequence[Outcome]) -> str:
    spans: defaultdict[str, list[tuple[int, Span]]] = defaultdict(list)
    for rank, outcome in enumerate(outcomes):
        for span in outcome.spans:
            spans[span.what].append((rank, span))
    for what, ranks_spans in spans.items():
        last, came = max(ranks_spans, key=lambda item: item[1].called)
        first, gone = min(ranks_spans, key=lambda item: item[1].left)
        if gone.left < came.called:
            return f"{what}: rank {first} was done {came.called - gone.left:.6f} s before rank {last} called it"
    return ""
