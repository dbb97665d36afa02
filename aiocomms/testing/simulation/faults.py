"""The faults of a history: how many of each kind there are is the test's to say, and all else is the seed's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocomms.errors import ArgumentError

if TYPE_CHECKING:
    from aiocomms.testing.simulation.world import SimulatedWorld

_SHORT, _LONG = 1e-3, 20.0
"""Seconds that a pause or a partition takes at least and at most; a rank counts as dead after 5."""


@dataclass(frozen=True)
class Faults:
    """The numbers of faults in a history.

    :param deaths: ranks that die, as by SIGKILL.
    :param restarts: whether a rank that has died is started anew; :attr:`SimulatedRank.restarts` tells it so.
    :param pauses: ranks that stand still for 1 ms to 20 s, as by SIGSTOP.
    :param slow: ranks that do everything up to 50 ms late from some time on.
    :param cuts: connections that are cut.
    :param partitions: pairs of ranks of which one does not reach the other for 1 ms to 20 s, or neither the other.
    :param stores: 1 if the store dies.
    :param within: the seconds in which all of it happens; None: as long as the program takes without faults.
    """

    deaths: int = 0
    restarts: bool = False
    pauses: int = 0
    slow: int = 0
    cuts: int = 0
    partitions: int = 0
    stores: int = 0
    within: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        :raises ArgumentError: one is no number of faults.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _KINDS:
                continue
            if type(value) is not int or value < 0:
                raise ArgumentError(f"{field.name} is {value!r}, wanted a number of faults")
        if type(self.restarts) is not bool:
            raise ArgumentError(f"restarts is {self.restarts!r}, wanted True or False")
        if self.within is not None and not (type(self.within) in (int, float) and self.within > 0):
            raise ArgumentError(f"within is {self.within!r}, wanted seconds above 0, or None")

    @property
    def any(self) -> bool:
        """True if there is a fault at all."""
        return any(getattr(self, name) for name in _KINDS)

    def plan(self, seed: int, ranks: int, within: float) -> list[SimulatedFault]:
        """Return the faults of a seed, in their order.

        :param within: the seconds in which they happen.
        """
        draw = Random(f"faults {seed}")  # noqa: S311 - A seed repeats it.
        found = [
            SimulatedFault(within * draw.random(), kind, _arguments(kind, draw, ranks, self.restarts))
            for kind in _KINDS
            for _ in range(getattr(self, kind))
        ]
        return sorted(found, key=lambda fault: fault.time)


class SimulatedFault(NamedTuple):
    """One fault."""

    time: float
    kind: str
    arguments: tuple[Any, ...]

    def happen(self, world: SimulatedWorld) -> None:
        """Have it happen."""
        _KINDS[self.kind](world, *self.arguments)

    def halved(self, times: int) -> SimulatedFault:
        """Return it with its duration halved so often."""
        place = _DURATIONS.get(self.kind)
        if not times or place is None:
            return self
        shorter = [*self.arguments]
        shorter[place] /= 2**times
        return self._replace(arguments=tuple(shorter))

    @property
    def lasts(self) -> bool:
        """True if it has a duration."""
        return self.halved(1) != self

    def __str__(self) -> str:
        return f"at {self.time:.6f} s {self._words()}"

    def _words(self) -> str:
        match self.kind, self.arguments:
            case "deaths", (rank, restart):
                return f"rank {rank} dies" + ("" if restart is None else f", and starts anew {restart:.6g} s later")
            case "pauses", (rank, seconds):
                return f"rank {rank} stands still for {seconds:.6g} s"
            case "slow", (rank, seconds):
                return f"rank {rank} becomes slow: all that it does is up to {seconds:.6g} s late"
            case "cuts", (one, other):
                return f"the connections of rank {one} and rank {other} are cut"
            case "partitions", (one, other, seconds, both):
                return f"rank {one} does not reach rank {other}{', nor is reached by it,' * both} for {seconds:.6g} s"
        return "the store dies"


_DURATIONS = {"pauses": 1, "slow": 1, "partitions": 2}
"""The places of durations among the arguments of faults."""


def _both(world: SimulatedWorld, one: int, other: int, seconds: float, both: bool) -> None:
    world.part(one, other, seconds)
    if both:
        world.part(other, one, seconds)


_KINDS: dict[str, Callable[..., None]] = {
    "deaths": lambda world, rank, restart: world.kill(rank, restart),
    "pauses": lambda world, rank, seconds: world.pause(rank, seconds),
    "slow": lambda world, rank, seconds: world.slow(rank, seconds),
    "cuts": lambda world, one, other: world.cut(one, other),
    "partitions": _both,
    "stores": lambda world: world.lose_store(),
}


def _arguments(kind: str, draw: Random, ranks: int, restarts: bool) -> tuple[Any, ...]:
    """Draw whom a fault strikes, and for how long."""
    rank = int(draw.random() * ranks)
    other = (rank + 1 + int(draw.random() * max(1, ranks - 1))) % ranks
    seconds = _SHORT * (_LONG / _SHORT) ** draw.random()
    both = draw.random() < 0.5
    match kind:
        case "deaths":
            return rank, seconds if restarts else None
        case "pauses":
            return rank, seconds
        case "slow":
            return rank, min(seconds, 0.05)
        case "cuts":
            return rank, other
        case "partitions":
            return rank, other, seconds, both
    return ()


def kept(plan: list[SimulatedFault], chosen: Mapping[int, int] | None) -> list[SimulatedFault]:
    """Return the faults of a plan with these numbers, their durations halved so often; None: all.

    :raises ArgumentError: there is no fault of such a number.
    """
    if chosen is None:
        return plan
    if absent := [number for number in chosen if not 0 <= number < len(plan)]:
        raise ArgumentError(f"seed names fault {absent[0]}, wanted numbers below {len(plan)}, as many faults there are")
    return [plan[number].halved(times) for number, times in sorted(chosen.items())]
