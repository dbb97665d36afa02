"""Runs the contenders of a row in turn, round after round, so that the machine's drift hits all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.peers import perftest
from benchmarks.peers.rows import Row, Versus
from benchmarks.peers.world import ContenderFailedError, World

PERFTEST_EVERY = 3
"""Rounds from one run of ucx_perftest to the next: it starts two processes each time."""

MOST, LEAST = 20_000, 2
"""Iterations of a trial."""

Contender = tuple[str, str, int]
"""Its kind, the transport if it is one of ours, and the number of ranks."""


class Pace(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds: float
    """Of a trial's first half; the second, with a look at the clock for each iteration, is as long."""


class Entrant:
    """A way of one contender."""

    def __init__(
        self, name: str, contender: Contender, trial: Callable[[], tuple[float, list[float]]], every: int = 1
    ) -> None:
        self.name, self.contender, self.trial, self.every = name, contender, trial, every
        self.means: list[float | None] = []
        self.each: list[float] = []

    def run(self, number: int) -> None:
        """One trial, if this round has one."""
        if number % self.every:
            self.means.append(None)
            return
        mean, each = self.trial()
        self.means.append(mean)
        self.each += each

    def figures(self, nbytes: int) -> dict[str, Any]:
        """What goes into the report."""
        median = statistics.median(mean for mean in self.means if mean is not None)
        return {
            "name": self.name,
            "median_us": median * 1e6,
            "p99_us": sorted(self.each)[math.ceil(len(self.each) * 0.99) - 1] * 1e6 if self.each else None,
            "gb_per_s": nbytes / median / 1e9 if nbytes > 4096 else None,
            "iterations": len(self.each),
            "rounds_us": [None if mean is None else mean * 1e6 for mean in self.means],
        }


class Worlds:
    """The contenders' processes, started when they are first needed."""

    def __init__(self, transport: str, example: str | None) -> None:
        self.transport, self.example = transport, example
        self._open: dict[Contender, World] = {}

    def contenders(self, row: Row) -> list[Contender]:
        """Who takes part."""
        kinds = [("ours", self.transport), ("mpich", ""), ("gloo", "")]
        if row.case.kind in ("ping_pong", "stream"):
            kinds.append(("ucxx", ""))
            if self.example is not None:
                kinds.append(("ours", self.example))
        if row.case.kind in ("put_signal", "get"):
            kinds = kinds[:1]
        return [(kind, transport, row.size) for kind, transport in kinds]

    def get(self, contender: Contender) -> World:
        """A contender's."""
        if contender not in self._open:
            kind, transport, size = contender
            self._open[contender] = World(kind, size, transport)
            self._open[contender].freeze()
        return self._open[contender]

    def drop(self, contender: Contender) -> None:
        """Kill what went wrong."""
        if contender in self._open:
            self._open.pop(contender).kill()

    def close(self, *, force: bool = False) -> None:
        """End all."""
        while self._open:
            _, world = self._open.popitem()
            world.kill() if force else world.close()


def entrants(worlds: Worlds, row: Row, pace: Pace, failures: list[str]) -> list[Entrant]:
    """Everybody who can do it, warmed up."""
    found: list[Entrant] = []
    for contender in worlds.contenders(row):
        ways = []
        try:
            world = worlds.get(contender)
            with world.awake():
                for name in world.ask("prepare", row.case)[0]:
                    n = iterations(world, name, pace.seconds)
                    ways.append(Entrant(name, contender, partial(trial, world, row, name, n)))
        except ContenderFailedError as error:
            failures.append(f"{row.title}: {error}")
            worlds.drop(contender)
            ways = []
        found += ways
    if row.case.kind in perftest.TESTS:
        for tls in perftest.TRANSPORTS:
            run = perftest.Perftest(row.case, tls).trial
            contender = "ucx_perftest", tls, row.size
            found.append(Entrant(f"ucx_perftest {tls}", contender, lambda run=run: (run(), []), PERFTEST_EVERY))
    return found


def iterations(world: World, name: str, seconds: float) -> int:
    """How many make a trial of so many seconds."""
    n = 1
    while True:
        took = max(mean for mean, _ in world.ask("trial", name, n))
        if took * n >= seconds / 8 or n >= MOST:
            return max(LEAST, min(MOST, int(seconds / took)))
        n *= 4


def trial(world: World, row: Row, name: str, n: int) -> tuple[float, list[float]]:
    """Seconds per op: the slowest rank's, for an op is done when it is done everywhere."""
    with world.awake():
        answers = world.ask("trial", name, n)
    mean = max(mean for mean, _ in answers) * row.case.share
    each = zip(*(each for _, each in answers if each), strict=True)
    return mean, [max(ranks) * row.case.share for ranks in each]


def race(worlds: Worlds, row: Row, pace: Pace) -> dict[str, Any]:
    """One row's figures and verdicts."""
    failures: list[str] = []
    field = entrants(worlds, row, pace, failures)
    for number in range(pace.rounds):
        shift = number % max(1, len(field))
        for entrant in field[shift:] + field[:shift]:
            if entrant not in field:
                continue  # its contender has just failed
            try:
                entrant.run(number)
            except (ContenderFailedError, perftest.PerftestFailedError) as error:
                failures.append(f"{row.title}: {entrant.name}: {error}")
                worlds.drop(entrant.contender)
                field = [other for other in field if other.contender != entrant.contender]
    figures = [entrant.figures(row.case.nbytes) for entrant in field]
    ours = next((f for f in figures if f["name"] == f"aiocomms {worlds.transport}"), None)
    verdicts = [judge(ours, figures, target) for target in row.targets] if ours else []
    return {
        "title": row.title,
        "ours": f"aiocomms {worlds.transport}",
        "figures": figures,
        "verdicts": [verdict for verdict in verdicts if verdict],
        "failures": failures,
    }


def judge(ours: dict[str, Any], figures: list[dict[str, Any]], target: Versus) -> dict[str, Any] | None:
    """Ours against the quickest of those meant; None where there is none."""
    field = [f for f in figures if f["name"].startswith(target.against) and f is not ours]
    if not field:
        return None
    best = min(field, key=lambda figure: figure["median_us"])
    ratio = paired(ours["rounds_us"], best["rounds_us"])
    return {"what": f"time / {best['name']}", "value": ratio, "unit": "x", "must": target.must, "aim": target.aim}


def paired(ours: list[float | None], theirs: list[float | None]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)
