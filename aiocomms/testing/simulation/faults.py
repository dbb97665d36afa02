"""The faults of a history, which is one simulated run.

The test sets the number of faults of each kind. The seed decides the time and the ranks of each fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocomms.errors import ArgumentError

if TYPE_CHECKING:
    from aiocomms.testing.simulation.world import SimulatedWorld

_SHORT, _LONG = 1e-3, 20.0
"""The shortest and the longest duration, in seconds, of a pause or a partition.

The other ranks treat a silent rank as dead after 5 s.
"""


def changed(record: Any, first: int = 0) -> str:
    """Return the fields of a dataclass that differ from their defaults, as text in the form of keyword arguments.

    :param first: the index of the first field to compare.
    """
    given = [(field.name, getattr(record, field.name), field.default) for field in fields(record)[first:]]
    return ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)


@dataclass(frozen=True)
class Faults:
    """The numbers of faults in a history, which is one simulated run.

    :param deaths: the number of ranks that die, as after SIGKILL.
    :param restarts: whether a rank that has died restarts. The program finds the number of restarts in
        :attr:`.SimulatedRank.restarts`.
    :param pauses: the number of ranks that stop for 1 ms to 20 s, as after SIGSTOP.
    :param slow: the number of ranks that become slow at some time. Each later event of such a rank is up to 50 ms late.
    :param cuts: the number of pairs of ranks whose connections break.
    :param partitions: the number of pairs of ranks between which no traffic passes for 1 ms to 20 s, in one direction
        or in both.
    :param stores: 1 if the store dies.
    :param within: the time, in seconds, within which all faults happen. None stands for the time that the program takes
        without faults.
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
        """Check the fields.

        :raises ArgumentError: a field is wrong.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _KINDS:
                continue
            if type(value) is not int or value < 0:
                raise ArgumentError(f"{field.name} is {value!r}, wanted a number of faults")
        if type(self.restarts) is not bool:
            raise ArgumentError(f"restarts is {self.restarts!r}, wanted True or False")
        if self.within is not None and not (type(self.within) in (int, float) and 0 < self.within < float("inf")):
            raise ArgumentError(f"within is {self.within!r}, wanted seconds above 0, or None")

    def __repr__(self) -> str:
        return f"Faults({changed(self)})"

    @property
    def any(self) -> bool:
        """True if there is any fault."""
        return any(getattr(self, name) for name in _KINDS)

    def plan(self, seed: int, ranks: int, within: float) -> list[SimulatedFault]:
        """Draw the faults of a seed, and return them in the order of their times.

        :param within: the seconds within which the faults happen.
        """
        draw = Random(f"faults {seed}")  # noqa: S311 - A seed repeats it.
        found = [
            SimulatedFault(within * draw.random(), kind, _arguments(kind, draw, ranks, self.restarts))
            for kind in _KINDS
            for _ in range(getattr(self, kind))
        ]
        return sorted(found, key=lambda fault: fault.time)


class SimulatedFault(NamedTuple):
    """One fault of a history."""

    time: float
    kind: str
    arguments: tuple[Any, ...]

    def happen(self, world: SimulatedWorld) -> None:
        """Inject the fault into a world."""
        _KINDS[self.kind](world, *self.arguments)

    def halved(self, times: int) -> SimulatedFault:
        """Return the fault with its duration halved ``times`` times."""
        place = _DURATIONS.get(self.kind)
        if not times or place is None:
            return self
        shorter = [*self.arguments]
        shorter[place] /= 2**times
        return self._replace(arguments=tuple(shorter))

    @property
    def lasts(self) -> bool:
        """True if the fault has a duration."""
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
"""The position of the duration among the arguments of a fault, by the kind of the fault."""


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
    """Draw the ranks that a fault affects, and the fault's duration."""
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
    """Return the chosen faults of a plan.

    :param chosen: a mapping. The keys are the numbers of the chosen faults in the plan. Each value is the number of
        times to halve the fault's duration. If ``chosen`` is None, all faults are returned unchanged.
    :raises ArgumentError: the plan has no fault with a chosen number.
    """
    if chosen is None:
        return plan
    if absent := [number for number in chosen if not 0 <= number < len(plan)]:
        raise ArgumentError(
            f"seed names fault {absent[0]}, wanted numbers below {len(plan)}, as many faults there are: pass the same "
            "faults= as the history that has failed"
        )
    return [plan[number].halved(times) for number, times in sorted(chosen.items())]
