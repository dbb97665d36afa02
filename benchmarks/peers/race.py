"""Runs the contenders of a row in turn, round after round, so that the machine's drift hits all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.peers import perftest
from benchmarks.peers.rows import Row, Versus
from benchmarks.peers.state import Probe
from benchmarks.peers.world import ContenderFailedError, Neighbours, World

PERFTEST_EVERY = 3
"""Rounds from one run of ucx_perftest to the next: it starts two processes each time."""

MOST, LEAST = 20_000, 2
"""Iterations of a trial."""

Contender = tuple[str, str, int, bool]
"""Its kind, the transport if it is one of ours, the number of ranks, and whether each is bound to a core."""

Trial = tuple[float, list[float], float | None]
"""Seconds per op, the mean; of each op; and on cores per op, all ranks together, where that is known."""


class Pace(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds: float
    """Of a trial's first half; the second, with a look at the clock for each iteration, is as long."""


class Entrant:
    """A way of one contender."""

    def __init__(self, name: str, contender: Contender, trial: Callable[[], Trial], every: int = 1) -> None:
        self.name, self.contender, self.trial, self.every = name, contender, trial, every
        self.means: list[float | None] = []
        self.each: list[float] = []
        self.on_cores: list[float] = []

    def run(self, number: int) -> None:
        """One trial, if this round has one."""
        if number % self.every:
            self.means.append(None)
            return
        mean, each, on_cores = self.trial()
        self.means.append(mean)
        self.each += each
        self.on_cores += [] if on_cores is None else [on_cores]

    def figures(self, nbytes: int) -> dict[str, Any]:
        """What goes into the report."""
        means = [mean for mean in self.means if mean is not None]
        median = statistics.median(means)
        return {
            "name": self.name,
            "median_us": median * 1e6,
            "mean_us": statistics.mean(means) * 1e6,
            "cpu_us": statistics.mean(self.on_cores) * 1e6 if self.on_cores else None,
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
        if any(target.of != "median" for target in row.targets):
            kinds = kinds[:2]  # gloo polls with sleep(0), and takes 10 ms an op where ranks outnumber cores
        return [(kind, transport, row.size, row.bound) for kind, transport in kinds]

    def get(self, contender: Contender) -> World:
        """A contender's."""
        if contender not in self._open:
            kind, transport, size, bound = contender
            self._open[contender] = World(kind, size, transport, bound=bound)
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


def entrants(worlds: Worlds, row: Row, neighbours: Neighbours, pace: Pace, failures: list[str]) -> list[Entrant]:
    """Everybody who can do it, warmed up."""
    found: list[Entrant] = []
    for contender in worlds.contenders(row):
        ways = []
        try:
            world = worlds.get(contender)
            with world.awake():
                for name in world.ask("prepare", row.case)[0]:
                    with neighbours.awake():
                        n = iterations(world, name, row.patience, pace.seconds)
                    ways.append(Entrant(name, contender, partial(trial, world, row, neighbours, name, n)))
        except ContenderFailedError as error:
            failures.append(f"{row.title}: {error}")
            worlds.drop(contender)
            ways = []
        found += ways
    if row.case.kind in perftest.TESTS:
        for tls in perftest.TRANSPORTS:
            run = perftest.Perftest(row.case, tls).trial
            contender = "ucx_perftest", tls, row.size, row.bound
            found.append(Entrant(f"ucx_perftest {tls}", contender, lambda run=run: (run(), [], None), PERFTEST_EVERY))
    return found


def iterations(world: World, name: str, patience: int, seconds: float) -> int:
    """How many make a trial of ``patience`` times so many seconds."""
    n, most, seconds = 1, patience * MOST, patience * seconds
    while True:
        took = max(mean for mean, _ in world.ask("trial", name, n))
        if took * n >= seconds / 8 or n >= most:
            return max(LEAST, min(most, int(seconds / took)))
        n *= 4


def trial(world: World, row: Row, neighbours: Neighbours, name: str, n: int) -> Trial:
    """Seconds per op: the slowest rank's, for an op is done when it is done everywhere."""
    with world.awake(), neighbours.awake():
        before = world.seconds_on_cores()
        answers = world.ask("trial", name, n)
        on_cores = (world.seconds_on_cores() - before) / (2 * n)  # n ops twice
    mean = max(mean for mean, _ in answers) * row.case.share
    each = zip(*(each for _, each in answers if each), strict=True)
    return mean, [max(ranks) * row.case.share for ranks in each], on_cores * row.case.share


def race(worlds: Worlds, row: Row, pace: Pace, probe: Probe) -> dict[str, Any]:
    """One row's figures and verdicts, and the host's state in each trial."""
    failures: list[str] = []
    neighbours = Neighbours(row.neighbours)
    try:
        field = entrants(worlds, row, neighbours, pace, failures)
        field = run_rounds(worlds, row, field, pace, failures, probe)
    finally:
        neighbours.kill()
    figures = [entrant.figures(row.case.nbytes) for entrant in field]
    ours = next((f for f in figures if f["name"] == f"aiocomms {worlds.transport}"), None)
    verdicts = [judge(ours, figures, target) for target in row.targets] if ours else []
    return {
        "title": row.title,
        "ours": f"aiocomms {worlds.transport}",
        "figures": figures,
        "verdicts": [verdict for verdict in verdicts if verdict],
        "failures": failures,
        "states": probe.trials,
    }


def run_rounds(
    worlds: Worlds,
    row: Row,
    field: list[Entrant],
    pace: Pace,
    failures: list[str],
    probe: Probe,
) -> list[Entrant]:
    """Every contender's trials, in turn, and a probe of the host between them; returns those that have not failed."""
    probe.begin()
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
            probe.note_trial()
    return field


def judge(ours: dict[str, Any], figures: list[dict[str, Any]], target: Versus) -> dict[str, Any] | None:
    """Ours against the quickest of those meant; None where there is none."""
    field = [f for f in figures if f["name"].startswith(target.against) and f is not ours]
    if not field:
        return None
    figure = f"{target.of}_us"
    best = min(field, key=lambda other: other[figure])
    if target.of == "median":
        what, ratio = "time", paired(ours["rounds_us"], best["rounds_us"])
    else:
        what, ratio = target.of, ours[figure] / best[figure]
    return {"what": f"{what} / {best['name']}", "value": ratio, "unit": "x", "must": target.must, "aim": target.aim}


def paired(ours: list[float | None], theirs: list[float | None]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)
